"""How much each run of consecutive layers changes the stream, so that the one which changes it least can be looped.

    angular(start, n)   = mean over tokens of arccos(cos(h_start, h_{start+n})) / pi       arXiv:2403.17887
    influence(start, n) = mean over tokens of 1 - cos(h_start, h_{start+n})                 arXiv:2403.03853, n = 1

h_k is what enters layer k, h_L what leaves the last layer, before the final norm. Cosines are taken in float64.
Deviations: the mean is over all tokens of a text; the first reference has the last token of each text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.data.documents import Document, DocumentSet
from looplab.data.tokenizers import Tokenizer
from looplab.models.base import LoopedLM
from looplab.recurrence.loop import forward
from looplab.recurrence.trace import Recorder

TOKENS_AT_ONCE = 128
"""Tokens whose cosines between all pairs of layers are held together."""

Table = tuple[tuple[float, ...], ...]
"""Row n - 1 holds runs of n layers, entry s the run from layer s on."""


@dataclass(frozen=True, kw_only=True)
class LayerDistance:
    """What every run of consecutive layers does to the stream."""

    layers: int
    tokens: int
    """Calibration tokens that the means are over."""
    text: str
    """Name of the text."""
    text_hash: str
    angular: Table
    influence: Table

    def of(self, start: int, length: int) -> tuple[float, float]:
        """Angular distance and block influence of the run `start .. start + length - 1`."""
        return self.angular[length - 1][start], self.influence[length - 1][start]

    def least(self, length: int, *, first: int, stop: int) -> int:
        """Start of the run of `length` layers within `first .. stop - 1` whose angular distance is smallest."""
        return min(range(first, stop - length + 1), key=lambda start: self.angular[length - 1][start])


def calibration_tokens(
    documents: DocumentSet, tokenizer: Tokenizer, *, tokens: int, longest: int
) -> list[Int[Tensor, "1 _"]]:
    """The first documents, each cut to `longest` tokens, until `tokens` of them are there.

    Documents of less than two tokens are left out. Where texts are meant to begin with bos, they do.
    """
    bos = [tokenizer.bos] if tokenizer.starts_with_bos and tokenizer.bos is not None else []
    rows, left = [], tokens
    for document in documents.documents:
        if left < 1:
            break
        if not isinstance(document, Document):
            continue
        ids = [*bos, *tokenizer.encode(document.prompt + document.text)][: min(longest, left)]
        if len(ids) > 1:
            rows.append(torch.tensor([ids]))
            left -= len(ids)
    return rows


def measure_layers(
    model: LoopedLM,
    rows: Sequence[Int[Tensor, "1 _"]],
    *,
    text: str,
    text_hash: str,
    advanced: Callable[[int, int], None] = lambda done, total: None,
) -> LayerDistance:
    """The table of a dense model.

    Args:
        model: Each of its layers is a block that runs once.
        rows: Texts, one per forward pass.
        advanced: Called with (tokens done, all tokens) after each text.
    Raises:
        ValueError: There is no text.
    """
    total, done = sum(row.shape[1] for row in rows), 0
    if not total:
        raise ValueError(
            f"retrofit: --text must hold at least two tokens. Got {text!r}, which has none. Give more text."
        )
    layers = len(model.spec.blocks)
    angles = torch.zeros(layers + 1, layers + 1, dtype=torch.float64)
    falls = angles.clone()
    for row in rows:
        for cosine in _cosines(_stream(model, row)):
            angles += cosine.arccos().sum(dim=0).cpu() / torch.pi
            falls += (1 - cosine).sum(dim=0).cpu()
        done += row.shape[1]
        advanced(done, total)
    return LayerDistance(
        layers=layers,
        tokens=total,
        text=text,
        text_hash=text_hash,
        angular=_by_length(angles / total),
        influence=_by_length(falls / total),
    )


def _stream(model: LoopedLM, row: Int[Tensor, "1 _"]) -> Float[Tensor, "states seq dim"]:
    """What enters each layer, and what leaves the last."""
    recorder = Recorder()
    with torch.no_grad():
        forward(model, row.to(next(model.parameters()).device), recorder=recorder, logits_to_keep=0)
    return torch.cat(recorder.states)


def _cosines(stream: Float[Tensor, "states seq dim"]) -> Iterator[Float[Tensor, "seq states states"]]:
    """Cosines between all pairs of states of a token, some tokens at a time."""
    for part in stream.split(TOKENS_AT_ONCE, dim=1):
        h = torch.nn.functional.normalize(part.transpose(0, 1).double(), dim=-1)
        yield (h @ h.mT).clamp(-1, 1)


def _by_length(pairs: Float[Tensor, "states states"]) -> Table:
    layers = pairs.shape[0] - 1
    return tuple(
        tuple(float(pairs[start, start + length]) for start in range(layers - length + 1))
        for length in range(1, layers + 1)
    )

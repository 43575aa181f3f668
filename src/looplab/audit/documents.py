"""Documents to scored tokens: one fixed table that every schedule and every probe is scored on.

    ids     bos (if the tokenizer begins texts with one) + tokens(prompt) + tokens(text), cut at max_tokens
    scored  positions that belong to the text and are not position 0; the hidden state before a position predicts it
    u       first 8 bytes of SHA-256("<seed>:<key>") / 2^64; calibration u < 1/2, evaluation u >= 1/2;
            with the full-rank probe its training documents have u < 1/4, and calibration the rest below 1/2
    order   by u, the first `documents` are taken: smaller runs are subsets of larger ones

Reference: arXiv:2609.19934. Deviation: evaluation and calibration never share a document (the original scripts fit the
temperature on evaluation documents), and the split does not depend on the order of the file.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Int, Integer
from looplab.data.documents import DataError, Document, DocumentSet, drop_duplicates
from looplab.data.tokenizers import ByteTokenizer, Tokenizer
from looplab.recurrence.state import item_of

MIN_EVALUATION, MIN_CALIBRATION = 20, 10
THIRD = 0.25
"""With the full-rank probe, u below this trains it, and calibration lies between this and one half."""
NGRAM = 13


@dataclass(frozen=True, eq=False)
class ScoredDocument:
    """One document as tokens. Positions `first` .. end are scored."""

    key: str
    """Names the document in the split and in its noise; documents of one group share it."""
    content_key: str
    tokens: Integer[np.ndarray, " seq"]
    first: int
    text_bytes: int
    """UTF-8 bytes of the scored tokens."""
    text: str
    line: int
    cut: bool

    @property
    def scored(self) -> int:
        """Scored tokens."""
        return len(self.tokens) - self.first

    def item(self, noise_seed: int) -> int:
        """The item number of this document's initial noise."""
        return item_of(self.key, noise_seed)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a launch: documents of similar length, padded on the right.

    `read` picks the hidden states that predict scored tokens, flattened in row order; `place` is where each of them
    stands in the split's token table.
    """

    documents: tuple[ScoredDocument, ...]
    tokens: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    read: tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]
    place: Int[Tensor, " tokens"]


@dataclass(frozen=True, eq=False)
class Split:
    """Documents of one side, in the order of u, and their token table."""

    documents: tuple[ScoredDocument, ...]

    @cached_property
    def tokens(self) -> int:
        """Rows of the token table."""
        return sum(document.scored for document in self.documents)

    @cached_property
    def targets(self) -> Int[Tensor, " tokens"]:
        """The scored tokens, document after document."""
        scored = [document.tokens[document.first :] for document in self.documents]
        return torch.from_numpy(np.concatenate(scored).astype(np.int64))

    @cached_property
    def owners(self) -> Int[Tensor, " tokens"]:
        """The document (its place in `documents`) of every scored token."""
        counts = torch.tensor([document.scored for document in self.documents])
        return torch.arange(len(self.documents)).repeat_interleave(counts)

    @cached_property
    def positions(self) -> Int[Tensor, " tokens"]:
        """The position in its document of every scored token."""
        return torch.cat([torch.arange(document.first, len(document.tokens)) for document in self.documents])

    @cached_property
    def counts(self) -> Integer[np.ndarray, " documents"]:
        """Scored tokens per document."""
        return np.array([document.scored for document in self.documents])

    @cached_property
    def text_bytes(self) -> Integer[np.ndarray, " documents"]:
        """Bytes of the scored text per document."""
        return np.array([document.text_bytes for document in self.documents])

    def head(self, tokens: int) -> "Split":
        """The leading whole documents with at most `tokens` scored tokens in all, at least one."""
        within = int((np.cumsum(self.counts) <= tokens).sum())
        return Split(self.documents[: max(1, within)])

    def batches(self, batch_tokens: int) -> list[Batch]:
        """All documents, sorted by length, in launches of at most `batch_tokens` positions (at least one row)."""
        order = sorted(range(len(self.documents)), key=lambda i: len(self.documents[i].tokens))
        groups: list[list[int]] = []
        for i in order:
            width = len(self.documents[i].tokens)
            if groups and (len(groups[-1]) + 1) * width <= batch_tokens:
                groups[-1].append(i)
            else:
                groups.append([i])
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        return [_batch([self.documents[i] for i in group], [int(starts[i]) for i in group]) for group in groups]

    def padding(self, batch_tokens: int) -> float:
        """Share of launched positions that are padding."""
        launched = sum(batch.tokens.numel() for batch in self.batches(batch_tokens))
        return 1 - sum(len(document.tokens) for document in self.documents) / launched


def _batch(documents: Sequence[ScoredDocument], starts: Sequence[int]) -> Batch:
    tokens, valid = pad(documents)
    rows = [torch.full((document.scored,), row) for row, document in enumerate(documents)]
    before = [torch.arange(document.first - 1, len(document.tokens) - 1) for document in documents]
    place = [torch.arange(start, start + d.scored) for start, d in zip(starts, documents, strict=True)]
    return Batch(tuple(documents), tokens, valid, (torch.cat(rows), torch.cat(before)), torch.cat(place))


def pad(
    documents: Sequence[ScoredDocument], *, side: Literal["left", "right"] = "right", extra: int = 0
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"] | None]:
    """Tokens of several documents as rows of one width.

    Args:
        side: Where padding goes.
        extra: Padding that even the longest row gets.
    Returns:
        Tokens (padding is id 0) and which of them are real; None where all are.
    """
    width = max(len(document.tokens) for document in documents) + extra
    tokens = torch.zeros(len(documents), width, dtype=torch.int64)
    valid = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, document in enumerate(documents):
        start = width - len(document.tokens) if side == "left" else 0
        tokens[row, start : start + len(document.tokens)] = torch.from_numpy(document.tokens.astype(np.int64))
        valid[row, start : start + len(document.tokens)] = True
    return tokens, None if bool(valid.all()) else valid


@dataclass(frozen=True, kw_only=True, eq=False)
class Domain:
    """A named set of documents, split and counted."""

    name: str
    source: str
    data_hash: str
    read: int
    duplicates: int
    empty: int
    unscored: int
    evaluation: Split
    calibration: Split
    training: Split = Split(())
    """Documents of the full-rank probe; empty without it."""
    overlap: float
    """Share of evaluation 13-grams (of words) that occur in calibration."""


def prepare(
    name: str,
    documents: DocumentSet,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    evaluation: int = 200,
    calibration: int = 200,
    calibration_tokens: int = 50_000,
    max_tokens: int = 1024,
    vocabulary: int | None = None,
    calibration_set: DocumentSet | None = None,
    training: int = 0,
) -> Domain:
    """Tokenises, removes duplicates, splits by hash and takes the first documents of each side.

    Args:
        vocabulary: Columns of the model's logits; a larger token id is refused.
        calibration_set: Documents to calibrate on; None splits `documents` in two.
        training: Documents of the full-rank probe, at most: the half of the calibration side with the smaller u.

    Raises:
        DataError: Too few documents, nothing scored, a token outside the vocabulary, or a document on both sides.
    """
    own = _scored(documents, tokenizer, max_tokens, name)
    if calibration_set is None:
        pool = sorted(own.kept, key=lambda document: (unit(seed, document.key), document.content_key))
        near = [document for document in pool if unit(seed, document.key) < 0.5]
        far = [document for document in pool if unit(seed, document.key) >= 0.5]
        other = None
    else:
        other = _scored(calibration_set, tokenizer, max_tokens, name)
        far, near = ([*sorted(side.kept, key=lambda d: (unit(seed, d.key), d.content_key))] for side in (own, other))
        _refuse_shared(far, near)
    duplicates, empty = own.duplicates + (other.duplicates if other else 0), own.empty + (other.empty if other else 0)
    if len(far) < MIN_EVALUATION or len(near) < MIN_CALIBRATION:
        raise DataError(
            f"domain {name} needs {MIN_EVALUATION} evaluation and {MIN_CALIBRATION} calibration documents. "
            f"Got {len(far)} and {len(near)} after removing {duplicates} duplicates and {empty} empty. "
            "Add text or split it by blank lines."
        )
    cut = THIRD if calibration_set is None else 2 * THIRD
    third = Split(tuple(document for document in near if unit(seed, document.key) < cut)[:training])
    if training:
        near = [document for document in near if unit(seed, document.key) >= cut]
        if min(len(third.documents), len(near)) < MIN_CALIBRATION:
            raise DataError(
                f"domain {name} needs {MIN_CALIBRATION} training and {MIN_CALIBRATION} calibration documents for the "
                f"full-rank probe. Got {len(third.documents)} and {len(near)}. Add text, or leave the probe out."
            )
    sides = Split(tuple(far[:evaluation])), Split(tuple(near[:calibration])).head(calibration_tokens)
    _check_vocabulary((*sides, third), vocabulary)
    return Domain(
        name=name,
        source=documents.name,
        data_hash=documents.hash,
        read=len(documents.documents) + (len(calibration_set.documents) if calibration_set else 0),
        duplicates=duplicates,
        empty=empty,
        unscored=own.unscored + (other.unscored if other else 0),
        evaluation=sides[0],
        calibration=sides[1],
        training=third,
        overlap=overlap(sides[0], sides[1]),
    )


def unit(seed: int, key: str) -> float:
    """The place of a document in [0, 1): it decides the side and the order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") / 2**64


@dataclasses.dataclass(frozen=True)
class _Kept:
    kept: tuple[ScoredDocument, ...]
    duplicates: int
    empty: int
    unscored: int


def _scored(documents: DocumentSet, tokenizer: Tokenizer, max_tokens: int, name: str) -> _Kept:
    texts: list[Document] = []
    for document in documents.documents:
        if not isinstance(document, Document):
            raise DataError(
                f"domain {name} must hold texts for this model. Got tokens and labels (line {document.line}). "
                "Give documents with a 'text'."
            )
        texts.append(document)
    unique = drop_duplicates(texts)
    filled = [document for document in unique if document.text.strip()]
    scored = list(_tokenised(filled, tokenizer, max_tokens))
    kept = tuple(document for document in scored if document.scored > 0)
    if filled and not kept:
        raise DataError(
            f"all {len(filled)} documents of {name} have prompts of {max_tokens} tokens or more. "
            "Raise --max-tokens or shorten prompts."
        )
    return _Kept(kept, len(texts) - len(unique), len(unique) - len(filled), len(scored) - len(kept))


def _tokenised(documents: Sequence[Document], tokenizer: Tokenizer, max_tokens: int) -> Iterator[ScoredDocument]:
    start = [tokenizer.bos] if tokenizer.starts_with_bos else []
    prompts = tokenizer.encode_all([document.prompt for document in documents])
    texts = tokenizer.encode_all([document.text for document in documents])
    for document, prompt, text in zip(documents, prompts, texts, strict=True):
        ids = [*start, *prompt, *text]
        tokens = np.array(ids[:max_tokens], dtype=np.int32)
        first = min(max(1, len(start) + len(prompt)), len(tokens))
        yield ScoredDocument(
            key=document.key,
            content_key=document.content_key,
            tokens=tokens,
            first=first,
            text_bytes=_bytes_of(tokens[first:], tokenizer),
            text=document.text,
            line=document.line,
            cut=len(ids) > max_tokens,
        )


def _bytes_of(tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, ByteTokenizer):  # a cut may fall inside a character, which decoding would widen
        return int((tokens < 256).sum())
    return len(tokenizer.decode(tokens.tolist()).encode())


def _refuse_shared(evaluation: Sequence[ScoredDocument], calibration: Sequence[ScoredDocument]) -> None:
    keys = {document.key for document in evaluation}
    shared = sorted(document.line for document in calibration if document.key in keys)
    if shared:
        raise DataError(
            f"{len(shared)} calibration documents also occur in evaluation (first: line {shared[0]}). "
            "Remove them or drop --calibration."
        )


def _check_vocabulary(sides: Sequence[Split], vocabulary: int | None) -> None:
    largest = max(int(document.tokens.max()) for split in sides for document in split.documents)
    if vocabulary is not None and largest >= vocabulary:
        raise DataError(
            f"token id {largest} is outside the model's vocabulary of {vocabulary}. "
            "The tokenizer belongs to another model."
        )


def overlap(evaluation: Split, calibration: Split) -> float:
    """Share of the 13-grams of words in evaluation texts that occur in calibration texts."""
    seen = {gram for document in calibration.documents for gram in _ngrams(document.text)}
    grams = [gram for document in evaluation.documents for gram in _ngrams(document.text)]
    return sum(gram in seen for gram in grams) / len(grams) if grams else 0.0


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[start:] for start in range(NGRAM)), strict=False)

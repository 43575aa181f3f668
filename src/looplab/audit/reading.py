"""How a model reads documents: rows of token ids, and which positions are scored against which ids.

    text    bos (if the tokenizer begins texts with one) + tokens(prompt) + tokens(text), cut at max_tokens
            scored: positions that belong to the text and are not position 0, from the hidden state before each
    window  where a text was cut, the next row goes on after bos, up to `windows` rows; the prompt is not repeated
    masked  for a model with a mask token: the same rows, ended by eos where they begin with bos, read PASSES times;
            a pass masks max(1, min(6, 2 % of the row)) text tokens that no other pass masks, by hash
            scored: the masked positions, against the ids that stood there, from the hidden state at the position
    grid    token ids and labels of equal length, never cut
            scored: labels other than -100, from the hidden state at the position; nothing is shifted
            (problems of a task are read so too, where a position may answer with several cells: `problems`)

All rows of a document lie in one split and are one unit of every bootstrap: their sums add up.

Reference: arXiv:2609.19934. Deviation: masked positions come from a hash, and a short text has one mask although that
is more than 2 % of it.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from looplab._types import Integer
from looplab.data.documents import IGNORED, DataError, Document, Grid
from looplab.data.tokenizers import ByteTokenizer, Tokenizer
from looplab.recurrence.state import item_of

MASKED_SHARE = 50
"""One mask for so many tokens of a row ..."""
MOST_MASKS = 6
"""... and at most this many in a pass: what is predicted should not lack its context."""
PASSES = 4
"""Passes over a row: 24 tokens of a long one, so that 200 documents suffice for an affine probe of width 1024."""


@dataclass(frozen=True, eq=False)
class ScoredDocument:
    """One row: a document as tokens, one window of it, or a masked pass over one.

    Without `labels`, positions `first` .. end are scored, each from the position before it.
    """

    key: str
    """Names the document in the split and in its noise; documents of one group share it."""
    content_key: str
    tokens: Integer[np.ndarray, " seq"]
    first: int
    text_bytes: int
    """UTF-8 bytes of the scored tokens; 0 for grids."""
    text: str
    line: int
    cut: bool
    """Whether some of the document is in none of its rows."""
    labels: Integer[np.ndarray, "seq *cells"] | None = None
    """What is predicted at each position itself, cell by cell where it has several; -100 is not scored."""
    window: int = 0
    """Which window of its document this is."""
    masking: int = 0
    """Which pass over that window this is."""
    puzzle_id: int | None = None

    @cached_property
    def positions(self) -> Integer[np.ndarray, " scored"]:
        """Positions of the scored tokens."""
        if self.labels is None:
            return np.arange(self.first, len(self.tokens))
        return np.flatnonzero((self.labels != IGNORED).reshape(len(self.labels), -1).any(axis=1))

    @property
    def read(self) -> Integer[np.ndarray, " scored"]:
        """Positions whose hidden states predict the scored tokens."""
        return self.positions - 1 if self.labels is None else self.positions

    @property
    def targets(self) -> Integer[np.ndarray, "scored *cells"]:
        """The scored token ids."""
        return (self.tokens if self.labels is None else self.labels)[self.positions]

    @property
    def scored(self) -> int:
        """Scored tokens."""
        return len(self.positions)

    @property
    def name(self) -> str:
        """Names document and window."""
        return _windowed(self.content_key, self.window)

    def item(self, noise_seed: int) -> int:
        """The item number of this row's initial noise; all passes over a window share it."""
        return item_of(_windowed(self.key, self.window), noise_seed)

    def trimmed(self, length: int) -> "ScoredDocument":
        """The first `length` tokens."""
        labels = None if self.labels is None else self.labels[:length]
        return dataclasses.replace(
            self, tokens=self.tokens[:length], labels=labels, first=min(self.first, length), text_bytes=0, text=""
        )


def _windowed(key: str, window: int) -> str:
    return key if window == 0 else f"{key}/{window}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a model reads, and how much of it.

    Raises:
        ValueError: `max_tokens` leaves no room for text.
    """

    tokenizer: Tokenizer | None
    """None: grids."""
    mask_token: int | None = None
    """Of a model that is scored on masked tokens."""
    puzzle_ids: bool | None = None
    """Whether a model of grids needs puzzle ids; None where it takes none."""
    grid_tokens: int | None = None
    """Tokens of every grid, of a model that takes no other number."""
    max_tokens: int = 1024
    windows: int = 1
    seed: int = 0
    """Decides which tokens are masked."""

    def __post_init__(self) -> None:
        least = len(self._start) + len(self._end) + 1
        if self.max_tokens < least:
            raise ValueError(f"--max-tokens must be at least {least} for this tokenizer. Got {self.max_tokens}.")

    @property
    def _start(self) -> list[int]:
        tokenizer = self.tokenizer
        bos = tokenizer.bos if tokenizer is not None and tokenizer.starts_with_bos else None
        return [] if bos is None else [bos]

    @property
    def _end(self) -> list[int]:
        eos = None if self.tokenizer is None else self.tokenizer.eos
        return [eos] if self.mask_token is not None and self._start and eos is not None else []

    def check(self, documents: Sequence[Document | Grid], domain: str) -> None:
        """Refuses documents of the other kind, with the line of the first."""
        for document in documents:
            if self.tokenizer is not None and isinstance(document, Grid):
                raise DataError(
                    f"domain {domain} must hold texts for this model. Got tokens and labels (line {document.line}). "
                    "Give documents with a 'text'."
                )
            if self.tokenizer is None and isinstance(document, Document):
                raise DataError(
                    f"domain {domain} must hold grids for this model, which is not causal and has no mask token. "
                    f"Got a text (line {document.line}). Give documents with 'tokens' and 'labels', or put the "
                    "tokenizer of a masked model into its folder."
                )

    def rows(self, documents: Sequence[Document | Grid], domain: str) -> Iterator[list[ScoredDocument]]:
        """The rows of every document; rows without a scored token are among them."""
        if self.tokenizer is None:
            grids = [document for document in documents if isinstance(document, Grid)]
            known = self.puzzle_ids is not None and any(grid.puzzle_id is not None for grid in grids)
            for grid in grids:
                yield [self._grid(grid, domain, with_puzzle=bool(self.puzzle_ids) or known)]
            return
        texts = [document for document in documents if isinstance(document, Document)]
        prompts = self.tokenizer.encode_all([document.prompt for document in texts])
        bodies = self.tokenizer.encode_all([document.text for document in texts])
        for document, prompt, text in zip(texts, prompts, bodies, strict=True):
            rows = list(self._windows(document, prompt, text, self.tokenizer))
            yield rows if self.mask_token is None else [masked for row in rows for masked in self._passes(row)]

    def _windows(
        self, document: Document, prompt: Sequence[int], text: Sequence[int], tokenizer: Tokenizer
    ) -> Iterator[ScoredDocument]:
        body = [*prompt, *text]
        room = self.max_tokens - len(self._start) - len(self._end)
        for window, at in enumerate(range(0, max(1, len(body)), room)[: self.windows]):
            tokens = np.array([*self._start, *body[at : at + room], *self._end], dtype=np.int32)
            end = len(tokens) - len(self._end)
            first = min(max(1, len(self._start) + len(prompt) - at, len(self._start)), end)
            yield ScoredDocument(
                key=document.key,
                content_key=document.content_key,
                tokens=tokens,
                first=first,
                text_bytes=_bytes_of(tokens[first:end], tokenizer),
                text=document.text,
                line=document.line,
                cut=len(body) > self.windows * room,
                window=window,
            )

    def _passes(self, row: ScoredDocument) -> Iterator[ScoredDocument]:
        """Rows whose masks are disjoint. A token of the text counts its share of the text's bytes."""
        free = np.arange(row.first, len(row.tokens) - len(self._end))
        digest = hashlib.shake_256(f"{self.seed}:{row.name}:mask".encode()).digest(8 * len(free))
        free = free[np.argsort(np.frombuffer(digest, dtype="<u8"), kind="stable")]
        masks = max(1, min(MOST_MASKS, len(row.tokens) // MASKED_SHARE))
        for masking in range(PASSES):
            chosen = free[masking * masks : (masking + 1) * masks]
            tokens, labels = row.tokens.copy(), np.full(len(row.tokens), IGNORED, dtype=np.int32)
            labels[chosen] = tokens[chosen]
            tokens[chosen] = self.mask_token
            share = len(chosen) / max(1, len(free))
            yield dataclasses.replace(
                row, tokens=tokens, labels=labels, text_bytes=round(share * row.text_bytes), masking=masking
            )

    def _grid(self, grid: Grid, domain: str, *, with_puzzle: bool) -> ScoredDocument:
        where = f"domain {domain} line {grid.line}"
        if len(grid.tokens) > self.max_tokens:
            raise DataError(
                f"{where} must have at most {self.max_tokens} tokens: a grid is never cut. Got {len(grid.tokens)}. "
                "Raise --max-tokens or give smaller grids."
            )
        if self.grid_tokens is not None and len(grid.tokens) != self.grid_tokens:
            raise DataError(
                f"{where} must have {self.grid_tokens} tokens, the only size that this model takes. "
                f"Got {len(grid.tokens)}. Give grids of that size."
            )
        if with_puzzle and grid.puzzle_id is None:
            raise DataError(f"{where} must have a 'puzzle_id': this model reads it. Got none. Add the field.")
        return ScoredDocument(
            key=grid.key,
            content_key=grid.content_key,
            tokens=np.array(grid.tokens, dtype=np.int32),
            first=0,
            text_bytes=0,
            text="",
            line=grid.line,
            cut=False,
            labels=np.array(grid.labels, dtype=np.int32),
            puzzle_id=grid.puzzle_id if with_puzzle else None,
        )

    def check_vocabulary(self, rows: Sequence[ScoredDocument], vocabulary: int, domain: str) -> None:
        """Refuses ids that the model has no logit for."""
        for row in rows:
            largest = max(int(row.tokens.max()), -1 if row.labels is None else int(row.labels.max()))
            if largest < vocabulary:
                continue
            if self.tokenizer is None:
                raise DataError(
                    f"domain {domain} line {row.line} must have ids below {vocabulary}, the model's vocabulary. "
                    f"Got {largest}. Repair the line, or give the puzzles that this model was made for."
                )
            raise DataError(
                f"token id {largest} is outside the model's vocabulary of {vocabulary}. "
                "The tokenizer belongs to another model."
            )

    def nothing_scored(self, rows: Sequence[ScoredDocument], domain: str) -> DataError:
        """Why none of several documents has a scored token; `rows` has one row of each."""
        number = len(rows)
        if self.tokenizer is None:
            return DataError(
                f"all {number} documents of {domain} have only labels of -100, which are not scored. "
                "Give labels at the positions to score."
            )
        full = sum(row.cut for row in rows)
        prompts = f"prompts of {self.max_tokens} tokens or more"
        short = "no token of text after the first position, which is never scored"
        if full == number:
            return DataError(
                f"all {number} documents of {domain} have {prompts}. Raise --max-tokens or shorten prompts."
            )
        if full == 0:
            return DataError(f"all {number} documents of {domain} have {short}. Give longer texts.")
        return DataError(
            f"none of the {number} documents of {domain} has a scored token: {full} have {prompts}, "
            f"{number - full} have {short}. Raise --max-tokens or give longer texts."
        )


def _bytes_of(tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, ByteTokenizer):  # a cut may fall inside a character, which decoding would widen
        return int((tokens < 256).sum())
    return len(tokenizer.decode(tokens.tolist()).encode())

"""Documents to scored tokens: one fixed table that every schedule and every probe is scored on.

    rows    a document is one row of tokens, or several: windows, masked passes (see `reading`)
    u       first 8 bytes of SHA-256("<seed>:<key>") / 2^64; calibration u < 1/2, evaluation u >= 1/2;
            with the full-rank probe its training documents have u < 1/4, and calibration the rest below 1/2
    order   by u, the first `documents` are taken: smaller runs are subsets of larger ones

Reference: arXiv:2609.19934. Deviation: evaluation and calibration never share a document (the original scripts fit the
temperature on evaluation documents), and the split does not depend on the order of the file.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Int, Integer
from looplab.audit.reading import Reading, ScoredDocument
from looplab.audit.result import TaskFacts
from looplab.data.documents import DataError, DocumentSet, Grid, drop_duplicates
from looplab.data.tokenizers import Tokenizer

PUZZLE_IDS = "puzzle_ids"
"""Key of `encode(extras=...)`."""
MIN_EVALUATION, MIN_CALIBRATION = 20, 10
THIRD = 0.25
"""With the full-rank probe, u below this trains it, and calibration lies between this and one half."""
NGRAM = 13


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a launch: of similar length, padded on the right.

    `read` picks the hidden states that predict scored tokens, flattened in row order; `place` is where each of them
    stands in the split's token table. `extras` is for models that read more than tokens.
    """

    documents: tuple[ScoredDocument, ...]
    """The rows."""
    tokens: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    read: tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]
    place: Int[Tensor, " tokens"]
    extras: dict[str, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Split:
    """Documents of one side, in the order of u, and their token table.

    `rows`: those of one document follow each other. Numbers per document are sums over its rows.
    """

    rows: tuple[ScoredDocument, ...]

    @cached_property
    def documents(self) -> tuple[ScoredDocument, ...]:
        """The first row of every document."""
        starts = [i for i, row in enumerate(self.rows) if i == 0 or row.content_key != self.rows[i - 1].content_key]
        return tuple(self.rows[i] for i in starts)

    @cached_property
    def row_owners(self) -> Integer[np.ndarray, " rows"]:
        """The document (its place in `documents`) of every row."""
        first = {document.content_key: i for i, document in enumerate(self.documents)}
        return np.array([first[row.content_key] for row in self.rows], dtype=np.int64)

    @cached_property
    def tokens(self) -> int:
        """Rows of the token table."""
        return sum(row.scored for row in self.rows)

    @cached_property
    def targets(self) -> Int[Tensor, "tokens *cells"]:
        """The scored tokens, document after document; one column per cell where a position answers with several."""
        return torch.from_numpy(np.concatenate([row.targets for row in self.rows]).astype(np.int64))

    @cached_property
    def owners(self) -> Int[Tensor, " tokens"]:
        """The document of every scored token."""
        return torch.from_numpy(self.row_owners.repeat([row.scored for row in self.rows]))

    @cached_property
    def positions(self) -> Int[Tensor, " tokens"]:
        """The position in its row of every scored token."""
        return torch.from_numpy(np.concatenate([row.positions for row in self.rows]).astype(np.int64))

    @cached_property
    def windows(self) -> Int[Tensor, " tokens"]:
        """The window of every scored token."""
        return torch.tensor([row.window for row in self.rows]).repeat_interleave(
            torch.tensor([row.scored for row in self.rows])
        )

    @cached_property
    def counts(self) -> Integer[np.ndarray, " documents"]:
        """Scored tokens per document."""
        return self._summed([row.scored for row in self.rows])

    @cached_property
    def text_bytes(self) -> Integer[np.ndarray, " documents"]:
        """Bytes of the scored text per document; 0 for grids."""
        return self._summed([row.text_bytes for row in self.rows])

    @cached_property
    def lengths(self) -> Integer[np.ndarray, " documents"]:
        """Tokens per document, prompt included; a window counts once, however often it is read."""
        return self._summed([len(row.tokens) * (row.masking == 0) for row in self.rows])

    def _summed(self, values: Sequence[int]) -> Integer[np.ndarray, " documents"]:
        total = np.zeros(len(self.documents), dtype=np.int64)
        np.add.at(total, self.row_owners, values)
        return total

    def take(self, documents: int) -> "Split":
        """The leading documents, with all their rows."""
        return Split(self.rows[: int((self.row_owners < documents).sum())])

    def head(self, tokens: int) -> "Split":
        """The leading whole documents with at most `tokens` scored tokens in all, at least one."""
        return self.take(max(1, int((np.cumsum(self.counts) <= tokens).sum())))

    def batches(self, batch_tokens: int, *, padded: bool = True) -> list[Batch]:
        """All rows, sorted by length, in launches of at most `batch_tokens` positions (at least one row).

        Args:
            padded: Whether rows of different lengths may share a launch.
        """
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i].tokens))
        groups: list[list[int]] = []
        for i in order:
            width = len(self.rows[i].tokens)
            fits = groups and (len(groups[-1]) + 1) * width <= batch_tokens
            if fits and (padded or len(self.rows[groups[-1][-1]].tokens) == width):
                groups[-1].append(i)
            else:
                groups.append([i])
        starts = np.cumsum([0, *(row.scored for row in self.rows)])
        return [_batch([self.rows[i] for i in group], [int(starts[i]) for i in group]) for group in groups]

    def padding(self, batch_tokens: int, *, padded: bool = True) -> float:
        """Share of launched positions that are padding."""
        launched = sum(batch.tokens.numel() for batch in self.batches(batch_tokens, padded=padded))
        return 1 - sum(len(row.tokens) for row in self.rows) / launched


def _batch(rows: Sequence[ScoredDocument], starts: Sequence[int]) -> Batch:
    tokens, valid = pad(rows)
    own = [torch.full((row.scored,), i) for i, row in enumerate(rows)]
    read = [torch.from_numpy(row.read) for row in rows]
    place = [torch.arange(start, start + row.scored) for start, row in zip(starts, rows, strict=True)]
    return Batch(tuple(rows), tokens, valid, (torch.cat(own), torch.cat(read)), torch.cat(place), extras_of(rows))


def extras_of(rows: Sequence[ScoredDocument]) -> dict[str, Tensor] | None:
    """What rows bring along besides tokens, for `encode(extras=...)`; all of a domain or none has a puzzle id."""
    puzzles = [row.puzzle_id for row in rows if row.puzzle_id is not None]
    return {PUZZLE_IDS: torch.tensor(puzzles)} if puzzles else None


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
    overlap: float | None
    """Share of evaluation 13-grams (of words) that occur in calibration; None for grids, which have no words."""
    task: TaskFacts | None = None
    """Where the documents are problems of a task."""


Rows = tuple[ScoredDocument, ...]
"""Those of one document."""


def prepare(
    name: str,
    documents: DocumentSet,
    tokenizer: Tokenizer | None,
    *,
    mask_token: int | None = None,
    puzzle_ids: bool | None = None,
    grid_tokens: int | None = None,
    seed: int = 0,
    evaluation: int = 200,
    calibration: int = 200,
    calibration_tokens: int = 50_000,
    max_tokens: int = 1024,
    windows: int = 1,
    vocabulary: int | None = None,
    calibration_set: DocumentSet | None = None,
    training: int = 0,
) -> Domain:
    """Reads documents as the model does, removes duplicates, splits by hash and takes the first of each side.

    Args:
        tokenizer: None for a model of grids.
        mask_token: Of a masked model.
        puzzle_ids: Whether a model of grids needs puzzle ids; None where it takes none.
        grid_tokens: Tokens of every grid, where the model takes no other number.
        windows: Most windows of a document that is longer than `max_tokens`.
        vocabulary: Columns of the model's logits; a larger id is refused.
        calibration_set: Documents to calibrate on; None splits `documents` in two.
        training: Documents of the full-rank probe, at most: the half of the calibration side with the smaller u.

    Raises:
        DataError: Documents of another kind, too few, nothing scored, an id outside the vocabulary, or a document on
            both sides.
        ValueError: `max_tokens` leaves no room for text.
    """
    reading = Reading(
        tokenizer=tokenizer,
        mask_token=mask_token,
        puzzle_ids=puzzle_ids,
        grid_tokens=grid_tokens,
        max_tokens=max_tokens,
        windows=windows,
        seed=seed,
    )

    def ordered(kept: Sequence[Rows]) -> list[Rows]:
        return sorted(kept, key=lambda rows: (unit(seed, rows[0].key), rows[0].content_key))

    found = [_scored(source, reading, name) for source in (documents, calibration_set) if source is not None]
    far, near = ordered(found[0].kept), ordered(found[-1].kept)
    if calibration_set is None:
        near = [rows for rows in near if unit(seed, rows[0].key) < 0.5]
        far = [rows for rows in far if unit(seed, rows[0].key) >= 0.5]
    else:
        _refuse_shared(far, near)
    duplicates, empty, unscored = (sum(getattr(f, n) for f in found) for n in ("duplicates", "empty", "unscored"))
    if len(far) < MIN_EVALUATION or len(near) < MIN_CALIBRATION:
        removed = f"{duplicates} duplicates and {empty} empty"
        if unscored:
            removed = f"{duplicates} duplicates, {empty} empty and {unscored} without a scored token"
        raise DataError(
            f"domain {name} needs {MIN_EVALUATION} evaluation and {MIN_CALIBRATION} calibration documents. "
            f"Got {len(far)} and {len(near)} after removing {removed}. {_MORE[tokenizer is None]}"
        )
    cut = THIRD if calibration_set is None else 2 * THIRD
    third = [rows for rows in near if unit(seed, rows[0].key) < cut][:training]
    if training:
        near = [rows for rows in near if unit(seed, rows[0].key) >= cut]
        if min(len(third), len(near)) < MIN_CALIBRATION:
            raise DataError(
                f"domain {name} needs {MIN_CALIBRATION} training and {MIN_CALIBRATION} calibration documents for the "
                f"full-rank probe. Got {len(third)} and {len(near)}. Add text, or leave the probe out."
            )
    sides = [_split(far[:evaluation]), _split(near[:calibration]).head(calibration_tokens), _split(third)]
    if vocabulary is not None:
        reading.check_vocabulary([row for side in sides for row in side.rows], vocabulary, name)
    return Domain(
        name=name,
        source=documents.name,
        data_hash=documents.hash,
        read=len(documents.documents) + (len(calibration_set.documents) if calibration_set else 0),
        duplicates=duplicates,
        empty=empty,
        unscored=unscored,
        evaluation=sides[0],
        calibration=sides[1],
        training=sides[2],
        overlap=None if tokenizer is None else overlap(sides[0], sides[1]),
    )


_MORE = ("Add text or split it by blank lines.", "Add grids.")


def _split(documents: Sequence[Rows]) -> Split:
    return Split(tuple(row for rows in documents for row in rows))


def check_domain_name(name: str, option: str = "a domain's name") -> None:
    """Refuses a name of which no name of a file can be made.

    Args:
        option: What the user calls it.

    Raises:
        ValueError: It is empty, begins with a dot, or has a slash in it.
    """
    if not name or name.startswith(".") or set(name) & {"/", "\0"}:
        raise ValueError(f"{option} must be a plain file name. Got {name!r}. Leave out / and a leading dot.")


def unit(seed: int, key: str) -> float:
    """The place of a document in [0, 1): it decides the side and the order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class _Kept:
    kept: tuple[Rows, ...]
    """The rows of every document that has a scored token."""
    duplicates: int
    empty: int
    unscored: int


def _scored(documents: DocumentSet, reading: Reading, name: str) -> _Kept:
    reading.check(documents.documents, name)
    unique = drop_duplicates(documents.documents)
    filled = [document for document in unique if isinstance(document, Grid) or document.text.strip()]
    read = list(reading.rows(filled, name))
    kept = tuple(found for rows in read if (found := tuple(row for row in rows if row.scored > 0)))
    if read and not kept:
        raise reading.nothing_scored([rows[-1] for rows in read], name)
    removed = len(documents.documents) - len(unique), len(unique) - len(filled), len(read) - len(kept)
    return _Kept(kept, *removed)


def _refuse_shared(evaluation: Sequence[Rows], calibration: Sequence[Rows]) -> None:
    keys = {rows[0].key for rows in evaluation}
    shared = sorted(rows[0].line for rows in calibration if rows[0].key in keys)
    if shared:
        raise DataError(
            f"{len(shared)} calibration documents also occur in evaluation (first: line {shared[0]}). "
            "Remove them or drop --calibration."
        )


def overlap(evaluation: Split, calibration: Split) -> float:
    """Share of the 13-grams of words in evaluation texts that occur in calibration texts."""
    seen = {gram for document in calibration.documents for gram in _ngrams(document.text)}
    grams = [gram for document in evaluation.documents for gram in _ngrams(document.text)]
    return sum(gram in seen for gram in grams) / len(grams) if grams else 0.0


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[start:] for start in range(NGRAM)), strict=False)

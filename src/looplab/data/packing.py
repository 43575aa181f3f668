"""Packed batches of text, resumable by the step number alone.

The stream of an epoch is every document in permuted order, each followed by eos; epochs follow each other without a
gap. The stream is cut into rows of seq_len + 1 tokens: row r of step t is the piece number t * rows + r. So a batch is
a pure function of (t, r): there is no state to save, no padding, nothing is dropped, and each of several processes
reads its own rows of the same global batch.

    tokens = piece[:-1], labels = piece[1:], label IGNORED where the target is a prompt token

With `document_mask` attention may not cross documents: `document_ids` numbers the documents of a row from 0,
`positions` start again at 0 in each, and the label that would cross into the next document is IGNORED.

Memory: the tokenised documents stay in memory, 2 bytes per token for vocabularies up to 65,536 and 4 above, 16 bytes
per document, and 16 more per document for each of the (at most two) epochs in use.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab._types import Int
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import IGNORED, DataError, Document, DocumentSet, OnBadLine, read_documents
from looplab.data.order import permuted
from looplab.data.tokenizers import Tokenizer, load_tokenizer

BUILTIN: dict[str, Literal["train", "heldout"]] = {"builtin:train": "train", "builtin:heldout": "heldout"}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Shape of the batches: `rows` of the global batch, each with `seq_len` inputs and targets."""

    seq_len: int
    rows: int
    document_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"Packing.{name} must be at least 1. Got {getattr(self, name)}. Raise it.")


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Text for training: files (or "builtin:train", "builtin:heldout") in this order, a tokenizer, a shape."""

    sources: tuple[str, ...] = ("builtin:train",)
    tokenizer: str = "bytes"
    text_field: str = "text"
    on_bad_line: OnBadLine = "error"
    packing: Packing

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("PackedText.sources must name at least one file. Got none. Add a path or 'builtin:train'.")

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return self.packing.rows

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.packing.seq_len

    def load(self, *, seed: int, vocab_size: int) -> "PackedLoader":
        """The batches of a run; arguments and errors are those of `PackedLoader`."""
        return load_packed(self, seed=seed, vocab_size=vocab_size)


@dataclass(frozen=True)
class Position:
    """A place in the stream: epoch, document (its number in the order of the files), token of that document."""

    epoch: int
    document: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class SourceHash:
    """A source by name, with the hash of its content."""

    name: str
    hash: str


@dataclass(frozen=True, kw_only=True)
class DataState:
    """What a checkpoint keeps of the data, to find out on resume that everything is as it was."""

    step: int
    position: Position
    sources: tuple[SourceHash, ...]
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step that one process reads.

    Attributes:
        tokens, labels: Ids, and the next ids (IGNORED = -100 where nothing is to be predicted). Of tasks the answers
            at their positions, several per position where an answer has several symbols.
        positions: From 0 in each row; with `document_mask` from 0 in each document.
        document_ids: With `document_mask`, the number of a token's document within its row, from 0; else None.
        rows: Numbers of these rows in the global batch.
        start: First token of the *global* batch, the same on every process.
        data_hash: Hash over the contents of all sources and the tokenizer.
        task: Where the rows are problems, the `tasks.base.Task` they are of ..
        difficulty: .. and the difficulty that they have in common; of text 0.
    """

    tokens: Int[Tensor, "batch seq"]
    labels: Int[Tensor, "batch seq *cells"]
    positions: Int[Tensor, "batch seq"]
    document_ids: Int[Tensor, "batch seq"] | None
    rows: Int[Tensor, " batch"]
    start: Position
    data_hash: str
    task: Any = None
    difficulty: int = 0


@dataclass(frozen=True)
class _Epoch:
    """Documents of an epoch in their order, and where each begins in the stream (one entry more: the end)."""

    documents: NDArray[np.int64]
    begins: NDArray[np.int64]


class PackedLoader:
    """Batches by step number.

    Attributes:
        num_tokens: Tokens of one epoch, the eos of every document included.
        num_bytes: UTF-8 bytes of all texts and prompts. Bits per byte = loss in bits * num_tokens / num_bytes.
        hash: The batches' `data_hash`.
        skipped: Lines of the sources that were left out under `on_bad_line="skip"`.
    """

    def __init__(
        self, sources: Sequence[DocumentSet], tokenizer: Tokenizer, packing: Packing, *, seed: int, vocab_size: int
    ):
        """Tokenises everything.

        Args:
            sources: Documents in order; their numbers run on over all sources.
            seed: Seed of the run; decides the order of documents.
            vocab_size: Of the model: larger ids are an error.

        Raises:
            DataError: A grid among the documents, no eos, or a token id outside the model's vocabulary.
        """
        if not 0 <= seed < 2**64:
            raise ValueError(f"packing: seed must be from 0 to 2**64 - 1. Got {seed}. Choose another.")
        if tokenizer.eos is None:
            raise DataError(f"packing: tokenizer {tokenizer.name!r} must have an eos token. Got none. Declare one.")
        documents = _texts(sources)
        self._packing, self._seed = packing, seed
        self._sources = tuple(SourceHash(name=s.name, hash=s.hash) for s in sources)
        self.tokenizer_hash = self._tokenizer_hash = tokenizer.hash
        self._tokens, self._begins, self._prompts = _tokenised(documents, tokenizer, tokenizer.eos)
        self._epochs: dict[int, _Epoch] = {}
        self.num_tokens = int(self._begins[-1])
        self.skipped = sum(source.skipped for source in sources)
        self.num_bytes = sum(len(d.text.encode()) + len(d.prompt.encode()) for d in documents)
        self.hash = _joined_hash([*(s.hash for s in self._sources), tokenizer.hash])
        self._check_vocabulary(vocab_size)

    def batch(self, step: int, *, rows: Int[Tensor, " batch"] | None = None) -> Batch:
        """Some rows of the global batch of a step (from 0), in this order; None: all of them."""
        if step < 0:
            raise ValueError(f"batch: step must be at least 0. Got {step}. Steps count from 0.")
        width, size = self._packing.seq_len + 1, self._packing.rows
        wanted = checked_rows(rows, size)
        places = (step * size + wanted)[:, None] * width + np.arange(width, dtype=np.int64)
        tokens, documents, offsets, slots = self._read(places)
        labels = np.where(offsets < self._prompts[documents], IGNORED, tokens)[:, 1:]
        positions, ids = np.broadcast_to(np.arange(width - 1), labels.shape), None
        if self._packing.document_mask:
            labels = np.where(slots[:, 1:] != slots[:, :-1], IGNORED, labels)
            positions, ids = _per_document(slots[:, :-1])
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            labels=torch.from_numpy(labels.copy()),
            positions=torch.from_numpy(positions.copy()),
            document_ids=None if ids is None else torch.from_numpy(ids),
            rows=torch.from_numpy(wanted),
            start=self.position(step),
            data_hash=self.hash,
        )

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Batches of the steps start, start + 1, ... without end."""
        step = start
        while True:
            yield self.batch(step)
            step += 1

    def position(self, step: int) -> Position:
        """The first token of a step's global batch."""
        place = step * self._packing.rows * (self._packing.seq_len + 1)
        _, documents, offsets, _ = self._read(np.array([place]))
        return Position(place // self.num_tokens, int(documents[0]), int(offsets[0]))

    def state(self, step: int) -> DataState:
        """What to keep in a checkpoint whose next step is `step`."""
        return DataState(step=step, position=self.position(step), sources=self._sources, tokenizer=self._tokenizer_hash)

    def check(self, saved: DataState) -> None:
        """Make sure that resuming at `saved.step` continues the stream it belonged to.

        Raises:
            DataError: A source or the tokenizer changed (named, with both hashes), or the stream is at another place.
        """
        since = f"since step {saved.step}"
        before, now = ([s.name for s in sources] for sources in (saved.sources, self._sources))
        if before != now:
            raise DataError(f"data sources changed {since}: were {before}, are {now}. Restore the list and its order.")
        for old, new in zip(saved.sources, self._sources, strict=True):
            if old.hash != new.hash:
                raise DataError(f"{new.name} changed {since} (hash {old.hash[:8]}.. is now {new.hash[:8]}..).")
        if saved.tokenizer != self._tokenizer_hash:
            raise DataError(
                f"the tokenizer changed {since} (hash {saved.tokenizer[:8]}.. is now {self._tokenizer_hash[:8]}..)."
            )
        if saved.position != self.position(saved.step):
            raise DataError(
                f"the data position changed {since}: was {saved.position}, is {self.position(saved.step)}. "
                "Restore seq_len, rows and the seed."
            )

    def _read(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Token, document, offset in it, and number of the document in the endless stream, at places of the stream."""
        tokens, documents, offsets, slots = (np.empty_like(places) for _ in range(4))
        epochs = places // self.num_tokens
        for number in np.unique(epochs):
            here = epochs == number
            epoch = self._epoch(int(number))
            within = places[here] - number * self.num_tokens
            slot = np.searchsorted(epoch.begins, within, side="right") - 1
            documents[here] = epoch.documents[slot]
            offsets[here] = within - epoch.begins[slot]
            tokens[here] = self._tokens[self._begins[documents[here]] + offsets[here]]
            slots[here] = slot + number * len(epoch.documents)
        return tokens, documents, offsets, slots

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            size = len(self._begins) - 1
            documents = permuted(np.arange(size), size, seed=self._seed, epoch=number)
            begins = np.concatenate([[0], np.cumsum(np.diff(self._begins)[documents])])
            # Only what is needed again soon: a batch spans two epochs unless the data is smaller than a batch.
            self._epochs = {n: e for n, e in self._epochs.items() if n == number - 1}
            self._epochs[number] = _Epoch(documents, begins)
        return self._epochs[number]

    def _check_vocabulary(self, vocab_size: int) -> None:
        beyond = np.flatnonzero(self._tokens >= vocab_size)
        if len(beyond):
            document = int(np.searchsorted(self._begins, beyond[0], side="right")) - 1
            raise DataError(
                f"token id {self._tokens[beyond[0]]} at document {document}, offset "
                f"{beyond[0] - self._begins[document]}, but vocab_size is {vocab_size}: tokenizer and model differ."
            )


def checked_rows(rows: Int[Tensor, " batch"] | None, size: int) -> NDArray[np.int64]:
    """Numbers of rows of a global batch of `size` rows; None: all of them.

    Raises:
        ValueError: There is none, or one that the batch does not have.
    """
    if rows is None:
        return np.arange(size, dtype=np.int64)
    if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= size:
        raise ValueError(f"batch: rows must be numbers from 0 to {size - 1}. Got {rows.tolist()}. Give at least one.")
    return rows.numpy().astype(np.int64)


def load_packed(config: PackedText, *, seed: int, vocab_size: int) -> PackedLoader:
    """Reads the sources and the tokenizer of a configuration; arguments and errors are those of `PackedLoader`."""
    sources = [
        builtin_corpus(BUILTIN[name])
        if name in BUILTIN
        else read_documents(name, text_field=config.text_field, on_bad_line=config.on_bad_line)
        for name in config.sources
    ]
    return PackedLoader(sources, load_tokenizer(config.tokenizer), config.packing, seed=seed, vocab_size=vocab_size)


def _texts(sources: Sequence[DocumentSet]) -> list[Document]:
    documents = []
    for source in sources:
        for document in source.documents:
            if not isinstance(document, Document):
                raise DataError(f"packing: {source.name} must hold texts. Got a grid at line {document.line}.")
            documents.append(document)
    if not documents:
        raise DataError("packing: sources must hold at least one document. Got none. Add text.")
    return documents


def _tokenised(
    documents: Sequence[Document], tokenizer: Tokenizer, eos: int
) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64], NDArray[np.int64]]:
    """All documents, each with its eos, as one array; where each begins (and the end); lengths of the prompts."""
    texts = tokenizer.encode_all([d.text for d in documents])
    prompts = tokenizer.encode_all([d.prompt for d in documents])
    largest = max(eos, tokenizer.vocab_size - 1)
    dtype = np.uint16 if largest < 2**16 else np.uint32
    pieces = [np.array([*p, *t, eos], dtype) for p, t in zip(prompts, texts, strict=True)]
    begins = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
    return np.concatenate(pieces), begins, np.array([len(p) for p in prompts], np.int64)


def _per_document(slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that start again, and numbers that count up, wherever a row enters another document."""
    index = np.broadcast_to(np.arange(slots.shape[1]), slots.shape)
    first = np.zeros(slots.shape, bool)
    first[:, 1:] = slots[:, 1:] != slots[:, :-1]
    return index - np.maximum.accumulate(np.where(first, index, 0), axis=1), np.cumsum(first, axis=1)


def _joined_hash(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

"""Documents: what they are, what makes two of them the same, and how they are read from files.

    .txt      cut at blank lines; neighbours are joined in order until a piece has PIECE_CHARACTERS characters
    .jsonl    one object per line: {text, prompt?, group?} or {tokens, labels, puzzle_id?, group?}
    .parquet  the same fields as columns

A file is held in memory while it is read. Errors say which file and line, and carry no command name in front, so that
every command can put its own there.
"""

import hashlib
import json
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet

PIECE_CHARACTERS = 2000
IGNORED = -100
FORMATS = "Give a .txt, .jsonl or .parquet path."

OnBadLine = Literal["error", "skip"]


class DataError(ValueError):
    """Data that cannot be used: a missing file, a broken line, a token out of range."""


class _BadRecordError(DataError):
    """One line or row that cannot be used; `on_bad_line="skip"` counts it and goes on."""


class _Keyed(ABC):
    """The two identities of a document."""

    group: str | None

    @abstractmethod
    def _content(self) -> bytes: ...

    @cached_property
    def content_key(self) -> str:
        """SHA-256, as hex, of what the document holds: equal keys are duplicates, whatever their groups."""
        return hashlib.sha256(self._content()).hexdigest()

    @cached_property
    def key(self) -> str:
        """SHA-256, as hex, of `group` if there is one, else `content_key`: documents of one key share a split."""
        return self.content_key if self.group is None else hashlib.sha256(self.group.encode()).hexdigest()


@dataclass(frozen=True)
class Document(_Keyed):
    """One text. `prompt` comes before it, is read by a model and never scored.

    `group` names documents that must not be separated by a split. `line` is where the document began in its file
    (from 1; a row number for parquet; 0 if it came from no file) and takes no part in comparisons.
    """

    text: str
    prompt: str = ""
    group: str | None = None
    line: int = field(default=0, compare=False)

    def _content(self) -> bytes:
        return f"{_normal(self.prompt)}\0{_normal(self.text)}".encode()


@dataclass(frozen=True)
class Grid(_Keyed):
    """A fixed-length puzzle: token ids and targets of equal length. Label -100 is not scored; nothing is shifted."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    puzzle_id: int | None = None
    group: str | None = None
    line: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.labels) or not self.tokens:
            raise DataError(
                f"a grid must have 'tokens' and 'labels' of equal length, at least 1. Got {len(self.tokens)} and "
                f"{len(self.labels)} (line {self.line}). Give every token a label; {IGNORED} is not scored."
            )
        least = min(0, *self.tokens, *(label for label in self.labels if label != IGNORED))
        if least < 0:
            raise DataError(
                f"a grid must have ids from 0, and {IGNORED} where a label is not scored. Got {least} "
                f"(line {self.line}). Correct the ids."
            )

    def _content(self) -> bytes:
        return np.asarray(self.tokens, dtype="<i8").tobytes()


@dataclass(frozen=True)
class DocumentSet:
    """Documents of one source, in order.

    `hash` is blake2b over the file's bytes (over the documents for the built-in corpus); `skipped` counts lines that
    were left out under `on_bad_line="skip"`.
    """

    name: str
    documents: tuple[Document | Grid, ...]
    hash: str
    skipped: int = 0


D = TypeVar("D", bound=Document | Grid)


def drop_duplicates(documents: Iterable[D]) -> list[D]:
    """The documents without those whose content occurred before; the first of equals is kept."""
    first: dict[str, D] = {}
    for document in documents:
        first.setdefault(document.content_key, document)
    return list(first.values())


def read_documents(
    path: str | Path, *, text_field: str = "text", on_bad_line: OnBadLine = "error", option: str | None = None
) -> DocumentSet:
    """All documents of one file.

    Args:
        path: A .txt, .jsonl or .parquet file.
        text_field: Name of the field or column that holds the text.
        on_bad_line: "error" stops at the first line or row that cannot be used; "skip" leaves it out and counts it.
        option: How the user named the file, such as `--data math=m.jsonl`, for the message about a missing file.

    Raises:
        DataError: No such file, another format, not UTF-8, a broken line, or no document in it.
    """
    file, name = Path(path), str(path)
    if not file.is_file():
        raise DataError(f"{option or name}: {'a folder' if file.is_dir() else 'no such file'}. {FORMATS}")
    if file.suffix not in _READERS:
        raise DataError(f"{option or name}: format {file.suffix!r} is not read. {FORMATS}")
    documents, skipped = [], 0
    for item in _READERS[file.suffix](file, name, text_field):
        if not isinstance(item, _BadRecordError):
            documents.append(item)
        elif on_bad_line == "skip":
            skipped += 1
        else:
            raise item
    if not documents:
        seen = f"{skipped} lines, all left out" if skipped else "an empty file"
        raise DataError(f"{name} must hold at least one document. Got {seen}. Add text or give another file.")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return DocumentSet(name, tuple(documents), digest, skipped)


def cut_at_blank_lines(text: str, *, characters: int = PIECE_CHARACTERS) -> Iterator[Document]:
    """Pieces of a text: blocks between blank lines, joined in order until a piece has `characters` characters.

    A block is never cut, so pieces may be longer, and the last one shorter. Blank lines at a joint become one.
    """
    blocks: list[str] = []
    start, size = 1, 0
    for line, block in _blocks(text):
        start = start if blocks else line
        blocks.append(block)
        size += len(block) + (2 if size else 0)
        if size >= characters:
            yield Document("\n\n".join(blocks), line=start)
            blocks, size = [], 0
    if blocks:
        yield Document("\n\n".join(blocks), line=start)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Runs of lines that are not blank, each with the number of its first line."""
    lines: list[str] = []
    for number, line in enumerate(f"{text}\n".split("\n"), 1):
        if line.strip():
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines)
            lines = []


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error) from None


def _not_utf8(name: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(f"{name} must be UTF-8. Byte {byte:#04x} at offset {error.start}. Re-encode the file.")


def _read_text(file: Path, name: str, text_field: str) -> Iterator[Document]:
    return cut_at_blank_lines(_decoded(file.read_bytes(), name).replace("\r\n", "\n"))


def _read_jsonl(file: Path, name: str, text_field: str) -> Iterator[Document | Grid | _BadRecordError]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(_decoded(file.read_bytes(), name).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            yield _bad_text(where, text_field, f"text that is not JSON ({error.msg}, column {error.colno})")
        except (ValueError, RecursionError) as error:
            yield _bad_text(where, text_field, f"JSON that cannot be read ({error})")
        else:
            yield _document(record, where, text_field, number)


def _read_parquet(file: Path, name: str, text_field: str) -> Iterator[Document | Grid | _BadRecordError]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            present = table.schema_arrow.names
            wanted = [c for c in (text_field, *_GRID_FIELDS, "prompt", "group") if c in present]
            if text_field not in wanted and not {"tokens", "labels"} <= set(wanted):
                raise DataError(
                    f"{name} must have a string column {text_field!r}. Got columns {present}. "
                    "Rename the column or use --text-field."
                )
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=wanted):
                for record in batch.to_pylist():
                    number += 1
                    yield _document(record, f"{name} row {number}", text_field, number)
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error) from None
    except pa.ArrowException as error:
        raise DataError(f"{name} must be a parquet file. Got: {error}. Write it again.") from None


_READERS = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
_GRID_FIELDS = ("tokens", "labels", "puzzle_id")


def _document(record: Any, where: str, text_field: str, line: int) -> Document | Grid | _BadRecordError:
    if not isinstance(record, dict):
        return _bad_text(where, text_field, f"a value of type {type(record).__name__}")
    if text_field not in record and {"tokens", "labels"} <= record.keys():
        return _grid(record, where, line)
    if text_field not in record:
        return _bad_text(where, text_field, f"keys {list(record)}", "Rename the field or use --text-field.")
    text, prompt, group = record[text_field], record.get("prompt"), record.get("group")
    for name, value in ((text_field, text), ("prompt", prompt or ""), ("group", group or "")):
        if not isinstance(value, str):
            return _bad_text(where, name, f"a value of type {type(value).__name__}")
        if not _encodable(value):
            return _bad_text(where, name, "half of a surrogate pair")
    return Document(text, prompt or "", group, line)


def _grid(record: dict[str, Any], where: str, line: int) -> Grid | _BadRecordError:
    tokens, labels = record["tokens"], record["labels"]
    puzzle, group = record.get("puzzle_id"), record.get("group")
    if not _whole(tokens, least=0) or not _labels(labels) or len(tokens) != len(labels) or not tokens:
        sizes = " and ".join(f"{len(v)} entries" if isinstance(v, list) else repr(v) for v in (tokens, labels))
        return _BadRecordError(
            f"{where} must have 'tokens' and 'labels' of equal length, ids from 0 (label -100: not scored). "
            f"Got {sizes}. Repair the line."
        )
    if puzzle is not None and not _whole([puzzle], least=0):
        return _BadRecordError(f"{where} must have a whole number 'puzzle_id'. Got {puzzle!r}. Repair the line.")
    if group is not None and not (isinstance(group, str) and _encodable(group)):
        return _bad_text(where, "group", f"{group!r}")
    return Grid(tuple(tokens), tuple(labels), puzzle, group, line)


def _labels(values: Any) -> bool:
    return isinstance(values, list) and _whole([v for v in values if v != IGNORED], least=0)


def _whole(values: Any, *, least: int) -> bool:
    """Whether this is a list of whole numbers of 32 bits from `least` on."""
    return isinstance(values, list) and all(type(v) is int and least <= v < 2**31 for v in values)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_text(where: str, name: str, got: str, remedy: str = "Repair the line.") -> _BadRecordError:
    return _BadRecordError(f"{where} must be a JSON object with a string {name!r}. Got {got}. {remedy}")

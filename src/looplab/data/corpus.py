"""The built-in corpus: the language reference and the docstrings that every CPython ships. No network, no files kept.

Sources, in this order: the topics of `pydoc_data.topics`, then the docstrings of the standard library's modules,
classes and functions, read from the syntax trees of the .py files (nothing is imported). A docstring that occurs
several times is taken once. Each topic and each module is cut at blank lines into documents of about 1,000 characters;
of equal documents the first is kept.

Whole names are held out: a topic or a top-level module, leading underscores removed, goes to "heldout" if its hash
falls into HELDOUT_PERCENT of 100.

For CPython 3.11 this is 1.8 MB: 1.4 MB in about 1,500 training documents, 0.4 MB in about 400 held-out ones. Another
version has another text, so the hash of the documents is recorded with every result. Packages that distributors strip
or move (tkinter, venv, distutils, ...) are left out, so builds of one version agree as far as their sources do.
"""

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from looplab.data.documents import DataError, Document, DocumentSet, cut_at_blank_lines

Split = Literal["train", "heldout"]

PIECE_CHARACTERS = 1000
HELDOUT_PERCENT = 15

_LEFT_OUT = {
    *("antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data"),
    *("test", "this", "tkinter", "turtle", "turtledemo", "venv"),
}
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NESTED_STATEMENTS = ("body", "orelse", "handlers", "finalbody")


def builtin_corpus(split: Split) -> DocumentSet:
    """One side of the built-in corpus. The first call in a process reads and parses the standard library.

    Raises:
        DataError: This Python ships without its sources or without `pydoc_data`.
    """
    if split not in ("train", "heldout"):
        raise DataError(f"builtin_corpus: split must be 'train' or 'heldout'. Got {split!r}. Pass one of the two.")
    documents = _documents()[split]
    return DocumentSet(f"builtin:{split}", documents, _hash(documents))


def is_heldout(name: str) -> bool:
    """Whether the topic or top-level module of this name belongs to the held-out side."""
    digest = hashlib.blake2b(name.lstrip("_").encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < HELDOUT_PERCENT


@functools.cache
def _documents() -> dict[str, tuple[Document, ...]]:
    sides: dict[str, list[Document]] = {"train": [], "heldout": []}
    seen: set[str] = set()
    for name, text in (*_topics(), *_modules()):
        for piece in cut_at_blank_lines(text, characters=PIECE_CHARACTERS):
            if piece.content_key not in seen:
                seen.add(piece.content_key)
                sides["heldout" if is_heldout(name) else "train"].append(piece)
    return {side: tuple(documents) for side, documents in sides.items()}


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise _stripped("pydoc_data") from None
    for name in sorted(topics):
        yield f"topic:{name}", topics[name]


def _modules() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        single = library / f"{name}.py"
        files = [single] if single.is_file() else sorted((library / name).rglob("*.py"))
        for file in files:
            if {"test", "tests"} & set(file.relative_to(library).parts):
                continue
            new = [d for d in _docstrings(ast.parse(file.read_bytes())) if d not in seen]
            seen.update(new)
            yield name, "\n\n".join(dict.fromkeys(new))
    if not seen:
        raise _stripped(f"the standard library's sources in {library}")


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a syntax tree in the order of the source; only statements are visited."""
    if isinstance(node, _HAS_DOCSTRING) and (text := ast.get_docstring(node)):
        yield text
    for field in _NESTED_STATEMENTS:
        for child in getattr(node, field, ()):
            yield from _docstrings(child)


def _hash(documents: tuple[Document, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        data = document.text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _stripped(what: str) -> DataError:
    return DataError(f"the built-in corpus needs {what}, which this Python lacks. Give text of your own instead.")

"""Tokenizers: raw bytes, and Hugging Face `tokenizer.json` files from the local disk.

Text is always encoded without special tokens; who needs bos or eos adds the id. `starts_with_bos` says whether a
text is meant to begin with bos.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from looplab.data.documents import DataError

FILE = "tokenizer.json"
SPECIALS = ("bos", "eos", "pad")


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        name: "bytes", or the path the tokenizer was read from.
        vocab_size: One more than the largest id.
        bos, eos, pad: Ids of the special tokens; None where the tokenizer has none.
        starts_with_bos: Whether texts begin with bos in training and evaluation.
        hash: Hex digest of everything that decides the ids; runs with different hashes have no comparable losses.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int | None
    starts_with_bos: bool
    hash: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special tokens are left out."""

    @abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, faster where the tokenizer can."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, then bos 256, eos 257, pad 258. `specials=False`: the 256 bytes only."""

    name = "bytes"
    starts_with_bos = False

    def __init__(self, *, specials: bool = True):
        self.bos, self.eos, self.pad = (256, 257, 258) if specials else (None, None, None)
        self.vocab_size = 259 if specials else 256
        self.hash = _digest(b"bytes", self)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD. An id outside the vocabulary is a DataError."""
        _check_range(ids, self)
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` with the special ids that stand beside it.

    bos, eos and pad come from `tokenizer_config.json`, else `special_tokens_map.json` (texts of tokens), else
    `config.json`, else `generation_config.json` (ids; the first of a list); all four are optional. Truncation and
    padding stored in the file are turned off. `starts_with_bos` is `add_bos_token` of `tokenizer_config.json`, else
    what the file's own post-processor does.
    """

    def __init__(self, path: str | Path):
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        self.name = str(path)
        data = file.read_bytes()
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"tokenizer: {file} must be a Hugging Face {FILE}. Got: {error}. Save it again.") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos, self.eos, self.pad = (self._special(name, file.parent) for name in SPECIALS)
        self.starts_with_bos = self._starts_with_bos(file.parent)
        self.hash = _digest(data, self)

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """An id outside the vocabulary is a DataError."""
        _check_range(ids, self)
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def written(self, token: int) -> str | None:
        """A token as the vocabulary writes it, special ones included; None where no token has the id."""
        return self._inner.id_to_token(token)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _special(self, name: str, folder: Path) -> int | None:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _json_object(folder / file).get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                return self._id_of(token, f"{name}_token", folder / file)
        for file in ("config.json", "generation_config.json"):
            value = _json_object(folder / file).get(f"{name}_token_id")
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int):
                return value
        return None

    def _id_of(self, token: Any, field: str, file: Path) -> int:
        found = self._inner.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise DataError(
                f"tokenizer: {field} of {file} must be a token of {FILE}. Got {token!r}. Correct the field."
            )
        return found

    def _starts_with_bos(self, folder: Path) -> bool:
        declared = _json_object(folder / "tokenizer_config.json").get("add_bos_token")
        if declared is not None:
            return bool(declared) and self.bos is not None
        first = self._inner.encode("a", add_special_tokens=True).ids[:1]
        return self.bos is not None and first == [self.bos]


def load_tokenizer(source: str | Path) -> Tokenizer:
    """`"bytes"`, a folder with a `tokenizer.json`, or such a file.

    Raises:
        DataError: No such path, a folder without the file, or a file that is no tokenizer.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source)
    if path.is_file() or (path / FILE).is_file():
        return FileTokenizer(source)
    if not path.exists():
        raise DataError(
            f"tokenizer must be 'bytes' or a local path. Got {str(source)!r}: no such path. Download it first."
        )
    others = ", ".join(sorted(f.name for f in path.iterdir() if f.name.startswith(("tokenizer", "vocab", "merges"))))
    raise DataError(
        f"tokenizer: {path} must hold {FILE}. Got {others or 'no tokenizer files'}. "
        "Save the tokenizer there with save_pretrained of transformers, or pass 'bytes'."
    )


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"tokenizer: {file} must be JSON. Got: {error}. Repair the file or remove it.") from None
    if not isinstance(value, dict):
        raise DataError(f"tokenizer: {file} must hold a JSON object. Got a {type(value).__name__}. Repair the file.")
    return value


def _check_range(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"decode: ids must be from 0 to {tokenizer.vocab_size - 1}. Got {token} at position {position}. "
                "The ids come from another tokenizer."
            )


def _digest(data: bytes, tokenizer: Tokenizer) -> str:
    specials = repr((tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.starts_with_bos)).encode()
    return hashlib.blake2b(data + b"\0" + specials, digest_size=16).hexdigest()

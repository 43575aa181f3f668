"""What engine and server know of a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from looplab.data.tokenizers import FileTokenizer, Tokenizer


@runtime_checkable
class ServedTokenizer(Protocol):
    """Text to ids and back, with what a client may ask about it."""

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text."""

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a text."""

    @property
    def pad(self) -> int | None:
        """Id of padding."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source that turns messages into a prompt; None: no chat."""

    @property
    def vocab(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; with `special` begun as texts of this tokenizer are."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""

    def written(self, token: int) -> str | None:
        """A token as the vocabulary writes it, special or not; None where it has no such text."""


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer of `looplab.data` as it is served."""

    inner: Tokenizer
    chat_template: str | None = None

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text."""
        return self.inner.bos

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a text."""
        return self.inner.eos

    @property
    def pad(self) -> int | None:
        """Id of padding."""
        return self.inner.pad

    @property
    def vocab(self) -> int:
        """One more than the largest id."""
        return self.inner.vocab_size

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; with `special`, bos in front where texts begin with it and this one does not."""
        ids = self.inner.encode(text)
        if special and self.inner.starts_with_bos and ids[:1] != [self.inner.bos]:
            assert self.inner.bos is not None
            return [self.inner.bos, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out."""
        return self.inner.decode(ids)

    def written(self, token: int) -> str | None:
        """A token as the vocabulary writes it; None of raw bytes."""
        return self.inner.written(token) if isinstance(self.inner, FileTokenizer) else None

"""A tokenizer of single characters for tiny models: id i is chr(48 + i)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Characters:
    """`vocab` characters from "0" on."""

    vocab: int = 64
    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    chat_template: str | None = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(character) - 48 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(48 + i) for i in ids if i != self.eos)

    def written(self, token: int) -> str | None:
        return chr(48 + token)

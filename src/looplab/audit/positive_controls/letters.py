"""Texts whose law is known exactly: a Markov chain over letters, and the tokenizer that reads them.

    P(next = j | now = i) = softmax(sharpness * N(0, 1))_j       the first letter is drawn from the stationary law

A model that knows the chain predicts every letter as well as it can be predicted, at temperature 1. One that knows only
the stationary law is calibrated too, and worse by the mutual information of neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looplab._types import Float
from looplab.data.documents import Document, DocumentSet
from looplab.data.tokenizers import Tokenizer

Ids = Sequence[int]
FIRST_LETTER = 0x100
"""Latin letters with diacritics, each one character under Unicode normalisation."""


class Letters(Tokenizer):
    """One letter is one id, without special tokens."""

    bos = eos = pad = None
    starts_with_bos = False

    def __init__(self, size: int):
        self.vocab_size = size
        self.name = self.hash = f"{size} letters"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - FIRST_LETTER for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(FIRST_LETTER + i) for i in ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain over letters, as probabilities in float64."""

    moves: Float[np.ndarray, "letters letters"]
    """From row to column."""

    @classmethod
    def drawn(cls, seed: int, *, size: int = 12, sharpness: float = 1.5) -> "Chain":
        """A chain with scores drawn from a normal law."""
        scores = np.exp(sharpness * np.random.default_rng([seed, 1]).normal(size=(size, size)))
        return cls(scores / scores.sum(axis=1, keepdims=True))

    @property
    def stationary(self) -> Float[np.ndarray, " letters"]:
        """The law of a letter far from the start."""
        return np.linalg.matrix_power(self.moves, 1024)[0]

    def documents(self, seed: int, *, count: int = 120, length: int = 40) -> DocumentSet:
        """Texts of ragged length, at most `length` letters."""
        random = np.random.default_rng([seed, 2])
        rising = self.moves.cumsum(axis=1)
        letters = np.empty((count, length), dtype=np.int64)
        letters[:, 0] = random.choice(len(rising), size=count, p=self.stationary)
        for t in range(1, length):
            level = random.random((count, 1)) * rising[letters[:, t - 1], -1:]
            letters[:, t] = (rising[letters[:, t - 1]] < level).sum(axis=1)
        ends = length - random.integers(length // 3, size=count)
        return document_set("chain", [([], letters[i, :end].tolist()) for i, end in enumerate(ends)])


def document_set(name: str, documents: Sequence[tuple[Ids, Ids]]) -> DocumentSet:
    """Documents from ids: (prompt, text) each."""
    read = Letters(0)
    made = tuple(
        Document(read.decode(text), prompt=read.decode(prompt), line=i) for i, (prompt, text) in enumerate(documents, 1)
    )
    return DocumentSet(name, made, name)

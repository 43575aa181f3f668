"""The two ends of a language model: tokens to vectors, and vectors to logits.

    embeds = scale * (E[token] + P[position])          P only where positions are learned
    logits = c tanh(z / c),  z = logit_scale * (W hidden + b)      softcap c, bias b and the scale are optional

The product W hidden is in the model's type; everything after it in float32 (float64 for float64 models). Rows of a
padded embedding past the vocabulary never become logits. A tied head has no weight of its own: it reads that of the
embedding, so no load, cast or move can break the tie.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Init
from looplab.nn.rope import Learned


class TokenEmbedding(nn.Module):
    """The table of tokens, and of positions where these are learned.

    Args:
        rows: Rows of the table, padding rows included.
        dim: Width of the stream.
        scale: Factor of the sum.
        positions: The position rule, if it has a table.
        init: Start of both tables.
    """

    def __init__(self, rows: int, dim: int, *, scale: float = 1.0, positions: Learned | None = None, init: Init):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(rows, dim))
        self.position_weight = None if positions is None else nn.Parameter(torch.empty(positions.max, dim))
        for table in self.parameters():
            init.embedding_(table)

    def forward(
        self, tokens: Int[Tensor, "batch seq"], positions: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq dim"]:
        """The embedded tokens; `positions` are read only where they are learned."""
        x = F.embedding(tokens, self.weight)
        if self.position_weight is not None:
            x = x + F.embedding(positions, self.position_weight)
        return x if self.scale == 1 else self.scale * x


@dataclass(frozen=True, kw_only=True)
class Head:
    """From hidden vectors to logits."""

    tied: bool
    """Whether the embedding's table is the head's matrix."""
    outputs: int | None = None
    """Columns, where the answers are not the vocabulary."""
    cells: int = 1
    """Answers per position: the columns are cells times as many symbols, and each cell is a law of its own."""
    softcap: float | None = None
    """Bound of the logits."""
    logit_scale: float = 1.0
    bias: bool = False

    def __post_init__(self):
        if self.tied and self.outputs is not None:
            raise ValueError(
                f"Head.outputs must be None for a tied head, whose columns are the vocabulary. Got {self.outputs}. "
                "Set tied=False"
            )
        if self.outputs is not None and self.outputs < 1:
            raise ValueError(f"Head.outputs must be at least 1. Got {self.outputs}. Use None for the vocabulary.")
        if self.cells < 1 or (self.outputs or 0) % self.cells or (self.cells > 1 and self.outputs is None):
            raise ValueError(
                f"Head.cells must divide outputs ({self.outputs}). Got {self.cells}. Set outputs to cells * symbols."
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"Head.softcap must be positive. Got {self.softcap}. Use None for no bound.")

    def columns(self, vocab: int) -> int:
        """Columns of the logits."""
        return vocab if self.outputs is None else self.outputs

    def matmul_params(self, dim: int, vocab: int) -> int:
        """Entries of the matrix that one scored token is multiplied with."""
        return dim * self.columns(vocab)

    def build(self, dim: int, *, vocab: int, embedding: TokenEmbedding, init: Init) -> "HeadModule":
        """The head of a model of width `dim`.

        Args:
            vocab: True size of the vocabulary; the embedding may have more rows.
            embedding: Whose table a tied head reads, and whose number of rows an untied one has.
            init: Start of an untied matrix.
        """
        return HeadModule(self, dim, vocab, embedding, init)


class HeadModule(nn.Module):
    """The head of `Head`."""

    def __init__(self, config: Head, dim: int, vocab: int, embedding: TokenEmbedding, init: Init):
        super().__init__()
        self.config = config
        self.columns = config.columns(vocab)
        # In a tuple, so that the embedding is not registered here a second time.
        self._tied_to = (embedding,) if config.tied else ()
        if not config.tied:
            rows = self.columns if config.outputs is not None else embedding.weight.shape[0]
            self.own_weight = nn.Parameter(torch.empty(rows, dim))
            init.matrix_(self.own_weight)
        self.bias = nn.Parameter(torch.zeros(self.columns)) if config.bias else None

    @property
    def weight(self) -> Tensor:
        """The matrix, padding rows included: the embedding's own parameter where the head is tied."""
        return self._tied_to[0].weight if self._tied_to else self.own_weight

    def forward(self, hidden: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any vocab"]:
        """Logits of the true vocabulary, in float32 (float64 for float64 models)."""
        weight = self.weight
        if weight.shape[0] > self.columns:  # else no slice, whose backward pass holds the gradient twice
            weight = weight[: self.columns]
        logits = F.linear(hidden, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        if self.config.logit_scale != 1:
            logits = self.config.logit_scale * logits
        if self.config.softcap is not None:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

"""What a forward or backward pass costs, in exact integers. No PyTorch: scaling laws use the same formulas.

    forward   = sum over groups  2 * matmul * tokens + 4 * attention_width * pairs      per row and execution
    backward  = 2 * forward, for executions inside the gradient window
    pairs     = T (T + 1) / 2 causal (exact), or T * T ("square", the papers' convention and that of PyTorch's counter)

One multiply-add is 2. Lookups, norms, activations, softmax and rotary count 0. `matmul` is the number of entries of the
weight matrices that a token is multiplied with; `attention_width` is the sum over layers of heads * head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Pairs = Literal["causal", "square"]

KV_SLOTS = {
    "DepthIndexed": lambda iterations, size: iterations,
    "Single": lambda iterations, size: 1,
    "First": lambda iterations, size: 1,
    "Average": lambda iterations, size: 1,
    "Modulo": lambda iterations, size: min(size, iterations),
    "Anchor": lambda iterations, size: min(size + 1, iterations),
}
"""Key-value slots per core layer by rule name: (iterations of the block, the rule's own number) -> slots."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that run together: one prelude, one application of a block, one coda, or the head."""

    matmul: int = 0
    """Weight-matrix entries one token is multiplied with, per execution."""
    matmul_per_row: int = 0
    """Weight-matrix entries one row (not token) is multiplied with, per execution: time embeddings."""
    attention_width: int = 0
    """Sum over layers of heads * head_dim."""
    layers: int = 0
    """Layers executed."""
    kv_width: int = 0
    """Sum over stored layers of 2 * kv_heads * head_dim: numbers that one slot keeps per token."""

    window: int | None = None
    """Keys a query may see at most, itself included; None: all."""
    prefix: int = 0
    """Positions of the model's own that run along with the tokens of every row."""

    def forward(self, *, tokens: int, past: int = 0, rows: int = 1, pairs: Pairs = "causal") -> int:
        """FLOPs of one execution: `rows` rows of `tokens` tokens each, after `past` cached tokens."""
        executed = self.prefix + tokens
        seen = attention_pairs(executed, past=past, pairs=pairs, window=self.window)
        return rows * (2 * self.matmul * executed + 2 * self.matmul_per_row + 4 * self.attention_width * seen)


@dataclass(frozen=True, kw_only=True)
class CostSpec:
    """The groups of a model."""

    prelude: Group
    blocks: tuple[Group, ...]
    coda: Group
    head: Group

    @property
    def matmul_once(self) -> int:
        """Matrix entries outside the loop, without embedding and head."""
        return self.prelude.matmul + self.coda.matmul

    @property
    def matmul_rec(self) -> int:
        """Matrix entries of one application of every block; the injection counts inside."""
        return sum(block.matmul for block in self.blocks)

    def forward(
        self,
        applications: Mapping[int, int],
        *,
        tokens: int,
        scored: int | None = None,
        past: int = 0,
        rows: int = 1,
        pairs: Pairs = "causal",
    ) -> int:
        """FLOPs of one forward pass.

        Args:
            applications: Block -> number of executions.
            tokens: Tokens per row that run through the layers.
            scored: Tokens per row whose logits are made (default: all).
            past: Cached tokens per row.
        """

        def cost(group: Group) -> int:
            return group.forward(tokens=tokens, past=past, rows=rows, pairs=pairs)

        loop = sum(n * cost(self.blocks[b]) for b, n in applications.items())
        logits = self.head.forward(tokens=tokens if scored is None else scored, rows=rows)
        return cost(self.prelude) + loop + cost(self.coda) + logits

    def backward(
        self,
        applications: Mapping[int, int],
        *,
        tokens: int,
        scored: int | None = None,
        rows: int = 1,
        pairs: Pairs = "causal",
    ) -> int:
        """FLOPs of the backward pass; `applications` counts those inside the gradient window only."""
        return 2 * self.forward(applications, tokens=tokens, scored=scored, rows=rows, pairs=pairs)

    def kv_bytes_per_token(self, rule: str, iterations: Mapping[int, int], *, itemsize: int, size: int = 0) -> int:
        """Key-value bytes that one token leaves behind.

        Args:
            rule: Name of the KV rule, a key of `KV_SLOTS`.
            iterations: Block -> iterations.
            itemsize: Bytes of one number.
            size: The rule's own number (Modulo m, Anchor n).
        """
        core = sum(KV_SLOTS[rule](n, size) * self.blocks[b].kv_width for b, n in iterations.items())
        return itemsize * (self.prelude.kv_width + core + self.coda.kv_width)


def attention_pairs(tokens: int, *, past: int = 0, pairs: Pairs = "causal", window: int | None = None) -> int:
    """Query-key pairs of one row: `tokens` queries after `past` cached tokens.

    Args:
        pairs: "causal" counts visible pairs exactly; "square" counts every query against every key.
        window: Keys a query may see at most, itself included; only for "causal".
    """
    if pairs == "square":
        return tokens * (tokens + past)
    if window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    return sum(min(past + i + 1, window) for i in range(tokens))

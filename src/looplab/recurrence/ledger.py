"""The ledger: exact counts of what ran. Applications, tokens, FLOPs, key-value bytes and wall time, from one place.

The loop writes it at the launch, so it counts what ran and not what a caller meant to run. Backward work is counted for
executions inside the gradient window; recomputation under checkpointing has its own column.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from looplab.nn.cost import Group
from looplab.recurrence.spec import LoopSpec

_SUMMED = (
    "launches",
    "encoded_tokens",
    "readouts",
    "head_tokens",
    "flops_forward",
    "flops_backward",
    "flops_recompute",
)


@dataclass
class Ledger:
    """Counts of one run. Adding two ledgers adds every count."""

    applications: dict[int, int] = field(default_factory=dict)
    """Block -> row-applications (one application of one row)."""
    launches: int = 0
    """Calls of `step`, whatever their number of rows."""
    encoded_tokens: int = 0
    readouts: int = 0
    """Rows for which `coda` ran."""
    head_tokens: int = 0
    """Tokens whose logits were made."""
    flops_forward: int = 0
    flops_backward: int = 0
    flops_recompute: int = 0
    kv_bytes: int = 0
    """Largest number of key-value bytes held."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase."""

    @property
    def row_applications(self) -> int:
        """Row-applications of all blocks."""
        return sum(self.applications.values())

    def count_encode(self, spec: LoopSpec, *, rows: int, tokens: int, past: int = 0, gradient: bool = False) -> None:
        """One call of `encode` over `tokens` tokens per row."""
        self.encoded_tokens += rows * tokens
        self._flops(spec, spec.cost.prelude, rows=rows, tokens=tokens, past=past, gradient=gradient)

    def count_step(
        self,
        spec: LoopSpec,
        block: int,
        *,
        rows: int,
        tokens: int,
        past: int = 0,
        gradient: bool = False,
        recomputed: bool = False,
    ) -> None:
        """One call of `step`; `rows` are those that were active."""
        self.launches += 1
        self.applications[block] = self.applications.get(block, 0) + rows
        group = spec.cost.blocks[block]
        flops = self._flops(spec, group, rows=rows, tokens=tokens, past=past, gradient=gradient)
        if gradient and recomputed:
            self.flops_recompute += flops

    def count_coda(self, spec: LoopSpec, *, rows: int, tokens: int, past: int = 0, gradient: bool = False) -> None:
        """One call of `coda`."""
        self.readouts += rows
        self._flops(spec, spec.cost.coda, rows=rows, tokens=tokens, past=past, gradient=gradient)

    def count_head(self, spec: LoopSpec, *, tokens: int, gradient: bool = False) -> None:
        """Logits of `tokens` tokens in all."""
        self.head_tokens += tokens
        flops = 2 * spec.cost.head.matmul * tokens
        self.flops_forward += flops
        self.flops_backward += 2 * flops * gradient

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall time of its body to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def add(self, other: "Ledger") -> None:
        """Adds every count and time of another ledger."""
        for name in ("applications", "seconds"):
            target = getattr(self, name)
            for key, value in getattr(other, name).items():
                target[key] = target.get(key, 0) + value
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_bytes = max(self.kv_bytes, other.kv_bytes)

    def __add__(self, other: "Ledger") -> "Ledger":
        total = Ledger()
        total.add(self)
        total.add(other)
        return total

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> "Ledger":
        """The ledger that `to_dict` wrote."""
        applications = {int(block): n for block, n in counts["applications"].items()}
        plain = {name: counts[name] for name in (*_SUMMED, "kv_bytes")}
        return cls(applications=applications, seconds=dict(counts.get("seconds", {})), **plain)

    def to_dict(self, *, times: bool = True) -> dict[str, Any]:
        """JSON-ready counts; without `times`, equal runs give equal dicts."""
        counts: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "seconds"}
        counts["applications"] = {str(block): n for block, n in sorted(self.applications.items())}
        counts["row_applications"] = self.row_applications
        return {**counts, "seconds": dict(self.seconds)} if times else counts

    def _flops(self, spec: LoopSpec, group: Group, *, rows: int, tokens: int, past: int, gradient: bool) -> int:
        pairs = "causal" if spec.causal else "square"
        flops = group.forward(tokens=tokens, past=past, rows=rows, pairs=pairs)  # type: ignore[arg-type]
        self.flops_forward += flops
        self.flops_backward += 2 * flops * gradient
        return flops

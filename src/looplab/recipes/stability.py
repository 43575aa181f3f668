"""Arms of the study stability: how often training fails as a block is looped more, and what keeps it from failing.

    grid        H loops {1, 2, 4, 8, 16} x peak rate {1, 3, 9}e-3 x stabiliser {none, end_norm, loom, diagonal}
    expressive  no stabiliser, more to express: 2 H stored layers (untied), or twice the width (wide)
    contract    no stabiliser, H = 16: gradient through one loop, segments of 3 loops, a loss after every loop

    u = s + e,  s <- layers(u)      none; s_0 = 0, e the embedding, two pre-norm layers, no prelude, no coda
    end_norm    s <- s / rms(s) after every loop
    loom        branches weigh 0.5 / (H sqrt(2))
    diagonal    u = decay o s + dt o (W e), decay < 1

Branches start at about unit variance, so that an unscaled stream does grow with H^2. Data, their order and steps are
equal in all arms; weights at the start wherever shapes are.

References: EndNorm of progress-aligned recurrence; LOOM, arXiv:2610.01153; Parcae, arXiv:2604.12946.
Deviations: LOOM's residual scale alone, without its decaying re-injection, routers and looping residual.
"""

import dataclasses
from typing import Any

from looplab.data.packing import PackedText, Packing
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.residual import LoomResidual
from looplab.nn.rope import Rope
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.next_token import NextToken
from looplab.recipes.base import RECIPES
from looplab.recurrence.boundary import EndNorm
from looplab.recurrence.depth import FixedDepth, PrefixDepth
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT
from looplab.recurrence.injection import Add, Diagonal
from looplab.recurrence.plan import Blocks, ModelLoop
from looplab.recurrence.state_init import Zeros
from looplab.training.config import Evaluation, RunConfig
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

BYTES = 259
"""Bytes, bos, eos, pad."""
LAYERS = 2
RATES = (1e-3, 3e-3, 9e-3)
LOOPS = (1, 4, 16)
FURTHER_LOOPS = (2, 8)
DEEPEST = 16
STABILISERS: dict[str, dict[str, Any]] = {
    "none": {},
    "end_norm": {"boundary": EndNorm()},
    "loom": {"residual": LoomResidual()},
    "diagonal": {"injection": Diagonal(initial_decay=0.2**0.5, source="embeds")},
}
EXPRESSIVE = ("untied", "wide")
CONTRACTS: dict[str, dict[str, Any]] = {
    "window_1": {"gradient": TruncatedBPTT(window=1)},
    "segments_3": {"gradient": SegmentedDetach(every=3), "objective": EveryIteration()},
    "every_loop": {"objective": EveryIteration()},
}
KINDS = (*STABILISERS, *EXPRESSIVE, *CONTRACTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is equal in all arms."""

    width: int
    heads: int
    hidden: int
    seq_len: int
    rows: int
    steps: int
    warmup_steps: int
    early: int
    """A run that ends above its loss after so many steps has failed."""
    every: int
    """Steps between evaluations."""
    batches: int
    """Held-out batches."""


CPU = Size(
    width=48, heads=4, hidden=128, seq_len=64, rows=16, steps=240, warmup_steps=20, early=60, every=20, batches=8
)
SMOKE = Size(width=16, heads=2, hidden=32, seq_len=32, rows=4, steps=12, warmup_steps=2, early=3, every=3, batches=1)


@RECIPES.register("stability-none")
def stability_none() -> RunConfig:
    """Two layers looped 16 times with plain additive re-injection, at the middle rate."""
    return stability("none", DEEPEST, RATES[1])


@RECIPES.register("stability-end-norm")
def stability_end_norm() -> RunConfig:
    """The same with the size of the state pinned after every loop."""
    return stability("end_norm", DEEPEST, RATES[1])


@RECIPES.register("stability-loom")
def stability_loom() -> RunConfig:
    """The same with LOOM's residual scale."""
    return stability("loom", DEEPEST, RATES[1])


@RECIPES.register("stability-diagonal")
def stability_diagonal() -> RunConfig:
    """The same with a decaying linear carry in place of plain addition."""
    return stability("diagonal", DEEPEST, RATES[1])


def stability(kind: str, loops: int, rate: float, size: Size = CPU, seed: int = 0) -> RunConfig:
    """One run: a stabiliser, a more expressive model, or a training contract, by its name in `KINDS`."""
    changes = {"objective": NextToken(), **CONTRACTS.get(kind, {})}
    return RunConfig(
        recipe=f"stability-{kind.replace('_', '-')}",
        model=_model(kind, loops, size),
        data=PackedText(packing=Packing(seq_len=size.seq_len, rows=size.rows)),
        optimizer=AdamW(lr=rate),
        schedule=Cosine(warmup_steps=size.warmup_steps, floor=0.1),
        steps=size.steps,
        evaluation=Evaluation(every=size.every, batches=size.batches, depths=(loops,)),
        save_every=size.steps,
        seed=seed,
        **changes,
    )


def _model(kind: str, loops: int, size: Size) -> LoopedConfig:
    factor = 2 if kind == "wide" else 1
    width = factor * size.width
    tied = kind != "untied"
    settings: dict[str, Any] = {
        "dim": width,
        "vocab": BYTES,
        "attention": Attention(
            heads=size.heads, kv_heads=size.heads, head_dim=width // size.heads, position=Rope(base=10000.0)
        ),
        "ffn": SwiGLU(hidden=factor * size.hidden),
        "blocks": (LAYERS,) if tied else (LAYERS,) * loops,
        "order": ModelLoop(num_steps=loops) if tied else Blocks(num_steps=(1,) * loops),
        "trained_depth": FixedDepth(num_steps=loops) if tied else PrefixDepth(law=FixedDepth(num_steps=loops)),
        "envelope": NoEnvelope(),
        "injection": Add(source="embeds"),
        "state_init": Zeros(),
        "head": Head(tied=False),
        "init": Init(std=width**-0.5, embed_std=1.0),
        "max_positions": size.seq_len,
    }
    return LoopedConfig(**(settings | STABILISERS.get(kind, {})))

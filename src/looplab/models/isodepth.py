"""Iso-depth models: 20 executed layers, of which the middle 16 are 16 / r stored ones, run r times.

    e       = prelude(norm_e(E[x]));   s_0 = e
    s_{t+1} = norm_r(core(W [e ; s_t]))         W = [I | 0] at the start, so the core reads e; no W at r = 1
    logits  = 15 tanh(W_out norm_f(coda(s_r)) / 15)
    layer     h += attn(n1 h);  h += W_2 relu(W_1 n2 h)^2;  queries and keys normed after rotary, without a weight

A point of the configurable family (models/looped.py): D = 64 * size, heads of 128, 2 + 16 / r + 2 layers; at r = 1 the
20 layers are one stack without prelude or coda, whose norm_r and norm_f follow each other. Parameters: layers (12 D^2 +
2 D) + 2 V D + 3 D, and 2 D^2 for W, with V = 32,064.

Reference: iso-depth scaling of looped models, arXiv:2604.21106; code kschwethelm/looped-lm-scaling.
Deviations: matrices start normal, the original's uniform of equal spread; there the head starts at 0.001 and the second
    matrix of the feed-forward at half the spread of the others, here as they. Rotary turns the other way round there,
    which is another order of the channels, and its angles are bfloat16.
"""

from typing import Any

from looplab.models.base import PRESETS
from looplab.models.looped import Envelope, LoopedConfig, NoEnvelope
from looplab.nn.attention import RMS, Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import ReluSquared
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.boundary import OwnNorm
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.injection import Concat, NoInjection
from looplab.recurrence.plan import ModelLoop

LAYERS = 16
"""Executed layers of the core."""
ENDS = 2
"""Layers of the prelude, and of the coda."""
HEAD = 128
VOCABULARY = 32_001
ROWS = 64
"""The embedding's rows are a multiple of this."""


def isodepth(size: int, r: int) -> LoopedConfig:
    """The model of width 64 * size (rounded up to whole heads of 128) whose core runs r times.

    Raises:
        ValueError: A size below 1, or an r that does not divide the 16 layers of the core.
    """
    if size < 1:
        raise ValueError(f"isodepth: size must be at least 1. Got {size}. The paper has 6 to 34.")
    if r < 1 or LAYERS % r:
        raise ValueError(f"isodepth: r must divide {LAYERS}. Got {r}. The paper has 1, 2, 4 and 8.")
    heads = -(-64 * size // HEAD)
    return _config(
        heads=heads,
        head_dim=HEAD,
        core=LAYERS // r,
        ends=ENDS,
        r=r,
        vocab=VOCABULARY,
        max_positions=2048,
        init=Init(std=(heads * HEAD) ** -0.5, embed_std=1.0),
    )


def _config(*, heads: int, head_dim: int, core: int, ends: int, r: int, **changes: Any) -> LoopedConfig:
    dim, vocab = heads * head_dim, changes["vocab"]
    return LoopedConfig(
        dim=dim,
        padded_vocab=-(-vocab // ROWS) * ROWS,
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            position=Rope(base=10_000.0, order="before_norm"),
            qk_norm=RMS(affine=False, over="head", eps=1e-6),
        ),
        ffn=ReluSquared(hidden=4 * dim),
        order=ModelLoop(num_steps=r),
        trained_depth=FixedDepth(num_steps=r),
        blocks=(core if r > 1 else core + 2 * ends,),
        envelope=Envelope(prelude=ends, coda=ends) if r > 1 else NoEnvelope(),
        injection=Concat(order="embeds_first", init="identity") if r > 1 else NoInjection(),
        boundary=OwnNorm(),
        norm=RMSNorm(eps=1e-6),
        embed_norm=RMSNorm(eps=1e-6),
        head=Head(tied=False, softcap=15.0),
        **changes,
    )


@PRESETS.register("isodepth-12-r1")
def isodepth_12_r1() -> LoopedConfig:
    """Width 768: 20 layers, nothing looped."""
    return isodepth(12, 1)


@PRESETS.register("isodepth-12-r2")
def isodepth_12_r2() -> LoopedConfig:
    """Width 768: 2 layers, 8 layers twice, 2 layers."""
    return isodepth(12, 2)


@PRESETS.register("isodepth-12-r4")
def isodepth_12_r4() -> LoopedConfig:
    """Width 768: 2 layers, 4 layers 4 times, 2 layers."""
    return isodepth(12, 4)


@PRESETS.register("isodepth-12-r8")
def isodepth_12_r8() -> LoopedConfig:
    """Width 768: 2 layers, 2 layers 8 times, 2 layers."""
    return isodepth(12, 8)


@PRESETS.register("tiny-isodepth")
def tiny_isodepth() -> LoopedConfig:
    """The shape of r = 4 at toy width: 1 layer, 1 layer 4 times, 1 layer."""
    return _config(heads=2, head_dim=16, core=1, ends=1, r=4, vocab=61, max_positions=64, init=Init(std=0.15))

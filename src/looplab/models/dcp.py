"""The shape of the 90M grid of the Depth Control Protocol: two one-layer blocks, each run four times, behind a prelude.

    e       = norm_m(prelude(E[tokens]));  s_0 = e
    u       = s + a_b[t]                              b the block, t its iteration
    s       <- g o h + (1 - g) o s,  h = layer_b(u)   g: the energy gate of recurrence/update.py
    logits  = E^T norm_f(s)

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934; sizes of the three arms in
    dauhavanHaniAI/depth-control-protocol: recurrent/run_dcb_grid.sh. Their model is VERA (models/vera.py).
Deviations: a point of models/looped.py, without what VERA has beside the loop: no thought tokens and no bridge from
    them, no gated state for keys and values, one rotary base instead of a learned mix. The iteration embedding is added
    to the stream; VERA adds it to its thoughts. The arms differ in the law of training alone; the preset has that of
    arm B, prefixes drawn uniformly.
"""

from looplab.models.base import PRESETS
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.depth import PrefixDepth, UniformDepth
from looplab.recurrence.plan import Blocks
from looplab.recurrence.signal import StepEmbedding
from looplab.recurrence.update import EnergyGate

NUM_STEPS = 4
"""Iterations of each of the two blocks."""


def _config(
    *, dim: int, vocab: int, heads: int, kv_heads: int, hidden: int, prelude: int, positions: int, std: float
) -> LoopedConfig:
    layers = prelude + 2
    return LoopedConfig(
        dim=dim,
        vocab=vocab,
        attention=Attention(heads=heads, kv_heads=kv_heads, head_dim=dim // heads, position=Rope(base=10000.0)),
        ffn=SwiGLU(hidden=hidden),
        order=Blocks(num_steps=(NUM_STEPS, NUM_STEPS)),
        trained_depth=PrefixDepth(law=UniformDepth(low=1, high=2 * NUM_STEPS)),
        blocks=(1, 1),
        envelope=Envelope(prelude=prelude, coda=0),
        prelude_norm=RMSNorm(),
        signal=StepEmbedding(max=NUM_STEPS),
        update=EnergyGate(hidden=dim // 4),
        max_positions=positions,
        init=Init(std=std, out_std=std / (2 * layers) ** 0.5),
    )


@PRESETS.register("dcp-90m")
def dcp_90m() -> LoopedConfig:
    """The sizes of the grid: 640 wide, a prelude of 8, two one-layer blocks x 4 with energy gate."""
    return _config(dim=640, vocab=32000, heads=10, kv_heads=2, hidden=1792, prelude=8, positions=1024, std=0.02)


@PRESETS.register("tiny-dcp")
def tiny_dcp() -> LoopedConfig:
    """The same with a prelude of one layer, 32 wide."""
    return _config(dim=32, vocab=64, heads=4, kv_heads=2, hidden=48, prelude=1, positions=64, std=0.15)

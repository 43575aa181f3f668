"""LoopFormer: a stack whose every layer is told the time it starts from and the size of the step it takes.

    s_0     = E[token] + P[position]
    s_{k+1} = stack(s_k; time_k, dt_k),   time_0 = 0,  time_{k+1} = time_k + dt_k
    layer   h += g1 o attn(n(h) o (1 + k1));  h += g2 o gelu_mlp(n(h) o (1 + k2));  (g1, g2, k1, k2) = W silu(c) + b
    c       = MLP_t(code(time_k)) + MLP_dt(code(dt_k)),   code(x) = [cos | sin] of x * 10000^(-i / 128)
    logits  = E^T norm(s_K)

A point of the family in models/looped.py. Reference: Jeddi et al., "LoopFormer: elastic-depth looped transformers",
arXiv:2602.11451; code: armenjeddi/loopformer: models/loopformer.py. Norms inside layers have no weight; all norms add
float32's epsilon, PyTorch's default for float32 and bfloat16.

An iteration id stands for a (time, step size) pair: ids 0 .. 7 are the trained grid of 8 x 1/8, the ids after them the
coarser grids of 1, 2, .., 7 equal steps to the same end. `num_steps=m` runs m steps of 1/m (`spec.grid`); the first m
of the 8 steps are another schedule, which stops at time m/8: the plan's first m entries. Uneven steps are given as
`extras={"step_sizes": Float[B M]}`, and are then ids 0 .. M-1 of the plan.

Deviations: `NOTES` lists what the original does otherwise. Positions past the table are refused, as there.
"""

from collections.abc import Mapping
from typing import Any

from looplab.models.base import PRESETS
from looplab.models.looped import Looped, LoopedConfig, NoEnvelope
from looplab.models.published import PUBLISHED, Family, KeyMap, Rename, Rule, Split
from looplab.nn.attention import Attention
from looplab.nn.linear import Init
from looplab.nn.mlp import Gelu
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Learned
from looplab.recurrence.depth import Grid
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.signal import AdaLN

REFERENCE = "arXiv:2602.11451; armenjeddi/loopformer"
NOTES = (
    "Without targets the original scores the last position only.",
    "Its generation takes a list of steps and runs the default one.",
    "Its weight initialisation overwrites the zero start of the AdaLN maps.",
)
EPS = 2.0**-23
"""Epsilon of float32."""
TRAINED = Grid(sizes=(1 / 8,) * 8)


def config_of(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LoopedConfig:
    """Our configuration of a LoopFormer `config.json`.

    Raises:
        ValueError: Biases in the linear maps, or a width that the heads do not divide.
    """
    if facts.get("bias", False):
        raise ValueError("config.json: bias must be false. Got true. No released LoopFormer has biases.")
    width, heads = facts["n_embd"], facts["n_head"]
    if width % heads:
        raise ValueError(
            f"config.json: n_embd ({width}) must be a multiple of n_head ({heads}). Got remainder {width % heads}. "
            "Correct one of them."
        )
    return _config(
        dim=width,
        vocab=facts["vocab_size"],
        layers=facts["n_layer"],
        heads=heads,
        hidden=facts.get("intermediate_dim") or 4 * width,
        positions=facts["block_size"],
    )


def inverse(c: LoopedConfig) -> dict[str, Any]:
    """config.json of a model in this shape; what it cannot say is found by `models/inverse.py`."""
    positions = c.attention.position
    return {
        "model_type": "loopformer",
        "n_embd": c.dim,
        "vocab_size": c.vocab,
        "n_layer": sum(c.blocks),
        "n_head": c.attention.heads,
        "intermediate_dim": c.ffn.linears(c.dim)["down"][0],
        "block_size": positions.max if isinstance(positions, Learned) else 1,
        "bias": False,
    }


def _config(
    *, dim: int, vocab: int, layers: int, heads: int, hidden: int, positions: int, init: Init | None = None
) -> LoopedConfig:
    out_std = 0.02 / (2 * layers) ** 0.5
    return LoopedConfig(
        dim=dim,
        vocab=vocab,
        attention=Attention(heads=heads, kv_heads=heads, head_dim=dim // heads, position=Learned(max=positions)),
        ffn=Gelu(hidden=hidden),
        order=ModelLoop(num_steps=len(TRAINED.sizes)),
        trained_depth=TRAINED,
        blocks=(layers,),
        envelope=NoEnvelope(),
        norm=RMSNorm(eps=EPS, affine=False),
        final_norm=RMSNorm(eps=EPS),
        signal=AdaLN(),
        init=init or Init(std=0.02, out_std=out_std),
    )


def key_map_of(config: LoopedConfig) -> KeyMap:
    """Names of a LoopFormer file for a configuration of this shape."""
    rules: list[Rule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.wpe.weight", "embedding.position_weight"),
        Rename("transformer.norm_f.weight", "final_norm.weight"),
    ]
    rules += [
        Rename(f"{theirs}.mlp.{layer}.{part}", f"signals.0.{ours}.{layer}.{part}")
        for theirs, ours in (("time_embedder", "time"), ("dt_embedder", "step_size"))
        for layer in (0, 2)
        for part in ("weight", "bias")
    ]
    for i in range(sum(config.blocks)):
        theirs, ours = f"transformer.h.blocks.{i}", f"core.{i}"
        rules += [
            Split(f"{theirs}.attn.c_attn.weight", tuple((f"{ours}.attn.{x}.weight", config.dim) for x in "qkv")),
            Rename(f"{theirs}.attn.c_proj.weight", f"{ours}.attn.o.weight"),
            Rename(f"{theirs}.mlp.c_fc.weight", f"{ours}.ffn.up.weight"),
            Rename(f"{theirs}.mlp.c_proj.weight", f"{ours}.ffn.down.weight"),
            Rename(f"{theirs}.adaLN_modulation.1.weight", f"layer_signals.{i}.map.weight"),
            Rename(f"{theirs}.adaLN_modulation.1.bias", f"layer_signals.{i}.map.bias"),
        ]
    # `attn.bias` is the causal mask of machines without a fused attention.
    ignorable = (r"transformer\.h\.blocks\.\d+\.attn\.bias",)
    return KeyMap(tuple(rules), ignorable=ignorable, aliases={"lm_head.weight": "transformer.wte.weight"})


PUBLISHED.register("loopformer")(
    Family(
        name="loopformer",
        model_types=("loopformer",),
        reference=REFERENCE,
        config=config_of,
        key_map=key_map_of,
        build=Looped,
        inverse=inverse,
        recognises=lambda names: {"dt_embedder.mlp.0.weight", "time_embedder.mlp.0.weight"} <= names,
        notes=NOTES,
    )
)


@PRESETS.register("loopformer-3blk")
def loopformer_3blk() -> LoopedConfig:
    """LoopFormer with three layers, 8 loops."""
    return _config(dim=2048, vocab=50304, layers=3, heads=32, hidden=5120, positions=1024)


@PRESETS.register("tiny-loopformer")
def tiny_loopformer() -> LoopedConfig:
    """LoopFormer's shape with two layers."""
    return _config(dim=32, vocab=64, layers=2, heads=4, hidden=40, positions=32, init=Init(std=0.15))

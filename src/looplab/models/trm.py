"""TRM: one tiny network that refines a latent (low) and an answer (high) in turn, supervised after every round.

    x    = sqrt(dim) [prefix ; embed(tokens)]
    low  <- f(low + (high + x))                     l_cycles times
    high <- f(high + low)                           the same f; both h_cycles times per supervision step
    logits = W high[:, prefix:];  halt = W_q high[:, 0] + b

    f, attention:  u <- r(u + attention(u));  u <- r(u + swiglu(u))          r: RMS without weight, over channels
    f, token MLP:  v <- r(v + swiglu(v)), v = u transposed;  u <- r(u + swiglu(u))     the first r is over positions

Reference: Jolicoeur-Martineau, "Less is More: Recursive Reasoning with Tiny Networks", arXiv:2510.04871;
    code SamsungSAILMontreal/TinyRecursiveModels: models/recursive_reasoning/trm.py.
Deviations: none in the numbers. An attention model takes shorter grids than it was trained on; the original takes its
own length only. Gradient goes through the last high cycle of a supervision step, which is `TruncatedBPTT(l_cycles + 1)`
here and not part of the model. What the original does on purpose: saved weights are an exponential average of the
trained ones; it runs in bfloat16 with the halting logits cast to float32; evaluation never halts early; H_layers is
ignored, and so is a rotary setting of the token-MLP variant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from looplab._types import Float
from looplab.models.base import MODELS, PRESETS
from looplab.models.published import PUBLISHED, Family, KeyMap, Rule
from looplab.models.puzzle import (
    HaltRule,
    PuzzleConfig,
    PuzzleModel,
    PuzzlePrefix,
    attention_layer,
    attention_rules,
    feed_forward_rules,
    key_map_of,
    settings_of,
    shared_settings,
)
from looplab.nn.attention import Scope
from looplab.nn.cost import Group
from looplab.nn.linear import Init
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import NoPE, Rope

DEFAULT_PREFIX = 16
"""Slots of the prefix where the original's settings say nothing."""


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Cells are mixed by attention."""

    heads: int


@dataclass(frozen=True, kw_only=True)
class TokenMLP:
    """Cells are mixed by a feed-forward over positions, made for one length."""


@dataclass(frozen=True, kw_only=True)
class TRMConfig(PuzzleConfig):
    """Everything that fixes a TRM."""

    layers: int
    """Layers of the one network."""
    mixing: SelfAttention | TokenMLP
    halt_rule: HaltRule = "q_halt > 0"
    """When the trained model stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise ValueError(f"TRMConfig.layers must be at least 1. Got {self.layers}.")
        if isinstance(self.mixing, SelfAttention):
            self.attention(self.mixing.heads)  # refuses heads that do not fit
        if isinstance(self.mixing, TokenMLP) and (self.cells is None or isinstance(self.position, Rope)):
            raise ValueError(
                "TRMConfig.mixing=TokenMLP() needs cells, and NoPE() or Learned(...) as position. "
                f"Got cells={self.cells} and {self.position}. It is built for one length and rotates nothing."
            )


class MixerLayer(nn.Module):
    """A feed-forward over positions and one over channels, each normed after the sum, the first while transposed."""

    def __init__(self, config: TRMConfig, slots: int):
        super().__init__()
        self.mixer = config.feed_forward(slots).build(slots, Init())
        self.mixer_out = RMSNorm(eps=config.eps, affine=False).build(slots)
        self.ffn = config.feed_forward(config.dim).build(config.dim, Init())
        self.ffn_out = RMSNorm(eps=config.eps, affine=False).build(config.dim)

    def forward(self, h: Float[Tensor, "batch slots dim"], scope: Scope | None) -> Float[Tensor, "batch slots dim"]:
        """The stream after the layer."""
        v = h.transpose(1, 2).contiguous()
        h = self.mixer_out(v + self.mixer(v)).transpose(1, 2).contiguous()
        return self.ffn_out(h + self.ffn(h))


@MODELS.register("trm")
class TRM(PuzzleModel):
    """Tiny recursive model: one network for both levels."""

    config_class = TRMConfig
    reference = "Jolicoeur-Martineau, arXiv:2510.04871"

    def __init__(self, config: TRMConfig):
        attention = config.attention(config.mixing.heads) if isinstance(config.mixing, SelfAttention) else None
        made: list[tuple[nn.Module, Group]] = [
            _mixer_layer(config) if attention is None else attention_layer(config, attention)
            for _ in range(config.layers)
        ]
        every = tuple(range(config.layers))
        super().__init__(
            config,
            name="trm",
            attention=attention,
            layers=[layer for layer, _ in made],
            block_layers=(every, every),
            cost=made[0][1],
            halt_rule=config.halt_rule,
            fixed_length=config.cells if attention is None else None,
        )


def _mixer_layer(config: Any) -> tuple[MixerLayer, Group]:
    slots = config.slots(config.cells)
    across, within = config.feed_forward(slots), config.feed_forward(config.dim)
    cost = Group(
        matmul=within.matmul_params(config.dim),
        matmul_per_row=config.dim * across.matmul_params(slots),
        layers=1,
        prefix=config.slots(0),
    )
    return MixerLayer(config, slots), cost


def _config(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> TRMConfig:
    facts = settings_of(facts)
    given = facts.get("puzzle_emb_len", DEFAULT_PREFIX)
    across = shapes.get("L_level.layers.0.mlp_t.down_proj.weight")
    needs = ("L_layers",) if across is not None else ("L_layers", "num_heads")
    shared = shared_settings("trm", facts, shapes, prefix_slots=given, needs=needs)
    if shared["prefix"] is None and given:
        raise ValueError(
            f"load: puzzle_emb_len must be 0 without puzzle embeddings (puzzle_emb_ndim=0). Got {given}. "
            "The original would cut cells that are no prefix."
        )
    if across is not None:
        before = 0 if shared["prefix"] is None else shared["prefix"].slots
        shared["cells"] = across[0] - before if shared["cells"] is None else shared["cells"]
        shared["position"] = NoPE() if isinstance(shared["position"], Rope) else shared["position"]
    return TRMConfig(
        **shared,
        layers=facts["L_layers"],
        mixing=SelfAttention(heads=facts["num_heads"]) if across is None else TokenMLP(),
        halt_rule="q_halt > 0" if facts.get("no_ACT_continue", True) else "q_halt > q_continue",
    )


def _key_map(config: TRMConfig) -> KeyMap:
    rules: list[Rule] = []
    for i in range(config.layers):
        theirs, ours = f"L_level.layers.{i}", f"core.{i}"
        if isinstance(config.mixing, TokenMLP):
            across = config.feed_forward(config.slots(config.cells or 0))
            rules += feed_forward_rules(across, f"{theirs}.mlp_t", f"{ours}.mixer")
        else:
            rules += attention_rules(config, theirs, ours)
        rules += feed_forward_rules(config.feed_forward(config.dim), f"{theirs}.mlp", f"{ours}.ffn")
    return key_map_of(config, rules)


PUBLISHED.register("trm")(
    Family(
        name="trm",
        model_types=(),
        reference="Jolicoeur-Martineau, arXiv:2510.04871; SamsungSAILMontreal/TinyRecursiveModels",
        config=_config,
        key_map=_key_map,
        build=TRM,
        recognises=lambda names: "H_init" in names and not any(name.startswith("H_level.") for name in names),
        config_files=("config.json", "all_config.yaml"),
        notes=(
            "saved weights are an exponential average of the trained ones",
            "the original runs in bfloat16 with halting logits cast to float32",
            "evaluation never halts early",
        ),
    )
)


@PRESETS.register("trm-attn")
def trm_attn() -> TRMConfig:
    """The attention variant, for Sudoku."""
    return TRMConfig(
        dim=512,
        vocab=11,
        layers=2,
        mixing=SelfAttention(heads=8),
        position=Rope(base=10000.0),
        prefix=PuzzlePrefix(entries=1, width=512, slots=DEFAULT_PREFIX),
        cells=81,
        h_cycles=3,
        l_cycles=6,
        steps=16,
    )


@PRESETS.register("trm-sudoku-mlp")
def trm_sudoku_mlp() -> TRMConfig:
    """The token-MLP variant, for Sudoku."""
    return replace(trm_attn(), mixing=TokenMLP(), position=NoPE())


@PRESETS.register("tiny-trm-attn")
def tiny_trm_attn() -> TRMConfig:
    """Attention, two supervision steps of one cycle."""
    return TRMConfig(
        dim=32,
        vocab=11,
        layers=1,
        mixing=SelfAttention(heads=2),
        position=Rope(base=10000.0),
        prefix=PuzzlePrefix(entries=5, width=48, slots=3),
        cells=36,
        h_cycles=1,
        l_cycles=2,
        steps=2,
        expansion=2.0,
    )


@PRESETS.register("tiny-trm-mlp")
def tiny_trm_mlp() -> TRMConfig:
    """The same with the token MLP, for grids of nine cells."""
    return replace(tiny_trm_attn(), mixing=TokenMLP(), position=NoPE(), cells=9)

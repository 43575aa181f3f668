"""HRM: a slow (high) and a fast (low) network that refine an answer in turn, supervised after every round.

    x    = sqrt(dim) [prefix ; embed(tokens)]
    low  <- f_L(low + (high + x))                   l_cycles times
    high <- f_H(high + low)                         both h_cycles times per supervision step
    logits = W high[:, prefix:];  (halt, continue) = W_q high[:, 0] + b

    f:  u <- r(u + attention(u));  u <- r(u + swiglu(u))          r: RMS without weight

Reference: Wang et al., "Hierarchical Reasoning Model", arXiv:2506.21734; code sapientinc/HRM: models/hrm/hrm_act_v1.py.
Deviations: none in the numbers. A rotary model takes shorter grids than it was trained on; the original takes its own
length only. Gradient goes through the last low and the last high application of a supervision step, which is
`TruncatedBPTT(window=2)` here and not part of the model. What the original does on purpose: the continue target of
training is bootstrapped from one more supervision step; it runs in bfloat16 with the halting logits cast to float32;
evaluation never halts early.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looplab.models.base import MODELS, PRESETS
from looplab.models.published import PUBLISHED, Family, KeyMap, Rule
from looplab.models.puzzle import (
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
from looplab.nn.rope import Learned, NoPE, Rope


@dataclass(frozen=True, kw_only=True)
class HRMConfig(PuzzleConfig):
    """Everything that fixes an HRM."""

    heads: int
    """Heads of every attention."""
    high_layers: int
    low_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("high_layers", "low_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"HRMConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        self.attention(self.heads)  # refuses heads that do not fit
        if isinstance(self.position, NoPE):
            raise ValueError("HRMConfig.position must be Rope(...) or Learned(...). Got NoPE(). Use models.trm.")


@MODELS.register("hrm")
class HRM(PuzzleModel):
    """Hierarchical reasoning model: a network of its own for each level."""

    config_class = HRMConfig
    reference = "Wang et al., arXiv:2506.21734"

    def __init__(self, config: HRMConfig):
        low = config.low_layers
        attention = config.attention(config.heads)
        made = [attention_layer(config, attention) for _ in range(low + config.high_layers)]
        super().__init__(
            config,
            name="hrm",
            attention=attention,
            layers=[layer for layer, _ in made],
            block_layers=(tuple(range(low)), tuple(range(low, len(made)))),
            cost=made[0][1],
            halt_rule="q_halt > q_continue",
        )


def _config(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> HRMConfig:
    facts = settings_of(facts)
    needs = ("num_heads", "H_layers", "L_layers")
    shared = shared_settings("hrm", facts, shapes, prefix_slots=0, needs=needs)
    return HRMConfig(**shared, heads=facts["num_heads"], high_layers=facts["H_layers"], low_layers=facts["L_layers"])


def _key_map(config: HRMConfig) -> KeyMap:
    rules: list[Rule] = []
    stacks = (("L_level", config.low_layers, 0), ("H_level", config.high_layers, config.low_layers))
    for stack, count, first in stacks:
        for i in range(count):
            theirs, ours = f"{stack}.layers.{i}", f"core.{first + i}"
            rules += attention_rules(config, theirs, ours)
            rules += feed_forward_rules(config.feed_forward(config.dim), f"{theirs}.mlp", f"{ours}.ffn")
    return key_map_of(config, rules)


PUBLISHED.register("hrm")(
    Family(
        name="hrm",
        model_types=(),
        reference="Wang et al., arXiv:2506.21734; sapientinc/HRM",
        config=_config,
        key_map=_key_map,
        build=HRM,
        recognises=lambda names: "H_init" in names and any(name.startswith("H_level.") for name in names),
        config_files=("config.json", "all_config.yaml"),
        notes=(
            "the continue target of training is bootstrapped from one more supervision step",
            "the original runs in bfloat16 with halting logits cast to float32",
            "evaluation never halts early",
        ),
    )
)


@PRESETS.register("hrm")
def hrm() -> HRMConfig:
    """The released size, for Sudoku."""
    return HRMConfig(
        dim=512,
        vocab=11,
        heads=8,
        high_layers=4,
        low_layers=4,
        position=Rope(base=10000.0),
        prefix=PuzzlePrefix(entries=1, width=512, slots=1),
        cells=81,
        h_cycles=2,
        l_cycles=2,
        steps=16,
    )


@PRESETS.register("tiny-hrm")
def tiny_hrm() -> HRMConfig:
    """One layer per level and learned positions, two supervision steps."""
    return HRMConfig(
        dim=32,
        vocab=11,
        heads=2,
        high_layers=1,
        low_layers=1,
        position=Learned(max=38),
        prefix=PuzzlePrefix(entries=5, width=40, slots=2),
        cells=36,
        h_cycles=1,
        l_cycles=2,
        steps=2,
        expansion=2.0,
    )

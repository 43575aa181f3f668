"""The way back: a model that was made here, in the words of a published family's config.json.

A family writes what it has words for (`Family.inverse`). Whether that is everything is found by reading it again: every
field of the configuration that comes back otherwise has no place in the format, and the first one is named. Fields that
only say how weights start are not compared, and a law of training without words is lost, which the caller tells.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from looplab.models.looped import LoopedConfig
from looplab.models.published import PUBLISHED, Family
from looplab.nn.attention import Attention
from looplab.nn.rope import Llama3, Rope
from looplab.recurrence.state_init import Normal, Zeros

START_ONLY = {
    ("LoopedConfig", "init"), ("Concat", "init"), ("Diagonal", "initial_decay"), ("Diagonal", "decay_params"),
    ("HazardGate", "bias"),
}  # fmt: skip
"""Class and field of what says how weights start or are trained, and nothing about what they compute."""
LAWS = "trained_depth"
"""The field that may be lost."""


def formats() -> list[str]:
    """Families in whose format models that were made here can be written."""
    return [name for name in PUBLISHED if PUBLISHED[name].inverse is not None]


def settings_of(config: Any, family: Family) -> tuple[dict[str, Any], list[str]]:
    """config.json of a model in a family's format, and what of the configuration it does not say.

    Raises:
        ValueError: Something that the model computes has no place in the format; the message names it.
    """
    if family.inverse is None:
        raise ValueError(
            f"export: format must be one that models made here can be written in. Got {family.name!r}. "
            f"Choose one of {', '.join(formats())}."
        )
    if not isinstance(config, LoopedConfig):
        raise ValueError(
            f"export: MODEL must be of the configurable family (looped). Got {type(config).__name__}, which has no "
            f"place in format {family.name!r}. Retrofit it first if it is dense."
        )
    facts = family.inverse(config)
    try:
        names = family.key_map(config).theirs
        again = family.config(facts, dict.fromkeys(names, ()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"export: this configuration has no place in format {family.name!r} ({error})") from error
    lost = list(_differences(canonical(config), canonical(again), ""))
    for name, words in lost:
        if name != LAWS:
            raise ValueError(f"export: {words} has no place in format {family.name!r}")
    return facts, [words for _, words in lost]


def canonical(c: LoopedConfig) -> LoopedConfig:
    """The same model with every default that stands for another field written out."""
    attention = _canonical_attention(c.attention)
    state_init = c.state_init
    if isinstance(state_init, Normal) and state_init.std == "like_init":
        state_init = replace(state_init, std=math.sqrt(2 / (5 * c.width)))
    if isinstance(state_init, Zeros):
        state_init = Normal(std=0.0)
    return replace(
        c,
        attention=attention,
        core_attention=attention if c.core_attention is None else _canonical_attention(c.core_attention),
        core_ffn=c.core_ffn or c.ffn,
        final_norm=c.final_norm or c.norm,
        state_dim=c.width,
        padded_vocab=c.padded_vocab or c.vocab,
        state_init=state_init,
    )


def rope_facts(c: LoopedConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as the transformers library has them; empty without rotary positions."""
    rope = c.attention.position
    if not isinstance(rope, Rope):
        return {}
    return {"rope_theta": rope.base, "rope_scaling": None if rope.scaling is None else _llama3(rope.scaling)}


def steps_of(c: LoopedConfig) -> int:
    """Iterations that the model runs by itself; 1 where they are no single number."""
    return c.order.default_steps if isinstance(c.order.default_steps, int) else 1


def _llama3(scaling: Llama3) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def _canonical_attention(a: Attention) -> Attention:
    """Without an order of rotation and norm where there is no norm."""
    if a.qk_norm is None and isinstance(a.position, Rope):
        return replace(a, position=replace(a.position, order="before_norm"))
    return a


def _differences(own: Any, again: Any, name: str) -> Iterator[tuple[str, str]]:
    """(field, `field=value`) of everything that differs, the outermost object of another kind first."""
    if own == again:
        return
    if not dataclasses.is_dataclass(own) or type(own) is not type(again) or name == LAWS:
        value = f"{type(own).__name__}(...)" if dataclasses.is_dataclass(own) else repr(own)
        yield name, f"{name}={own if name == LAWS else value}"
        return
    for part in dataclasses.fields(own):
        if (type(own).__name__, part.name) not in START_ONLY:
            inner = f"{name}.{part.name}" if name else part.name
            yield from _differences(getattr(own, part.name), getattr(again, part.name), inner)

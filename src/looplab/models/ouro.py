"""Ouro: the whole stack loops, its normed state is fed back, and a gate on every state says how likely it stops there.

    s_0     = E[token]
    s_{t+1} = norm(stack(s_t)),   each layer  h += n2(attn(n1 h));  h += n4(swiglu(n3 h))
    logits  = W s_t                                      at any t; the readout norms no second time
    lambda_t = sigmoid(w . s_t + b),   p_t = lambda_t prod_{j<t} (1 - lambda_j), the last loop takes the rest

A point of the family in models/looped.py. Reference: Zhu et al., "Scaling latent reasoning via looped language
models", arXiv:2510.25741; code: LoopedLMs/ouro_rl: ouro_rl/modeling/modeling_ouro.py. Rotary pairs are half-split;
key-value slot = t * layers + layer.

Deviations: depth is an argument, so no exit threshold is read from the configuration (`NOTES` lists what the original
does otherwise). The gate and the logits answer in float32. Rotary angles are float32 under any type.
"""

from collections.abc import Mapping
from typing import Any

from looplab.models.base import PRESETS
from looplab.models.inverse import rope_facts, steps_of
from looplab.models.looped import Looped, LoopedConfig, NoEnvelope
from looplab.models.published import PUBLISHED, Family, KeyMap, Rename, Rule
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import PreAndBranch, RMSNorm
from looplab.nn.rope import Llama3, Rope
from looplab.recurrence.boundary import SharedFinalNorm
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.plan import ModelLoop

REFERENCE = "arXiv:2510.25741; ByteDance/Ouro-*, LoopedLMs/ouro_rl"
NOTES = (
    "With labels the original returns logits weighted by exit probability, whatever else is asked for.",
    "Its default threshold of 1.0 means 'summed exit probability >= 1', which rounding can meet before the last loop.",
    "All loops always run there; an exit only chooses which loop's state is read, so every token has all cache slots.",
    "A cache sized by num_hidden_layers fails at the second loop: slots are loops x layers.",
    "Its config.json gives 0 for the begin, end and padding tokens; 1, 2 and 0 are right.",
    "More loops than total_ut_steps were never trained.",
)
LAYER = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
    "input_layernorm": "attn_in",
    "input_layernorm_2": "attn_out",
    "post_attention_layernorm": "ffn_in",
    "post_attention_layernorm_2": "ffn_out",
}
"""Weights of a layer, theirs -> ours."""
ROTARY = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A table that old files carry; it is made anew."""


def config_of(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LoopedConfig:
    """Our configuration of an Ouro `config.json`.

    Raises:
        ValueError: Another activation, a rotary scaling other than Llama 3's, or layers that differ in their window.
    """
    if facts.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act must be 'silu'. Got {facts['hidden_act']!r}. No Ouro has another.")
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    if width % heads and "head_dim" not in facts:
        raise ValueError(
            f"config.json: hidden_size ({width}) must be a multiple of num_attention_heads ({heads}). "
            f"Got remainder {width % heads}. Give head_dim or correct one of them."
        )
    loops = facts.get("total_ut_steps", 4)
    return LoopedConfig(
        dim=width,
        vocab=facts["vocab_size"],
        attention=Attention(
            heads=heads,
            kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or width // heads,
            position=_rotary(facts),
            window=_window(facts),
        ),
        ffn=SwiGLU(hidden=facts["intermediate_size"]),
        order=ModelLoop(num_steps=loops),
        trained_depth=FixedDepth(num_steps=loops),
        blocks=(facts["num_hidden_layers"],),
        envelope=NoEnvelope(),
        boundary=SharedFinalNorm(),
        norm=RMSNorm(eps=facts.get("rms_norm_eps", 1e-6)),
        placement=PreAndBranch(),
        halt=HazardGate(),
        head=Head(tied=facts.get("tie_word_embeddings", False)),
        max_positions=facts.get("max_position_embeddings"),
        init=Init(std=facts.get("initializer_range", 0.02)),
    )


def inverse(c: LoopedConfig) -> dict[str, Any]:
    """config.json of a model in this shape; what it cannot say is found by `models/inverse.py`."""
    layers, window = sum(c.blocks), c.attention.window
    facts = {
        "model_type": "ouro",
        "architectures": ["OuroForCausalLM"],
        "hidden_size": c.dim,
        "vocab_size": c.vocab,
        "num_hidden_layers": layers,
        "num_attention_heads": c.attention.heads,
        "num_key_value_heads": c.attention.kv_heads,
        "head_dim": c.attention.head_dim,
        "intermediate_size": c.ffn.linears(c.dim)["down"][0],
        "hidden_act": "silu",
        "rms_norm_eps": getattr(c.norm, "eps", 1e-6),
        "total_ut_steps": steps_of(c),
        "tie_word_embeddings": c.head.tied,
        "initializer_range": c.init.std,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [f"{'full' if window is None else 'sliding'}_attention"] * layers,
        **rope_facts(c),
    }
    return facts if c.max_positions is None else facts | {"max_position_embeddings": c.max_positions}


def _rotary(facts: Mapping[str, Any]) -> Rope:
    newer = facts.get("rope_parameters") or {}
    scaling = facts.get("rope_scaling") or newer
    base = facts.get("rope_theta", newer.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(base=base)
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_scaling must be 'default' or 'llama3'. Got {kind!r}. "
            "Set it to null to run within the trained context."
        )
    return Rope(
        base=base,
        scaling=Llama3(
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_positions=scaling["original_max_position_embeddings"],
        ),
    )


def _window(facts: Mapping[str, Any]) -> int | None:
    """The window of every layer; None: all positions."""
    size = facts.get("sliding_window", 4096) if facts.get("use_sliding_window") else None
    if size is None:
        return None
    count, first = facts["num_hidden_layers"], facts.get("max_window_layers", 28)
    kinds = facts.get("layer_types") or [f"{'sliding' if i >= first else 'full'}_attention" for i in range(count)]
    sliding = {kind == "sliding_attention" for kind in kinds}
    if len(sliding) > 1:
        raise ValueError(
            f"config.json: layer_types must be the same for all layers. Got {sorted(set(kinds))}. "
            "Set use_sliding_window to false if no layer was trained with a window."
        )
    return size if True in sliding else None


def key_map_of(config: LoopedConfig) -> KeyMap:
    """Names of an Ouro file for a configuration of this shape."""
    rules: list[Rule] = [
        Rename("model.embed_tokens.weight", "embedding.weight"),
        Rename("model.norm.weight", "final_norm.weight"),
        Rename("model.early_exit_gate.weight", "gate.weight"),
        Rename("model.early_exit_gate.bias", "gate.bias"),
    ]
    rules += [
        Rename(f"model.layers.{i}.{theirs}.weight", f"core.{i}.{ours}.weight")
        for i in range(sum(config.blocks))
        for theirs, ours in LAYER.items()
    ]
    if config.head.tied:
        return KeyMap(tuple(rules), ignorable=(ROTARY,), aliases={"lm_head.weight": "model.embed_tokens.weight"})
    return KeyMap((*rules, Rename("lm_head.weight", "lm_head.own_weight")), ignorable=(ROTARY,))


PUBLISHED.register("ouro")(
    Family(
        name="ouro",
        model_types=("ouro",),
        reference=REFERENCE,
        config=config_of,
        key_map=key_map_of,
        build=Looped,
        inverse=inverse,
        recognises=lambda names: {"early_exit_gate.weight", "norm.weight"} <= names,
        notes=NOTES,
    )
)


def _released(layers: int) -> LoopedConfig:
    return LoopedConfig(
        dim=2048,
        vocab=49152,
        attention=Attention(heads=16, kv_heads=16, head_dim=128, position=Rope(base=1e6)),
        ffn=SwiGLU(hidden=5632),
        order=ModelLoop(num_steps=4),
        trained_depth=FixedDepth(num_steps=4),
        blocks=(layers,),
        envelope=NoEnvelope(),
        boundary=SharedFinalNorm(),
        placement=PreAndBranch(),
        halt=HazardGate(),
        head=Head(tied=False),
        max_positions=65536,
    )


@PRESETS.register("ouro-1.4b")
def ouro_1_4b() -> LoopedConfig:
    """Ouro 1.4B: 24 layers, 4 loops."""
    return _released(24)


@PRESETS.register("ouro-2.6b")
def ouro_2_6b() -> LoopedConfig:
    """Ouro 2.6B: 48 layers, 4 loops."""
    return _released(48)


@PRESETS.register("tiny-ouro")
def tiny_ouro() -> LoopedConfig:
    """Ouro's shape with one layer and grouped key-value heads."""
    return LoopedConfig(
        dim=32,
        vocab=64,
        attention=Attention(heads=4, kv_heads=2, head_dim=8, position=Rope(base=1e4)),
        ffn=SwiGLU(hidden=40),
        order=ModelLoop(num_steps=4),
        trained_depth=FixedDepth(num_steps=4),
        blocks=(1,),
        envelope=NoEnvelope(),
        boundary=SharedFinalNorm(),
        placement=PreAndBranch(),
        halt=HazardGate(bias=-1.0),
        head=Head(tied=False),
        init=Init(std=0.15),
    )

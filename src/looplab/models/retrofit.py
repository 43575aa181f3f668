"""Retrofitted recurrence: layers of a trained dense model become prelude, core and coda, and an adapter joins them.

    e       = prelude(E[x]);   s_{t+1} = core(W_a [s_t ; e]);   logits = W_out norm_f(coda(s_r))

    s_0     = std trunc(z)    initial_state_mode "random"
            = e               "embed-init"
            = e               "skip-adapter", whose iteration 0 is core(e): two operator classes
    layers  from Llama: PreNorm;  from OLMo-2: BranchOnly, with q and k normed over their whole width before rotary

No norm stands between loop and coda. A point of the configurable family (models/looped.py) with the names of Huginn's
code (models/huginn.py), whose model_type "huginn_raven" these files keep; layers have two norms instead of four.

Reference: arXiv:2511.07384, code mcleish7/retrofitting-recurrence.
Deviations: padding is masked, where the original attends to it. Starts have the file's `init_values.std`; training had
    0.0087039 = sqrt(2 / (5 * 5280)) whatever the width. The original's `predict_from_latents`, which norms twice, has
    no counterpart. A file may say `tie_word_embeddings` twice: the last one counts, unless there is `tie_embeddings`.
"""

from collections.abc import Mapping
from typing import Any

from looplab.models.base import PRESETS
from looplab.models.huginn import Shapes, common_facts, head_dim, key_map, sizes, start_std, whole
from looplab.models.inverse import rope_facts
from looplab.models.looped import Looped, LoopedConfig
from looplab.models.published import PUBLISHED, Family
from looplab.nn.attention import RMS, Attention
from looplab.nn.norm import BranchOnly, PreNorm, RMSNorm
from looplab.nn.rope import Llama3, Rope
from looplab.recurrence.injection import Concat, Every, SkipFirst
from looplab.recurrence.state_init import FromEmbeds, Normal

QK_NORM = "transformer.core_block.0.attn.q_norm.weight"
"""Only files that come from OLMo-2 have it."""
MODES = ("random", "embed-init", "skip-adapter")


def config(facts: Mapping[str, Any], shapes: Shapes) -> LoopedConfig:
    """Our configuration of a retrofitted file; whether its layers are Llama's or OLMo-2's follows from its tensors.

    Raises:
        ValueError: A size that is missing, or a choice that the published code does not have.
    """
    mode = facts.get("initial_state_mode", "random")
    if mode not in MODES:
        raise ValueError(
            f"load: config.json must have initial_state_mode {', '.join(MODES[:-1])} or {MODES[-1]}. Got {mode!r}. "
            "This variant has no native implementation."
        )
    olmo, heads, eps = (
        QK_NORM in shapes,
        whole(facts, "n_heads", "num_attention_heads"),
        float(facts.get("norm_eps", 1e-6)),
    )
    return LoopedConfig(
        **sizes(facts),
        attention=Attention(
            heads=heads,
            kv_heads=facts.get("num_key_value_heads", heads),
            head_dim=head_dim(facts),
            position=rope(facts),
            qk_norm=RMS(affine=True, over="full", eps=eps) if olmo else None,
            qk_bias=bool(facts.get("qk_bias", False)),
        ),
        placement=BranchOnly() if olmo else PreNorm(),
        injection=Concat(order="state_first", init="normal", when=SkipFirst() if mode == "skip-adapter" else Every()),
        state_init=Normal(std=start_std(facts)) if mode == "random" else FromEmbeds(),
        norm=RMSNorm(eps=eps),
    )


def inverse(c: LoopedConfig) -> dict[str, Any]:
    """config.json of a model in this shape; what it cannot say is found by `models/inverse.py`."""
    skips = isinstance(c.injection, Concat) and c.injection.when == SkipFirst()
    mode = "skip-adapter" if skips else "embed-init" if isinstance(c.state_init, FromEmbeds) else "random"
    return {**common_facts(c), **rope_facts(c), "initial_state_mode": mode}


def rope(facts: Mapping[str, Any]) -> Rope:
    """Rotary positions as the dense source has them; the field `rope_base` is not read."""
    given = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = facts.get("rope_theta", given.get("rope_theta"))
    if theta is None:
        raise ValueError("load: config.json must have rope_theta. Got none. Copy the file again.")
    scaling = None
    if kind == "llama3":
        scaling = Llama3(
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_max_positions=given["original_max_position_embeddings"],
        )
    elif kind != "default":
        raise ValueError(
            f"load: config.json must have rope_scaling of type 'llama3' or none. Got {kind!r}. "
            "This variant has no native implementation."
        )
    return Rope(base=float(theta), order="after_norm", scaling=scaling)


PUBLISHED.register("retrofit")(
    Family(
        name="retrofit",
        model_types=("huginn_raven",),
        reference="arXiv:2511.07384, mcleish7/retrofitting-recurrence",
        config=config,
        key_map=key_map,
        build=Looped,
        inverse=inverse,
        recognises=lambda names: (
            "transformer.adapter.weight" in names
            and any(name.endswith(".norm_1.weight") for name in names)
            and not any(name.endswith(".norm_3.weight") for name in names)
        ),
        notes=(
            "padding is masked; the original attends to it",
            "a random start has the file's init_values.std; training had 0.0087039 whatever the width",
        ),
    )
)


def _preset(*, olmo: bool = False, **facts: Any) -> LoopedConfig:
    every = {"init_values": {"embed_scale": 1.0}, "qk_bias": False, "norm_eps": 1e-5, "tie_embeddings": False}
    return config(every | facts, {QK_NORM: (1,)} if olmo else {})


@PRESETS.register("retrofit-tinyllama")
def retrofit_tinyllama() -> LoopedConfig:
    """TinyLlama, 16 of its 22 layers as 4-8-4."""
    return _preset(
        n_embd=2048,
        n_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        n_layers_in_prelude=4,
        n_layers_in_recurrent_block=8,
        n_layers_in_coda=4,
        vocab_size=32000,
        rope_theta=10000.0,
    )


@PRESETS.register("retrofit-llama-1b")
def retrofit_llama_1b() -> LoopedConfig:
    """Llama-3.2-1B, 14 of its 16 layers as 4-6-4."""
    return _preset(
        n_embd=2048,
        n_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        n_layers_in_prelude=4,
        n_layers_in_recurrent_block=6,
        n_layers_in_coda=4,
        vocab_size=128256,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


@PRESETS.register("retrofit-olmo-1b")
def retrofit_olmo_1b() -> LoopedConfig:
    """OLMo-2-1B, 14 of its 16 layers as 4-6-4."""
    return _preset(
        olmo=True,
        n_embd=2048,
        n_heads=16,
        intermediate_size=8192,
        n_layers_in_prelude=4,
        n_layers_in_recurrent_block=6,
        n_layers_in_coda=4,
        vocab_size=100352,
        norm_eps=1e-6,
        rope_theta=500000.0,
    )


@PRESETS.register("tiny-retrofit-llama")
def tiny_retrofit_llama() -> LoopedConfig:
    """Retrofitted Llama with a random start at toy width."""
    return _preset(
        n_embd=32,
        n_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=2,
        n_layers_in_coda=1,
        vocab_size=67,
        block_size=64,
        mean_recurrence=4,
        rope_theta=10000.0,
    )


@PRESETS.register("tiny-retrofit-olmo")
def tiny_retrofit_olmo() -> LoopedConfig:
    """Retrofitted OLMo-2 at toy width, whose first iteration skips the adapter."""
    return _preset(
        olmo=True,
        n_embd=32,
        n_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=1,
        n_layers_in_coda=1,
        vocab_size=67,
        block_size=64,
        mean_recurrence=4,
        rope_theta=10000.0,
        initial_state_mode="skip-adapter",
        # Large enough for embeddings to count beside branches whose outputs are normed.
        init_values={"embed_scale": 1.0, "std": 0.3},
    )

"""Huginn: prelude, recurrent core, coda, from a random start, trained at random depth.

    e       = prelude(sqrt(D) E[x]);   s_0 = sqrt(D) std trunc(z),  std = sqrt(2 / (5 D))
    s_{t+1} = core(W_a [s_t ; e])                    layers SandwichSum, rotary on neighbouring pairs
    logits  = E^T norm_f(coda(norm_f(s_r)))          the same norm_f twice

A point of the configurable family (models/looped.py). A file says its sizes in `config.json` (model_type
"huginn_raven", which retrofitted models share: models/retrofit.py) and keeps q, k, v in one matrix, gate and up in one.

Reference: arXiv:2502.05171, code seal-rg/recurrent-pretraining, checkpoint tomg-group-umd/huginn-0125.
Deviations: padding is masked, where the original attends to it; test-time noise is off; rotary angles are float32
    whatever type the file's table has. States are those before norm_f: the original's step function returns them so,
    its output field `latent_states` holds them after it. Its `n_layers` counts stored layers. Depth is an int or one
    number per row; there a 0-d tensor fails. Its `compress-s<N>` counts cache slots over layers and iterations
    together, so layers share slots unless N is a multiple of the core's layers; `Modulo` counts iterations. It scales
    given embeddings like looked-up ones; here tokens are the only input. Key-value heads other than all or one never
    ran there; here any number that divides the heads does, and with `qk_bias` all heads have their own.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from looplab.models.base import PRESETS
from looplab.models.inverse import canonical, rope_facts, steps_of
from looplab.models.looped import Envelope, Looped, LoopedConfig
from looplab.models.published import PUBLISHED, Family, KeyMap, Rename, Rule, Split
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm, SandwichSum
from looplab.nn.rope import Rope
from looplab.recurrence.depth import Depth, FixedDepth, PoissonLognormal, Unknown
from looplab.recurrence.injection import Concat
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.state_init import Normal

ONLY: dict[str, Any] = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
}
"""Fields of config.json with one value that the published code implements."""

STACKS = (("prelude", "prelude"), ("core_block", "core"), ("coda", "coda_layers"))
"""Stacks of layers: the file's name and ours."""

Shapes = Mapping[str, tuple[int, ...]]


def config(facts: Mapping[str, Any], shapes: Shapes) -> LoopedConfig:
    """Our configuration of a Huginn file.

    Args:
        facts: What config.json says; fields that it may leave out have the defaults of the original's class.
        shapes: Shapes of the tensors; not needed here.
    Raises:
        ValueError: A size that is missing, or a choice that the published code does not have.
    """
    heads = whole(facts, "n_heads", "num_attention_heads")
    rope = Rope(base=float(facts.get("rope_base", 50_000)), pairing="interleaved")
    return LoopedConfig(
        **sizes(facts),
        attention=Attention(
            heads=heads,
            kv_heads=facts.get("num_key_value_heads", heads),
            head_dim=head_dim(facts),
            position=rope,
            qk_bias=bool(facts.get("qk_bias", True)),
        ),
        placement=SandwichSum(),
        injection=Concat(order="state_first", init="normal"),
        state_init=Normal(std=start_std(facts)),
        exit_norm="final",
        norm=RMSNorm(eps=float(facts.get("norm_eps", 1e-6))),
    )


def sizes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LoopedConfig` that mean the same in every descendant of Huginn's code."""
    for name, value in ONLY.items():
        if facts.get(name, value) != value:
            raise ValueError(
                f"load: config.json must have {name} {value!r} for model_type 'huginn_raven'. Got {facts[name]!r}. "
                "This variant has no native implementation."
            )
    dim, steps = whole(facts, "n_embd", "hidden_size"), facts.get("mean_recurrence", 32)
    values = facts.get("init_values", {})
    std = float(values.get("std", math.sqrt(2 / (5 * dim))))
    vocab = whole(facts, "vocab_size")
    padded = facts.get("padded_vocab_size", vocab)
    return {
        "dim": dim,
        "vocab": vocab,
        "padded_vocab": None if padded == vocab else padded,
        "ffn": SwiGLU(hidden=whole(facts, "intermediate_size")),
        "envelope": Envelope(prelude=whole(facts, "n_layers_in_prelude"), coda=whole(facts, "n_layers_in_coda")),
        "blocks": (whole(facts, "n_layers_in_recurrent_block"),),
        "order": ModelLoop(num_steps=steps),
        "trained_depth": trained_depth(facts, steps),
        "head": Head(tied=bool(facts.get("tie_embeddings", facts.get("tie_word_embeddings", True)))),
        "embed_scale": float(values.get("embed_scale", math.sqrt(dim))),
        "max_positions": facts.get("block_size"),
        "init": Init(std=std, out_std=float(values.get("out_proj", std)), cut=3.0),
    }


def start_std(facts: Mapping[str, Any]) -> float:
    """Standard deviation of the start, before the factor of the embeddings."""
    dim = whole(facts, "n_embd", "hidden_size")
    return float(facts.get("init_values", {}).get("std", math.sqrt(2 / (5 * dim))))


def head_dim(facts: Mapping[str, Any]) -> int:
    """Width of a head; the original divides and ignores the field of that name."""
    return whole(facts, "n_embd", "hidden_size") // whole(facts, "n_heads", "num_attention_heads")


def trained_depth(facts: Mapping[str, Any], steps: int) -> Depth:
    """The law of num_steps in training, as far as `sampling_scheme` tells."""
    scheme = facts.get("sampling_scheme", "poisson-lognormal-filling")
    if scheme == "poisson-lognormal-filling":
        return PoissonLognormal(rate=float(steps), max_steps=max(512, 16 * steps))
    return FixedDepth(num_steps=steps) if scheme == "fixed" else Unknown()


def whole(facts: Mapping[str, Any], *names: str) -> int:
    """A count of config.json under the first of these names that it has."""
    for name in names:
        if name in facts:
            if type(facts[name]) is int and facts[name] >= 0:
                return facts[name]
            raise ValueError(
                f"load: config.json must have a whole number as {name}. Got {facts[name]!r}. Copy the file again."
            )
    raise ValueError(f"load: config.json must have {names[0]}. Got none. Copy the file again.")


def inverse(c: LoopedConfig) -> dict[str, Any]:
    """config.json of a model in this shape; what it cannot say is found by `models/inverse.py`."""
    rope = rope_facts(c)
    return {**common_facts(c), "rope_base": rope.get("rope_theta", 50_000.0)}


def common_facts(c: LoopedConfig) -> dict[str, Any]:
    """Settings that mean the same in every descendant of Huginn's code, and `ONLY`."""
    steps = steps_of(c)
    laws: dict[Depth, str] = {
        PoissonLognormal(rate=float(steps), max_steps=max(512, 16 * steps)): "poisson-lognormal-filling",
        FixedDepth(num_steps=steps): "fixed",
    }
    start = canonical(c).state_init
    facts = {
        **ONLY,
        "model_type": "huginn_raven",
        "n_embd": c.dim,
        "n_heads": c.attention.heads,
        "num_key_value_heads": c.attention.kv_heads,
        "intermediate_size": c.ffn.linears(c.dim)["down"][0],
        "n_layers_in_prelude": c.envelope.prelude,
        "n_layers_in_recurrent_block": sum(c.blocks),
        "n_layers_in_coda": c.envelope.coda,
        "n_layers": c.stored_layers,
        "vocab_size": c.vocab,
        "padded_vocab_size": c.padded_vocab or c.vocab,
        "norm_eps": getattr(c.norm, "eps", 1e-6),
        "qk_bias": c.attention.qk_bias,
        "tie_embeddings": c.head.tied,
        "tie_word_embeddings": c.head.tied,
        "mean_recurrence": steps,
        "sampling_scheme": laws.get(c.trained_depth, "unknown"),
        "init_values": {
            "std": start.std if isinstance(start, Normal) else c.init.std,
            "out_proj": c.init.std if c.init.out_std is None else c.init.out_std,
            "embed_scale": c.embed_scale,
        },
    }
    return facts if c.max_positions is None else facts | {"block_size": c.max_positions}


def key_map(c: LoopedConfig) -> KeyMap:
    """Names of Huginn's code and its descendants. Norms are numbered in the order in which a layer runs them."""
    rules: list[Rule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.adapter.weight", "injections.0.rule.w.weight"),
        Rename("transformer.ln_f.weight", "final_norm.weight"),
    ]
    counts = (c.envelope.prelude, sum(c.blocks), c.envelope.coda)
    for (theirs, ours), count in zip(STACKS, counts, strict=True):
        for index in range(count):
            rules += _layer_rules(c, f"transformer.{theirs}.{index}", f"{ours}.{index}")
    aliases = {"lm_head.weight": "transformer.wte.weight"}
    if not c.head.tied:
        rules.append(Rename("lm_head.weight", "lm_head.own_weight"))
        aliases = {}
    return KeyMap(tuple(rules), ignorable=("freqs_cis",), aliases=aliases, computed=computed_tables(c))


def _layer_rules(c: LoopedConfig, theirs: str, ours: str) -> list[Rule]:
    a = c.attention
    queries, keys, hidden = a.heads * a.head_dim, a.kv_heads * a.head_dim, c.ffn.linears(c.dim)["down"][0]
    parts = ((f"{ours}.attn.q.weight", queries), (f"{ours}.attn.k.weight", keys), (f"{ours}.attn.v.weight", keys))
    rules: list[Rule] = [
        Split(f"{theirs}.attn.Wqkv.weight", parts),
        Rename(f"{theirs}.attn.proj.weight", f"{ours}.attn.o.weight"),
        Split(f"{theirs}.mlp.fc.weight", ((f"{ours}.ffn.gate.weight", hidden), (f"{ours}.ffn.up.weight", hidden))),
        Rename(f"{theirs}.mlp.proj.weight", f"{ours}.ffn.down.weight"),
    ]
    if a.qk_bias:
        shape = (a.heads, a.head_dim)
        rules.append(Rename(f"{theirs}.attn.qk_bias", f"{ours}.attn.qk_bias", (2, *shape), (2, 1, *shape)))
    if a.qk_norm is not None:
        rules += [Rename(f"{theirs}.attn.{n}.weight", f"{ours}.attn.{n}.weight") for n in ("q_norm", "k_norm")]
    norms = [f"{branch}_{side}" for branch in ("attn", "ffn") for side in ("in", "out") if side in c.placement.norms]
    rules += [Rename(f"{theirs}.norm_{n}.weight", f"{ours}.{name}.weight") for n, name in enumerate(norms, 1)]
    return rules


def computed_tables(c: LoopedConfig) -> dict[str, Callable[[], Tensor]]:
    """The rotary table of the file, [1, positions, 1, pairs, 2], as this code computes it."""
    rope, positions = c.attention.position, c.max_positions
    if not isinstance(rope, Rope) or positions is None:
        return {}

    def table() -> Tensor:
        waves = rope.waves(torch.arange(positions)[None], c.attention.head_dim, torch.float32)
        return torch.stack(waves, dim=-1)[:, :, None]

    return {"freqs_cis": table}


PUBLISHED.register("huginn")(
    Family(
        name="huginn",
        model_types=("huginn_raven",),
        reference="arXiv:2502.05171, seal-rg/recurrent-pretraining",
        config=config,
        key_map=key_map,
        build=Looped,
        inverse=inverse,
        recognises=lambda names: (
            "transformer.adapter.weight" in names and any(name.endswith(".norm_3.weight") for name in names)
        ),
        notes=(
            "padding is masked; the original attends to it",
            "test-time noise is off",
            "the original starts from noise of an unseeded generator; here each token's noise follows from its item",
        ),
    )
)


@PRESETS.register("huginn-0125")
def huginn_0125() -> LoopedConfig:
    """The published checkpoint: 3.6 billion parameters, a core of four layers."""
    return config(
        {
            "n_embd": 5280,
            "n_heads": 55,
            "intermediate_size": 17920,
            "n_layers_in_prelude": 2,
            "n_layers_in_recurrent_block": 4,
            "n_layers_in_coda": 2,
            "vocab_size": 65536,
            "block_size": 4096,
            "init_values": {"out_proj": math.sqrt(2 / (5 * 5280)) / math.sqrt(2 * 132)},
        },
        {},
    )


@PRESETS.register("tiny-huginn")
def tiny_huginn() -> LoopedConfig:
    """Huginn with a core of two layers at toy width."""
    return config(
        {
            "n_embd": 32,
            "n_heads": 4,
            "intermediate_size": 24,
            "n_layers_in_prelude": 1,
            "n_layers_in_recurrent_block": 2,
            "n_layers_in_coda": 1,
            "vocab_size": 67,
            "padded_vocab_size": 72,
            "block_size": 64,
            "mean_recurrence": 4,
        },
        {},
    )

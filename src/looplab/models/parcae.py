"""Parcae: a core that is stable because the state decays, with value embeddings and a projected readout.

    e       = norm_p(prelude(E[x]))                       norm_p: `prelude_norm`, absent in some checkpoints
    u       = decay o s_t + dt o (B e)                    dt = softplus(dt_bias), decay = exp(-dt o exp(A_log))
    s_{t+1} = core(u)
    logits  = cap tanh(z / cap),  z = logit_scale * W norm_f(coda(C s_r))                       cap: `logit_softcap`
    layer   : h + attn(n1(h)), then h + ffn(n2(h));  v += 2 sigmoid(G n1(h)[:32]) o VE_i[x] where G and VE_i exist
    variants: u = W [s_t ; e] (`linear`), u = s_t + e (`add`)

A checkpoint is a point of the configurable family (models/looped.py); this file maps its settings and tensor names.

Reference: Parcae, arXiv:2604.12946, github.com/sandyresearch/parcae.
Deviations:
    Tables and gates of value embeddings follow two parities of different layer numbers, so a layer may have one
        without the other. What the file holds decides; tables and gates that nothing reads are kept for `export`.
    Padding is honoured; the original ignores its mask.
    Logits have the columns of the true vocabulary; the original returns padded ones too, and none unless asked.
    The random start is noise that is handed in; the original draws it unseeded at every call.
    Depths per row freeze rows at their own end, as the original does in training. Sampled depths per batch ran
        n + min(n, window) iterations there, not the n that was drawn: `trained_depth` is the law of what ran.
    Loading is strict where the original loads with strict=False, and the rotary table of the file is made anew.
    Presets start from truncated normals of the original's spread, the original from orthogonal matrices; its tables and
        gates of value embeddings start from PyTorch's defaults, ours like every other matrix.
Refused: biases, clipped queries, other norms or blocks than the released ones, scaled positions. No released
    checkpoint has them.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from looplab.models.base import PRESETS
from looplab.models.huginn import computed_tables, whole
from looplab.models.inverse import rope_facts, steps_of
from looplab.models.looped import Envelope, Looped, LoopedConfig
from looplab.models.published import PUBLISHED, Family, KeyMap, Rename, Rule, Split
from looplab.nn.attention import RMS, Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import FeedForward, GatedReluSquared, GeGLU, Gelu, ReluSquared, Silu, SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import NoPE, Rope
from looplab.recurrence.depth import CategoricalDepth, Depth, FixedDepth, PoissonDepth
from looplab.recurrence.depth.poisson import poisson_mass, poisson_reach
from looplab.recurrence.injection import Add, Concat, Diagonal, Injection
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.state_init import Normal, StateInit, Unit, Zeros

Facts = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

ONLY: dict[str, tuple[Any, Any]] = {
    "bias": (False, False),
    "clip_qkv": (None, None),
    "block_class_name": ("TransformerPreNormBlock", "TransformerPreNormBlock"),
    "norm_class_name": ("RMSNorm", "LayerNorm"),
    "mup_model_scaling_factor": (1, 1),
    "rope_condense_ratio": (1, 1),
}
"""Settings of which one value has a place here: name -> (that value, the original's default)."""

FEED_FORWARDS: dict[tuple[str, str], Callable[[int], FeedForward]] = {
    ("BaseMLP", "ReLU2"): lambda hidden: ReluSquared(hidden=hidden, scale=0.5),
    ("BaseMLP", "SiLU"): lambda hidden: Silu(hidden=hidden),
    ("BaseMLP", "GELU"): lambda hidden: Gelu(hidden=hidden),
    ("GatedMLP", "ReLU2"): lambda hidden: GatedReluSquared(hidden=hidden, scale=0.5),
    ("GatedMLP", "SiLU"): lambda hidden: SwiGLU(hidden=hidden),
    ("GatedMLP", "GELU"): lambda hidden: GeGLU(hidden=hidden),
}
"""(`mlp_class_name`, `nonlin_name`) -> branch of an inner width."""

INJECTIONS: dict[str, Injection] = {
    "diagonal": Diagonal(initial_decay=5**-0.5),
    "linear": Concat(order="state_first", init="normal"),
    "add": Add(),
}
"""`injection_type` -> injection."""

SCALES: dict[str, Callable[[int], tuple[float, float, float]]] = {
    "normal": lambda dim: (dim**-0.5, 1.0, 1.0),
    **dict.fromkeys(("illiterate", "scaled-large-embed"), lambda dim: (1.0, 1.0, 1.0)),
    "scaled-and-logit-scale": lambda dim: (1.0, 1.0, dim**-0.5),
    **dict.fromkeys(("bert", "megatron"), lambda dim: (0.02, 1.0, 1.0)),
    **dict.fromkeys(
        ("small", "scaled", "scaled-geiping", "scaled-zero", "scaled-stuck"), lambda dim: (_small(dim), 1.0, 1.0)
    ),
    "kaiming": lambda dim: (math.sqrt(2 / dim), 1.0, 1.0),
    "megatron2": lambda dim: (math.sqrt(1 / (3 * dim)), 1.0, 1.0),
    "takase": lambda dim: (_small(dim), math.sqrt(dim), 1.0),
    "takase-scaled": lambda dim: (_small(dim), math.sqrt(dim), math.sqrt(2 / 5) / math.sqrt(dim)),
}
"""`init_strategy` -> width -> spread of the embedding's start, factor of the embedding, factor of the logits. The
original's other strategies cannot start a Parcae model, or are for residual branches of other models."""


STARTS = ("like-init", "normal", "embed", "zero", "unit")
"""Values of `state_init`."""


def _small(dim: int) -> float:
    return math.sqrt(2 / (5 * dim))


def config(facts: Facts, shapes: Shapes) -> LoopedConfig:
    """The configuration of a checkpoint.

    Args:
        facts: Its config.json; absent settings have the original's defaults.
        shapes: Its tensors, which say where value embeddings and their gates are.
    """
    tables = {int(i) for name in shapes for i in re.findall(r"value_embeds\.(\d+)\.weight", name)}
    found = {name for name in shapes if name.endswith(".attn.ve_gate.weight")}
    gates = {layer for layer, (theirs, _) in enumerate(_layers(facts)) if f"{theirs}.attn.ve_gate.weight" in found}
    return _config(facts, tables, gates)


def inverse(c: LoopedConfig) -> dict[str, Any]:
    """config.json of a model in this shape; what it cannot say is found by `models/inverse.py`.

    Where value embeddings stand is said by the tensors. The window of training is not known here: it is written as the
    whole depth, which makes the law of "poisson-full" the one of the mean.
    """
    core, core_ffn, steps = c.core_attention or c.attention, c.core_ffn or c.ffn, steps_of(c)
    rope = rope_facts(c)
    kinds = (key for key, make in FEED_FORWARDS.items() if make(getattr(c.ffn, "hidden", 1)) == c.ffn)
    mlp, nonlin = next(kinds, ("BaseMLP", "GELU"))
    facts = {
        "n_embd": c.dim,
        "num_attention_heads": c.attention.heads,
        "num_key_value_heads": c.attention.kv_heads,
        "intermediate_size": c.ffn.linears(c.dim)["down"][0],
        "recurrent_embedding_dimension": c.width,
        "recurrent_num_attention_heads": core.heads,
        "recurrent_intermediation_embedding_dimension": core_ffn.linears(c.width)["down"][0],
        "vocab_size": c.vocab,
        "padded_vocab_size": c.padded_vocab or c.vocab,
        "n_layers_in_prelude": c.envelope.prelude,
        "n_layers_in_recurrent_block": sum(c.blocks),
        "n_layers_in_coda": c.envelope.coda,
        "mean_recurrence": steps,
        "mean_backprop_depth": steps,
        "sampling_scheme": "fixed" if isinstance(c.trained_depth, FixedDepth) else "poisson-full",
        "recurrent_iteration_method": "per-sequence",
        "injection_type": next((n for n, kind in INJECTIONS.items() if type(kind) is type(c.injection)), "diagonal"),
        "norm_class_name": "RMSNorm",
        "norm_eps": getattr(c.norm, "eps", 1e-5),
        "prelude_norm": c.prelude_norm is not None,
        "mlp_class_name": mlp,
        "nonlin_name": nonlin,
        "qk_norm": c.attention.qk_norm is not None,
        "qk_bias": c.attention.qk_bias,
        "logit_softcap": c.head.softcap,
        "tie_embeddings": c.head.tied,
        "rope_settings": {"use_rope": bool(rope), "rope_base": rope.get("rope_theta", 50_000.0)},
        **_start_facts(c),
    }
    return facts if c.max_positions is None else facts | {"block_size": c.max_positions}


def _start_facts(c: LoopedConfig) -> dict[str, str]:
    """`init_strategy` and `state_init` whose factors and start are those of the configuration; the first that fits."""
    for strategy, scales in SCALES.items():
        _, embed_scale, logit_scale = scales(c.dim)
        if (embed_scale, logit_scale) == (c.embed_scale, c.head.logit_scale):
            for start in STARTS:
                found = {"init_strategy": strategy, "state_init": start}
                if _start(found, c.dim) == c.state_init:
                    return found
    return {}


def key_map(c: LoopedConfig) -> KeyMap:
    """Names of a checkpoint's tensors."""
    layers = {"prelude": c.envelope.prelude, "core_block": sum(c.blocks), "coda": c.envelope.coda}
    rules: list[Rule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.C.weight", "project.weight"),
        Rename("transformer.ln_f.weight", "final_norm.weight"),
    ]
    for layer, (theirs, ours) in enumerate(_names(**layers)):
        rules += _layer_rules(theirs, ours, *c.parts(layer))
    rules += [Rename(f"value_embeds.{i}.weight", f"value_tables.{i}.weight") for i in c.stored_tables]
    if c.prelude_norm is not None:
        rules.append(Rename("transformer.ln_prelude.weight", "prelude_norm.weight"))
    if isinstance(c.injection, Diagonal):
        inner = {"A_log": "a_log", "dt_bias": "dt_bias", "B": "w.weight"}
        rules += [Rename(f"transformer.adapter.{a}", f"injections.0.rule.{b}") for a, b in inner.items()]
    if isinstance(c.injection, Concat):
        rules.append(Rename("transformer.adapter.adapter.weight", "injections.0.rule.w.weight"))
    if not c.head.tied:
        rules.append(Rename("lm_head.weight", "lm_head.own_weight"))
    aliases = {"lm_head.weight": "transformer.wte.weight"} if c.head.tied else {}
    return KeyMap(tuple(rules), ignorable=("freqs_cis",), aliases=aliases, computed=computed_tables(c))


def _layer_rules(theirs: str, ours: str, attention: Attention, ffn: FeedForward) -> list[Rule]:
    names = {
        "attn.c_q.weight": "attn.q.weight",
        "attn.c_k.weight": "attn.k.weight",
        "attn.c_v.weight": "attn.v.weight",
        "attn.c_proj.weight": "attn.o.weight",
        "mlp.proj.weight": "ffn.down.weight",
        "norm_1.weight": "attn_in.weight",
        "norm_2.weight": "ffn_in.weight",
    }
    if attention.value_embedding:
        names["attn.ve_gate.weight"] = "attn.value_gate.weight"
    rules: list[Rule] = [Rename(f"{theirs}.{a}", f"{ours}.{b}") for a, b in names.items()]
    if attention.qk_bias:
        shape = (2, attention.heads, attention.head_dim)
        rules.append(Rename(f"{theirs}.attn.qk_bias", f"{ours}.attn.qk_bias", shape, (2, 1, *shape[1:])))
    if isinstance(ffn, SwiGLU | GeGLU | GatedReluSquared):
        halves = tuple((f"{ours}.ffn.{name}.weight", ffn.hidden) for name in ("gate", "up"))
        rules.append(Split(f"{theirs}.mlp.fc.weight", halves))
    else:
        rules.append(Rename(f"{theirs}.mlp.fc.weight", f"{ours}.ffn.up.weight"))
    return rules


def _names(prelude: int, core_block: int, coda: int) -> list[tuple[str, str]]:
    """Their and our name of every stored layer, in order."""
    places = (("prelude", "prelude", prelude), ("core_block", "core", core_block), ("coda", "coda_layers", coda))
    return [(f"transformer.{theirs}.{i}", f"{ours}.{i}") for theirs, ours, count in places for i in range(count)]


def _layers(facts: Facts) -> list[tuple[str, str]]:
    counts = {"prelude": 1, "recurrent_block": 4, "coda": 1}
    prelude, core, coda = (_count(facts, f"n_layers_in_{name}", default) for name, default in counts.items())
    return _names(prelude, core, coda)


def _config(facts: Facts, tables: set[int], gates: set[int]) -> LoopedConfig:
    _refuse_unsupported(facts)
    dim, width = whole(facts, "n_embd"), _count(facts, "recurrent_embedding_dimension", 1024)
    heads = whole(facts, "num_attention_heads")
    outer = _attention(facts, dim, heads, _count(facts, "num_key_value_heads", heads), bool(tables | gates))
    inner_heads = _count(facts, "recurrent_num_attention_heads", heads)
    inner = _attention(facts, width, inner_heads, inner_heads, bool(tables | gates))
    ffn = _feed_forward(facts, _count(facts, "intermediate_size", 4 * dim))
    core_ffn = _feed_forward(facts, _count(facts, "recurrent_intermediation_embedding_dimension", 3520))
    strategy = facts.get("init_strategy", "scaled")
    _, embed_scale, logit_scale = _known(SCALES, "init_strategy", strategy)(dim)
    vocab, rows = _vocabulary(facts)
    layers = range(len(_layers(facts)))
    return LoopedConfig(
        dim=dim,
        vocab=vocab,
        padded_vocab=rows if rows != vocab else None,
        state_dim=width if width != dim else None,
        attention=outer,
        core_attention=inner if inner != outer else None,
        ffn=ffn,
        core_ffn=core_ffn if core_ffn != ffn else None,
        value_tables=None if not tables | gates or tables == set(layers) else tuple(sorted(tables)),
        value_gates=None if not tables | gates or gates == set(layers) else tuple(sorted(gates)),
        order=ModelLoop(num_steps=_count(facts, "mean_recurrence", 32)),
        blocks=(_count(facts, "n_layers_in_recurrent_block", 4),),
        envelope=Envelope(prelude=_count(facts, "n_layers_in_prelude", 1), coda=_count(facts, "n_layers_in_coda", 1)),
        injection=_known(INJECTIONS, "injection_type", facts.get("injection_type", "diagonal")),
        state_init=_start(facts, dim),
        norm=RMSNorm(eps=facts.get("norm_eps", 1e-5)),
        prelude_norm=RMSNorm(eps=facts.get("norm_eps", 1e-5)) if facts.get("prelude_norm", False) else None,
        projection=True,
        embed_scale=embed_scale,
        head=Head(tied=facts.get("tie_embeddings", False), softcap=facts.get("logit_softcap"), logit_scale=logit_scale),
        trained_depth=_trained_depth(facts),
        max_positions=_count(facts, "block_size", 4096),
        init=Init(std=_small(dim), out_std=0.0 if strategy == "scaled-zero" else None, cut=3.0),
    )


def _refuse_unsupported(facts: Facts) -> None:
    settings = {**facts, **_rope(facts)}
    for name, (wanted, default) in ONLY.items():
        if settings.get(name, default) != wanted:
            raise ValueError(
                f"load: config.json of parcae must have {name} {wanted!r}. Got {settings.get(name, default)!r}. "
                "This variant has no native implementation."
            )


def _count(facts: Facts, name: str, default: int) -> int:
    """A count of config.json, or the original's default where it is left out or null."""
    return default if facts.get(name) is None else whole(facts, name)


def _known(table: Mapping[Any, Any], name: str, key: Any) -> Any:
    if key not in table:
        known = ", ".join(str(k) for k in table)
        raise ValueError(
            f"load: config.json of parcae must have {name} out of {known}. Got {key!r}. "
            "This variant has no native implementation."
        )
    return table[key]


def _rope(facts: Facts) -> Facts:
    return facts.get("rope_settings") or {}


def _attention(facts: Facts, dim: int, heads: int, kv_heads: int, value_embedding: bool) -> Attention:
    if heads < 1 or dim % heads:
        raise ValueError(
            f"load: config.json of parcae must have widths that its heads divide. Got width {dim} and {heads} heads. "
            "Copy the file again."
        )
    rope = _rope(facts)
    base = float(rope.get("rope_base", 50_000))
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim // heads,
        position=Rope(base=base, pairing="interleaved") if rope.get("use_rope", True) else NoPE(),
        qk_norm=RMS(affine=False, over="head", eps=2**-23) if facts.get("qk_norm", False) else None,
        qk_bias=facts.get("qk_bias", False),
        value_embedding=value_embedding,
    )


def _feed_forward(facts: Facts, hidden: int) -> FeedForward:
    kind = (facts.get("mlp_class_name", "BaseMLP"), facts.get("nonlin_name", "GELU"))
    return _known(FEED_FORWARDS, "(mlp_class_name, nonlin_name)", kind)(hidden)


def _vocabulary(facts: Facts) -> tuple[int, int]:
    """Columns of the logits, and rows of the embedding."""
    vocab, multiple = whole(facts, "vocab_size"), _count(facts, "padding_multiple", 512)
    rows = _count(facts, "padded_vocab_size", -(-vocab // multiple) * multiple)
    return min(vocab, rows), rows


def _start(facts: Facts, dim: int) -> StateInit:
    """`state_init`; only like-init is multiplied with the factor of the embedding there, here every normal start is."""
    std, scale, _ = _known(SCALES, "init_strategy", facts.get("init_strategy", "scaled"))(dim)
    starts = {
        "like-init": Normal(std=std),
        "normal": Normal(std=1 / scale, cut=None),
        "embed": Normal(std=dim**-0.5 / scale, cut=None),
        "zero": Zeros(),
        "unit": Unit(),
    }
    return _known(starts, "state_init", facts.get("state_init", "like-init"))


def _trained_depth(facts: Facts) -> Depth:
    """The law of the iterations that ran at the end of training, curricula over.

    With t = max(mean_recurrence - window, 0) and window = mean_backprop_depth, per sequence (and per token):
    poisson-truncated-full and poisson-full max(1, Poisson(t + window)); fixed t + window; all others Poisson(t) +
    window. Per batch they differ: poisson-truncated-full runs T + min(T, window), and poisson-unbounded and -bounded
    draw the window from U{1 .. 2 window}.
    """
    scheme = facts.get("sampling_scheme", "poisson-truncated-full")
    window = _count(facts, "mean_backprop_depth", 8)
    before = max(_count(facts, "mean_recurrence", 32) - window, 0)
    total, reach = float(before + window), poisson_reach(float(before + window))
    batch = facts.get("recurrent_iteration_method", "per-batch") == "per-batch"
    drawn = PoissonDepth(rate=total, max_steps=reach)
    kinds = ("poisson-unbounded", "poisson-fill", "poisson-truncated-full", "poisson-full", "poisson-bounded", "fixed")
    kind = next((k for k in kinds if k in scheme), "poisson-unbounded")
    if kind == "fixed":
        return FixedDepth(num_steps=before + window)
    if kind == "poisson-full" or (kind == "poisson-truncated-full" and not batch):
        return drawn
    if kind == "poisson-truncated-full":
        mass = np.zeros(reach + window + 1)
        for steps, probability in enumerate(drawn.pmf()):
            mass[steps + min(steps, window)] += probability
    else:
        first = np.array([1.0]) if before == 0 else poisson_mass(float(before), poisson_reach(float(before)))
        if kind == "poisson-bounded" and batch and before > 0:
            cut = min(2 * before - 1, len(first) - 1)
            first = np.append(first[:cut], first[cut:].sum())
        last = np.eye(window + 1)[window]
        if batch and kind != "poisson-fill":
            last = np.append(0.0, np.full(2 * window, 1 / (2 * window)))
        mass = np.convolve(first, last)
    return CategoricalDepth(probs=tuple(float(p) for p in mass[1:] / mass.sum()))


PUBLISHED.register("parcae")(
    Family(
        name="parcae",
        model_types=(),
        reference="arXiv:2604.12946; github.com/sandyresearch/parcae",
        config=config,
        key_map=key_map,
        build=Looped,
        inverse=inverse,
        recognises=lambda names: {"transformer.wte.weight", "transformer.C.weight", "transformer.ln_f.weight"} <= names,
        notes=(
            "The original ignores its attention mask; here padded rows equal rows alone.",
            "The original starts every forward from fresh unseeded noise; here the noise is handed in.",
            "The original returns logits of padded vocabulary rows too; here they are cut.",
        ),
    )
)


def _rule_layers(facts: Facts) -> tuple[set[int], set[int]]:
    """Stored layers that a new model gives tables and gates of value embeddings, by the original's two parities."""
    prelude, core, coda = (facts[f"n_layers_in_{name}"] for name in ("prelude", "recurrent_block", "coda"))
    stored = prelude + core + coda
    tables = {i for i in range(stored) if i % 2 == (stored - 1) % 2}
    parity = (core * facts["mean_backprop_depth"] - 1) % 2
    numbers = [*range(prelude + core), *(prelude + core * facts["mean_recurrence"] + i for i in range(coda))]
    return tables, {i for i, number in enumerate(numbers) if number % 2 == parity}


def _released(dim: int, layers: int, **changes: Any) -> LoopedConfig:
    """The released shape: as many layers in the core as before and after it, heads of 128, an inner width of 4 dim."""
    facts = {
        "n_embd": dim,
        "num_attention_heads": dim // 128,
        "intermediate_size": 4 * dim,
        "vocab_size": 32768,
        "padding_multiple": 64,
        "block_size": 2048,
        "recurrent_embedding_dimension": dim,
        "recurrent_intermediation_embedding_dimension": 4 * dim,
        "n_layers_in_prelude": layers,
        "n_layers_in_recurrent_block": layers,
        "n_layers_in_coda": layers,
        "mean_recurrence": 8,
        "mean_backprop_depth": 4,
        "sampling_scheme": "poisson-truncated-full",
        "recurrent_iteration_method": "per-sequence",
        "injection_type": "diagonal",
        "init_strategy": "scaled-zero",
        "state_init": "like-init",
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "BaseMLP",
        "nonlin_name": "ReLU2",
        "qk_norm": True,
        "prelude_norm": True,
        "tie_embeddings": True,
        **changes,
    }
    return _config(facts, *_rule_layers(facts))


@PRESETS.register("parcae-140m")
def parcae_140m() -> LoopedConfig:
    """144,323,136 parameters, 68,825,088 without value embeddings and their gates."""
    return _released(768, 2)


@PRESETS.register("parcae-370m")
def parcae_370m() -> LoopedConfig:
    """388,003,328 parameters, 186,675,200 without value embeddings and their gates."""
    return _released(1024, 4)


@PRESETS.register("parcae-770m")
def parcae_770m() -> LoopedConfig:
    """776,655,680 parameters, 399,165,440 without value embeddings and their gates."""
    return _released(1280, 6)


@PRESETS.register("parcae-1.3b")
def parcae_1_3b() -> LoopedConfig:
    """1,338,591,744 parameters, 734,607,360 without value embeddings and their gates."""
    return _released(1536, 8)


@PRESETS.register("tiny-parcae")
def tiny_parcae() -> LoopedConfig:
    """56,416 parameters: one layer, two looped, one layer; value embeddings in the first core layer and the coda."""
    small = _released(
        40,
        1,
        n_layers_in_recurrent_block=2,
        num_attention_heads=4,
        intermediate_size=64,
        recurrent_intermediation_embedding_dimension=56,
        vocab_size=64,
        block_size=64,
        mean_recurrence=4,
        mean_backprop_depth=2,
    )
    return replace(small, init=Init(std=0.15))

"""The ablation checkpoints of "Towards Looped Models Done Right": one Llama layer, looped in several ways.

    ouro       s_0 = E[x];                  s_{t+1} = stack(inject(s_t, E[x]))                     28 layers, 4 times
    middle     e = prelude(E[x]), s_0 = e;  s_{t+1} = core(inject(s_t, e))                      8 + 12 x 8 + 8 layers
    huginn     as middle, from s_0 ~ N(0, 1/D)
    H/L        low <- C_L(inject(low + high, e)) 3 times, high <- C_H(inject(high + low, e)), all twice; high_0 = e
    inject     exp(-dt o exp(A_log)) o s + dt o (W e), dt = softplus(dt_bias); absent in some arms
               part II also: W [s ; e] + b with s / rms(s) after every application, or OrthoInj
    logits     W_out norm_f(coda(s))
    layer      h += attn(n1 h);  h += swiglu(n2 h);  norms are (1 + w) o x / rms(x)

A point of the configurable family (models/looped.py); arms without a loop are models/dense.py. The settings stand in
the section "model" of config.json; the tensors are named after the original's modules. `config.json` says nothing of
which of fc1 and fc3 is the gate, or of how rotary pairs lie (`OPEN`): these are answered by whoever opens a file, or by
recorded logits (interop/assume.py).

Reference: Huang et al., "Towards Looped Models Done Right", parts I and II; code and recipes ifm-ai/xllm-loop, layers
ifm-ai/xllm (xllm/modules). There fc1 is the gate, pairs are neighbours, and norm weights are differences from 1.
Deviations:
    A random start is noise that is handed in; at evaluation the original hashes the row number (part I) or the
        example id (part II) in its place.
    Learned depth priors are trained beside the weights and not in the file: `trained_depth` is then unknown.
    Capped depths come from our mixture, whose mean is matched before the cap of 64 instead of after it.
    Mixture layers, and the injection of unrolled mixture controls, are not supported yet. Distilled students are no
        models by themselves.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from looplab.models.base import PRESETS, LoopedLM
from looplab.models.dense import Dense, DenseConfig
from looplab.models.huginn import whole
from looplab.models.looped import Envelope, Looped, LoopedConfig, NoEnvelope
from looplab.models.published import PUBLISHED, Family, KeyMap, Rename, Rule
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.boundary import NoBoundary, PlainRMS
from looplab.recurrence.depth import Depth, FixedDepth, PoissonLognormal, Unknown
from looplab.recurrence.injection import Concat, Diagonal, Injection, NoInjection, Orthogonal
from looplab.recurrence.plan import ModelLoop, PlanOrder, TwoLevel
from looplab.recurrence.state_init import FromEmbeds, Normal, StateInit, Zeros

Facts = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

OPEN = {"gate": ("fc1", "fc3"), "rope": ("interleaved", "half")}
"""What no file says: which matrix goes through silu, and which channels a rotation pairs; the authors' code first."""
ORIGINAL = {question: answers[0] for question, answers in OPEN.items()}

ONLY: dict[str, tuple[Any, Any]] = {
    "attn_act_func": ("softmax", "softmax"),
    "qknorm": (False, False),
    "apply_attn_gate": (False, False),
    "apply_rmsnorm": (True, False),
    "norm_affine": (True, True),
    "layernorm_num_groups": (1, 1),
    "residual_func": ("base", "base"),
    "swiglu": (True, False),
    "scale_emb": (False, False),
    "output_size": (-1, -1),
    "num_experts": (0, 0),
    "num_values": (0, 0),
    "dense_prelude_input_injection": ("none", "none"),
}
"""Settings of which one value has a place here: name -> (that value, the original's default)."""

LAYER = {
    "attention.norm": "attn_in",
    "attention.wq": "attn.q",
    "attention.wk": "attn.k",
    "attention.wv": "attn.v",
    "attention.wo": "attn.o",
    "nffn.norm": "ffn_in",
    "nffn.fc2": "ffn.down",
}
"""Weights of a layer, theirs -> ours; fc1 and fc3 are added by the answer."""


def config(facts: Facts, shapes: Shapes, *, rope: str) -> LoopedConfig | DenseConfig:
    """Our configuration of a file; absent settings have the original's defaults.

    Args:
        facts: What config.json says.
        shapes: Its tensors, which tell a mixture.
        rope: Answer to how rotary pairs lie.
    Raises:
        ValueError: A mixture, a size that is missing, or a choice that no dense checkpoint has.
    """
    m = facts.get("model")
    if not isinstance(m, Mapping):
        raise ValueError("load: config.json of ifm must have a section 'model'. Got none. Copy the file again.")
    _refuse_mixture(m, shapes)
    for name, (wanted, default) in ONLY.items():
        if m.get(name, default) != wanted:
            raise ValueError(
                f"load: config.json of ifm must have {name} {wanted!r}. Got {m.get(name, default)!r}. "
                "This variant has no native implementation."
            )
    shared = _layers(m, rope)
    if m.get("arch", "transformer") == "huginn":
        return LoopedConfig(**shared, **_huginn(m))
    if _of(m, "loop_times", 1) == 1 and m.get("loop_input_injection", "none") == "none":
        return DenseConfig(**shared, layers=whole(m, "num_layers"))
    return LoopedConfig(**shared, **_ouro(m))


def _refuse_mixture(m: Facts, shapes: Shapes) -> None:
    found = next((name for name in sorted(shapes) if ".moe." in name), None)
    experts = _of(m, "num_experts", 0)
    if found or experts:
        raise ValueError(
            f"load: layers of an ifm file must be dense. Got {found or f'num_experts {experts}'}. "
            "Mixture checkpoints are not supported yet; take one whose name has 'dense'."
        )


def _of(m: Facts, name: str, default: int) -> int:
    """A count, or the original's default where it is left out or null."""
    return default if m.get(name) is None else whole(m, name)


def _known(table: Mapping[Any, Any], m: Facts, name: str, default: str) -> Any:
    key = m.get(name, default)
    if key not in table:
        raise ValueError(
            f"load: config.json of ifm must have {name} out of {', '.join(table)}. Got {key!r}. "
            "This variant has no native implementation."
        )
    return table[key]


def _norm(m: Facts) -> RMSNorm:
    return RMSNorm(eps=float(m.get("rmsnorm_eps", 1e-6)), zero_centred=True)


def _layers(m: Facts, rope: str) -> dict[str, Any]:
    """Arguments that looped and dense configurations share."""
    dim, heads = whole(m, "model_dim"), _of(m, "num_heads", 1)
    head_dim = _of(m, "head_dim", dim // heads)
    if _of(m, "rope_head_dim", head_dim) != head_dim:
        raise ValueError(
            f"load: config.json of ifm must have rope_head_dim {head_dim}, the whole head. Got {m['rope_head_dim']}. "
            "This variant has no native implementation."
        )
    std = m.get("init_std")
    return {
        "dim": dim,
        "vocab": whole(m, "vocab_size"),
        "attention": Attention(
            heads=heads,
            kv_heads=_of(m, "num_kv_heads", heads),
            head_dim=head_dim,
            position=Rope(base=float(m.get("rope_base", 1e5)), pairing=rope),  # type: ignore[arg-type]
        ),
        "ffn": SwiGLU(hidden=whole(m, "ffn_hidden_dim")),
        "norm": _norm(m),
        "head": Head(tied=False),
        "init": Init(std=dim**-0.5 if std is None else std, embed_std=dim**-0.5, cut=3.0),
    }


def _ouro(m: Facts) -> dict[str, Any]:
    """A range of the stack that loops; the embeddings may enter at every turn."""
    total, loops, first = whole(m, "num_layers"), _of(m, "loop_times", 1), _of(m, "loop_start_layer", 0)
    end = _of(m, "loop_end_layers", total)
    if not 0 <= first < end <= total:
        raise ValueError(
            f"load: config.json of ifm must have loop_start_layer below loop_end_layers, within num_layers ({total}). "
            f"Got {first} and {end}. Copy the file again."
        )
    carry = partial(_diagonal, m, "loop", source="embeds")
    return {
        "order": ModelLoop(num_steps=loops),
        "trained_depth": FixedDepth(num_steps=loops),
        "blocks": (end - first,),
        "envelope": NoEnvelope() if end - first == total else Envelope(prelude=first, coda=total - end),
        "injection": _known({"none": NoInjection, "diagonal": carry}, m, "loop_input_injection", "none")(),
    }


def _huginn(m: Facts) -> dict[str, Any]:
    """Prelude, core and coda, with one state or two."""
    total, loops = whole(m, "num_layers"), _of(m, "loop_times", 1)
    prelude, coda = _of(m, "huginn_prelude_layers", 1), _of(m, "huginn_coda_layers", 1)
    core = _of(m, "huginn_recurrent_layers", total - prelude - coda)
    if core < 1 or prelude + core + coda != total:
        raise ValueError(
            f"load: config.json of ifm must have num_layers = prelude + recurrent + coda. Got {total} and "
            f"{prelude} + {core} + {coda}. Copy the file again."
        )
    exit_norm = {"none": NoBoundary(), "parameterless_rms": PlainRMS(eps=_norm(m).eps)}
    orders = {
        "none": ModelLoop(num_steps=loops),
        "shared_hl": _two_level(m, share=True),
        "split_hl": _two_level(m, share=False),
    }
    order: PlanOrder = _known(orders, m, "huginn_hierarchical_state", "none")
    starts: dict[str, StateInit] = {
        "zero": Zeros(),
        "input": FromEmbeds(),
        "normal": Normal(std=whole(m, "model_dim") ** -0.5, cut=None),
    }
    return {
        "order": order,
        "trained_depth": FixedDepth(num_steps=order.h) if isinstance(order, TwoLevel) else _trained_depth(m, loops),
        "blocks": (core,),
        "envelope": Envelope(prelude=prelude, coda=coda),
        "injection": _injection(m),
        "state_init": _known(starts, m, "huginn_state_init", "zero"),
        "prelude_norm": _known({"none": None, "rms": _norm(m)}, m, "huginn_prelude_norm", "none"),
        "boundary": _known(exit_norm, m, "huginn_recurrent_exit_norm", "none"),
    }


def _two_level(m: Facts, *, share: bool) -> TwoLevel:
    h, low = _of(m, "huginn_hierarchical_h_cycles", 2), _of(m, "huginn_hierarchical_l_cycles", 3)
    return TwoLevel(h=h, l=low, share=share, repeats=_of(m, "huginn_split_module_repeats", 1))


def _injection(m: Facts) -> Injection:
    if m.get("huginn_prelude_orthogonal", False):
        return Orthogonal(
            initial_decay=_decay(m, "huginn"), decay_params=True, eps=m.get("huginn_ortho_projection_eps", 1e-6)
        )
    kinds: dict[str, Callable[[], Injection]] = {
        "none": NoInjection,
        "diagonal": partial(_diagonal, m, "huginn"),
        "linear": lambda: Concat(order="state_first", init="normal", bias=m.get("apply_bias_term", False)),
    }
    return _known(kinds, m, "huginn_input_injection", "diagonal")()


def _diagonal(m: Facts, prefix: str, **options: Any) -> Diagonal:
    return Diagonal(initial_decay=_decay(m, prefix), decay_params=True, **options)


def _decay(m: Facts, prefix: str) -> float:
    return math.exp(-m.get(f"{prefix}_diagonal_dt_init", 1.0) * m.get(f"{prefix}_diagonal_a_init", 1.0))


def _trained_depth(m: Facts, loops: int) -> Depth:
    if m.get("huginn_depth_prior", "none") != "none":
        return Unknown()
    capped = PoissonLognormal(
        rate=m.get("huginn_poisson_lognormal_target_mean", 5.0) - 1,
        sigma=m.get("huginn_poisson_lognormal_sigma", 0.5),
        max_steps=_of(m, "huginn_poisson_lognormal_max", 64),
    )
    laws = {"fixed": FixedDepth(num_steps=loops), "poisson-lognormal-capped": capped}
    return _known(laws, m, "huginn_sampling_scheme", "fixed")


def key_map(c: LoopedConfig | DenseConfig, *, gate: str) -> KeyMap:
    """Names of a file's tensors. `gate`: answer to which of fc1 and fc3 goes through silu."""
    up = "fc3" if gate == "fc1" else "fc1"
    layer = LAYER | {f"nffn.{gate}": "ffn.gate", f"nffn.{up}": "ffn.up"}
    rules: list[Rule] = [
        Rename("embed.weight", "embedding.weight"),
        Rename("output.final_norm.weight", "final_norm.weight"),
        Rename("output.output.weight", "lm_head.own_weight"),
    ]
    rules += [
        Rename(f"layers.{i}.{theirs}.weight", f"{place}.{ours}.weight")
        for i, place in enumerate(_places(c))
        for theirs, ours in layer.items()
    ]
    if isinstance(c, LoopedConfig):
        rules += _injection_rules(c.injection)
        rules += [Rename("huginn_prelude_norm_module.weight", "prelude_norm.weight")] if c.prelude_norm else []
    return KeyMap(tuple(rules))


def _places(c: LoopedConfig | DenseConfig) -> list[str]:
    """Our name of every stored layer, in order."""
    if isinstance(c, DenseConfig):
        return [f"layers.{i}" for i in range(c.layers)]
    counts = {"prelude": c.envelope.prelude, "core": sum(c.blocks), "coda_layers": c.envelope.coda}
    return [f"{stack}.{i}" for stack, count in counts.items() for i in range(count)]


def _injection_rules(injection: Injection) -> list[Rule]:
    names = {}
    module = "input_injection"
    if isinstance(injection, Diagonal | Orthogonal):
        names = {"input_adapter.weight": "w.weight", "A_log": "a_log", "dt_bias": "dt_bias"}
        module = "loop_input_injection_module" if injection.source == "embeds" else module
    elif isinstance(injection, Concat):
        names = {f"adapter.{part}": f"w.{part}" for part in ("weight", "bias") if part == "weight" or injection.bias}
    return [Rename(f"{module}.{theirs}", f"injections.0.rule.{ours}") for theirs, ours in names.items()]


def _build(c: LoopedConfig | DenseConfig) -> LoopedLM:
    return Dense(c) if isinstance(c, DenseConfig) else Looped(c)


def family(answers: Mapping[str, str] | None = None) -> Family:
    """The family, with answers to what its files leave open; None: open, for reading names and sizes only."""
    given = ORIGINAL if answers is None else answers
    return Family(
        name="ifm",
        model_types=(),
        reference="Huang et al., Towards Looped Models Done Right; ifm-ai/xllm-loop",
        config=partial(config, rope=given["rope"]),
        key_map=partial(key_map, gate=given["gate"]),
        build=_build,
        recognises=lambda names: {"embed.weight", "output.final_norm.weight", "output.output.weight"} <= names,
        notes=(
            "Weights of norms are stored as differences from 1.",
            "At evaluation the original starts random states from a hash of the row number (part I) or of the example "
            "id (part II); here the noise is handed in.",
        ),
        open_questions=OPEN if answers is None else {},
        answered=family,
    )


PUBLISHED.register("ifm")(family())


def _part_1(**changes: Any) -> Facts:
    """Settings that the recipes of part I share."""
    return {
        "arch": "transformer",
        "num_layers": 28,
        "model_dim": 1536,
        "num_heads": 24,
        "num_kv_heads": 6,
        "head_dim": 64,
        "ffn_hidden_dim": 4352,
        "vocab_size": 250_624,
        "apply_rmsnorm": True,
        "apply_bias_term": True,
        "rope_base": 1_000_000,
        "swiglu": True,
        "init_std": 0.02,
        **changes,
    }


def _middle(**changes: Any) -> Facts:
    """Part I with 8 + 12 + 8 layers, of which the middle ones loop."""
    counts = {"huginn_prelude_layers": 8, "huginn_recurrent_layers": 12, "huginn_coda_layers": 8}
    return _part_1(**{"arch": "huginn", "loop_times": 8, **counts, "huginn_state_init": "normal", **changes})


def _part_2(scale: int, **changes: Any) -> Facts:
    """Part II at `scale` times its smallest width: 1 + 2 + 1 layers, trained at 5 iterations."""
    return _part_1(
        arch="huginn",
        num_layers=4,
        model_dim=1536 * scale,
        num_heads=24 * scale,
        num_kv_heads=6 * scale,
        ffn_hidden_dim=4352 * scale,
        vocab_size=64_256,
        loop_times=5,
        huginn_state_init="normal",
        **changes,
    )


PARCAE = {"huginn_diagonal_dt_init": math.log(5) / 2}
SAMPLED = {"huginn_sampling_scheme": "poisson-lognormal-capped"}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"huginn_input_injection": "linear", "huginn_recurrent_exit_norm": "parameterless_rms", **SAMPLED},
    "parcae": {"huginn_prelude_norm": "rms", **PARCAE, **SAMPLED},
    "orthogonal": {"huginn_prelude_orthogonal": True, **PARCAE, **SAMPLED},
}
"""Injections of part II, all trained at sampled depths."""

RECIPES: dict[str, tuple[str, Facts]] = {
    "ifm-dense-d28": ("28 layers without a loop.", _part_1()),
    "ifm-dense-d112": ("112 layers without a loop, the control of equal depth.", _part_1(num_layers=112)),
    "ifm-dense-ouro": ("28 layers, 4 times.", _part_1(loop_times=4)),
    "ifm-dense-raw-injection": (
        "28 layers, 4 times; the embeddings enter each time.",
        _part_1(loop_times=4, loop_input_injection="diagonal"),
    ),
    "ifm-dense-middle": (
        "8 layers, 12 layers 8 times, 8 layers.",
        _middle(huginn_state_init="input", huginn_input_injection="none"),
    ),
    "ifm-dense-prelude-injection": (
        "As middle; what the first 8 layers made enters each time.",
        _middle(huginn_state_init="input"),
    ),
    "ifm-dense-huginn": ("As prelude-injection, from a random state.", _middle()),
    "ifm-dense-shared-hl": (
        "Two states: 2 cycles of 3 low updates and a high one by the same 12 layers.",
        _middle(huginn_hierarchical_state="shared_hl"),
    ),
    "ifm-dense-split-hl": (
        "As shared-hl, with 6 layers for each state.",
        _middle(huginn_hierarchical_state="split_hl"),
    ),
    "ifm-dense-split-hl-x2": (
        "As split-hl, each update running its layers twice.",
        _middle(huginn_hierarchical_state="split_hl", huginn_split_module_repeats=2),
    ),
    **{f"ifm-p2-{size}": (f"Width {1536 * scale}: 1 layer, 2 layers 5 times, 1 layer.", _part_2(scale))
       for size, scale in (("s", 1), ("m", 2), ("l", 4))},
    **{f"ifm-p2-{size}-{variant}": (f"As ifm-p2-{size} with {variant} injection, at sampled depths.",
                                    _part_2(scale, **changes))
       for size, scale in (("s", 1), ("m", 2)) for variant, changes in VARIANTS.items()},
    "tiny-ifm-ouro": (
        "raw-injection at toy width.",
        _part_1(num_layers=2, loop_times=3, loop_input_injection="diagonal", init_std=0.15),
    ),
    "tiny-ifm-split-hl": (
        "split-hl-x2 at toy width.",
        _middle(num_layers=4, huginn_prelude_layers=1, huginn_recurrent_layers=2, huginn_coda_layers=1,
                huginn_hierarchical_state="split_hl", huginn_split_module_repeats=2, init_std=0.15),
    ),
}  # fmt: skip
"""Name of a preset -> what it is, and the settings of its recipe (section "model" of the file)."""
TINY = {"model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden_dim": 40, "vocab_size": 64}


def _register(name: str, about: str, recipe: Facts) -> None:
    def preset() -> LoopedConfig | DenseConfig:
        small = TINY if name.startswith("tiny-") else {}
        return config({"model": {**recipe, **small}}, {}, rope=ORIGINAL["rope"])

    preset.__doc__ = about
    PRESETS.register(name)(preset)


for _name, (_about, _recipe) in RECIPES.items():
    _register(_name, _about, _recipe)

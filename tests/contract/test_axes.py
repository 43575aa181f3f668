"""Point 12 of the contract: every choice of every axis is built and run, every refused pair says why."""

import collections
import dataclasses
import functools
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from contract.axes import ATTENTION, BASE, CHOICES, INJECTIONS, attention, config
from contract.zoo import noise, run, tokens
from looplab._config import from_dict, to_dict
from looplab.models.base import build
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import FeedForward
from looplab.nn.norm import Norm, Placement
from looplab.nn.residual import LoomResidual, Residual
from looplab.nn.rope import Learned, Position, Rope
from looplab.recurrence import state as states
from looplab.recurrence.boundary import Boundary, SharedFinalNorm
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.halting import Halt
from looplab.recurrence.injection import INJECTIONS as REGISTERED_INJECTIONS
from looplab.recurrence.injection import Concat, Diagonal, Injection, NoInjection
from looplab.recurrence.injection.add import Weight
from looplab.recurrence.injection.base import When
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import Blocks, DeepSupervision, LayerLoop, PlanOrder, Sequential, TwoLevel
from looplab.recurrence.signal import AdaLN, PerIterationLoRA, Signal, StepEmbedding
from looplab.recurrence.spec import Refuse
from looplab.recurrence.state_init import STATE_INITS, Normal, StateInit, Zeros
from looplab.recurrence.update import Damped, Update
from tolerances import CACHED, ROWS

every_choice = pytest.mark.parametrize("name", CHOICES)
unchecked = pytest.mark.usefixtures("unchecked")
"""Annotations of every choice are checked where rows of their own iteration run; elsewhere that only takes time."""
SEQ = 5


@functools.cache
def model(name):
    """The model of one choice, its parameters moved away from starts that hide a difference."""
    made, draw = build(config(name), dtype=torch.float64), torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return made


@unchecked
@every_choice
def test_12_forward_and_backward_run_and_their_flops_are_those_of_the_formula(name):
    made = model(name)
    ids, plan = tokens(made, 2, SEQ), made.spec.plan()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = run(made, ids, plan=plan).logits
        forward_flops = counter.get_total_flops()
        logits.square().sum().backward()
    if made.spec.halt is not None:  # no logit reads the stopping score
        made.halt(run(made, ids, plan=plan).state).square().sum().backward()
    assert logits.shape == (2, SEQ, made.spec.vocab[0])
    for label, parameter in made.named_parameters():
        assert parameter.grad is not None, f"{label} gets no gradient"
        assert torch.isfinite(parameter.grad).all()
        parameter.grad = None
    applications = collections.Counter(block for block, _ in plan)
    shape = {"tokens": SEQ, "rows": 2, "pairs": "square"}
    assert forward_flops == made.spec.cost.forward(applications, **shape)
    backward = made.spec.cost.backward(applications, **shape)
    signal = made.config.signal
    if isinstance(signal, AdaLN):  # nothing differentiates the sinusoids that the two time codes read
        backward -= len(plan) * 2 * 2 * 2 * signal.freq_dim * made.config.width
    assert counter.get_total_flops() - forward_flops == backward


@every_choice
def test_12_config_round_trips_and_parameters_add_up(name):
    made = model(name)
    assert from_dict(LoopedConfig, to_dict(made.config)) == made.config
    assert made.spec.params.total == sum(p.numel() for p in made.parameters())
    assert [block.params for block in made.spec.blocks] == list(made.spec.params.core)


@unchecked
@every_choice
def test_12_cached_decoding_equals_recomputation(name):
    made = model(name)
    rule = made.spec.kv_rules[0]
    if not made.spec.causal:
        with pytest.raises(ValueError, match="looped is not causal: no KV cache. Pass cache=None"):
            new_cache(made.spec, rows=2, capacity=SEQ)
        return
    ids = tokens(made, 2, SEQ)
    drawn = noise(made, torch.arange(SEQ).expand(2, -1))
    warned = pytest.warns(UserWarning, match="kv_rule=") if rule != made.spec.kv_rule else torch.no_grad()
    with warned:
        cache = new_cache(made.spec, rows=2, capacity=SEQ, rule=rule, dtype=torch.float64)
    with torch.no_grad():
        pieces = []
        for start, end in ((0, 4), (4, 5)):
            part = None if drawn is None else drawn[:, start:end]
            pieces.append(forward(made, ids[:, start:end], noise=part, cache=cache).logits)
        torch.testing.assert_close(torch.cat(pieces, 1), run(made, ids).logits, **CACHED)
    per_token = made.spec.cost.kv_bytes_per_token("DepthIndexed", made.spec.plan().iterations(), itemsize=8)
    assert cache.nbytes == 2 * SEQ * per_token


@every_choice
def test_12_rows_at_their_own_iteration_and_padding_equal_rows_alone(name):
    made = model(name)
    ids = tokens(made, 2, 4)
    valid = torch.tensor([[True] * 4, [False, True, True, True]])
    context = made.encode(ids, valid=valid)
    state = made.init_state(context, noise(made, context.positions))
    alone = [made.encode(ids[row : row + 1], valid=valid[row : row + 1]) for row in range(2)]
    with torch.no_grad():
        for block in range(len(made.spec.blocks)):
            together = made.step(state, context, block, torch.tensor([1, 0]))
            for row, iteration in enumerate((1, 0)):
                single = made.step(states.select(state, [row]), alone[row], block, torch.tensor([iteration]))
                for a, b in zip(states.leaves(states.select(together, [row])), states.leaves(single), strict=True):
                    torch.testing.assert_close(a[:, valid[row]], b[:, valid[row]], **ROWS)


@unchecked
@every_choice
def test_12_equal_operator_classes_are_the_same_function(name):
    made = model(name)
    context = made.encode(tokens(made, 1, 3))
    draw = torch.Generator().manual_seed(2)
    state = states.map(
        lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=torch.float64),
        made.init_state(context, noise(made, context.positions)),
    )
    refuses = made.spec.max_iteration is not None and isinstance(made.config.beyond, Refuse)
    reached = range(min(5, made.spec.max_iteration) if refuses and not made.spec.grid else 3)
    with torch.no_grad():
        for block in range(len(made.spec.blocks)):
            results = {t: made.step(state, context, block, torch.tensor([t])) for t in reached}
            for a in reached:
                for b in reached:
                    leaves = zip(states.leaves(results[a]), states.leaves(results[b]), strict=True)
                    same = all(torch.equal(one, other) for one, other in leaves)
                    assert same == (made.spec.operator_class(block, a) == made.spec.operator_class(block, b)), (a, b)


def concrete(base):
    """All classes below `base` that can be made."""
    below = {c for child in base.__subclasses__() for c in (child, *concrete(child))}
    return {c for c in below if not getattr(c, "__abstractmethods__", None) and c.__module__.startswith("looplab.")}


def chosen(value):
    """Types of all choices inside a configuration."""
    found = {type(value)}
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            found |= chosen(getattr(value, field.name))
    return found


@pytest.mark.parametrize(
    "axis",
    [
        PlanOrder,
        Injection,
        When,
        Weight,
        StateInit,
        Boundary,
        Norm,
        Placement,
        Residual,
        Signal,
        Update,
        Halt,
        FeedForward,
        Position,
    ],
    ids=lambda axis: axis.__name__,
)
def test_12_every_choice_of_the_axis_is_among_those_run(axis):
    run_types = set().union(*(chosen(config(name)) for name in CHOICES))
    assert concrete(axis) - run_types - {Sequential, DeepSupervision} == set()


def test_12_every_option_of_attention_and_head_is_among_those_run():
    for part, field_of in ((Attention, "attention"), (Head, "head")):
        for field in dataclasses.fields(part):
            used = {repr(getattr(getattr(config(name), field_of), field.name)) for name in CHOICES}
            assert len(used) > 1 or field.name in ("heads", "head_dim"), f"{field_of}.{field.name} is never varied"


def test_12_every_field_of_the_config_is_varied():
    fixed = {"dim", "vocab"}
    for field in dataclasses.fields(LoopedConfig):
        used = {repr(getattr(config(name), field.name)) for name in CHOICES}
        assert len(used) > 1 or field.name in fixed, f"{field.name} is never varied"


def test_12_every_registered_injection_and_start_is_run():
    run_types = set().union(*(chosen(config(name)) for name in CHOICES))
    assert set(map(REGISTERED_INJECTIONS.__getitem__, REGISTERED_INJECTIONS)) <= run_types
    assert set(map(STATE_INITS.__getitem__, STATE_INITS)) <= run_types


REFUSED = [
    (
        lambda: {"envelope": NoEnvelope(), "injection": make_source("prelude")},
        "LoopedConfig.injection.source must be 'embeds' without an envelope. Got 'prelude'. "
        "Set source='embeds' or add Envelope(...)",
    ),
    *[
        (
            lambda start=start: {"injection": NoInjection(), "state_init": start},
            "the core would never see the tokens: add an injection or use state_init=FromEmbeds()",
        )
        for start in (Zeros(), Normal(std=1.0))
    ],
    (
        lambda: {"injection": make_source("embeds"), "state_init": Zeros()},
        "LoopedConfig.envelope.prelude must be 0 where nothing reads it: the injection and the start read the "
        "embeddings. Got 1. Set injection.source='prelude' or state_init=FromEmbeds()",
    ),
    (
        lambda: {"boundary": SharedFinalNorm()},
        "boundary=SharedFinalNorm() needs NoEnvelope(): the coda would read normed states. Use OwnNorm()",
    ),
    *[
        (
            lambda change=change: {"order": TwoLevel(), "state_init": Zeros(), **change},
            f"TwoLevel(...) does not combine with {label}: its high cycle has no single loop index",
        )
        for label, change in {
            "StepEmbedding": {"signal": StepEmbedding(max=8)},
            "AdaLN": {"signal": AdaLN()},
            "PerIterationLoRA": {"signal": PerIterationLoRA(rank=1, targets=("q",), max=8)},
            "Damped": {"update": Damped(alpha=0.5)},
        }.items()
    ],
    (
        lambda: {"order": TwoLevel(), "state_init": Zeros(), "residual": LoomResidual()},
        "TwoLevel(...) does not combine with LoomResidual: its layers have no single number of loops. "
        "Use residual=UnitResidual().",
    ),
    (
        lambda: {"signal": StepEmbedding(max=8), "trained_depth": UniformDepth(low=1, high=64)},
        "signal=StepEmbedding(max=8) is shorter than trained_depth: UniformDepth(1, 64) draws up to 64. Set max=64",
    ),
    (
        lambda: {"signal": AdaLN(), "trained_depth": UniformDepth(low=1, high=8)},
        "signal=AdaLN() is shorter than trained_depth: UniformDepth(1, 8) draws up to 8. "
        "Set the order's num_steps to 8",
    ),
    (
        lambda: {"order": LayerLoop(num_steps=2), "signal": StepEmbedding(max=1)},
        "signal=StepEmbedding(max=1) is shorter than trained_depth: FixedDepth(2) draws up to 2. Set max=2",
    ),
    (
        lambda: {**wide_state(), "injection": Concat(order="state_first", init="identity")},
        "identity init needs equal widths. Got state 1024, embeds 8. Use init='normal'",
    ),
    (
        lambda: {"state_dim": 12},
        "LoopedConfig.projection must be True where state_dim (12) is not dim (8).",
    ),
    (
        lambda: wide_state(),
        "LoopedConfig.state_dim must equal dim (8) where the context enters unmapped. Got 1024. "
        "Use an injection with a matrix and a start that is not FromEmbeds().",
    ),
    (
        lambda: {**wide_state(), "injection": Diagonal(initial_decay=0.5), "exit_norm": "final"},
        "LoopedConfig.state_dim must equal dim (8) for a norm or level they share. Got 1024.",
    ),
    (
        lambda: {"order": DeepSupervision(steps=2, h=1, l=1)},
        "LoopedConfig.order must be ModelLoop, LayerLoop, Blocks or TwoLevel. "
        "Got DeepSupervision(steps=2, h=1, l=1). Use models.trm or models.hrm.",
    ),
    (
        lambda: {"core_attention": dataclasses.replace(ATTENTION, head_dim=8)},
        "LoopedConfig.core_attention.head_dim must be that of attention (4), whose positions and mask the core shares. "
        "Got 8. Change heads or kv_heads only.",
    ),
    (
        lambda: {"value_gates": (0,)},
        "LoopedConfig.value_gates must be None without value embeddings. Got (0,).",
    ),
    *[
        (
            lambda layers=layers: {**attention(value_embedding=True), "value_tables": layers},
            f"LoopedConfig.value_tables must name stored layers 0..2 in order. Got {layers}.",
        )
        for layers in ((2, 0), (0, 3), (1, 1))
    ],
    (
        lambda: {
            **attention(value_embedding=True),
            "core_attention": dataclasses.replace(ATTENTION, heads=4, kv_heads=4, value_embedding=True),
        },
        "LoopedConfig.core_attention must have kv_heads * head_dim = 8 where layer 1 adds value embeddings, whose "
        "tables are that wide. Got 16. Leave out its gate or table.",
    ),
    (
        lambda: {"order": Sequential()},
        "LoopedConfig.order must repeat a block. Got Sequential(). Use models.dense for a dense stack.",
    ),
    (
        lambda: {"blocks": (1, 1)},
        "LoopedConfig.blocks must have one entry for ModelLoop. Got (1, 1). Use Blocks(...).",
    ),
    (
        lambda: {"order": Blocks(num_steps=(1, 1))},
        "LoopedConfig.blocks must have one entry per count of Blocks(num_steps=(1, 1)). Got (1,). "
        "Make them equally long.",
    ),
    (
        lambda: {"order": TwoLevel(share=False), "blocks": (3,), "state_init": Zeros()},
        "LoopedConfig.blocks must be even for TwoLevel(share=False). Got (3,).",
    ),
    (lambda: {"dim": 0}, "LoopedConfig.dim must be at least 1. Got 0."),
    (lambda: {"blocks": ()}, "LoopedConfig.blocks must hold layer counts of at least 1. Got ()."),
    (lambda: {"blocks": (0,)}, "LoopedConfig.blocks must hold layer counts of at least 1. Got (0,)."),
    (
        lambda: attention(heads=8, qk_bias=True),
        "attention.qk_bias has one key bias per query head; kv_heads must equal heads (8). Got 2. "
        "Set kv_heads=8 or qk_bias=False",
    ),
    (
        lambda: attention(head_dim=15),
        "attention.head_dim must be even for Rope. Got 15. Use 16 or NoPE()",
    ),
    (
        lambda: attention(heads=6, kv_heads=4),
        "heads (6) must be a multiple of kv_heads (4). Got remainder 2. Choose a divisor of heads.",
    ),
]


def make_source(source):
    return INJECTIONS["gated"](source=source)


def wide_state():
    return {"state_dim": 1024, "projection": True, "state_init": Normal(std=1.0)}


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_12_refused_pairs_say_why(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(BASE, **changes())


def test_12_two_position_rules_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"attention\.position: must be one of"):
        dataclasses.replace(ATTENTION, position=(Rope(base=100.0), Learned(max=8)))


def test_12_a_negative_envelope_is_refused():
    with pytest.raises(ValueError, match=r"Envelope\.prelude and coda must be at least 0\. Got -1 and 2"):
        type(BASE.envelope)(prelude=-1)

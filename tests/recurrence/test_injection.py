import math

import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.linear import Init
from looplab.recurrence.injection import (
    INJECTIONS,
    Add,
    Concat,
    Constant,
    Diagonal,
    FirstOnly,
    Gated,
    Injection,
    LearnedScalar,
    NoInjection,
    Orthogonal,
    SkipFirst,
)
from reference import recurrence as twin
from tolerances import BLOCK_GRADIENTS, BLOCKS, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


DIM, INIT = 5, Init(std=0.5)
CASES = {
    "add": (Add(weight=Constant(value=0.7)), "Add", {"value": 0.7}),
    "learned_scalar": (Add(weight=LearnedScalar()), "LearnedScalar", {}),
    "embeds_first": (
        Concat(order="embeds_first", init="normal", bias=True),
        "Concat",
        {"order": "embeds_first"},
    ),
    "state_first": (Concat(order="state_first", init="normal"), "Concat", {"order": "state_first"}),
    "diagonal": (Diagonal(initial_decay=0.4), "Diagonal", {}),
    "orthogonal": (Orthogonal(initial_decay=0.4, eps=1e-3), "Orthogonal", {"eps": 1e-3}),
    "gated": (Gated(), "Gated", {}),
}
ITERATION = torch.tensor([0, 3, 1])


def built(config, state_dim=DIM, embed_dim=DIM, shaken=True):
    module = config.build(state_dim, embed_dim, INIT).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters() if shaken else ():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def data(embed_dim=DIM, rows=3):
    generator = torch.Generator().manual_seed(1)
    s, e = (torch.randn(rows, 2, d, generator=generator, dtype=torch.float64) for d in (DIM, embed_dim))
    return s.requires_grad_(), e.requires_grad_()


@pytest.mark.parametrize("name", CASES)
def test_an_injection_equals_its_twin_in_value_and_gradient(name):
    config, kind, options = CASES[name]
    module = built(config)
    s, e = data()
    weights = dict(module.named_parameters())
    slow = torch.stack(
        [
            torch.stack([twin.inject(kind, s[b, t], e[b, t], int(ITERATION[b]), weights, **options) for t in range(2)])
            for b in range(3)
        ]
    )
    fast = module(s, e, ITERATION)
    torch.testing.assert_close(fast, slow, **BLOCKS)
    inputs = [s, e, *weights.values()]
    for a, b in zip(*(torch.autograd.grad(u.pow(3).sum(), inputs) for u in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


@pytest.mark.parametrize("name", CASES)
def test_each_row_takes_the_branch_of_its_own_iteration(name):
    config, _, _ = CASES[name]
    s, e = data()
    weights = built(config).state_dict()
    for when, injected in ((FirstOnly(), [True, False, False]), (SkipFirst(), [False, True, True])):
        module = type(config)(**{**vars(config), "when": when}).build(DIM, DIM, INIT).double()
        module.load_state_dict(weights)
        u = module(s, e, ITERATION)
        always = built(config)(s, e, ITERATION)
        for row in range(3):
            torch.testing.assert_close(u[row], always[row] if injected[row] else s[row], **EXACT)


@pytest.mark.parametrize("order", ["embeds_first", "state_first"])
def test_concat_with_identity_start_passes_the_context_exactly(order):
    s, e = data()
    module = built(Concat(order=order, init="identity"), shaken=False)
    assert torch.equal(module(s, e, ITERATION), e)


def test_the_two_presets_of_diagonal_start_at_their_published_values():
    s, e = data()
    three_axis = built(Diagonal(initial_decay=math.exp(-1)), shaken=False)(s, e, ITERATION)
    torch.testing.assert_close(three_axis, math.exp(-1) * s + e, rtol=0, atol=1e-6)  # the start is float32
    parcae = built(Diagonal(initial_decay=5**-0.5), shaken=False)(s, e, ITERATION)
    torch.testing.assert_close(parcae, 0.44721360 * s + 0.80471896 * e, rtol=0, atol=1e-6)


def test_the_linear_carry_never_grows():
    module = built(Diagonal(initial_decay=0.9))
    module.rule.a_log.data.mul_(5)
    decay, _ = module.rule.decay()
    assert ((decay > 0) & (decay < 1)).all()


def test_the_orthogonal_carry_has_nothing_along_the_input():
    module = built(Orthogonal(initial_decay=0.5))
    s, e = data()
    u = module(s, e, ITERATION)
    entering = module.rule.decay()[1] * module.rule.w(e)
    overlap = ((u - entering) * entering).sum(-1)
    torch.testing.assert_close(overlap, torch.zeros_like(overlap), rtol=0, atol=2e-6)


def test_a_learned_scalar_of_zero_and_its_first_iteration_leave_the_state():
    s, e = data()
    off = built(Add(weight=LearnedScalar()), shaken=False)
    assert torch.equal(off(s, e, ITERATION), s)
    on = built(Add(weight=LearnedScalar(init=0.5, norm=False)), shaken=False)
    u = on(s, e, ITERATION)
    assert torch.equal(u[0], s[0])
    torch.testing.assert_close(u[1], s[1] + 0.5 * e[1], **BLOCKS)
    first_too = built(Add(weight=LearnedScalar(init=0.5, norm=False, skip_first=False)), shaken=False)
    torch.testing.assert_close(first_too(s, e, ITERATION), s + 0.5 * e, **BLOCKS)


def test_a_gate_starts_half_open():
    s, e = data()
    torch.testing.assert_close(built(Gated(), shaken=False)(s, e, ITERATION), (s + e) / 2, **BLOCKS)


def test_state_and_context_of_different_widths_where_a_matrix_joins_them():
    s, e = data(embed_dim=3)
    for config in (
        Concat(order="state_first", init="normal"),
        Diagonal(initial_decay=0.5),
        Orthogonal(initial_decay=0.5),
    ):
        module = built(config, embed_dim=3)
        matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
        assert module(s, e, ITERATION).shape == s.shape
        assert config.matmul_params(DIM, 3) == matrices


@pytest.mark.parametrize("name", CASES)
def test_matmul_params_are_the_entries_of_the_matrices(name):
    config, _, _ = CASES[name]
    matrices = sum(p.numel() for p in built(config).parameters() if p.dim() == 2)
    assert config.matmul_params(DIM, DIM) == matrices


def test_the_operator_class_says_at_which_iterations_an_injection_differs():
    classes = {
        Add(): [0, 0, 0],
        Add(weight=LearnedScalar()): [0, 1, 1],
        Add(weight=LearnedScalar(skip_first=False)): [0, 0, 0],
        Gated(when=FirstOnly()): [0, 1, 1],
        Gated(when=SkipFirst()): [0, 1, 1],
        NoInjection(): [0, 0, 0],
    }
    for config, expected in classes.items():
        assert [config.operator_class(t) for t in range(3)] == expected, config


def test_weight_decay_spares_the_carry_unless_asked():
    spared = built(Diagonal(initial_decay=0.5))
    assert set(spared.no_weight_decay) == {n for n, _ in spared.named_parameters()}
    assert built(Diagonal(initial_decay=0.5, decay_params=True)).no_weight_decay == ()
    assert built(Gated()).no_weight_decay == ()


def test_no_injection_builds_nothing():
    assert NoInjection().build(DIM, DIM, INIT) is None
    assert NoInjection().matmul_params(DIM, DIM) == 0


def test_a_bfloat16_injection_keeps_its_type():
    for config, _, _ in CASES.values():
        module = config.build(DIM, DIM, INIT).bfloat16()
        s, e = (x.detach().bfloat16() for x in data())
        assert module(s, e, ITERATION).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [Add(), Gated()], ids=lambda c: type(c).__name__)
def test_unequal_widths_are_refused_where_no_matrix_joins_them(config):
    with pytest.raises(ValueError, match=rf"{type(config).__name__} needs equal widths\. Got state 5, embeds 3"):
        config.build(5, 3, INIT)


def test_an_identity_start_needs_equal_widths():
    with pytest.raises(
        ValueError, match=r"identity init needs equal widths\. Got state 1024, embeds 768\. Use init='normal'"
    ):
        Concat(order="state_first", init="identity").build(1024, 768, INIT)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_outside_the_unit_interval_is_refused(decay):
    with pytest.raises(ValueError, match=rf"Diagonal\.initial_decay must lie between 0 and 1\. Got {decay}"):
        Diagonal(initial_decay=decay)


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (Gated(), "source", r"Gated\.source must be 'prelude' or 'embeds'\. Got 'other'"),
        (CASES["state_first"][0], "order", r"Concat\.order must be 'embeds_first' or 'state_first'\. Got 'other'"),
        (CASES["state_first"][0], "init", r"Concat\.init must be 'identity' or 'normal'\. Got 'other'"),
    ],
)
def test_a_misspelt_choice_is_refused_where_types_are_not_checked(config, field, message):
    config = type(config)(**vars(config))
    object.__setattr__(config, field, "other")
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_every_choice_is_registered_and_survives_json():
    assert list(INJECTIONS) == ["add", "concat", "diagonal", "gated", "none", "orthogonal"]
    for config in (NoInjection(), *(c for c, _, _ in CASES.values()), Gated(when=FirstOnly(), source="embeds")):
        assert from_dict(Injection, to_dict(config)) == config

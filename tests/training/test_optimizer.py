import math

import pytest
import torch
from torch import nn

from looplab.models.base import PRESETS, build
from looplab.training.optimizer import AdamATan2, AdamW, SignSGD, decaying_parameters, load_state, state_tensors
from tolerances import EXACT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(3)
        self.carry = nn.Module()
        self.carry.decay = nn.Parameter(torch.ones(2, 2))
        self.carry.mix = nn.Parameter(torch.ones(2, 2))
        self.carry.no_weight_decay = ("decay",)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.out = nn.Linear(3, 2, bias=False)
        self.out.weight = self.matrix.weight


def test_only_matrices_decay_and_not_those_a_module_exempts():
    assert decaying_parameters(Net()) == {"matrix.weight", "carry.mix"}


def test_an_exemption_must_name_a_parameter():
    net = Net()
    net.carry.no_weight_decay = ("decya",)
    with pytest.raises(
        ValueError, match="carry.no_weight_decay must name parameters of the module. Got 'decya'. Known: decay, mix"
    ):
        decaying_parameters(net)


def test_norms_and_signals_of_a_real_model_are_sorted():
    model = build(PRESETS["tiny-blocks"]())
    decaying = decaying_parameters(model)
    assert {name for name, p in model.named_parameters() if p.dim() < 2}.isdisjoint(decaying)
    assert any("core" in name for name in decaying)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_every_model_has_an_optimizer(preset):
    model = build(PRESETS[preset](), device="meta")
    groups = AdamW(lr=0.1).build(model).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_an_injection_says_which_of_its_matrices_does_not_decay():
    model = build(PRESETS["tiny-parcae"](), device="meta")
    assert model.injections[0].rule.w.weight.dim() == 2
    assert "injections.0.rule.w.weight" not in decaying_parameters(model)


def test_one_update_is_the_equation():
    net = Net()
    optimizer = AdamW(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5).build(net)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    # The first update: both moments are corrected to g and g^2, so the step is lr * g / (|g| + eps).
    for name, decay in (("matrix.weight", 0.5), ("matrix.bias", 0.0), ("carry.decay", 0.0), ("norm.weight", 0.0)):
        expected = before[name] - 0.1 * decay * before[name] - 0.1 * 2.0 / (2.0 + 1e-8)
        torch.testing.assert_close(net.get_parameter(name).detach(), expected)
    torch.testing.assert_close(net.frozen, before["frozen"], **EXACT)


def test_updates_by_arc_tangent_are_the_equation():
    net = Net()
    optimizer = AdamATan2(lr=0.1, betas=(0.9, 0.8), weight_decay=0.5).build(net)
    wanted = {name: p.detach().clone() for name, p in net.named_parameters()}
    first = second = 0.0
    for count, gradient in enumerate((2.0, -1.0, 0.5), 1):
        for p in net.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.8 * second + 0.2 * gradient**2
        angle = math.atan2(first / (1 - 0.9**count), math.sqrt(second / (1 - 0.8**count)))
        for name, decay in (("matrix.weight", 0.5), ("matrix.bias", 0.0), ("carry.decay", 0.0)):
            wanted[name] = wanted[name] * (1 - 0.1 * decay) - 0.1 * angle
    for name in ("matrix.weight", "matrix.bias", "carry.decay"):
        torch.testing.assert_close(net.get_parameter(name).detach(), wanted[name])
    torch.testing.assert_close(net.frozen, wanted["frozen"], **EXACT)


def test_an_arc_tangent_does_not_see_the_scale_of_the_gradient():
    found = []
    for scale in (1.0, 2.0**-40):
        net = Net()
        with torch.no_grad():
            net.matrix.weight.fill_(1.0)
        optimizer = AdamATan2(lr=0.1, weight_decay=0.0).build(net)
        net.matrix.weight.grad = scale * torch.arange(1.0, 7.0).view(2, 3)
        optimizer.step()
        found.append(net.matrix.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=0.0)
    assert (found[0] - (1 - 0.1 * math.pi / 4)).abs().max() < 1e-6


def test_rows_of_a_puzzle_table_that_were_read_move_by_the_sign_of_their_gradient():
    model = build(PRESETS["tiny-trm-attn"]())
    optimizer, table = SignSGD(lr=0.1, weight_decay=0.5).build(model), model.puzzles.table
    with torch.no_grad():
        table.fill_(2.0)
    context = model.encode(torch.zeros(3, 36, dtype=torch.long), extras={"puzzle_ids": torch.tensor([1, 3, 1])})
    context.slots.square().sum().backward()
    optimizer.step()
    assert (table[[0, 2, 4]] == 2.0).all()
    torch.testing.assert_close(table[[1, 3]].detach(), torch.full((2, 48), 2.0 * (1 - 0.05) - 0.1))
    assert "puzzles.table" in model.state_dict()
    assert not any("puzzles" in name for name, _ in model.named_parameters())


def test_tables_are_trained_only_where_there_are_some():
    with pytest.raises(
        ValueError, match=r"SignSGD trains puzzle tables. Got a model without one. Set Optimizer.tables=N"
    ):
        SignSGD(lr=0.1).build(build(PRESETS["tiny-core"]()))


@pytest.mark.parametrize("kind", [AdamW, AdamATan2])
def test_the_state_comes_back_to_the_bit(kind):
    one, two = Net(), Net()
    two.load_state_dict(one.state_dict())
    optimizers = [kind(lr=0.1).build(net) for net in (one, two)]

    def update(net, optimizer, value):
        for p in net.parameters():
            p.grad = torch.full_like(p, value)
        net.norm.bias.grad = None  # a parameter without gradient has no state
        optimizer.step()

    update(one, optimizers[0], 1.0)
    two.load_state_dict(one.state_dict())
    saved = {name: t.clone() for name, t in state_tensors(optimizers[0], one).items()}
    assert "matrix.weight/exp_avg" in saved
    assert not any(name.startswith("norm.bias") for name in saved)
    load_state(optimizers[1], two, saved)
    for net, optimizer in zip((one, two), optimizers, strict=True):
        update(net, optimizer, -3.0)
    torch.testing.assert_close(one.state_dict(), two.state_dict(), **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "AdamW.lr must be positive. Got 0.0."),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, r"AdamW.betas must be in \[0, 1\)"),
        ({"lr": 1.0, "weight_decay": -0.1}, "AdamW.weight_decay must be at least 0. Got -0.1."),
    ],
)
def test_bad_options_are_refused(options, message):
    for kind in (AdamW, AdamATan2, SignSGD):
        if kind is not SignSGD or "betas" not in options:
            with pytest.raises(ValueError, match=message.replace("AdamW", kind.__name__)):
                kind(**options)

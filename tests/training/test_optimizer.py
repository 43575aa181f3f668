import pytest
import torch
from torch import nn

from looplab.models.base import PRESETS, build
from looplab.training.optimizer import AdamW, decaying_parameters, load_state, state_tensors
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


def test_the_state_comes_back_to_the_bit():
    one, two = Net(), Net()
    two.load_state_dict(one.state_dict())
    optimizers = [AdamW(lr=0.1).build(net) for net in (one, two)]

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
    with pytest.raises(ValueError, match=message):
        AdamW(**options)

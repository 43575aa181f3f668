import re

import pytest
import torch
from torch import nn

from looplab._config import from_dict, to_dict
from looplab.models.base import PRESETS, build
from looplab.training.muon import PUBLISHED, Muon, hidden_matrices, orthogonal
from looplab.training.optimizer import AdamW, Optimizer, load_state, state_tensors, trained
from reference import muon as twin
from tolerances import EXACT


class Net(nn.Module):
    """Linear maps of all shapes, three matrices in one parameter, two experts, and what AdamW keeps."""

    stacked = {"qkv.weight": 3, "experts": 2}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.qkv = nn.Linear(5, 6)
        self.tall, self.wide = nn.Linear(3, 7, bias=False), nn.Linear(6, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 4, 3))
        self.router, self.score = nn.Linear(3, 2), nn.Linear(3, 1)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def drawn(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 4)], ids=str)
def test_five_steps_move_singular_values_as_their_polynomial_does(shape):
    matrices = drawn((2, *shape), 0)
    found = orthogonal(matrices)
    for one, other in zip(matrices, found, strict=True):
        torch.testing.assert_close(other, twin.orthogonal(one), rtol=1e-10, atol=1e-10)


def test_singular_values_that_are_not_tiny_end_between_the_bounds():
    u, v = (torch.linalg.qr(drawn((40, 40), seed))[0] for seed in (1, 2))
    values = torch.logspace(0, -4, 40, dtype=torch.float64)
    found = orthogonal((u @ torch.diag(values) @ v.T)[None].float())[0].double()
    ends = torch.diagonal(u.T @ found @ v)
    large = values / values.norm() >= 0.003
    assert 20 < int(large.sum()) < 40
    assert (ends[large] > 0.68).all()
    assert (ends[large] < 1.21).all()
    assert ends.min() < 0.1


def test_a_matrix_of_zeros_stays_one():
    assert torch.equal(orthogonal(torch.zeros(1, 3, 2)), torch.zeros(1, 3, 2))


def test_updates_are_those_of_the_twin_for_every_matrix_in_a_parameter():
    torch.manual_seed(0)
    net = Net().double()
    optimizer = Muon(lr=0.1, weight_decay=0.5, others=AdamW(lr=0.01, weight_decay=0.0)).build(net)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    gradients = {name: [drawn(p.shape, seed) for seed in range(3)] for name, p in net.named_parameters()}
    for number in range(3):
        for name, parameter in trained(net):
            parameter.grad = gradients[name][number]
        optimizer.step()
    for name, parts in {"tall.weight": 1, "wide.weight": 1, "qkv.weight": 3, "experts": 2}.items():
        cut = [list(torch.chunk(t, parts)) for t in (before[name], *gradients[name])]
        wanted = [
            twin.updated(w.flatten(0, -2), [g.flatten(0, -2) for g in gs], lr=0.1, decay=0.5)
            for w, *gs in zip(*cut, strict=True)
        ]
        found = net.get_parameter(name).detach().flatten(0, -2)
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(net.frozen.weight, before["frozen.weight"], **EXACT)


def test_other_parameters_are_updated_by_adamw_at_its_own_rate():
    torch.manual_seed(0)
    one, two = Net(), Net()
    two.load_state_dict(one.state_dict())
    others = AdamW(lr=0.02, weight_decay=0.1)
    muon, adam = Muon(lr=0.1, others=others).build(one), others.build(two)
    for factor in (1.0, 0.5):
        for net, optimizer, lr in ((one, muon, 0.1), (two, adam, 0.02)):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor * group.get("share", 1.0)
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    matrices = hidden_matrices(one)
    for name, parameter in one.named_parameters():
        same = torch.allclose(parameter, two.get_parameter(name), rtol=1e-6, atol=1e-7)
        assert same != (name in matrices), name


def test_the_state_comes_back_to_the_bit():
    torch.manual_seed(0)
    one, two = Net(), Net()
    optimizers = [Muon(lr=0.1).build(net) for net in (one, two)]

    def update(net, optimizer, seed):
        for p in net.parameters():
            p.grad = drawn(p.shape, seed).float()
        net.tall.weight.grad = None
        optimizer.step()

    update(one, optimizers[0], 0)
    two.load_state_dict(one.state_dict())
    saved = {name: t.clone() for name, t in state_tensors(optimizers[0], one).items()}
    assert {"qkv.weight/momentum", "experts/momentum", "norm.bias/exp_avg", "norm.bias/step"} <= saved.keys()
    assert not any(name.startswith(("tall", "frozen")) for name in saved)
    load_state(optimizers[1], two, saved)
    for net, optimizer in zip((one, two), optimizers, strict=True):
        update(net, optimizer, 1)
    torch.testing.assert_close(one.state_dict(), two.state_dict(), **EXACT)


def test_every_parameter_has_one_group():
    net = Net()
    optimizer = Muon(lr=0.1).build(net)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for _, p in trained(net))
    assert hidden_matrices(net) == {"qkv.weight": 3, "tall.weight": 1, "wide.weight": 1, "experts": 2}


HIDDEN = re.compile(
    r"((prelude|core|coda_layers|layers)\.\d+\.(layer\.)?(attn|ffn|mixer)\.(q|k|v|o|g|gate|up|down)|injections\.\d+\.rule\.w"
    r"|layer_signals\.\d+\.map|signals\.\d+\.(time|step_size)\.\d|project|bridge\.(out|prefix|thought|verifier)"
    r"|core\.\d+\.(candidate|gate|k|v|energy\.up)|thoughts\.branches\.\d\.(up|down)|updates\.\d\.up|verifier\.net\.up)"
    r"\.weight"
)
"""Linear maps whose output is a vector that others read."""


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_hidden_matrices_of_a_model_are_its_maps_between_vectors(preset):
    model = build(PRESETS[preset](), device="meta")
    for name, parts in hidden_matrices(model).items():
        assert HIDDEN.fullmatch(name), name
        assert parts == (4 if "layer_signals" in name else 1)
    rest = {name for name, _ in trained(model)} - set(hidden_matrices(model))
    assert not [name for name in rest if re.search(r"\.(attn|ffn)\.(q|k|v|o|up|down)\.weight$", name)]


def test_what_a_module_says_of_its_matrices_must_be_true():
    net = Net()
    net.stacked = {"qvk.weight": 3}
    with pytest.raises(ValueError, match=r"Net.stacked must name parameters of the module. Got 'qvk.weight'. Known: "):
        hidden_matrices(net)
    net.stacked = {"qkv.weight": 4}
    with pytest.raises(ValueError, match=r"stacked: qkv.weight must have a multiple of 4 rows. Got 6. Give the number"):
        hidden_matrices(net)


def test_the_configuration_survives_the_round_trip():
    config = Muon(lr=0.03, momentum=0.9, others=AdamW(lr=1e-3))
    assert from_dict(Optimizer, to_dict(config)) == config
    assert (PUBLISHED.lr, PUBLISHED.weight_decay) == (0.02, 0.01)
    assert (PUBLISHED.others.lr, PUBLISHED.others.betas, PUBLISHED.others.weight_decay) == (3e-4, (0.9, 0.95), 0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "Muon.lr must be positive. Got 0.0."),
        ({"lr": 1.0, "momentum": 1.0}, r"Muon.momentum must be in \[0, 1\). Got 1.0. 0.95 is usual."),
        ({"lr": 1.0, "weight_decay": -1.0}, "Muon.weight_decay must be at least 0. Got -1.0."),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(**options)

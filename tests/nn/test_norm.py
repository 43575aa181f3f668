import pytest
import torch
from torch import nn

from looplab._config import from_dict, to_dict
from looplab.nn.norm import BranchOnly, LayerNorm, Norm, Placement, PostSum, PreAndBranch, PreNorm, RMSNorm, SandwichSum
from reference import layers
from tolerances import BLOCK_GRADIENTS, BLOCKS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


PLACEMENTS = [PreNorm(), SandwichSum(), PreAndBranch(), BranchOnly(), PostSum()]


def shaken(module, seed=0):
    """The module in float64 with every parameter redrawn, so that no weight is still 1 or 0."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def unused(x):
    """Stands where a placement has no norm."""
    raise AssertionError("a norm that the placement does not have was called")


@pytest.mark.parametrize("config", [RMSNorm(eps=0.1), LayerNorm(eps=0.1)], ids=lambda c: type(c).__name__)
def test_a_norm_equals_its_twin_in_value_and_gradient(config):
    norm = shaken(config.build(7))
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    if isinstance(config, RMSNorm):
        twin = torch.stack([torch.stack([layers.rms_norm(t, 0.1, norm.weight) for t in row]) for row in x])
    else:
        twin = torch.stack([torch.stack([layers.layer_norm(t, 0.1, norm.weight, norm.bias) for t in row]) for row in x])
    torch.testing.assert_close(norm(x), twin, **BLOCKS)
    inputs = [x, *norm.parameters()]
    grads = zip(*(torch.autograd.grad(y.pow(3).sum(), inputs) for y in (norm(x), twin)), strict=True)
    for fast, slow in grads:
        torch.testing.assert_close(fast, slow, **BLOCK_GRADIENTS)


def test_a_zero_centred_weight_is_a_difference_from_one():
    norm = shaken(RMSNorm(eps=0.1, zero_centred=True).build(7))
    plain = RMSNorm(eps=0.1).build(7).double()
    plain.weight.data.copy_(1 + norm.weight)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(norm(x), plain(x), **BLOCKS)
    assert RMSNorm(zero_centred=True).build(7).weight.tolist() == [0.0] * 7


@pytest.mark.parametrize("config", [RMSNorm(affine=False), LayerNorm(affine=False)], ids=lambda c: type(c).__name__)
def test_a_norm_without_weight_has_no_parameters_and_unit_size(config):
    norm = config.build(64)
    assert not list(norm.parameters())
    assert norm(5 * torch.randn(10, 64)).square().mean().item() == pytest.approx(1, rel=1e-4)


def test_statistics_of_bfloat16_are_float32_and_the_cast_comes_before_the_weight():
    norm = RMSNorm(eps=1e-6).build(4096).bfloat16()
    norm.weight.data.fill_(1.0078125)
    x = (torch.randn(3, 4096) * 20).bfloat16()
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm.weight
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("gate", [None, 0.7], ids=["plain", "gated"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: type(p).__name__)
def test_a_placement_equals_its_twin(placement, gate):
    n1, n2 = shaken(RMSNorm().build(6)), shaken(RMSNorm().build(6), seed=1)
    branch = shaken(nn.Linear(6, 6))
    h = torch.randn(2, 3, 6, dtype=torch.float64)
    before, after = (n if side in placement.norms else unused for n, side in ((n1, "in"), (n2, "out")))
    factor = None if gate is None else torch.tensor(gate, dtype=torch.float64)
    twin = layers.place(type(placement).__name__, h, branch, n1, n2, 1.0 if gate is None else gate)
    torch.testing.assert_close(placement.apply(h, branch, before, after, factor), twin, **BLOCKS)


def test_the_five_placements_differ_pairwise():
    n1, n2 = shaken(RMSNorm().build(6)), shaken(RMSNorm().build(6), seed=1)
    branch = shaken(nn.Linear(6, 6))
    h = torch.randn(2, 3, 6, dtype=torch.float64)
    outputs = [p.apply(h, branch, n1, n2, None) for p in PLACEMENTS]
    for i, a in enumerate(outputs):
        for j, b in enumerate(outputs[:i]):
            assert (a - b).abs().max() > 0.1, f"{PLACEMENTS[i]} and {PLACEMENTS[j]} do the same"


@pytest.mark.parametrize("config", [*PLACEMENTS, RMSNorm(eps=1e-5, affine=False), LayerNorm()], ids=repr)
def test_a_choice_survives_json(config):
    base = Placement if isinstance(config, Placement) else Norm
    assert from_dict(base, to_dict(config)) == config

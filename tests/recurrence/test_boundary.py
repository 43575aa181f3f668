import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.nn.norm import LayerNorm, RMSNorm
from looplab.recurrence.boundary import Boundary, EndNorm, NoBoundary, OwnNorm, PlainRMS, SharedFinalNorm
from reference import layers
from tolerances import BLOCKS, EXACT


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


ALL = [NoBoundary(), SharedFinalNorm(), OwnNorm(), PlainRMS(), EndNorm(c=2.0, learned_scale=True)]


def built(config, final_norm=None):
    return config.build(6, norm=RMSNorm(eps=1e-3), final_norm=final_norm)


def state():
    return torch.randn(2, 3, 6, dtype=torch.float64)


def test_no_boundary_builds_nothing():
    assert built(NoBoundary()) is None


def test_the_shared_norm_is_the_readouts_own_module_and_not_a_second_parameter():
    final = RMSNorm(eps=1e-3).build(6).double()
    final.weight.data.copy_(torch.randn(6))
    shared = built(SharedFinalNorm(), final)
    s = state()
    torch.testing.assert_close(shared(s), final(s), **EXACT)
    assert not list(shared.parameters())
    final.weight.data.zero_()
    assert not shared(s).any()


def test_own_norm_is_of_the_models_kind_with_its_own_weight():
    assert [n for n, _ in built(OwnNorm()).named_parameters()] == ["weight"]
    own = OwnNorm().build(6, norm=LayerNorm(), final_norm=None)
    assert [n for n, _ in own.named_parameters()] == ["weight", "bias"]


def test_plain_rms_equals_the_twin_without_a_weight():
    s = state()
    plain = built(PlainRMS(eps=0.1))
    expected = torch.stack([torch.stack([layers.rms_norm(t, 0.1, 1.0) for t in row]) for row in s])
    torch.testing.assert_close(plain(s), expected, **BLOCKS)
    assert not list(plain.parameters())


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_end_norm_pins_the_root_mean_square_over_all_iterations(dtype, size):
    pin = built(EndNorm(c=1.7)).to(dtype)
    s = (size * state()).to(dtype)
    for _ in range(5):
        s = pin(size * torch.tanh(s.roll(1, -1)) + 0.1 * size)
        torch.testing.assert_close(s.square().mean(-1).sqrt(), torch.full((2, 3), 1.7, dtype=dtype), rtol=1e-6, atol=0)


def test_end_norm_of_a_zero_state_is_zero():
    assert not built(EndNorm())(torch.zeros(1, 1, 6)).any()


def test_a_trained_scale_is_one_parameter_that_gets_a_gradient():
    pin = built(EndNorm(c=2.0, learned_scale=True)).double()
    pin(state()).sum().backward()
    assert pin.c.item() == 2
    assert pin.c.grad.abs() > 0
    assert not list(built(EndNorm(c=2.0)).parameters())


def test_only_the_shared_norm_spares_the_readout_its_own():
    assert [c.readout_is_normed for c in ALL] == [False, True, False, False, False]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"EndNorm\.c must be positive\. Got 0"):
        EndNorm(c=0.0)
    with pytest.raises(ValueError, match="final_norm must be a module. Got None"):
        built(SharedFinalNorm())


@pytest.mark.parametrize("config", ALL, ids=repr)
def test_a_choice_survives_json(config):
    assert from_dict(Boundary, to_dict(config)) == config

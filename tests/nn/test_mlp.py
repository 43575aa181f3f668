import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from looplab._config import from_dict, to_dict
from looplab.nn.linear import Init, LowRank
from looplab.nn.mlp import FeedForward, GatedReluSquared, GeGLU, Gelu, ReluSquared, Silu, SwiGLU
from reference import layers
from tolerances import BLOCK_GRADIENTS, BLOCKS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


CASES = [
    SwiGLU(hidden=9),
    GeGLU(hidden=9),
    GatedReluSquared(hidden=9, scale=0.5),
    Silu(hidden=9),
    ReluSquared(hidden=9),
    ReluSquared(hidden=9, scale=0.5),
    Gelu(hidden=9),
]


@pytest.mark.parametrize("config", CASES, ids=repr)
def test_a_feed_forward_equals_its_twin_in_outputs_and_gradients(config):
    torch.manual_seed(0)
    module = config.build(6, Init(std=0.5)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weights = dict(module.named_parameters())
    scale = getattr(config, "scale", 1.0)
    kind = type(config).__name__
    slow = torch.stack([torch.stack([layers.feed_forward(kind, t, weights, scale) for t in row]) for row in x])
    torch.testing.assert_close(module(x), slow, **BLOCKS)
    inputs = [x, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.pow(3).sum(), inputs) for y in (module(x), slow)), strict=True):
        torch.testing.assert_close(a, b, **BLOCK_GRADIENTS)


@pytest.mark.parametrize("config", CASES, ids=repr)
def test_matmul_params_give_the_flops_that_pytorch_counts(config):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        config.build(6, Init())(torch.randn(2, 3, 6))
    assert counter.get_total_flops() == 2 * config.matmul_params(6) * 6


@pytest.mark.parametrize("config", CASES, ids=repr)
def test_low_rank_changes_equal_changed_weights_row_by_row(config):
    torch.manual_seed(0)
    module = config.build(6, Init(std=0.5)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    deltas = {
        name: LowRank(torch.randn(2, 2, i, dtype=torch.float64), torch.randn(2, o, 2, dtype=torch.float64))
        for name, (i, o) in config.linears(6).items()
    }
    y = module(x, deltas=deltas)
    for row in range(2):
        weights = {
            n: p + deltas[n.split(".")[0]].b[row] @ deltas[n.split(".")[0]].a[row] for n, p in module.named_parameters()
        }
        changed = torch.func.functional_call(module, weights, (x[row : row + 1],))
        torch.testing.assert_close(y[row : row + 1], changed, **BLOCKS)


def test_the_map_into_the_stream_has_its_own_start():
    torch.manual_seed(0)
    module = SwiGLU(hidden=300).build(200, Init(std=0.5, out_std=0.01))
    spreads = {name: p.std().item() for name, p in module.named_parameters()}
    assert spreads["down.weight"] == pytest.approx(0.01, rel=0.02)
    assert spreads["gate.weight"] == pytest.approx(0.5, rel=0.02)


def test_an_empty_branch_is_refused():
    with pytest.raises(ValueError, match=r"SwiGLU\.hidden must be at least 1\. Got 0"):
        SwiGLU(hidden=0)


@pytest.mark.parametrize("config", CASES, ids=repr)
def test_a_choice_survives_json(config):
    assert from_dict(FeedForward, to_dict(config)) == config

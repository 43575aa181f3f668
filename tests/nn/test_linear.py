import pytest
import torch

from looplab.nn.linear import Init, LowRank, linear, project
from tolerances import BLOCKS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_a_matrix_starts_with_the_asked_standard_deviation_and_an_output_with_its_own():
    torch.manual_seed(0)
    init = Init(std=0.3, out_std=0.05)
    assert linear(200, 200, init=init).weight.std().item() == pytest.approx(0.3, rel=0.02)
    assert linear(200, 200, init=init, output=True).weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert linear(3, 2, init=init, bias=True).bias.tolist() == [0, 0]


def test_truncation_bounds_every_entry():
    weight = linear(200, 200, init=Init(std=0.3, cut=2.0)).weight
    assert 0.5 < weight.abs().max().item() <= 0.6


def test_a_low_rank_change_acts_row_by_row():
    torch.manual_seed(0)
    weight = linear(5, 3, init=Init(std=1.0)).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    delta = LowRank(torch.randn(2, 2, 5, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64))
    y = project(weight, x, delta)
    for row in range(2):
        changed = weight.weight + delta.b[row] @ delta.a[row]
        torch.testing.assert_close(y[row], x[row] @ changed.T, **BLOCKS)


@pytest.mark.parametrize("field", ["std", "out_std", "cut"])
def test_a_negative_spread_is_refused(field):
    with pytest.raises(ValueError, match=rf"Init\.{field} must be at least 0\. Got -1"):
        Init(**{field: -1.0})

"""One small design for all tests of scaling: 12 pairs, 3 budgets, 4 widths."""

import pytest

from looplab.scaling import read_runs
from looplab.scaling.laws import Decay, ForwardBackward, IsoDepth, Power
from synthetic import rows_of


@pytest.fixture(scope="session")
def power_rows():
    return rows_of(ForwardBackward(gain=Power()), gains={"phi_b": 0.459, "phi_f": 0.3})


@pytest.fixture(scope="session")
def power_runs(power_rows):
    return read_runs(power_rows)


@pytest.fixture(scope="session")
def decay_runs():
    return read_runs(rows_of(ForwardBackward(gain=Decay()), gains={"phi": 0.459, "kappa": 0.5}))


@pytest.fixture(scope="session")
def full_runs():
    """No run truncates."""
    pairs = ((1, 1), (2, 2), (4, 4), (8, 8))
    return read_runs(rows_of(IsoDepth(), gains={"phi": 0.459}, pairs=pairs))

"""Gains: the core counts once without loops, and r^phi times under full back-propagation."""

import numpy as np
import pytest

from looplab.scaling.laws import Additive, Decay, Power, Table, Tilt
from looplab.scaling.laws.gains.steps import Steps

FORMS = [Power(), Power(coordinates="ratio"), Tilt(), Decay(), Additive(), Steps()]
DIAGONAL = np.array([(r, r) for r in (1.0, 2.0, 3.0, 8.0)])


@pytest.mark.parametrize("gain", FORMS, ids=lambda gain: repr(gain))
def test_every_form_is_a_power_of_num_steps_on_the_diagonal(gain):
    theta = np.array([[0.45, 0.3, 0.6][: len(gain.names)]])
    value = gain.log_gain(theta, DIAGONAL)[0][0]
    assert value[0] == 0
    assert value == pytest.approx(0.45 * np.log(DIAGONAL[:, 0]), abs=1e-14)
    assert gain.diagonal(theta[0])[0] == pytest.approx(0.45)


def test_the_two_coordinates_of_power_are_one_law():
    pairs = np.array([(4.0, 1.0), (8.0, 3.0), (2.0, 2.0)])
    split = Power().log_gain(np.array([[0.5, 0.2]]), pairs)[0]
    ratio = Power(coordinates="ratio").log_gain(np.array([[0.5, 0.3]]), pairs)[0]
    assert split == pytest.approx(ratio, abs=1e-14)


def test_additive_counts_no_pass_that_is_not_there():
    value = Additive().log_gain(np.array([[0.5, 2.0, 0.0]]), np.array([(4.0, 4.0), (4.0, 2.0)]))[0][0]
    assert value == pytest.approx([np.log(2.0), np.log(2**0.5 + 2.0)])


def test_a_table_without_a_baseline_takes_its_first_pair_as_unit():
    table = Table().of(np.array([(2.0, 1.0), (2.0, 2.0)]))
    assert table.pairs == ((2.0, 2.0),) and table.names == ("ln_g(2,2)",)
    assert table.log_gain(np.array([[0.3]]), np.array([(2.0, 1.0), (2.0, 2.0)]))[0].tolist() == [[0.0, 0.3]]

"""Laws: exact derivatives, nested laws, names, and round trips."""

import math

import numpy as np
import pytest

from looplab._config import from_dict, to_dict
from looplab.scaling.laws import (
    Additive,
    Chinchilla,
    Decay,
    ForwardBackward,
    IsoDepth,
    Law,
    Ouro,
    Parcae,
    Points,
    Power,
    Table,
    Tilt,
)

PAIRS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 3), (8, 2), (8, 8)]
TABLE = Table(pairs=tuple((float(f), float(b)) for f, b in PAIRS[1:]))
LAWS = [
    Chinchilla(),
    IsoDepth(),
    *(ForwardBackward(gain=g) for g in (Power(), Power(coordinates="ratio"), Tilt(), Decay(), Additive(), TABLE)),
    Parcae(),
    Parcae(count="core"),
    Parcae(test_time=True),
    Ouro(),
]
IDS = [f"{i}-{law.title}" for i, law in enumerate(LAWS)]


def points(pairs=PAIRS, laws=None):
    steps, windows = np.array(pairs, dtype=float).T
    rise = np.arange(1.0, len(pairs) + 1)
    return Points.make(
        n_once=1e7 * rise,
        n_rec=3e7 * rise[::-1],
        tokens=1e9 * rise**2,
        loss=3.0 - 0.05 * rise,
        num_steps=steps,
        window=windows,
        eval_steps=steps + 1,
        laws=laws,
    )


def places(law, data, count=5):
    """Places of the box at which every term has a share."""
    low, high = law.box(data).T
    draws = np.random.default_rng(0)
    theta = low + (high - low) * (0.25 + 0.5 * draws.random((count, len(low))))
    for term, amplitude in zip(law.terms(theta, data), law.linear, strict=True):
        theta[:, amplitude] -= term.value.mean(axis=1)
    return theta


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_gradient_and_hessian_are_those_of_differences(law):
    data = points()
    theta = places(law, data)
    _, gradient, hessian = law.derivatives(theta, data)
    step = 1e-5
    for i in range(len(law.names)):
        moved = np.eye(len(law.names))[i] * step
        up, down = law.derivatives(theta + moved, data), law.derivatives(theta - moved, data)
        for exact, high, low in ((gradient[:, i], up[0], down[0]), (hessian[:, :, i], up[1], down[1])):
            difference = (high - low) / (2 * step)
            assert np.abs(exact - difference).max() <= 1e-6 * max(1.0, np.abs(difference).max())


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_a_batch_equals_its_rows_and_the_law_survives_json(law):
    data = points()
    theta = places(law, data)
    batch = law.log_loss(theta, data)
    for row, alone in zip(batch, theta, strict=True):
        assert np.allclose(row, law.log_loss(alone, data), rtol=0, atol=1e-13)
    assert from_dict(Law, to_dict(law)) == law


@pytest.mark.parametrize("law", [law for law in LAWS if law.nested], ids=lambda law: law.title)
def test_nested_laws_are_restrictions(law):
    data = points()
    for simpler, held in law.nested:
        theta = places(simpler, data)
        named = dict(zip(simpler.names, theta.T, strict=True))
        wide = np.stack([named.get(name, np.full(len(theta), held.get(name, 0.0))) for name in law.names], axis=1)
        assert np.abs(law.log_loss(wide, data) - simpler.log_loss(theta, data)).max() <= 1e-12


def test_a_run_of_sampled_depth_has_the_mean_gain():
    law = [(2.0, 1.0, 0.25), (8.0, 4.0, 0.75)]
    mixed, plain = points([(6.5, 3.25)], laws=[law]), points([(2, 1), (8, 4)])
    own = ForwardBackward(gain=Power())
    gains = np.array([[0.4, 0.2]])
    g = np.exp(own.gain.log_gain(gains, plain.pairs)[0][0])
    expected = math.log(mixed.n_once[0] + (0.25 * g[0] + 0.75 * g[1]) * mixed.n_rec[0])
    assert own.sizes(gains, mixed)[0][0, 0] == pytest.approx(expected, abs=1e-14)
    theta, step = places(own, mixed, 1), 1e-5
    _, gradient, _ = own.derivatives(theta, mixed)
    moved = np.eye(7)[6] * step
    difference = (own.log_loss(theta + moved, mixed) - own.log_loss(theta - moved, mixed)) / (2 * step)
    assert gradient[:, 6] == pytest.approx(difference, abs=1e-8)


def test_values_take_amplitudes_as_they_are_and_refuse_strangers():
    law = IsoDepth()
    theta = law.values(A=20.0, alpha=0.2, b=7.0, beta=0.3, E=1.5, phi=0.4)
    assert theta.tolist() == [math.log(20.0), 0.2, 7.0, 0.3, math.log(1.5), 0.4]
    with pytest.raises(KeyError, match="no parameter 'psi'"):
        law.values(A=1, alpha=1, B=1, beta=1, E=1, phi=1, psi=1)
    with pytest.raises(KeyError, match="needs 'phi'"):
        law.values(A=1, alpha=1, B=1, beta=1, E=1)


def test_the_table_takes_the_pairs_of_the_data():
    law = ForwardBackward(gain=Table()).on(points())
    assert law.gain == TABLE and len(law.names) == 5 + len(PAIRS) - 1

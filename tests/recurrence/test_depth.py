import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from looplab._config import from_dict, to_dict
from looplab.recurrence.depth import (
    DEPTH_SAMPLERS,
    CategoricalDepth,
    FixedDepth,
    Grid,
    PoissonDepth,
    PoissonLognormal,
    PrefixDepth,
    UniformDepth,
    Unknown,
)
from looplab.recurrence.philox import stream_key

KEY = stream_key(0, "depth")

fixed = st.integers(1, 60).map(lambda n: FixedDepth(num_steps=n))
uniform = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda p: UniformDepth(low=p[0], high=p[0] + p[1]))
plain = fixed | uniform
laws = plain | plain.map(lambda law: PrefixDepth(law=law))

EXAMPLES = {
    "fixed": FixedDepth(num_steps=5),
    "uniform": UniformDepth(low=5, high=8),
    "poisson_lognormal": PoissonLognormal(rate=3.0, max_steps=8),
    "poisson": PoissonDepth(rate=2.0, max_steps=6),
    "categorical": CategoricalDepth(probs=(0.25, 0.0, 0.75)),
    "prefix": PrefixDepth(law=UniformDepth(low=1, high=8)),
}


def test_every_registered_law_is_among_the_examples():
    assert set(DEPTH_SAMPLERS) == set(EXAMPLES)


@given(laws, st.integers(0, 10**6))
def test_the_mass_is_a_law_on_1_and_above(law, step):
    mass = law.pmf(step)
    assert mass.dtype == np.float64
    assert (mass >= 0).all()
    assert mass[0] == 0
    assert abs(mass.sum() - 1) < 1e-12


@given(laws, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_draws_lie_in_the_support_and_mean_and_quantiles_come_from_the_mass(law, key, step):
    drawn = law.draw(key, step, np.arange(40))
    assert drawn.dtype == np.int64
    assert set(drawn) <= set(law.support(step))
    mass = law.pmf(step)
    assert law.mean(step) == pytest.approx(sum(t * p for t, p in enumerate(mass)), rel=1e-12)
    for q in (0.01, 0.5, 0.95, 1.0):
        reached = [t for t in range(len(mass)) if mass[: t + 1].sum() >= q - 1e-12]
        assert law.quantile(q, step) == reached[0]


@pytest.mark.parametrize("law", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_law_of_the_draws_is_the_mass(law):
    drawn = law.draw(KEY, 3, np.arange(100_000))
    support = list(law.support())
    counts = np.array([(drawn == t).sum() for t in support])
    assert counts.sum() == 100_000
    if len(support) > 1:
        assert stats.chisquare(counts, 100_000 * law.pmf()[support]).pvalue > 1e-4


@pytest.mark.parametrize("law", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_row_draws_the_same_whatever_rank_holds_it(law):
    whole = law.draw(KEY, 7, np.arange(64))
    for world in (2, 4):
        ranks = [law.draw(KEY, 7, np.arange(64)[rank::world]) for rank in range(world)]
        dealt = np.empty(64, np.int64)
        for rank, drawn in enumerate(ranks):
            dealt[rank::world] = drawn
        assert (dealt == whole).all()


def test_steps_and_runs_have_their_own_draws():
    law = UniformDepth(low=1, high=1000)
    rows = np.arange(64)
    assert not (law.draw(KEY, 7, rows) == law.draw(KEY, 8, rows)).all()
    assert not (law.draw(KEY, 7, rows) == law.draw(stream_key(1, "depth"), 7, rows)).all()


@given(laws)
def test_laws_round_trip_as_config(law):
    assert from_dict(type(law), to_dict(law)) == law


def test_exact_means_and_supports():
    assert FixedDepth(num_steps=4).mean() == 4
    assert FixedDepth(num_steps=4).support() == (4,)
    assert UniformDepth(low=5, high=8).mean() == pytest.approx(6.5, rel=1e-15)
    assert UniformDepth(low=5, high=8).support() == (5, 6, 7, 8)
    assert UniformDepth(low=1, high=8).quantile(0.5) == 4


@pytest.mark.parametrize(
    ("rate", "mean", "variance", "quantiles", "window", "carried"),
    [
        (32.0, 33.000, 322.842, (12, 29, 67, 94, 136), 8, 7.9823),
        (8.0, 9.000, 26.178, (3, 8, 19, 26, 37), 4, 3.8625),
        (4.0, 5.000, 8.544, (1, 4, 10, 14, 21), 2, 1.9423),
    ],
)
def test_figures_of_huginns_law(rate, mean, variance, quantiles, window, carried):
    law = PoissonLognormal(rate=rate, max_steps=512)
    mass, depth = law.pmf(), np.arange(513)
    assert law.mean() == pytest.approx(mean, abs=5e-4)
    assert mass @ depth**2 - law.mean() ** 2 == pytest.approx(variance, abs=5e-4)
    assert tuple(law.quantile(q) for q in (0.05, 0.5, 0.95, 0.99, 0.999)) == quantiles
    assert np.minimum(depth, window) @ mass == pytest.approx(carried, abs=5e-5)


def test_huginns_law_is_the_mixture_and_its_tail_lies_on_the_last_depth():
    node, weight = np.polynomial.hermite_e.hermegauss(100)
    tau = np.exp(np.log(3) - 0.5**2 / 2 + 0.5 * node)
    mixture = [stats.poisson.pmf(t - 1, tau) @ weight / weight.sum() for t in range(1, 8)]
    mass = PoissonLognormal(rate=3.0, max_steps=8).pmf()
    assert mass[1:8] == pytest.approx(mixture, abs=1e-10)
    assert mass[8] == pytest.approx(1 - sum(mixture), abs=1e-10)
    assert PoissonLognormal(rate=3.0, sigma=0.0, max_steps=60).pmf()[1:] == pytest.approx(
        stats.poisson.pmf(np.arange(60), 3), abs=1e-12
    )


@pytest.mark.parametrize(
    ("rate", "mean", "window", "carried"), [(8.0, 8.000335, 4, 3.9408), (4.0, 4.018316, 2, 1.9084)]
)
def test_figures_of_parcaes_law(rate, mean, window, carried):
    law = PoissonDepth(rate=rate, max_steps=60)
    mass, depth = law.pmf(), np.arange(61)
    assert law.mean() == pytest.approx(mean, abs=5e-7)
    assert law.mean() == pytest.approx(rate + np.exp(-rate), rel=1e-12)
    assert np.minimum(depth, window) @ mass == pytest.approx(carried, abs=5e-5)
    assert mass[2:] == pytest.approx(stats.poisson.pmf(depth[2:], rate), abs=1e-14)


def test_a_poisson_law_that_ends_early_has_its_tail_on_the_last_depth():
    mass = PoissonDepth(rate=3.0, max_steps=4).pmf()
    assert mass[1:4] == pytest.approx([stats.poisson.cdf(1, 3), *stats.poisson.pmf([2, 3], 3)], rel=1e-12)
    assert mass[4] == pytest.approx(stats.poisson.sf(3, 3), rel=1e-12)
    assert PoissonDepth(rate=3.0, max_steps=1).pmf().tolist() == [0.0, 1.0]


def test_a_written_law_is_what_was_written():
    law = CategoricalDepth(probs=(0.25, 0.0, 0.75))
    assert law.pmf().tolist() == [0.0, 0.25, 0.0, 0.75]
    assert law.support() == (1, 3)


def test_a_prefix_law_counts_applications_and_has_its_laws_mass():
    law = UniformDepth(low=1, high=8)
    assert PrefixDepth(law=law).of_prefix
    assert not law.of_prefix
    assert (PrefixDepth(law=law).pmf() == law.pmf()).all()


def test_laws_are_named_as_in_warnings():
    assert [str(law) for law in EXAMPLES.values()] == [
        "FixedDepth(5)",
        "UniformDepth(5, 8)",
        "PoissonLognormal(3, max_steps=8)",
        "PoissonDepth(2, max_steps=6)",
        "CategoricalDepth(mean 2.5, max_steps=3)",
        "PrefixDepth(UniformDepth(1, 8))",
    ]
    assert Grid(sizes=(0.5, 0.5)).sizes == (0.5, 0.5)
    assert Unknown() == Unknown()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedDepth(num_steps=0), "FixedDepth.num_steps must be at least 1. Got 0."),
        (
            lambda: UniformDepth(low=0, high=4),
            "UniformDepth.low must be at least 1. Got 0. A model with no iteration is num_steps=0 at evaluation only.",
        ),
        (lambda: UniformDepth(low=4, high=3), "UniformDepth.high must be at least low (4). Got 3."),
        (
            lambda: PoissonLognormal(rate=0.0, max_steps=8),
            "PoissonLognormal.rate must be positive. Got 0.0. Huginn has 32.",
        ),
        (
            lambda: PoissonLognormal(rate=3.0, sigma=-1.0, max_steps=8),
            "PoissonLognormal.sigma must be at least 0. Got -1.0. Huginn has 0.5.",
        ),
        (
            lambda: PoissonLognormal(rate=3.0, max_steps=0),
            "PoissonLognormal.max_steps must be at least 1. Got 0. The 99.99 % quantile is a fair bound.",
        ),
        (lambda: PoissonDepth(rate=0.0, max_steps=8), "PoissonDepth.rate must be positive. Got 0.0. Parcae has 8."),
        (lambda: PoissonDepth(rate=1.0, max_steps=0), "PoissonDepth.max_steps must be at least 1. Got 0."),
        (
            lambda: CategoricalDepth(probs=(0.5, 0.4)),
            "CategoricalDepth.probs must be probabilities of T = 1, 2, .. that sum to 1. Got 2 with sum 0.9. "
            "Divide them by their sum.",
        ),
        (
            lambda: CategoricalDepth(probs=(1.5, -0.5)),
            "CategoricalDepth.probs must be probabilities of T = 1, 2, .. that sum to 1. Got 2 with sum 1.",
        ),
        (lambda: CategoricalDepth(probs=()), "CategoricalDepth.probs must be probabilities"),
        (
            lambda: PrefixDepth(law=PrefixDepth(law=FixedDepth(num_steps=1))),
            "PrefixDepth.law must be a law of num_steps. Got another PrefixDepth.",
        ),
    ],
)
def test_impossible_laws_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()

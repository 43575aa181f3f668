import dataclasses
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from looplab._config import from_dict, to_dict
from looplab.recurrence.depth import (
    DEPTH_SAMPLERS,
    Bucketed,
    CategoricalDepth,
    Curriculum,
    FixedDepth,
    Grid,
    LearnedCategorical,
    LognormalDepth,
    PoissonDepth,
    PoissonLognormal,
    PrefixDepth,
    UniformDepth,
    Unknown,
)
from looplab.recurrence.depth.curriculum import ramp
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.philox import stream_key

KEY = stream_key(0, "depth")


def made(law, /, **fields):
    """Makers of laws: type checks draw random numbers, which strategies must not, so tests build what is drawn."""
    return st.fixed_dictionaries(fields).map(lambda chosen: functools.partial(law, **chosen))


ends = st.sampled_from(["clip", "renormalise"])
rates, longest = st.floats(0.2, 12.0), st.integers(1, 40)
fixed = made(FixedDepth, num_steps=st.integers(1, 60))
uniform = made(
    lambda low, more: UniformDepth(low=low, high=low + more), low=st.integers(1, 40), more=st.integers(0, 40)
)
categorical = made(
    lambda weights: CategoricalDepth(probs=tuple(w / sum(weights) for w in weights)),
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),
)
poisson = made(PoissonDepth, rate=rates, max_steps=longest, zero=st.sampled_from(["clip", "condition"]), tail=ends)
mixed = made(PoissonLognormal, rate=rates, max_steps=longest, sigma=st.floats(0.0, 1.0), tail=ends)
lognormal = made(LognormalDepth, mu=st.floats(0.0, 2.0), sigma=st.floats(0.3, 1.0), max_steps=longest, tail=ends)
learned = made(LearnedCategorical, max_steps=longest)
plain = fixed | uniform | categorical | poisson | mixed | lognormal | learned
growing = made(
    lambda law, floor, **fields: Curriculum(law=law(), floor=floor * law().nominal, **fields),
    law=fixed | poisson,
    ramp_steps=st.integers(1, 1000),
    shape=st.sampled_from(["linear", "one_minus_sqrt"]),
    floor=st.floats(0.01, 1.0),
    rounding=st.sampled_from(["ceil", "none"]),
)


def with_edges(law, inner):
    low, *_, high = [*law().support(), law().support()[-1]]
    return Bucketed(law=law(), edges=tuple(sorted({low, high, *(e for e in inner if low < e < high)})))


edges = st.lists(st.integers(1, 60), max_size=6)
poissons = made(Curriculum, law=st.just(PoissonDepth(rate=5.0, max_steps=30)), ramp_steps=st.integers(1, 1000))
bucketed = made(with_edges, law=plain | poissons, inner=edges)
laws = plain | growing | bucketed | made(lambda law: PrefixDepth(law=law()), law=plain)

EXAMPLES = {
    "fixed": FixedDepth(num_steps=5),
    "uniform": UniformDepth(low=5, high=8),
    "poisson_lognormal": PoissonLognormal(rate=3.0, max_steps=8),
    "lognormal": LognormalDepth(max_steps=100),
    "poisson": PoissonDepth(rate=2.0, max_steps=6),
    "learned": LearnedCategorical(max_steps=5),
    "curriculum": Curriculum(law=PoissonDepth(rate=4.0, max_steps=9), ramp_steps=6),
    "bucketed": Bucketed(law=UniformDepth(low=1, high=9), edges=(1, 2, 5, 9)),
    "categorical": CategoricalDepth(probs=(0.25, 0.0, 0.75)),
    "prefix": PrefixDepth(law=UniformDepth(low=1, high=8)),
}


def test_every_registered_law_is_among_the_examples():
    assert set(DEPTH_SAMPLERS) == set(EXAMPLES)


@given(laws, st.integers(0, 10**6))
def test_the_mass_is_a_law_on_1_and_above(make, step):
    law = make()
    mass = law.pmf(step)
    assert mass.dtype == np.float64
    assert (mass >= 0).all()
    assert mass[0] == 0
    assert abs(mass.sum() - 1) < 1e-12


@given(laws, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_draws_lie_in_the_support_and_mean_and_quantiles_come_from_the_mass(make, key, step):
    law = make()
    drawn = law.draw(key, step, np.arange(40))
    assert drawn.dtype == np.int64
    assert set(drawn) <= set(law.support(step))
    for depth, window in zip(drawn[:9].tolist(), range(1, 10), strict=True):
        cuts = TruncatedBPTT(window=window).segments(depth)
        assert [s.stop - s.start for s in cuts if s.gradient] == [min(window, depth)]
        assert sum(s.stop - s.start for s in cuts) == depth
    mass = law.pmf(step)
    assert law.mean(step) == pytest.approx(sum(t * p for t, p in enumerate(mass)), rel=1e-12)
    for q in (0.01, 0.5, 0.95, 1.0):
        reached = [t for t in range(len(mass)) if mass[: t + 1].sum() >= q - 1e-12]
        assert law.quantile(q, step) == reached[0]


@pytest.mark.parametrize("law", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_law_of_the_draws_is_the_mass(law):
    drawn = law.draw(KEY, 3, np.arange(100_000))
    support = list(law.support(3))
    counts = np.array([(drawn == t).sum() for t in support])
    assert counts.sum() == 100_000
    if len(support) > 1:
        assert stats.chisquare(counts, 100_000 * law.pmf(3)[support]).pvalue > 1e-4


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
def test_laws_round_trip_as_config(make):
    law = make()
    assert from_dict(type(law), to_dict(law)) == law


def test_exact_means_and_supports():
    assert FixedDepth(num_steps=4).mean() == 4
    assert FixedDepth(num_steps=4).support() == (4,)
    assert UniformDepth(low=5, high=8).mean() == pytest.approx(6.5, rel=1e-15)
    assert UniformDepth(low=5, high=8).support() == (5, 6, 7, 8)
    assert UniformDepth(low=1, high=8).quantile(0.5) == 4


@pytest.mark.parametrize(
    ("rate", "mean", "variance", "quantiles", "window", "carried", "free", "inside"),
    [
        (32.0, 33.000, 322.842, (12, 29, 67, 94, 136), 8, 7.9823, 25.0177, 0.0145),
        (8.0, 9.000, 26.178, (3, 8, 19, 26, 37), 4, 3.8625, 5.1375, 0.1682),
        (4.0, 5.000, 8.544, (1, 4, 10, 14, 21), 2, 1.9423, 3.0577, 0.1848),
    ],
)
def test_figures_of_huginns_law(rate, mean, variance, quantiles, window, carried, free, inside):
    law = PoissonLognormal(rate=rate, max_steps=512)
    mass, depth = law.pmf(), np.arange(513)
    assert law.mean() == pytest.approx(mean, abs=5e-4)
    assert mass @ depth**2 - law.mean() ** 2 == pytest.approx(variance, abs=5e-4)
    assert tuple(law.quantile(q) for q in (0.05, 0.5, 0.95, 0.99, 0.999)) == quantiles
    assert np.minimum(depth, window) @ mass == pytest.approx(carried, abs=5e-5)
    assert np.maximum(depth - window, 0) @ mass == pytest.approx(free, abs=5e-5)
    assert mass[: window + 1].sum() == pytest.approx(inside, abs=5e-5)
    assert variance == pytest.approx(rate + rate**2 * np.expm1(0.5**2), abs=5e-4)


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
    ("rate", "mean", "window", "carried", "free"),
    [(8.0, 8.000335, 4, 3.9408, 4.0595), (4.0, 4.018316, 2, 1.9084, 2.1099)],
)
def test_figures_of_parcaes_law(rate, mean, window, carried, free):
    law = PoissonDepth(rate=rate, max_steps=60)
    mass, depth = law.pmf(), np.arange(61)
    assert law.mean() == pytest.approx(mean, abs=5e-7)
    assert law.mean() == pytest.approx(rate + np.exp(-rate), rel=1e-12)
    assert np.minimum(depth, window) @ mass == pytest.approx(carried, abs=5e-5)
    assert np.maximum(depth - window, 0) @ mass == pytest.approx(free, abs=5e-5)
    assert mass[2:] == pytest.approx(stats.poisson.pmf(depth[2:], rate), abs=1e-14)


def test_other_means_of_the_table():
    assert LognormalDepth(max_steps=100).mean() == pytest.approx(9.438, abs=5e-4)
    assert PoissonLognormal(rate=3.0, max_steps=8).mean() == pytest.approx(3.879, abs=5e-4)
    conditioned = PoissonDepth(rate=3.0, max_steps=80, zero="condition")
    assert conditioned.mean() == pytest.approx(3 / (1 - np.exp(-3)), rel=1e-12)
    assert conditioned.pmf()[1:] == pytest.approx(stats.poisson.pmf(np.arange(1, 81), 3) / stats.poisson.sf(0, 3))


def test_a_rounded_lognormal_has_the_mass_between_the_halves():
    law = stats.lognorm(s=0.7, scale=np.exp(2))
    mass = LognormalDepth(max_steps=20).pmf()
    assert mass[1] == pytest.approx(law.cdf(1.5), rel=1e-12)
    assert mass[2:20] == pytest.approx(law.cdf(np.arange(2, 20) + 0.5) - law.cdf(np.arange(2, 20) - 0.5), rel=1e-9)
    assert mass[20] == pytest.approx(law.sf(19.5), rel=1e-9)


@pytest.mark.parametrize(
    "law",
    [PoissonDepth(rate=3.0, max_steps=4), PoissonLognormal(rate=3.0, max_steps=4), LognormalDepth(max_steps=9)],
    ids=str,
)
def test_the_tail_is_moved_or_removed_and_its_mass_is_told(law):
    clipped, divided = law.pmf(), dataclasses.replace(law, tail="renormalise").pmf()
    beyond = law.beyond()
    whole = dataclasses.replace(law, max_steps=1000)
    assert whole.beyond() < 1e-6  # 4e-7 of the log-normal one lies beyond 1000
    assert beyond == pytest.approx(whole.pmf()[law.max_steps + 1 :].sum(), abs=1e-6)
    assert beyond > 0.03
    assert clipped[:-1] == pytest.approx(divided[:-1] * (1 - beyond), rel=1e-12)
    assert clipped[-1] == pytest.approx(divided[-1] * (1 - beyond) + beyond, rel=1e-12)
    for outer in (PrefixDepth(law=law), Bucketed(law=law, edges=(1, law.max_steps))):
        assert outer.beyond() == beyond


def test_published_draws_come_from_the_generators_of_the_published_code():
    law = PoissonLognormal(rate=32.0, max_steps=512, compat="huginn")
    for step in range(5):
        generator = torch.Generator().manual_seed(514229 + step)
        tau = torch.zeros((1,)).log_normal_(mean=math.log(32) - 0.5**2 / 2, std=0.5, generator=generator)
        wanted = int(torch.poisson(tau, generator=generator)) + 1
        assert law.draw(KEY, step, np.arange(3)).tolist() == [wanted] * 3
    assert dataclasses.replace(law, max_steps=20).draw(KEY, 0, np.arange(1)).tolist() == [20]  # the first draw is 43
    drawn = np.array([law.draw(0, step, np.zeros(1, np.int64))[0] for step in range(4000)])
    spread = math.sqrt(322.842 / 4000)
    assert drawn.mean() == pytest.approx(33.0, abs=4 * spread)


def test_micro_batches_have_their_own_draws():
    law = UniformDepth(low=1, high=1000)
    rows = np.arange(64)
    assert (law.draw(KEY, 7, rows) == law.draw(KEY, 7, rows, 0)).all()
    assert not (law.draw(KEY, 7, rows) == law.draw(KEY, 7, rows, 1)).all()


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("one_minus_sqrt", 1 - math.sqrt(0.5))])
def test_a_ramp_goes_from_0_to_1_and_never_down(shape, half):
    values = [ramp(x / 100, shape) for x in range(151)]
    assert values[0] == 0 and values[50] == pytest.approx(half) and values[100:] == [1.0] * 51
    assert values == sorted(values)


def test_a_curriculum_moves_the_mean_and_ends_at_the_law():
    law = PoissonLognormal(rate=32.0, max_steps=200)
    plain = Curriculum(law=law, ramp_steps=100, rounding="none")
    means = [plain.mean(step) for step in range(0, 130, 10)]
    assert means == sorted(means)
    assert [plain.at(step).nominal for step in (0, 50, 75)] == [1.0, 16.0, 24.0]
    assert (plain.pmf(100) == law.pmf()).all() and (plain.pmf() == law.pmf()).all()
    assert plain.pmf(50) == pytest.approx(PoissonLognormal(rate=16.0, max_steps=200).pmf(), abs=1e-15)
    kept = Curriculum(law=law, ramp_steps=100, kept=8.0, rounding="none")
    assert [kept.at(step).nominal for step in (0, 50, 100)] == [8.0, 20.0, 32.0]
    whole = Curriculum(law=FixedDepth(num_steps=8), ramp_steps=10, shape="one_minus_sqrt")
    assert [whole.at(step).num_steps for step in (0, 1, 5, 9, 10)] == [1, 1, 3, 6, 8]
    assert (
        plain.draw(KEY, 50, np.arange(9)) == PoissonLognormal(rate=16.0, max_steps=200).draw(KEY, 50, np.arange(9))
    ).all()


def test_a_ramp_over_a_part_of_the_run_is_one_of_so_many_steps():
    law = FixedDepth(num_steps=8)
    part = Curriculum(law=law, ramp_fraction=0.25)
    assert part.over(1000) == Curriculum(law=law, ramp_steps=250)
    assert part.over(1) == Curriculum(law=law, ramp_steps=1)
    assert Curriculum(law=law, ramp_steps=9).over(1000) == Curriculum(law=law, ramp_steps=9)
    assert str(part) == "Curriculum(FixedDepth(8), ramp_fraction=0.25)"
    assert PrefixDepth(law=part).over(40).mean(5) == 4.0
    bucketed = Bucketed(law=Curriculum(law=PoissonDepth(rate=5.0, max_steps=9), ramp_fraction=0.5), edges=(1, 4, 9))
    assert bucketed.over(40).mean(2) < bucketed.over(4).mean(2) == pytest.approx(bucketed.mean())
    assert (part.pmf() == law.pmf()).all()  # the end is known without the run
    with pytest.raises(
        ValueError, match=r"ramp_fraction \(0.25\) is a part of a run. Got a step of a run of unknown len"
    ):
        part.pmf(3)


@given(plain, edges)
def test_buckets_keep_the_mean_and_add_the_variance_between_edges(make, inner):
    law = make()
    law_of_few, mass = with_edges(make, inner), law.pmf()
    assert set(law_of_few.support()) <= set(law_of_few.edges)
    assert law_of_few.mean() == pytest.approx(law.mean(), rel=1e-9)

    def variance(mass):
        depth = np.arange(len(mass))
        return mass @ depth**2 - (mass @ depth) ** 2

    added = 0.0
    for low, high in zip(law_of_few.edges, law_of_few.edges[1:], strict=False):
        added += sum(mass[t] * (t - low) * (high - t) for t in range(low, high))
    assert variance(law_of_few.pmf()) == pytest.approx(variance(mass) + added, rel=1e-9, abs=1e-9)


def test_a_learned_law_starts_uniform_and_follows_the_gradient_of_its_objective():
    config = LearnedCategorical(max_steps=4, cost_weight=0.1, target_mean=2.0, mean_penalty=0.3)
    learner = config.learner()
    assert learner.pmf() == pytest.approx(config.pmf())
    learner.phi = np.array([0.3, -0.2, 0.5, 0.0])
    phi = torch.tensor(learner.phi, requires_grad=True)
    law = phi.softmax(0)
    mean = (law * torch.arange(1, 5)).sum()
    loss = -0.7 * law[2].log() + 0.01 * (law * law.log()).sum() + 0.3 * (mean - 2.0) ** 2
    loss.backward()
    assert learner.slope(3, 0.7) == pytest.approx(phi.grad.numpy(), rel=1e-12)


def test_a_learned_law_moves_after_its_warm_up_and_to_the_depth_that_pays():
    config = LearnedCategorical(max_steps=3, warmup=4, lr=0.05, entropy_weight=0.0)
    learner = config.learner()
    for step in range(400):
        depth = int(learner.draw(KEY, step, np.zeros(1, np.int64))[0])
        learner.update(depth, 0.2 if depth == 2 else 2.0)
        if step == 3:
            assert learner.pmf() == pytest.approx(config.pmf())
    assert learner.pmf()[2] > 0.9
    again = config.learner()
    again.load_state_dict(json.loads(json.dumps(learner.state_dict())))
    for one in (learner, again):
        one.update(1, 0.123)
    assert (learner.phi == again.phi).all() and learner.baseline == again.baseline


def test_the_baseline_is_the_moving_average_of_the_reward_and_the_first_reward_at_first():
    learner = LearnedCategorical(max_steps=4, cost_weight=0.4).learner()
    rewards = [math.exp(-1.0) - 0.4 * 2 / 4, math.exp(-0.5) - 0.4]
    learner.update(2, 1.0)
    assert learner.baseline == pytest.approx(rewards[0])
    learner.update(4, 0.5)
    assert learner.baseline == pytest.approx(0.95 * rewards[0] + 0.05 * rewards[1])


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
        "LognormalDepth(2, 0.7, max_steps=100)",
        "PoissonDepth(2, max_steps=6)",
        "LearnedCategorical(max_steps=5)",
        "Curriculum(PoissonDepth(4, max_steps=9), ramp_steps=6)",
        "Bucketed(UniformDepth(1, 9), (1, 2, 5, 9))",
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
            "PoissonLognormal.max_steps is required: the law has no upper end. For mean 3 the 99.99 % quantile is 22.",
        ),
        (
            lambda: PoissonLognormal(rate=32.0),
            "PoissonLognormal.max_steps is required: the law has no upper end. "
            "For mean 32 the 99.99 % quantile is 186.",
        ),
        (
            lambda: PoissonLognormal(rate=32.0, max_steps=-1),
            "PoissonLognormal.max_steps must be at least 1. Got -1. The 99.99 % quantile is 186.",
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
            lambda: PoissonLognormal(rate=3.0, max_steps=8, tail="renormalise", compat="huginn"),
            "PoissonLognormal.tail must be 'clip' with compat='huginn'. Got 'renormalise'.",
        ),
        (
            lambda: LognormalDepth(sigma=0.0, max_steps=8),
            "LognormalDepth.sigma must be positive. Got 0.0. STARS has 0.7.",
        ),
        (lambda: LognormalDepth(max_steps=0), "LognormalDepth.max_steps must be at least 1. Got 0. STARS has 100."),
        (
            lambda: Curriculum(law=UniformDepth(low=1, high=4), ramp_steps=5),
            "UniformDepth(1, 4) has no mean of its own to move. Use FixedDepth, PoissonDepth or PoissonLognormal.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4), ramp_steps=0),
            "Curriculum.ramp_steps must be at least 1. Got 0. Use the law alone.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4)),
            "Curriculum needs ramp_steps or ramp_fraction, not both. Got None and None. Give one.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4), ramp_steps=3, ramp_fraction=0.5),
            "Curriculum needs ramp_steps or ramp_fraction, not both. Got 3 and 0.5. Give one.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4), ramp_fraction=1.5),
            "Curriculum.ramp_fraction must be above 0 and at most 1. Got 1.5. Use the law alone.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4), ramp_steps=5, floor=5.0),
            "Curriculum.floor must be positive and at most the law's mean 4. Got 5.0.",
        ),
        (
            lambda: Curriculum(law=FixedDepth(num_steps=4), ramp_steps=5, kept=0.0),
            "Curriculum.kept must be positive and at most the law's mean 4. Got 0.0.",
        ),
        (
            lambda: Bucketed(law=UniformDepth(low=1, high=4), edges=(1, 3)),
            "Bucketed.edges must ascend from 1 to 4, the ends of the support. Got (1, 3).",
        ),
        (
            lambda: Bucketed(law=UniformDepth(low=1, high=4), edges=(1, 2, 3, 4), most=3),
            "Bucketed.edges must be at most 3. Got 4. Leave some out or raise most.",
        ),
        (
            lambda: LognormalDepth(sigma=0.05, max_steps=1, tail="renormalise").pmf(),
            "tail='renormalise' needs some probability up to max_steps. Got none up to 1. Raise max_steps.",
        ),
        (lambda: LearnedCategorical(max_steps=0), "LearnedCategorical.max_steps must be at least 1. Got 0."),
        (
            lambda: LearnedCategorical(max_steps=4, target_mean=2.0),
            "LearnedCategorical.target_mean and mean_penalty must be given together. Got 2.0 and 0.0.",
        ),
        (
            lambda: LearnedCategorical(max_steps=4, cost_weight=-1.0),
            "LearnedCategorical.cost_weight must be at least 0. Got -1.0.",
        ),
        (
            lambda: PrefixDepth(law=PrefixDepth(law=FixedDepth(num_steps=1))),
            "PrefixDepth.law must be a law of num_steps. Got another PrefixDepth.",
        ),
    ],
)
def test_impossible_laws_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()

import math

import pytest

from looplab._config import from_dict, to_dict
from looplab.training.schedule import WSD, Constant, Cosine, Linear, Schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Linear(warmup_steps=2), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (Linear(floor=0.4), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]),
        (Cosine(warmup_steps=2), [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        (
            Cosine(warmup_steps=2, floor=0.5),
            [0.5, 1.0, 1.0, 0.75 + math.sqrt(0.125) / 2, 0.75, 0.75 - math.sqrt(0.125) / 2],
        ),
        (WSD(warmup_steps=2, decay_fraction=0.5), [0.5, 1.0, 1.0, 1.0, 1.0, 0.5]),
        (WSD(decay_fraction=0.5, floor=0.4), [1.0, 1.0, 1.0, 1.0, 0.8, 0.6]),
        (
            WSD(warmup_steps=2, decay_fraction=1.0, shape="one_minus_sqrt", floor=0.2),
            [0.5, 1.0, 1.0, 0.6, 1.0 - 0.8 * math.sqrt(0.5), 1.0 - 0.8 * math.sqrt(0.75)],
        ),
        (
            WSD(decay_fraction=0.5, shape="one_minus_sqrt"),
            [1.0, 1.0, 1.0, 1.0, 1.0 - math.sqrt(1 / 3), 1.0 - math.sqrt(2 / 3)],
        ),
    ],
    ids=str,
)
def test_the_table_of_values(schedule, expected):
    assert [schedule.factor(step, 6) for step in range(6)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        Linear(warmup_steps=50, floor=0.1),
        Cosine(warmup_steps=50, floor=0.1),
        WSD(warmup_steps=50, decay_fraction=0.2, floor=0.1),
    ],
    ids=str,
)
def test_it_is_continuous_and_ends_at_the_floor(schedule):
    factors = [schedule.factor(step, 1000) for step in range(1001)]
    assert factors[0] > 0
    assert max(abs(a - b) for a, b in zip(factors, factors[1:], strict=False)) <= 1 / 50 + 1e-12
    assert factors[-1] == pytest.approx(0.1, rel=1e-12)
    assert schedule.factor(5000, 1000) == factors[-1]


def test_a_square_root_falls_steeply_at_first_and_ends_at_the_floor():
    schedule = WSD(warmup_steps=50, decay_fraction=0.2, shape="one_minus_sqrt", floor=0.1)
    factors = [schedule.factor(step, 1050) for step in range(50, 1051)]
    assert factors[:801] == [1.0] * 801
    falls = [a - b for a, b in zip(factors[800:], factors[801:], strict=False)]
    assert falls == sorted(falls, reverse=True)
    assert falls[0] == pytest.approx(0.9 * math.sqrt(1 / 200), rel=1e-9)
    assert factors[-1] == pytest.approx(0.1, rel=1e-12)


def test_a_run_shorter_than_its_warm_up_has_rates():
    assert [Cosine(warmup_steps=4).factor(step, 2) for step in range(2)] == [0.25, 0.5]


def test_a_choice_survives_the_round_trip():
    for schedule in (Constant(), Linear(floor=0.1), Cosine(warmup_steps=3), WSD(shape="one_minus_sqrt")):
        assert from_dict(Schedule, to_dict(schedule)) == schedule


def test_a_misspelt_key_gets_a_suggestion():
    with pytest.raises(KeyError, match=r"Unknown config key 'warmupsteps' for Schedule. Did you mean 'warmup_steps'\?"):
        from_dict(Schedule, {"kind": "Cosine", "warmupsteps": 3})


def test_an_unknown_schedule_gets_a_suggestion():
    with pytest.raises(
        KeyError, match=r"Unknown choice 'Cosin' for Schedule. Did you mean 'Cosine'\? Known: Constant,"
    ):
        from_dict(Schedule, {"kind": "Cosin"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(warmup_steps=-1), "Constant.warmup_steps must be at least 0. Got -1."),
        (lambda: Cosine(floor=1.5), r"Cosine.floor must be in \[0, 1\]. Got 1.5."),
        (lambda: WSD(floor=1.5), r"WSD.floor must be in \[0, 1\]. Got 1.5."),
        (lambda: WSD(decay_fraction=0.0), "WSD.decay_fraction must be above 0 and at most 1. Got 0.0. Use Constant"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

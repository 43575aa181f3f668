"""Counters add up, and a ledger that does not is refused."""

from dataclasses import replace

import pytest

from looplab._config import from_dict, to_dict
from looplab.engine.stats import Book, EngineStats, Histogram, Tally, check_ledger

SOUND = EngineStats(
    pages=9,
    free_pages=4,
    active_pages=2,
    cached_pages=1,
    quarantined_pages=1,
    output_tokens=5,
    first_tokens=2,
    decode_tokens=3,
    discarded_tokens=1,
    replayed_tokens=2,
    drafted_tokens=3,
    accepted_tokens=2,
    draft_rounds=1,
    pending_tokens=1,
    applications=32,
    chosen=8,
    wasted={"delayed": 1, "late": 2, "cancelled": 4, "replay": 7, "draft": 5},
    pending_applications=5,
    prefill_tokens=12,
    exit_steps=((2, 1), (3, 1), (4, 1)),
    launch_rows={"prefill": 12, "encode": 2, "core": 32, "coda": 10},
)


def test_a_sound_ledger_passes():
    check_ledger(SOUND)
    check_ledger(EngineStats(pages=1))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"applications": 28}, "core applications: 28 != 32"),
        ({"pending_tokens": 0}, "coda rows: 10 != 9"),
        ({"output_tokens": 4}, "output tokens"),
        ({"prefill_tokens": 13}, "prefilled tokens"),
        ({"exit_steps": ((3, 2), (4, 1))}, "steps of decoded tokens: 10 != 9"),
        ({"exit_steps": ((1, 1), (4, 2), (0, 1))}, "tokens by depth"),
        ({"cached_pages": 2}, "pages: 9 != 10"),
    ],
)
def test_each_identity_is_checked(change, name):
    with pytest.raises(ValueError, match=name):
        check_ledger(replace(SOUND, **change))


def test_a_histogram_counts_values_up_to_its_bounds():
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        tally.add(value)
    assert tally.read() == Histogram(bounds=(1.0, 2.0), counts=(2, 1, 1), sum=12.0)
    assert tally.read().count == 4


def test_stats_survive_a_round_trip_through_json():
    book = Book()
    book.launch("core", 3, 0.25)
    book.exit_steps[2] += 1
    book.finished["stop"] += 1
    stats = book.read(waiting=2)
    assert (stats.launches["core"], stats.launch_rows["core"], stats.launch_seconds["core"]) == (1, 3, 0.25)
    assert stats.waiting == 2 and stats.exit_steps == ((2, 1),)
    assert from_dict(EngineStats, to_dict(stats)) == stats

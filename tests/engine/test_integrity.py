"""A scheduler whose books contradict each other is found out, and says what it holds."""

import pytest

from engine.hash_world import World
from looplab.engine.integrity import check_integrity, dump
from looplab.engine.pages import IntegrityError
from looplab.engine.residents import State


@pytest.fixture
def scheduler():
    """Two choices under way, one request that waits, one prompt that is being read."""
    made = World("last_exited", max_resident=3, launch_rows=2, prefix_cache=False, stops=False)
    for number, length in enumerate((5, 5, 20, 1)):
        made.submit([number] * length, limit=9, rate=0)
    for _ in range(3):
        made.tick()
    check_integrity(made.scheduler)
    assert len(made.scheduler.ready[0]) == 2 and len(made.scheduler.admission.started) == 1
    return made.scheduler


def item_twice(scheduler):
    scheduler.coda.rows.append(scheduler.ready[0].rows[0])


def item_nowhere(scheduler):
    scheduler.ready[0].rows.pop()


def too_many_steps(scheduler):
    scheduler.ready[0].rows[0].steps = 4


def long_table(scheduler):
    choice = scheduler.ready[0].rows[0].choice
    choice.table += (scheduler.pool.take(),)


def shared_target(scheduler):
    choice = scheduler.ready[0].rows[0].choice
    scheduler.admission.started[0].table += choice.table[-1:]
    scheduler.pool.share(choice.table[-1:])
    scheduler.admission.started[0].read = 0


def lost_seat(scheduler):
    del scheduler.seats.taken[scheduler.ready[0].rows[0].choice.seat]


def wrong_seat(scheduler):
    scheduler.ready[0].rows[0].choice.seat = scheduler.ready[0].rows[1].choice.seat


def ended_but_there(scheduler):
    scheduler.ready[0].rows[0].choice.state = State.ENDED


def lost_request(scheduler):
    scheduler.admission.line.groups.clear()


def forgotten_request(scheduler):
    del scheduler.lives.groups["r0"]


FAULTS = {
    item_twice: "is in",
    item_nowhere: "no place",
    too_many_steps: "ready for iteration 4",
    long_table: "has 3 pages for 6 tokens",
    shared_target: "pages for|which others read",
    lost_seat: "tables give|free and taken",
    wrong_seat: "sits in seat",
    ended_but_there: "sits in seat",
    lost_request: "no place",
    forgotten_request: "requests that are over",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_shown(scheduler, fault):
    fault(scheduler)
    with pytest.raises(IntegrityError, match=FAULTS[fault]) as found:
        check_integrity(scheduler)
    assert "waiting: [" in str(found.value)


def test_the_dump_names_everyone(scheduler):
    text = dump(scheduler)
    assert "waiting: ['r3']" in text and "started: ['r2/0']" in text
    assert "ready 0: [('r0/0', 0, 1), ('r1/0', 0, 1)]" in text

"""One holder at a time, whoever dies, freezes or comes back."""

import json
import os
import signal
import socket
import threading
import time

import pytest

from looplab.training.sweep import claim as claims
from looplab.training.sweep.claim import Watch, claim_path, drop, look, take

FORK = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture
def path(tmp_path):
    return claim_path(tmp_path / "runs" / "0123")


def holder_that(path, act):
    """The pid of a child that takes the claim, and then does something; it is waited for."""
    child = os.fork()
    if child == 0:
        act(take(path, "theirs"))
        os._exit(0)
    os.waitpid(child, 0)
    return child


def foreign(path, **facts):
    """A claim of another machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"host": "far", "system": "far boot", "pid": 1, "sweep": "theirs", "token": "t1", **facts}
    path.write_text(json.dumps(facts))


def test_it_says_who_holds_the_run_and_how_far_he_is(path):
    claim = take(path, "ours")
    claim.beat(step=3, steps=6, loss=2.5)
    seen = look(path)
    assert path.name == "0123.claim" and path.parent.name == "runs"
    assert seen.holder == f"process {os.getpid()} on {socket.gethostname()}"
    assert {name: seen.facts[name] for name in ("sweep", "step", "steps", "loss")} == {
        "sweep": "ours", "step": 3, "steps": 6, "loss": 2.5,
    }  # fmt: skip
    assert not seen.dead and claim.held
    before = seen.facts["heartbeat"]
    time.sleep(0.01)
    claim.beat()
    assert look(path).facts["heartbeat"] > before


def test_a_shorter_beat_leaves_no_rest_of_a_longer_one(path):
    claim = take(path, "ours")
    claim.beat(step=123456789)
    claim.beat(step=1)
    assert look(path).facts["step"] == 1


def test_a_held_run_is_not_taken(path):
    claim = take(path, "ours")
    assert take(path, "theirs") is None
    claim.release()
    assert look(path) is None
    assert take(path, "theirs") is not None


def test_of_many_who_try_one_gets_it(path):
    """Eight threads, fifty times: also when a dead holder's claim is there to be taken over."""
    for attempt in range(50):
        if attempt % 2:
            foreign(path, system=claims.system(), pid=2**22 + 1)
        got, start = [], threading.Barrier(8)

        def contend(start=start, got=got):
            start.wait()
            got.append(take(path, "ours"))

        threads = [threading.Thread(target=contend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = [claim for claim in got if claim is not None and claim.held]
        assert len(held) <= 1, "two holders"
        winner = held[0] if held else take(path, "ours")
        assert winner is not None and winner.held
        winner.release()
    assert list(path.parent.iterdir()) == []


@FORK
def test_the_claim_of_a_dead_process_is_free_at_once(path):
    pid = holder_that(path, lambda claim: os.kill(os.getpid(), signal.SIGKILL))
    assert look(path).facts["pid"] == pid and look(path).dead
    assert take(path, "ours").held


def test_another_machines_process_is_not_judged_by_its_number(path):
    foreign(path, pid=2**22 + 1)
    assert not look(path).dead
    assert take(path, "ours") is None


def test_a_claim_found_silent_may_be_taken_over_but_not_the_one_that_followed_it(path):
    foreign(path)
    seen = look(path)
    foreign(path, token="t2")
    assert take(path, "ours", silent=seen) is None
    assert take(path, "ours", silent=look(path)).held


def test_a_beat_between_changes_nothing_about_whose_claim_it_is(path):
    foreign(path, step=1)
    seen = look(path)
    foreign(path, step=2)
    assert take(path, "ours", silent=seen).held


def test_the_former_holder_notices_and_touches_nothing(path):
    old = take(path, "ours")
    new = take(path, "theirs", silent=look(path))
    assert new.held and not old.held
    old.beat(step=99)
    old.release()
    assert new.held and "step" not in look(path).facts


def test_a_claim_moved_aside_by_mistake_goes_back(path):
    """Somebody judged an older claim, and reaches for the path after a new one stands there."""
    foreign(path)
    judged = look(path)
    path.unlink()
    holder = take(path, "theirs")
    assert not claims._remove(path, judged)
    assert holder.held and [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_sweep_drops_its_own_claims_only(path):
    foreign(path)
    drop(path, "ours")
    assert look(path) is not None
    drop(path, "theirs")
    assert look(path) is None
    drop(path, "theirs")


def test_a_claim_that_is_just_being_written_is_held(path):
    path.parent.mkdir()
    path.touch()
    seen = look(path)
    assert seen.facts == {} and not seen.dead and seen.holder == "process ? on ?"
    assert take(path, "ours") is None
    assert take(path, "ours", silent=seen).held


def test_silence_is_measured_by_the_clock_of_who_looks(path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    watch = Watch()
    foreign(path, heartbeat="2001-01-01")  # a clock that is wrong by years
    assert watch.silence(path, look(path)) == 0
    now[0] += 30
    assert watch.silence(path, look(path)) == 30
    foreign(path, heartbeat="2001-01-01", step=2)
    assert watch.silence(path, look(path)) == 0

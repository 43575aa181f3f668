"""Milliseconds of every depth: which depths, of which launch, by a clock that is read after every application."""

import pytest

from looplab.audit import timing
from looplab.audit.case import MODEL
from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from tiny import LetterTokenizer, Mixing, letters


def case_of(**more):
    config = AuditConfig(replicates=1000, grid=(1, 2, 4), controls=("suffix",), **more)
    return plan_audit(Mixing().eval(), letters(60), config, tokenizer=LetterTokenizer()).cases[MODEL, "text"]


@pytest.fixture
def ticks(monkeypatch):
    """A clock that moves by one millisecond whenever it is read."""
    now = [0.0]

    def tick(wait):
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(timing, "_now", tick)


def test_a_depth_costs_encoding_its_applications_and_the_readout(ticks):
    case = case_of()
    found = timing.milliseconds(case, repeats=2)
    positions = max(shard.batch.tokens.numel() for shard in case.shards("evaluation").values())
    expected = {"prefix(1)": 3, "prefix(2)": 4, "prefix(4)": 6, "full": 10}
    assert {name: round(value * positions, 6) for name, value in found.items()} == expected


def test_an_extension_is_timed_behind_the_full_plan(ticks):
    found = timing.milliseconds(case_of(extend=(9, 11)), repeats=1)
    assert list(sorted(found, key=found.get))[-3:] == ["full", "extend_last(9)", "extend_last(11)"]


def test_the_launch_is_run_once_more_than_it_counts(monkeypatch):
    case, runs = case_of(), []
    monkeypatch.setattr(type(case.subject.runner), "start", _counting(type(case.subject.runner).start, runs))
    timing.milliseconds(case, repeats=3)
    assert len(runs) == 4


def _counting(original, calls):
    def counted(self, *arguments, **more):
        calls.append(1)
        return original(self, *arguments, **more)

    return counted

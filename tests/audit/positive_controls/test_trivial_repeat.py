"""P5: what cannot be told apart has no number, on the real audit and on broken ones."""

import re

import pytest

from looplab.audit import decompose
from looplab.audit.positive_controls.trivial_repeat import TrivialRepeat
from looplab.records import write_atomic
from looplab.report import write_report


def fails(outcome):
    return [line.endswith("<- fails") for line in outcome.found.splitlines()]


@pytest.mark.slow
def test_p5_no_number_stands_in_page_tables_or_json():
    outcome = TrivialRepeat(write_report).run(0)
    assert outcome.passed, outcome
    assert {"report.html", "results.json", "tables.tex"} <= set(re.findall(r"\w+\.\w+", outcome.expected))


def test_p5_without_a_writer_searches_the_json_alone():
    outcome = TrivialRepeat().run(0)
    assert outcome.passed, outcome
    assert "no number for them in results.json" in outcome.expected


def test_p5_catches_an_audit_that_gives_every_contrast_a_number(monkeypatch):
    monkeypatch.setattr(decompose, "no_number", lambda *_: None)
    assert fails(TrivialRepeat().run(0)) == [True, True, True, False]


def test_p5_catches_the_part_that_takes_the_whole_gap_by_construction(monkeypatch):
    monkeypatch.setattr(decompose, "WHOLE_GAP", "")
    split = decompose._part

    def broken(losses, readout, name, plus, minus, reason, *rest):
        return split(losses, readout, name, plus, minus, None if name == "application" else reason, *rest)

    monkeypatch.setattr(decompose, "_part", broken)
    assert fails(TrivialRepeat().run(0)) == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "line"),
    [("report.html", "<li>distinct: 0.0 nats</li>"), ("tables.tex", "application & raw & 100.0 \\% \\\\\n")],
)
def test_p5_catches_a_report_that_prints_what_the_result_does_not_hold(name, line):
    outcome = TrivialRepeat(lambda result, folder: write_atomic(folder / name, line)).run(0)
    assert fails(outcome) == [False, False, True, False]
    assert f"\n{name}: " in outcome.found


def test_p5_catches_a_report_that_says_nothing_at_all():
    outcome = TrivialRepeat(lambda result, folder: write_atomic(folder / "report.html", "<p></p>")).run(0)
    assert fails(outcome) == [False, False, False, True]

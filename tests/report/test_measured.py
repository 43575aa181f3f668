import dataclasses
import re

import pytest

from looplab.audit.result import Answers, AnswerScore, TaskFacts
from looplab.report import answer, measured
from looplab.report.keyed import Keyed
from report.sample import CASES, dense, estimate, single_core, two_blocks

NUMBER = re.compile(r"\d\.\d")


def domain(result):
    return Keyed(result).domains[0]


def column(table, name):
    return [row[table.columns.index(name)].text for row in table.rows]


def with_part(result, **changes):
    """The result with its raw `distinct` part changed."""
    first = result.domains[0]
    raw = first.decompositions[0]
    parts = tuple(dataclasses.replace(p, **changes) if p.name == "distinct" else p for p in raw.parts)
    decompositions = (dataclasses.replace(raw, parts=parts), *first.decompositions[1:])
    return dataclasses.replace(result, domains=(dataclasses.replace(first, decompositions=decompositions),))


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize(
    "table", ["decomposition", "contrasts", "losses", "gains", "temperatures", "affine_fits", "metrics"]
)
def test_every_row_is_as_wide_as_the_head(table, make):
    found = getattr(measured, table)(domain(make()))
    assert {len(row) for row in found.rows} <= {len(found.columns)}


def test_the_decomposition_table_holds_the_numbers_of_the_result():
    table = measured.decomposition(domain(two_blocks()))
    assert column(table, "part")[:4] == ["gap", "application", "distinct", "composition"]
    assert column(table, "share of the gap")[1:4] == [
        "35.1\u00a0% [34.2, 36.0]",
        "0.8\u00a0% [0.5, 1.0]",
        "64.1\u00a0% [62.7, 65.6]",
    ]
    assert table.rows[1][4].path == "domains[0].decompositions[0].parts[0].share"


def test_parts_that_cannot_be_told_have_words_in_place_of_numbers():
    table = measured.decomposition(domain(single_core()))
    rows = [row for row in table.rows if row[0].text != "gap"]
    assert len(rows) == 9
    for row in rows:
        assert [row[3].text, row[4].text] == ["not identifiable", "not identifiable"]
        assert not NUMBER.search(" ".join(cell.text for cell in row))


def test_a_reason_wins_over_a_number_that_came_with_it():
    result = with_part(two_blocks(), reason="not measured: diverged at application 3")
    row = measured.decomposition(domain(result)).rows[2]
    assert [row[3].text, row[4].text] == ["not measured", "not measured"]


def test_bitwise_equal_effects_are_written_as_such():
    row = measured.decomposition(domain(with_part(two_blocks(), bitwise_equal=True))).rows[2]
    assert row[3].text == "0 (bitwise equal)"


def test_shares_of_a_small_gap_are_withheld():
    result = with_part(two_blocks(), share=None)
    row = measured.decomposition(domain(result)).rows[2]
    assert (row[4].text, row[4].path) == (measured.NONE, "")


def test_contrasts_without_a_number_say_why():
    table = measured.contrasts(domain(single_core()))
    for effect, reason in zip(column(table, "nats"), column(table, "why no number"), strict=True):
        assert (effect == "not identifiable") == reason.startswith("not identifiable: ")


def test_a_diverged_schedule_has_no_loss():
    result = two_blocks()
    first = result.domains[0]
    broken = dataclasses.replace(
        first.schedules[1], diverged_at=3, losses=(), temperature=None, affine=None, metrics=()
    )
    first = dataclasses.replace(first, schedules=(first.schedules[0], broken, *first.schedules[2:]))
    table = measured.losses(domain(dataclasses.replace(result, domains=(first,))))
    assert column(table, "loss, raw")[1] == "diverged at application 3"
    assert not table.rows[1][1].path


def test_a_gain_by_flattening_says_so():
    table = measured.gains(domain(two_blocks(domains=("text", "code"))))
    assert not any("flattening" in word for word in column(table, "word"))
    code = measured.gains(Keyed(two_blocks(domains=("text", "code"))).domains[1])
    assert column(code, "word")[0] == "present by flattening a wrong answer"


def test_a_schedule_is_never_compared_with_itself():
    core = single_core()
    first = core.domains[0]
    reason = "not identifiable: only one kind of unit"
    itself = dataclasses.replace(
        first.contrasts[0], name="full - full", plus="full", minus="full", effect=None, reason=reason
    )
    core = dataclasses.replace(core, domains=(dataclasses.replace(first, contrasts=(itself, *first.contrasts)),))
    assert "full - full" not in column(measured.contrasts(domain(core)), "contrast")
    assert not [line for line in answer.unidentified(domain(core)) if "full - full" in line]
    assert "full - full" not in column(measured.decomposition(domain(core)), "contrast")


def test_what_runs_past_full_depth_has_its_own_table():
    table = measured.extensions(domain(two_blocks()))
    assert column(table, "contrast") == ["extend_last(12) - full"]
    assert table.columns == ("contrast", "readout", "nats", "margin", "equivalent to zero")
    assert not measured.extensions(domain(dense())).rows


def test_full_rank_fits_say_what_they_were_trained_on():
    table = measured.full_rank_fits(domain(two_blocks()))
    assert [cell.text for cell in table.rows[0]] == [
        "full",
        "nll",
        "1.0e\N{MINUS SIGN}02",
        "yes",
        "yes",
        "44",
        "30,000",
    ]
    assert not measured.full_rank_fits(domain(dense())).rows


def answered(wilson=(0.91, 0.995)):
    """Two schedules under two readouts."""
    task = TaskFacts(
        name="state_tracking",
        version=1,
        options={},
        difficulty=8,
        chance=1 / 60,
        cells=5,
        num_steps=8,
        sides="splits",
        trained=False,
    )
    scores = tuple(
        AnswerScore(schedule=name, probe=probe, exact=estimate(value, 0.02), wilson=wilson, cells=0.5 + value / 2)
        for name, value in (("full", 0.97), ("prefix(1)", 0.02))
        for probe in ("raw", "affine")
    )
    result = two_blocks()
    first = dataclasses.replace(result.domains[0], answers=Answers(task=task, scores=scores))
    return dataclasses.replace(result, domains=(first, *result.domains[1:]))


def test_answers_stand_beside_chance_and_both_intervals():
    table = measured.answers(domain(answered()))
    assert column(table, "schedule") == ["full", "prefix(1)"]
    assert column(table, "exact match, affine") == ["97.0\u00a0% [95.0, 99.0]", "2.0\u00a0% [0.0, 4.0]"]
    assert column(table, "Wilson, raw") == ["91.0 .. 99.5\u00a0%"] * 2
    assert column(table, "cells right, raw") == ["98.5\u00a0%", "51.0\u00a0%"]
    assert "By chance 1.7 %." in table.note
    assert table.rows[1][4].path == "domains[0].answers.scores[3].exact"


def test_several_noise_seeds_have_no_score_interval():
    assert not [name for name in measured.answers(domain(answered(None))).columns if name.startswith("Wilson")]


def test_texts_have_no_table_of_answers():
    assert measured.answers(domain(two_blocks())) is None

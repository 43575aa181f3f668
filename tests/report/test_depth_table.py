import dataclasses
import json
import re

import pytest

from looplab.report.depth_table import depth_value_table, magnitude
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.tables import NONE
from report.depth_sample import VALUED, extended_core, made, valued
from report.sample import single_core


def table(result):
    return depth_value_table(Keyed(result).domains[0])


def column(found, name):
    return [row[found.columns.index(name)].text for row in found.rows]


def at(data, path):
    """What stands at `domains[0].depth_value...` in results.json."""
    for name, index, key in re.findall(r'(\w+)|\[(\d+)\]|\["([^"]+)"\]', re.sub(r'\["', '["', path)):
        data = data[name] if name else data[int(index)] if index else data[key]
    return data


@pytest.mark.parametrize("case", VALUED)
def test_every_row_is_as_wide_as_the_head(case):
    found = table(made(case))
    assert {len(row) for row in found.rows} == {len(found.columns)}
    assert len(found.rows) == 1 + len(made(case).domains[0].depth_value.steps)


@pytest.mark.parametrize("case", VALUED)
def test_every_number_stands_where_its_cell_says(case):
    result = made(case)
    data = json.loads(result.to_json())
    numbers = 0
    for row in table(result).rows:
        for cell in row:
            if cell.order is not None:
                held = at(data, cell.path)
                assert cell.order == (held["value"] if isinstance(held, dict) else held)
                numbers += 1
            elif cell.text not in ("", NONE):
                assert at(data, cell.path) == cell.text or at(data, cell.path) is None
    assert numbers > 5 * len(table(result).rows)


def test_the_row_of_a_step_holds_its_gain_cost_and_word():
    found = table(extended_core())
    last = dict(zip(found.columns, (cell.text for cell in found.rows[-1]), strict=True))
    step = extended_core().domains[0].depth_value.steps[-1]
    assert last["depth"] == "extend_last(12)"
    assert last["gain of the step"].startswith("\N{MINUS SIGN}0.081 [")
    assert last["word"] == "harms"
    assert step.flops == 13 * (2 * 131_072 + 2 * 128 * 513) + 2 * 32_768
    assert last["FLOPs per token"] == "5.18 M"
    assert last["KV bytes per token"] == "6,656"
    assert last["ms per token"] == "1.500"
    assert last["FLOPs added"] == "1.57 M"


def test_the_first_row_is_where_the_steps_begin_and_has_no_gain():
    found = table(made("two_blocks"))
    first = dict(zip(found.columns, (cell.text for cell in found.rows[0]), strict=True))
    assert (first["depth"], first["units"], first["gain of the step"]) == ("prefix(1)", "1", NONE)
    assert first["FLOPs per token"] == "852 k"


def test_columns_without_an_entry_are_left_out():
    assert "ms per token" not in table(made("two_blocks")).columns
    assert "more documents to decide" not in table(made("two_blocks")).columns
    assert "ms per token" in table(made("extended_core")).columns


def test_an_undecided_step_says_how_many_documents_would_decide():
    result = made("open")
    found = table(result)
    steps = result.domains[0].depth_value.steps
    for step, text in zip(steps, column(found, "more documents to decide")[1:], strict=True):
        expected = "" if step.word != "undecided" else f"about {step.more_documents:,}"
        assert text == expected
    assert "undecided" in column(found, "word")


def test_a_step_that_no_reasonable_sample_decides_says_so():
    result = made("open")
    value = result.domains[0].depth_value
    steps = tuple(dataclasses.replace(step, word="undecided", more_documents=None) for step in value.steps)
    domain = dataclasses.replace(result.domains[0], depth_value=dataclasses.replace(value, steps=steps))
    found = table(dataclasses.replace(result, domains=(domain,)))
    assert set(column(found, "more documents to decide")[1:]) == {"over 100 times as many"}


@pytest.mark.parametrize("probe", ["temperature", "affine"])
def test_every_probe_has_a_column_of_its_own_net_gains(probe):
    found = table(made("two_blocks"))
    paths = [row[found.columns.index(f"gain net of {probe}")].path for row in found.rows[1:]]
    assert paths == [f'domains[0].depth_value.steps[{i}].net["{probe}"]' for i in range(7)]


def test_models_whose_shares_cannot_be_told_apart_have_every_gain():
    result = made("extended_core")
    assert all(part.reason for part in result.domains[0].decompositions[0].parts)
    assert all(re.match(r"[−\d]", text) for text in column(table(result), "gain of the step")[1:])


def test_a_domain_without_a_value_has_an_empty_table():
    assert table(single_core()).rows == ()


def test_the_note_names_margin_context_and_bytes():
    note = table(made("two_blocks")).note
    assert "inside the margin of 0.020 nats" in note
    assert "at 512 tokens" in note
    assert "2 bytes a number" in note


def test_it_goes_into_latex():
    assert r"equivalent to zero" in render(table(made("extended_core")))


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (1000, "1 k"), (1_234_567, "1.23 M"), (45_600_000_000, "45.6 G"), (7 * 10**12, "7 T")],
)
def test_large_counts_have_three_digits_and_a_unit(number, text):
    assert magnitude(Keyed(number)).text == text


def test_two_domains_have_their_own_paths():
    result = valued(dataclasses.replace(single_core(), domains=single_core().domains * 2))
    paths = [row[3].path for row in depth_value_table(Keyed(result).domains[1]).rows[1:]]
    assert all(path.startswith("domains[1].depth_value.steps[") for path in paths)

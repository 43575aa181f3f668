import dataclasses
import re

import pytest

from looplab.report import orders
from looplab.report.keyed import Keyed
from report.sample import dense, estimate, single_core, two_blocks


def domain(result):
    return Keyed(result).domains[0]


def numbers(row):
    return [float(re.match(r"[−\d.]+", cell.text)[0].replace("−", "-")) for cell in row]


def test_the_terms_of_every_structural_order_add_up_to_the_gap():
    result = two_blocks()
    table = orders.structural(domain(result))
    assert [row[1].text for row in table.rows[:2]] == ["count first", "index first"]
    gaps = {found.probe: found.gap.value for found in result.domains[0].decompositions}
    for row in table.rows:
        assert sum(numbers(row[2:])) == pytest.approx(gaps[row[0].text], abs=0.002)


def test_the_four_way_view_has_every_order_its_mean_and_its_range():
    table = orders.four_way(domain(two_blocks()))
    rows = [row for row in table.rows if row[0].text == "affine"]
    assert [row[1].text for row in rows] == [
        "count first, probe last",
        "index first, probe last",
        "count first, probe first",
        "index first, probe first",
        "mean of the orders",
        "range over the orders",
    ]
    for row in rows[:5]:
        *terms, whole = numbers(row[2:])
        assert sum(terms) == pytest.approx(whole, abs=0.003)
    assert rows[4][2].path == 'domains[0].four_way[1].mean["application"]'
    low, high = (float(end) for end in rows[5][2].text.split(" .. "))
    assert (low, high) == (min(numbers(row[2:3])[0] for row in rows[:4]), max(numbers(row[2:3])[0] for row in rows[:4]))


def test_a_term_that_cannot_be_told_is_words():
    result = two_blocks()
    first = result.domains[0]
    raw = first.decompositions[0]
    parts = tuple(
        dataclasses.replace(part, reason="not identifiable: the block has no iteration index")
        if part.name == "distinct"
        else part
        for part in raw.parts
    )
    four = tuple(
        dataclasses.replace(
            found,
            paths=tuple(
                dataclasses.replace(p, terms={t: e for t, e in p.terms.items() if t != "distinct"}) for p in found.paths
            ),
        )
        for found in first.four_way
    )
    decompositions = (dataclasses.replace(raw, parts=parts), *first.decompositions[1:])
    first = dataclasses.replace(first, four_way=four, decompositions=decompositions)
    table = orders.four_way(domain(dataclasses.replace(result, domains=(first,))))
    place = table.columns.index("distinct")
    assert {row[place].text for row in table.rows if "probe" in row[1].text} == {"not identifiable"}


def test_structure_that_cannot_be_split_stands_as_one_term():
    result = two_blocks()
    first = result.domains[0]
    terms = {"structure": estimate(0.9, 0.1), "calibration": estimate(0.1, 0.1)}
    four = dataclasses.replace(
        first.four_way[0],
        paths=(dataclasses.replace(first.four_way[0].paths[0], terms=terms),),
        mean=terms,
        spread={term: (0.1, 0.9) for term in terms},
    )
    first = dataclasses.replace(first, four_way=(four,))
    table = orders.four_way(domain(dataclasses.replace(result, domains=(first,))))
    assert table.columns == ("readout", "order", "structure", "calibration", "whole")
    assert table.rows[0][2].text == "0.900 [0.800, 1.000]"


def test_the_factorial_has_one_column_per_readout_and_says_what_application_may_hide():
    result = two_blocks()
    table = orders.effects(domain(result))
    assert table.columns == ("effect", "losses", "raw", "temperature", "affine")
    assert "may come almost wholly from 1 to kmid applications and then saturate" in table.note
    assert (table.rows[0][2].under, table.rows[2][2].under) == ("equivalent to zero", "")
    cells = orders.cells(domain(result), result.model)
    assert [row[2].path for row in cells.rows[:2]] == [
        f'domains[0].factorials[0].cells["{name}"]' for name in ("same(4)", "prefix(4)")
    ]


@pytest.mark.parametrize("make", [single_core, dense])
def test_without_the_square_there_are_no_rows(make):
    result = make()
    for table in (
        orders.structural(domain(result)), orders.effects(domain(result)), orders.cells(domain(result), result.model),
    ):  # fmt: skip
        assert not table.rows

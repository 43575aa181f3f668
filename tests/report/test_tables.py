import pytest

from looplab.report import tables
from looplab.report.keyed import Keyed
from report.sample import estimate


def keyed(value):
    return Keyed(value, "here")


@pytest.mark.parametrize(
    ("value", "text"), [(0.99612, "0.996"), (-0.0451, "\N{MINUS SIGN}0.045"), (-0.0004, "0.000"), (0.0, "0.000")]
)
def test_numbers_have_three_digits_and_never_a_negative_zero(value, text):
    assert tables.amount(keyed(value)).text == text


def test_an_estimate_is_written_with_its_interval_and_sorts_by_its_value():
    cell = tables.nats(keyed(estimate(0.35, 0.008)))
    assert (cell.text, cell.path, cell.order) == ("0.350 [0.342, 0.358]", "here", 0.35)
    assert tables.percent(keyed(estimate(0.351, 0.009))).text == "35.1\u00a0% [34.2, 36.0]"


@pytest.mark.parametrize("write", [tables.nats, tables.percent, tables.amount, tables.tiny])
def test_what_has_no_number_is_a_dash_without_a_key(write):
    cell = write(keyed(None))
    assert (cell.text, cell.path, cell.order) == (tables.NONE, "", None)


def test_counts_have_thousands_apart_and_tiny_numbers_an_exponent():
    assert tables.count(keyed(101422)).text == "101,422"
    assert tables.tiny(keyed(3.1e-7)).text == "3.1e\N{MINUS SIGN}07"
    assert tables.tiny(keyed(0.0)).text == "0"
    assert tables.percent_of(keyed(0.0123)).text == "1.2\u00a0%"


def test_trimming_drops_empty_columns_and_keeps_text_columns_in_place():
    row = (tables.Cell("a"), tables.Cell(""), tables.Cell("b"))
    table = tables.Table("t", "T", ("one", "two", "three"), (row, row), text_columns=(0, 2)).trimmed()
    assert table.columns == ("one", "three")
    assert [cell.text for cell in table.rows[0]] == ["a", "b"]
    assert table.text_columns == (0, 1)

"""What pages of sentences and tables share."""

import json
import re

from engine.test_verdict import result, verdict
from looplab.report.keyed import Keyed
from looplab.report.sheet import measured, write_sheet
from looplab.report.tables import Table


def embedded(page):
    """The record inside a page."""
    return json.loads(re.search(r'class="results">(.*?)</script>', page, re.DOTALL)[1])


def test_an_interval_is_a_number_with_its_ends():
    cell = measured(Keyed(result(verdict(reuse=0.1))).verdicts[0].reuse, 2)
    assert (cell.text, cell.under, cell.order) == ("0.10", "0.10 .. 0.10", 0.1)
    assert measured(Keyed(result(verdict())).verdicts[0].slope).order is None


def test_tables_without_rows_are_left_out(tmp_path):
    tables = [Table("empty", "Empty table", ("a",), ())]
    path = write_sheet(result(), tmp_path / "new", title="Sheet", subject="x & y", sentences=["One."], tables=tables)
    page = path.read_text()
    assert "Empty table" not in page and "<p>One.</p>" in page and "x &amp; y" in page
    assert embedded(page)["weights"] == "w"
    assert (tmp_path / "new" / "tables.tex").read_text() == "% Sheet of x & y. Needs \\usepackage{booktabs}.\n"

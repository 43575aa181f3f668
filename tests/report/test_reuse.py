"""The page of a reuse audit, from planted verdicts."""

import dataclasses
import json

from engine.test_verdict import result, verdict
from looplab.records import dump_json
from looplab.report.keyed import Keyed
from looplab.report.reuse import free_table, verdicts_table, write_reuse
from report.test_sheet import embedded


def test_the_page_of_a_reuse_audit(tmp_path):
    record = result(verdict(word="not reusable", reuse=0.1), verdict(delay=1), verdict("first", word="undecided"))
    page = write_reuse(record, tmp_path).read_text()
    assert embedded(page) == json.loads(dump_json(record))
    assert "Passes with exit_delay=1" in page and 'data-key="verdicts[0].reuse.estimate"' in page
    table = verdicts_table(Keyed(record))
    assert [[cell.text for cell in row][:4] for row in table.rows] == [
        ["single", "0", "not reusable", "0.1000"],
        ["single", "1", "reusable", "0.0000"],
        ["first", "0", "undecided", "0.0000"],
    ]
    assert [cell.text for cell in free_table(Keyed(record)).rows[0]] == ["single", "0", "2", "5", "1", "3"]
    quiet = result(dataclasses.replace(verdict(), free=None, by_depth=()))
    (tmp_path / "quiet").mkdir()
    page = write_reuse(quiet, tmp_path / "quiet").read_text()
    assert "Free generation" not in page and "by the depth" not in page

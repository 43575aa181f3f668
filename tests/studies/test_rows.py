import json

import pytest

from looplab.records import StudyArm, StudyRow
from looplab.studies import rows
from looplab.studies.rows import RowsError, read_rows, write_rows

ARM = StudyArm(name="a", title="an arm", seed=0, audit="", sentence="", facts={"config": "x"})
ROWS = (
    StudyRow(arm="a", seed=0, quantity="loss", unit="nats", value=0.1, low=0.05, high=0.15),
    StudyRow(arm="a", seed=0, quantity="gap", unit="nats", value=None, reason="diverged"),
)


def stored(folder):
    write_rows(folder, "a-0", "p", ARM, ROWS)
    return folder / "rows" / "a-0.json"


def test_what_was_stored_comes_back(tmp_path):
    stored(tmp_path)
    assert read_rows(tmp_path, "a-0", "p") == (ARM, ROWS)
    assert read_rows(tmp_path, "a-1", "p") is None


def test_rows_of_other_predictions_or_other_code_do_not_count(tmp_path, monkeypatch):
    stored(tmp_path)
    assert read_rows(tmp_path, "a-0", "q") is None
    monkeypatch.setattr(rows, "code_hash", lambda: "other")
    assert read_rows(tmp_path, "a-0", "p") is None


def test_edited_rows_are_refused_by_file(tmp_path):
    path = stored(tmp_path)
    path.write_text(path.read_text().replace("0.1,", "0.2,"))
    with pytest.raises(RowsError, match=r"rows/a-0\.json was edited: SHA-256 \w{12} in it, \w{12} of it"):
        read_rows(tmp_path, "a-0", "p")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_something_else_is_refused(tmp_path, text):
    stored(tmp_path).write_text(text)
    with pytest.raises(RowsError, match="must hold rows of a study"):
        read_rows(tmp_path, "a-0", "p")


def test_another_schema_is_refused(tmp_path):
    path = stored(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(RowsError, match="must have schema 1. Got 99"):
        read_rows(tmp_path, "a-0", "p")


def test_the_code_is_known_by_its_source():
    rows.code_hash.cache_clear()
    first = rows.code_hash()
    rows.code_hash.cache_clear()
    assert rows.code_hash() == first
    assert len(first) == 16

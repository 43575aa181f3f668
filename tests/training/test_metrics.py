import json

import pytest

from looplab.training.checkpoint import CheckpointError
from looplab.training.metrics import MetricsFile


def test_lines_are_objects_and_odd_numbers_are_words(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"loss": float("nan"), "norm": float("inf"), "step": 1})
    file.write({"step": 2})
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"loss": "nan", "norm": "inf", "step": 1}, {"step": 2}]


def test_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    length = file.flushed_length()
    file.write({"step": 2})
    file.close()
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    file = MetricsFile(path, length=length)
    file.write({"step": 20})
    assert file.flushed_length() == path.stat().st_size
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 20}\n'


def test_a_file_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must have at least 5 bytes, as its checkpoint says. Got 0"):
        MetricsFile(tmp_path / "m.jsonl", length=5)

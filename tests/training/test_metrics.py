import json
from pathlib import Path

import pytest

from looplab.training.checkpoint import CheckpointError
from looplab.training.metrics import MetricsFile, Unwritten, peak_bytes, read_metrics


def test_lines_are_objects_and_odd_numbers_are_words(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"loss": float("nan"), "norm": float("inf"), "step": 1})
    file.write({"step": 2})
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"loss": "nan", "norm": "inf", "step": 1}, {"step": 2}]


def test_lines_are_read_back(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in (1, 2):
        file.write({"step": step, "loss": 0.1 + step})
    file.close()
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1, "loss": 1.1}, {"step": 2, "loss": 2.1}]


def test_a_process_that_writes_none_has_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Unwritten()
    file.write({"step": 1})
    assert file.flushed_length() == 0
    file.close()
    assert not list(tmp_path.iterdir())


def test_peak_memory_is_what_the_system_says_of_the_process(monkeypatch):
    assert peak_bytes("cpu") is None or peak_bytes("cpu") > 10**7
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\nVmHWM:\t   2048 kB\nVmRSS:\t    7 kB\n")
    assert peak_bytes("cpu") == 2**21
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\n")
    assert peak_bytes("cpu") is None

    def missing(path):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert peak_bytes("cpu") is None


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

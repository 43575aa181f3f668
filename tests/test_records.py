import json
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest

from looplab.records import Finding, Level, RunRecord, dump_json, encode_json, write_atomic

FINDING = Finding(kind="audit.index_inert", level=Level.WARNING, message="The index does nothing.", where={"block": 1})

RUN = RunRecord(
    run_id="a7",
    config_hash="0123456789abcdef",
    version="0.1.0",
    status="finished",
    seed=0,
    num_steps=4.5,
    window=4.5,
    depth_law="fixed",
    n_once=10,
    n_rec=20,
    width=8,
    layers_once=1,
    layers_core=2,
    seq_len=16,
    vocab_size=256,
    tokens=1000,
    unique_tokens=1000,
    train_flops=10**20,
    flops_pairs="causal",
    loss=2.5,
    loss_split="abc",
    tokenizer="bytes",
    eval_steps=4.0,
    seconds=1.25,
    hardware="CPU",
)


@pytest.mark.parametrize("value", [None, 0.1, 1e-300, math.inf, -math.inf, math.nan])
def test_a_finding_survives_json_whatever_its_number(value):
    finding = replace(FINDING, value=value)
    again = Finding.from_dict(json.loads(dump_json(finding)))
    assert repr(again) == repr(finding)  # repr, because nan != nan
    assert finding.to_dict() == json.loads(dump_json(finding))


def test_a_finding_prints_its_level_kind_message_and_remedy():
    assert str(FINDING) == "[warning] audit.index_inert: The index does nothing."
    assert str(replace(FINDING, remedy="Drop it.")).endswith("does nothing. Drop it.")


@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf])
def test_a_run_record_survives_json_even_when_the_run_diverged(loss):
    record = replace(RUN, loss=loss)
    assert repr(RunRecord.from_dict(json.loads(dump_json(record, indent=None)))) == repr(record)


def test_a_run_record_of_another_schema_or_with_other_keys_is_refused():
    data = encode_json(RUN)
    with pytest.raises(ValueError, match="RunRecord.schema must be 1. Got 2."):
        RunRecord.from_dict({**data, "schema": 2})
    with pytest.raises(TypeError, match="los"):
        RunRecord.from_dict({**data, "los": 1.0})


def test_json_text_is_deterministic_and_plain():
    @dataclass
    class Point:
        y: float
        x: int

    value = {
        "b": Point(y=math.nan, x=1),
        "a": (np.float32(0.5), np.int64(3), np.bool_(True)),
        "c": np.array([1.0, np.inf]),
    }
    assert dump_json(value, indent=None) == '{"a": [0.5, 3, true], "b": {"x": 1, "y": "nan"}, "c": [1.0, "inf"]}\n'


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="a value must be a number, string, list"):
        dump_json({"a": object()})
    with pytest.raises(TypeError, match="keys of a mapping must differ as text"):
        dump_json({1: "a", "1": "b"})


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomic(path, "old")
    assert path.read_text() == "old"

    def full_disk(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.json"]

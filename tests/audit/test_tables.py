"""Tables arrive whole or not at all, and hold what was measured."""

import os

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from looplab.audit import tables
from looplab.audit.case import MODEL
from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from looplab.journal import Journal
from tiny import LetterTokenizer, Mixing, letters


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    config = AuditConfig(replicates=1000, grid=(1, 4), controls=(), affine_tokens=400)
    plan = plan_audit(Mixing().eval(), letters(60), config, tokenizer=LetterTokenizer(), batch_tokens=400)
    return plan.measure(Journal(tmp_path_factory.mktemp("journal")), keep_tokens=True)


def write(measured, folder, keep_tokens=True):
    collected = {"text": measured.collected[MODEL, "text"]}
    tables.write_tables(folder, measured.journal, collected, keep_tokens=keep_tokens)


def test_every_table_is_written(measured, tmp_path):
    write(measured, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents.parquet", "probes", "tokens.parquet"]
    part = measured.collected[MODEL, "text"]
    split = part.case.domain.evaluation
    tokens = pyarrow.parquet.read_table(tmp_path / "tokens.parquet").to_pydict()
    schedules = list(part.case.subject.words)
    assert list(dict.fromkeys(tokens["schedule"])) == schedules
    assert len(tokens["schedule"]) == len(schedules) * split.tokens
    assert set(tokens["split"]) == {"evaluation"}
    documents = pyarrow.parquet.read_table(tmp_path / "documents.parquet").to_pydict()
    by_document = np.array(documents["nll_affine"]).reshape(len(schedules), -1)
    for schedule, losses in zip(schedules, by_document, strict=True):
        np.testing.assert_array_equal(losses, part.scores[schedule].losses["affine"].sum(axis=0))
    probes = load_file(tmp_path / "probes" / "text.safetensors")
    assert probes["full.beta"].tolist() == [part.fits["full"].temperature.beta]
    assert probes["prefix(1).gain"].tolist() == part.fits["prefix(1)"].affine.gain.tolist()


def test_an_interrupted_run_leaves_nothing(measured, tmp_path, monkeypatch):
    def interrupted(path, rows):
        assert os.listdir(tmp_path) == [f".tables.{os.getpid()}"]
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(measured, tmp_path)
    assert os.listdir(tmp_path) == []


def test_tokens_are_written_only_where_they_are_wanted(measured, tmp_path):
    write(measured, tmp_path, keep_tokens=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents.parquet", "probes"]

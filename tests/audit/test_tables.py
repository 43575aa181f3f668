"""Tables arrive whole or not at all."""

import os

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from looplab.audit.bootstrap import DocumentSums
from looplab.audit.measure import Fits
from looplab.audit.probes import Affine, Temperature
from looplab.audit.tables import FolderTables, NoTables


def fits():
    zeros = np.zeros(2)
    sums = DocumentSums(loss=zeros, first=zeros, second=zeros, third=zeros, tokens=zeros)
    temperature = Temperature(beta=2.0, status="converged", passes=3, loss=1.0, sums=sums)
    affine = Affine(
        gain=np.arange(3.0), shift=np.ones(3), scale=0.5, strength=0.1, heldout=(), converged=True, iterations=1,
        passes=1, tokens=4, convex=True, findings=(),
    )  # fmt: skip
    return Fits(temperature, None, affine)


def fill(tables):
    for schedule in ("full", "prefix(1)"):
        for start in (0, 2):
            tables.tokens("text", schedule, {"token": np.arange(start, start + 2), "nll_raw": np.ones(2, np.float32)})
        tables.documents("text", schedule, {"document": ["a", "b"], "nll_raw": np.array([1.0, 2.0])})
        tables.probes("text", schedule, fits())


def test_every_table_is_written(tmp_path):
    with FolderTables(tmp_path) as tables:
        fill(tables)
        tables.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents.parquet", "probes", "tokens.parquet"]
    tokens = pyarrow.parquet.read_table(tmp_path / "tokens.parquet").to_pydict()
    assert tokens["schedule"] == ["full"] * 4 + ["prefix(1)"] * 4
    assert tokens["token"] == [0, 1, 2, 3] * 2
    assert set(tokens["split"]) == {"evaluation"}
    documents = pyarrow.parquet.read_table(tmp_path / "documents.parquet").to_pydict()
    assert documents["nll_raw"] == [1.0, 2.0, 1.0, 2.0]
    probes = load_file(tmp_path / "probes" / "text.safetensors")
    assert probes["full.beta"].tolist() == [2.0]
    assert probes["prefix(1).gain"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("finished", [False, True])
def test_an_interrupted_run_leaves_nothing(tmp_path, finished):
    def interrupted():
        with FolderTables(tmp_path) as tables:
            fill(tables)
            assert os.listdir(tmp_path) == [f".tables.{os.getpid()}"]
            if finished:
                tables.finish()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert bool(os.listdir(tmp_path)) == finished
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_tokens_are_kept_only_where_they_are_wanted(tmp_path):
    assert FolderTables(tmp_path).keeps_tokens
    assert not FolderTables(tmp_path, keep_tokens=False).keeps_tokens
    nothing = NoTables()
    fill(nothing)
    assert not nothing.keeps_tokens

"""An audit whose work is spread over a Ray cluster of two nodes gives the files of one made in a single process."""

import json

import pytest
import torch

from looplab.cli import exit_codes, main
from ray_cluster import two_nodes

ARGUMENTS = [
    "audit", "text-2x4-fixed", "--replicates", "1000", "--grid", "1", "--controls", "none", "--affine-tokens", "300",
    "--documents", "24", "--calibration-documents", "12", "--max-tokens", "40", "--batch-tokens", "300",
    "--control", "none", "--quiet",
]  # fmt: skip


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly
def test_a_sharded_audit_gives_the_files_of_a_single_process(tmp_path, one_thread):
    assert main([*ARGUMENTS, "--out", str(tmp_path / "one")]) == exit_codes.DONE
    with two_nodes() as cluster:
        spread = ["--executor", "ray", "--address", cluster.address, "--workers", "2", "--out", str(tmp_path / "ray")]
        assert main([*ARGUMENTS, *spread]) == exit_codes.DONE
    one, ray = (tmp_path / name for name in ("one", "ray"))
    for name in ("tables.tex", "tokens.parquet", "documents.parquet", "probes/text.safetensors"):
        assert (one / name).read_bytes() == (ray / name).read_bytes(), name
    results = [json.loads((folder / "results.json").read_text()) for folder in (one, ray)]
    commands = [result.pop("command") for result in results]
    assert "--executor ray" in commands[1]
    assert results[0] == results[1]

import json

import pytest

from looplab.data.packing import Packing
from looplab.models.base import build
from looplab.records import RunRecord
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.training.trainer import train
from training.tiny_run import ENTRIES, core, metrics, tiny_run, two_blocks, with_data


def run(tmp_path, **changes):
    config = tiny_run(tmp_path, steps=4, **changes)
    record = train(config, tmp_path / "run")
    assert RunRecord.from_dict(json.loads((tmp_path / "run" / "record.json").read_text())) == record
    return config, record, metrics(tmp_path / "run", "train")


def test_it_holds_what_ran(tmp_path):
    config, record, steps = run(tmp_path, model=core(), gradient=TruncatedBPTT(window=2))
    spec = build(config.model).spec
    assert record.num_steps == sum(s["T"] for s in steps) / 4
    assert record.window == sum(min(2, s["T"]) for s in steps) / 4
    assert record.tokens == 4 * 4 * 12
    assert record.train_flops == sum(s["ledger"]["flops_forward"] + s["ledger"]["flops_backward"] for s in steps)
    assert (record.n_once, record.n_rec) == (spec.cost.matmul_once, spec.cost.matmul_rec)
    assert (record.width, record.layers_once, record.layers_core, record.eval_steps) == (16, 1, 1, 3.0)
    assert (record.run_id, record.status, record.seed) == ("run", "finished", 0)
    assert json.loads(record.depth_law)["kind"] == "UniformDepth"
    assert record.loss == metrics(tmp_path / "run", "eval")[-1]["losses"]["3"]


def test_prefix_draws_are_counted_in_applications(tmp_path):
    _, record, steps = run(tmp_path)
    assert record.num_steps == record.window == sum(s["n0"] + s["g"] for s in steps) / 4
    assert record.eval_steps == 4.0


def test_a_law_of_iterations_is_counted_in_iterations(tmp_path):
    _, record, steps = run(tmp_path, model=two_blocks(trained_depth=FixedDepth(num_steps=2)))
    assert [s["n0"] + s["g"] for s in steps] == [4] * 4
    assert (record.num_steps, record.window, record.eval_steps, record.depth_law) == (2.0, 2.0, 2.0, "fixed")


@pytest.mark.parametrize("rows", [1, 64])
def test_unique_tokens_are_bounded_by_the_data(tmp_path, rows):
    config = with_data(tiny_run(tmp_path, steps=4), packing=Packing(seq_len=12, rows=rows))
    record = train(config, tmp_path / "run")
    in_file = sum(len(entry) + 1 for entry in ENTRIES)
    assert record.tokens == 48 * rows
    assert record.unique_tokens == (48 if rows == 1 else in_file)

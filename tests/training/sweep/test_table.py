"""The table of a sweep, from planted records."""

import csv
import dataclasses
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from looplab._config import config_hash
from looplab.records import RunRecord
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.training.sweep.points import Axis, configurations, grid_points
from looplab.training.sweep.run import SweptRun
from looplab.training.sweep.table import SweepTable, sweep_table, table_paths
from training.tiny_run import core, tiny_run

NUMBERS = {
    "num_steps": 2.5, "window": 2.5, "n_once": 10, "n_rec": 20, "width": 16, "layers_once": 1, "layers_core": 1,
    "seq_len": 12, "vocab_size": 259, "tokens": 288, "unique_tokens": 288, "train_flops": 10**9, "eval_steps": 3.0,
}  # fmt: skip


def record(config, loss, **changes):
    words = {"depth_law": "fixed", "flops_pairs": "causal", "loss_split": "ab", "tokenizer": "cd", "hardware": "here"}
    named = {"run_id": config_hash(config), "config_hash": config_hash(config), "version": "0", "status": "finished"}
    return RunRecord(**{**NUMBERS, **words, **named, "seed": config.seed, "loss": loss, "seconds": 2.0, **changes})


def planted(folder, over=("seed=0..1", "optimizer.lr=1e-3,1e-2"), losses=(3.0, 2.0, 3.5, 2.25), lost=(), **changes):
    """Runs with these losses; those whose index is in `lost` have none."""
    configs = configurations(tiny_run(folder, model=core()), grid_points([Axis.parse(text) for text in over]))
    return [
        SweptRun(
            config=config,
            folder=Path("runs", config_hash(config)),
            status="failed" if place in lost else "finished",
            record=None if place in lost else record(config, loss, **changes),
            message="its worker died." if place in lost else "",
        )
        for place, (config, loss) in enumerate(zip(configs, losses, strict=True))
    ]


def test_a_row_is_a_run_with_what_was_varied_first(tmp_path):
    columns = sweep_table(planted(tmp_path), asked=["seed", "optimizer.lr"]).columns()
    names = list(columns)
    assert names[:4] == ["seed", "optimizer.lr", "run", "status"] and names.count("seed") == 1
    assert columns["seed"] == [0, 0, 1, 1] and columns["optimizer.lr"] == [0.001, 0.01] * 2
    assert columns["loss"] == [3.0, 2.0, 3.5, 2.25]
    assert {field.name for field in dataclasses.fields(RunRecord)} <= set(names)


def test_files_hold_the_same_rows(tmp_path):
    table = sweep_table(planted(tmp_path, lost=(2,)), command="looplab sweep")
    table.write(tmp_path / "out")
    with (tmp_path / "out" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    parquet = pq.read_table(tmp_path / "out" / "table.parquet")
    assert list(rows[0]) == parquet.column_names == list(table.columns())
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "", "2.25"]
    assert parquet["loss"].to_pylist() == [3.0, 2.0, None, 2.25]
    assert parquet["optimizer.lr"].to_pylist() == [0.001, 0.01] * 2 and rows[2]["message"] == "its worker died."
    assert SweepTable.from_json((tmp_path / "out" / "results.json").read_text()) == table


def test_choices_and_mixed_values_are_text_that_may_be_typed(tmp_path):
    runs = planted(tmp_path, over=("gradient=FullBPTT,TruncatedBPTT(window=2)", "clip_norm=none,1.0"))
    sweep_table(runs).write(tmp_path / "out")
    parquet = pq.read_table(tmp_path / "out" / "table.parquet")
    assert parquet["gradient"].to_pylist() == ["FullBPTT()"] * 2 + ["TruncatedBPTT(window=2)"] * 2
    assert parquet["clip_norm"].to_pylist() == [None, 1.0] * 2


def test_the_print_joins_seeds_and_names_the_least_loss_and_the_lost(tmp_path):
    text = str(sweep_table(planted(tmp_path)))
    assert text.splitlines() == [
        "   lr  runs    loss   least  largest  seconds",
        "0.001     2  3.2500  3.0000   3.5000        4",
        " 0.01     2  2.1250  2.0000   2.2500        4",
        "",
        "Least loss: 2.1250 at lr=0.01",
    ]
    text = str(sweep_table(planted(tmp_path, lost=(1, 3))))
    assert " 0.01  0 of 2       -       -        -        0" in text.splitlines()
    assert "Least loss" not in text, "of one setting there is no least"
    assert "failed: " in text and text.endswith("(lr=0.01 seed=1): its worker died.")


def test_a_setting_without_all_its_runs_is_not_the_best(tmp_path):
    over, losses = ("seed=0..1", "optimizer.lr=1e-3,1e-2,1e-1"), (3.0, 1.0, 2.0, 3.0, 9.0, 2.5)
    table = sweep_table(planted(tmp_path, over=over, losses=losses, lost=(4,)))
    assert table.best().values == {"optimizer.lr": 0.1} and table.best().mean == 2.25


@pytest.mark.parametrize("what", ["loss_split", "tokenizer"])
def test_losses_of_different_data_are_not_compared(tmp_path, what):
    runs = planted(tmp_path)
    other = dataclasses.replace(runs[1], record=dataclasses.replace(runs[1].record, **{what: "zz"}))
    table = sweep_table([runs[0], other, *runs[2:]])
    assert not table.comparable and table.best() is None
    assert "do not compare" in str(table)


def test_a_loss_that_is_no_number_survives(tmp_path):
    runs = planted(tmp_path, losses=(math.inf, 2.0, 3.0, 1.0))
    table = sweep_table(runs)
    table.write(tmp_path / "out")
    assert SweepTable.from_json((tmp_path / "out" / "results.json").read_text()) == table
    assert table.best().values == {"optimizer.lr": 0.01}


def test_columns_are_what_was_asked_for_and_whatever_else_differs(tmp_path):
    one, two = (tiny_run(tmp_path, model=core(), seed=seed) for seed in (0, 1))
    cut = dataclasses.replace(one, gradient=TruncatedBPTT(window=2))
    assert table_paths([one], ["optimizer.lr"]) == ("optimizer.lr",)
    assert table_paths([one, two], ["optimizer.lr"]) == ("optimizer.lr", "seed")
    assert table_paths([one, cut], ["gradient.window"]) == ("gradient",), "not all runs have a window"


@pytest.mark.parametrize("number", [1, 2])
def test_one_setting_has_no_best(tmp_path, number):
    runs = planted(tmp_path, over=(f"seed=0..{number - 1}",), losses=(3.0, 2.0)[:number])
    assert sweep_table(runs).best() is None

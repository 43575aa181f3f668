"""Tables of runs: formats, and every check with its message."""

import csv
import dataclasses
import json
import math
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from looplab.records import Level, RunRecord, dump_json
from looplab.scaling import RunsError, read_runs
from looplab.scaling.runs import depth_pmf

PMF = "[[2.0, 1.0, 0.5], [4.0, 2.0, 0.5]]"


def changed(rows, *which, **values):
    """The rows with some changed."""
    return [row | values if i in which or not which else dict(row) for i, row in enumerate(rows)]


def kinds(runs):
    return {finding.kind.removeprefix("scaling."): finding for finding in runs.findings}


def test_csv_jsonl_and_parquet_of_one_table_are_the_same_runs(tmp_path, power_rows):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in power_rows[:70]))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in reversed(power_rows[70:])))
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, power_rows[0])
        writer.writeheader()
        writer.writerows(power_rows)
    wide = [row | {"train_flops": str(row["train_flops"])} for row in power_rows]  # more than 64 bits
    pyarrow.parquet.write_table(pa.Table.from_pylist(wide), tmp_path / "t.parquet")
    found = {read_runs(tmp_path / name).data_hash for name in ("*.jsonl", "t.csv", "t.parquet")}
    assert found == {read_runs(power_rows).data_hash}
    assert read_runs(changed(power_rows, 0, loss=3.0)).data_hash not in found


def test_records_of_training_are_read(tmp_path):
    record = RunRecord(
        run_id="a", config_hash="h", version="0", status="finished", seed=0, num_steps=4.0, window=4.0,
        depth_law="fixed", n_once=0, n_rec=100, width=4, layers_once=0, layers_core=1, seq_len=8, vocab_size=8,
        tokens=8000, unique_tokens=8000, train_flops=(24 * 100 + 48 * 4 * 8 // 2 + 48 * 4 // 2 + 6 * 32) * 8000,
        flops_pairs="causal", loss=2.0, loss_split="s", tokenizer="t", eval_steps=4.0, seconds=1.0, hardware="cpu",
    )  # fmt: skip
    for name, text in (("record.json", dump_json(record)), ("table.jsonl", json.dumps(dataclasses.asdict(record)))):
        (tmp_path / name).write_text(text)
        runs = read_runs(tmp_path / name)
        assert not runs.refused and len(runs) == 1
    assert runs.cells == [("2.765e+07", "free", "(4,4)")]


def test_names_of_others_are_mapped_and_misspelt_ones_explained(power_rows):
    other = [{("windows" if name == "window" else name): value for name, value in row.items()} for row in power_rows]
    message = r"No column 'windows' is known. Did you mean 'window'\? Map names with columns="
    with pytest.raises(RunsError, match=message):
        read_runs(other)
    assert len(read_runs(other, columns={"windows": "window"})) == len(power_rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "Column 'tokens' is empty in 144 rows"),
        ({"loss": "many"}, "row 0: loss must be a number. Got 'many'"),
    ],
)
def test_tables_that_cannot_be_read(power_rows, change, message):
    with pytest.raises(RunsError, match=message):
        read_runs(changed(power_rows, **change))


def test_files_that_cannot_be_read(tmp_path, power_rows):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text("{")
    for name, message in (("a.txt", "must end in .jsonl"), ("b.jsonl", "must hold JSON"), ("c.csv", "No such file")):
        with pytest.raises(RunsError, match=message):
            read_runs(tmp_path / name)
    with pytest.raises(RunsError, match="Got none"):
        read_runs([])
    with pytest.raises(RunsError, match="leaves no row"):
        read_runs(power_rows, only={"loss_split": "other"})
    with pytest.raises(RunsError, match="loss_unit must be one of nats, bits, ppl"):
        read_runs(power_rows, loss_unit="bpb")


@pytest.mark.parametrize(
    ("rows", "values", "kind", "level", "message"),
    [
        ((0, 1), {"loss": float("nan")}, "loss_not_finite", Level.WARNING, "2 runs have no finite loss"),
        ((1,), {"run_id": "synthetic-000"}, "duplicate", Level.FAILURE, "run 'synthetic-000' occurs twice"),
        ((3,), {"window": 9}, "window", Level.FAILURE, "row 3: window 9 must be 1 to num_steps"),
        ((), {"loss": 21.0}, "loss_unit", Level.FAILURE, "look like perplexity; nats expected"),
        ((2,), {"tokens": 0.97}, "tokens", Level.FAILURE, "Tokens are counted singly"),
        ((3,), {"train_flops": 10**18}, "flops", Level.FAILURE, "row 3: recorded 1e\\+18, formula"),
        ((5,), {"loss_split": "other"}, "mixed", Level.FAILURE, r"2 evaluation splits \(1 and 143 runs\)"),
        ((5,), {"flops_pairs": "causal"}, "mixed", Level.FAILURE, "2 FLOP conventions"),
        ((5,), {"status": "diverged"}, "status", Level.INFO, "1 runs are diverged: dropped, never imputed"),
        ((5,), {"eval_steps": 99}, "other_depth", Level.WARNING, "1 rows have eval_steps != num_steps"),
        ((4, 5), {"unique_tokens": 10**6}, "epochs", Level.WARNING, "2 runs repeat data up to"),
        ((60,), {"depth_law": '{"kind": "P"}'}, "mean_depth", Level.WARNING, "num_steps 4 is a mean in 1 rows"),
        ((60,), {"depth_law": "[[2, 1, 0.7]]"}, "depth_law", Level.FAILURE, "masses of sum 1"),
        ((0,), {"n_rec": 0}, "parameters", Level.FAILURE, "n_rec must be above 0"),
    ],
)
def test_every_check_says_what_is_wrong(power_rows, rows, values, kind, level, message):
    found = kinds(read_runs(changed(power_rows, *rows, **values)))
    assert found[kind].level is level
    assert re.search(message, str(found[kind]))


def test_a_head_inside_the_counts_is_recognised(power_rows):
    rows = changed(power_rows)
    rows[7]["n_rec"] += rows[7]["width"] * rows[7]["vocab_size"]
    assert "Pass counts without embedding and head" in str(kinds(read_runs(rows))["head_counted"])


def test_rows_are_dropped_with_a_count_and_identical_ones_kept_once(power_rows):
    runs = read_runs([*power_rows, power_rows[0]])
    assert len(runs) == len(power_rows) and runs.dropped == {"identical row": 1}
    left = read_runs(changed(power_rows, 4, eval_steps=99))
    assert len(left) == len(power_rows) - 1
    assert len(read_runs(changed(power_rows, 4, eval_steps=99), test_time=True)) == len(power_rows)


def test_seeds_of_one_configuration_give_the_noise(power_rows):
    again = [row | {"run_id": f"{row['run_id']}b", "seed": 1, "loss": row["loss"] + 0.01} for row in power_rows[:9]]
    assert read_runs([*power_rows, *again]).sigma == pytest.approx(0.01 / 2**0.5)
    assert "noise_unknown" in kinds(read_runs(power_rows))


def test_units_of_loss_are_converted(power_rows):

    ppl = [row | {"loss": math.exp(row["loss"])} for row in power_rows]
    assert read_runs(ppl, loss_unit="ppl").column("loss") == pytest.approx(read_runs(power_rows).column("loss"))
    assert kinds(read_runs(ppl))["loss_unit"].level is Level.FAILURE


def test_budgets_without_a_label_are_runs_of_like_flops(power_rows):
    plain = [{name: value for name, value in row.items() if name != "budget"} for row in power_rows]
    assert len(set(read_runs(plain).column("budget"))) == 3
    assert "144 runs, 36 cells (4 to 4 widths each), 3 budgets, 12 pairs" in str(read_runs(plain))


def test_a_law_of_depth_becomes_a_mixture(power_rows):
    row = power_rows[60] | {"depth_law": PMF, "num_steps": 3.0, "window": 1.5, "eval_steps": 3, "run_id": "s"}
    row.pop("train_flops")
    runs = read_runs([*power_rows, row])
    assert depth_pmf(row) == [(2.0, 1.0, 0.5), (4.0, 2.0, 0.5)]
    place = runs.column("run_id").index("s")
    assert sorted(runs.points().mixture[place])[-3:] == [0.0, 0.5, 0.5]

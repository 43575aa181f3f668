"""Benchmarks of the engine: sizes shrink to seconds, columns are the specified ones, counts are right."""

import argparse
import json
import sys

import pytest
import torch
from benchmarks import engine_cpu, timing
from benchmarks.cases import engine, engine_depth, engine_load, engine_memory
from benchmarks.cases.engine_table import check_equal

from looplab.recurrence.loop import forward

COLUMNS = (
    "arm k r dbar W R m numerics kv_mib tokens_s ratio low high S_max S_adj work occupancy time prefill_launches "
    "core_launches coda_launches core_rows coda_rows waste_delayed waste_late waste_cancelled waste_replay padding "
    "ttft_ms_p50 ttft_ms_p90 ttft_ms_p99 tpot_ms_p50 latency_ms_p99 queue_ms_p90"
).split()


def options(**changes):
    small = {
        "model": "loop-64", "rows": 2, "residents": 3, "requests": 12, "prompt": 8, "outputs": 6, "pairs": 1,
        "sequential": 1, "numerics": "fast", "clock": "process", "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    return argparse.Namespace(**small | changes)


def test_all_specified_cases_are_reachable():
    asked = "depth_mix width coda_rows kv_rules gates online rivals prefix pressure overhead long_context targets"
    assert set(asked.split()) <= set(engine.CASES)


def test_parts_of_the_cpu_run_are_cases_with_options_that_exist():
    shares = 0.0
    for name, share, words in engine_cpu.CASES:
        asked = engine.parser().parse_args([name, *words.split()])
        assert asked.cases == [name] and asked.threads == 1
        shares += share
    assert shares == pytest.approx(1)
    assert {name for name, *_ in engine_cpu.CASES} >= {"targets", "rivals", "online", "gates", "kv_rules"}


@pytest.mark.nightly
def test_a_case_reports_every_column_and_writes_three_files(tmp_path, monkeypatch, capsys):
    words = "engine coda_rows --model loop-64 --rows 2 --requests 12 --prompt 8 --outputs 6 --pairs 1 --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path)])
    engine.main()
    found = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(found) == {".json", ".md", ".tex"}
    held = json.loads(found[".json"].read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == held
    assert {"hardware", "threads", "torch", "looplab", "commit", "options"} <= set(held)
    assert [row["m"] for row in held["rows"][1:]] == [1, 3]
    for row in held["rows"]:
        assert set(COLUMNS) <= set(row)
    text = found[".md"].read_text()
    assert all(f"| {name} |" in text for name in ("ratio", "core_launches", "waste_replay"))


@pytest.mark.nightly
def test_pages_below_the_need_are_counted_and_change_no_token():
    rows = engine_memory.pressure(options(prompt=8, outputs=56, pages=[1.0, 0.35]))
    roomy, tight = rows
    assert roomy["preemptions"] == roomy["waste_replay"] == 0
    assert tight["preemptions"] > 0 and tight["waste_replay"] > 0 and tight["work"] < 1 == roomy["work"]


@pytest.mark.nightly
def test_shared_prompts_are_read_once():
    rows = engine_memory.prefix(options(context=64, shares=[1.0], requests=8))
    plain, cached = rows
    # 32 tokens are two pages; the last token of a prompt is always read, so one page is saved wherever one is cached.
    saved = cached["prefill_saved"]
    assert plain["hit_rate"] == 0 and saved == cached["hit_rate"] * 8 * 32 * 4 and saved % (16 * 4) == 0 and saved > 0


@pytest.mark.nightly
def test_a_target_is_met_where_the_share_of_the_bound_is_reached(monkeypatch):
    monkeypatch.setattr(engine_depth, "TARGETS", (("loop-64", 1.5, False, {2: 1e-9, 4: 99.0}),))
    rows = engine_depth.targets(options(widths=[2, 4], pairs=2, only=None))
    assert [row["met"] for row in rows] == [True, False]
    assert [(row["W"], row["R"]) for row in rows] == [(2, 3), (4, 6)]
    for row in rows:
        assert row["work"] == 1 and row["time"] == pytest.approx(row["ratio"] / row["S_adj"])


def test_targets_are_those_of_three_models_at_three_widths():
    cells = [(name, factor, width) for name, factor, _, least in engine_depth.TARGETS for width in least]
    assert len(cells) == len(set(cells)) == 15
    assert {name for name, *_ in cells} == {"loop-512", "loop-768", "sandwich-512"}


def test_different_tokens_are_refused_before_any_ratio():
    check_equal("both", [[[1], [2, 3]], [[1], [2, 3]]])
    with pytest.raises(
        AssertionError, match="both must say the same tokens. They differ in 1 of 2 requests, first in 1"
    ):
        check_equal("both", [[[1], [2, 3]], [[1], [2, 4]]])


def test_latencies_of_a_trail():
    found = engine_load.Trail(arrived=1.0, opened=1.5, said=(2.0, 2.5, 3.0)).latencies()
    assert found == {"ttft_ms": 1000, "tpot_ms": 500, "latency_ms": pytest.approx(2000 / 3), "queue_ms": 500}


def test_loads_share_the_start_of_prompts_and_spread_lengths():
    load = engine_load.load_of("spread", 4, requests=40, prompt=8, outputs=8, seed=0, shared=4, spread=True)
    assert len({prompt[:4] for prompt in load.prompts}) == 1 and len({prompt[4:] for prompt in load.prompts}) == 40
    assert {len(own) + 1 for own in load.depths} == set(range(4, 13))


def test_rows_become_two_tables_with_words_in_both(tmp_path):
    rows = [{"arm": "a", "speed": 1.5, "count": 3}, {"arm": "b", "speed": 2.0, "count": 1000}]
    timing.report("made", {"rows": rows}, str(tmp_path), lambda column: column == "count")
    text = next(tmp_path.glob("*.md")).read_text()
    assert (
        "| arm | speed |" in text and "| b | 2.000 |" in text and "| arm | count |" in text and "| b | 1,000 |" in text
    )


@pytest.mark.parametrize(("name", "steps"), [("loop-64", 4), ("sandwich-64", 16)])
def test_models_of_the_engine_cases_run(name, steps):
    model = engine_load.model_of(name)
    assert model.spec.default_steps == steps
    assert forward(model, torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, engine_load.VOCAB)

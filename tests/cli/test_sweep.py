import json
import re

import pytest
from rich.console import Console

from looplab._config import config_hash, to_dict
from looplab.cli import exit_codes, main
from looplab.cli import sweep as command
from looplab.cli.sweep import Progress
from looplab.executors import Serial
from looplab.training.sweep.claim import Seen, claim_path, take
from looplab.training.sweep.run import SweptRun
from looplab.training.sweep.table import SweepTable
from looplab.training.trainer import train
from training.sweep.test_table import record
from training.tiny_run import broken_off, core, tiny_run


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The words of a sweep over a run of below a second, made in this process."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(to_dict(tiny_run(tmp_path, model=core(), steps=2))))
    monkeypatch.setattr(command, "sweep_pool", in_process)
    return ["sweep", str(path), "--out", str(tmp_path / "out")]


def in_process(name, configs, *, workers, **options):
    """Refuses what the real one refuses."""
    from looplab.training.sweep.run import sweep_pool

    sweep_pool(name, configs, workers=workers, **options)
    return Serial()


def refused(words, capsys):
    code = main(words)
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    return code, printed.err.strip()


def test_help_shows_the_forms_of_values_and_how_to_go_on(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", "--help"])
    assert stopped.value.code == exit_codes.DONE
    printed = capsys.readouterr().out
    for words in ("--over seed=0..2", "log(1e-4..1e-2)", "TruncatedBPTT(window=2)", "The\nsame command skips finished"):
        assert words in printed
    with pytest.raises(SystemExit) as stopped:
        main(["sweep"])
    assert stopped.value.code == exit_codes.USAGE
    assert capsys.readouterr().err.startswith("usage: looplab sweep RECIPE")


def test_the_overview_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    overview = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    own = {f"--{name.strip('_').replace('_', '-')}" for name in command.Options.__dataclass_fields__} - {"--run"}
    assert own <= overview


def test_a_sweep_leaves_one_table_and_a_page(tiny, tmp_path, capsys):
    words = [*tiny, "--over", "seed=0..1", "--over", "optimizer.lr=1e-3,1e-2", "--log-every", "1"]
    assert main(words) == exit_codes.DONE
    printed = capsys.readouterr()
    folder = tmp_path / "out" / "sweep"
    assert {"table.csv", "table.parquet", "results.json", "report.html", "tables.tex", "figures"} == {
        path.name for path in folder.iterdir()
    }
    table = SweepTable.from_json((folder / "results.json").read_text())
    assert [row.label for row in table.rows] == [f"seed={s} lr={lr}" for s in (0, 1) for lr in ("0.001", "0.01")]
    assert table.command.startswith("looplab sweep ") and "--over optimizer.lr=1e-3,1e-2" in table.command
    assert printed.out.startswith(str(table)) and printed.out.endswith(f"Report: {folder / 'report.html'}\n")
    assert "[4/4] seed=1 lr=0.01: finished  loss 5." in printed.err
    assert main([*words, "--quiet", "--name", "again"]) == exit_codes.DONE
    assert capsys.readouterr().err == "" and (tmp_path / "out" / "again" / "table.csv").exists()
    before, after = (
        [row.record for row in SweepTable.from_json((tmp_path / "out" / name / "results.json").read_text()).rows]
        for name in ("sweep", "again")
    )
    assert before == after, "nothing ran again"


def test_a_dry_run_says_how_every_run_stands_and_writes_nothing(tiny, tmp_path, capsys):
    base = tiny_run(tmp_path, model=core(), steps=4)
    (tmp_path / "tiny.json").write_text(json.dumps(to_dict(base)))
    runs = tmp_path / "out" / "runs"
    configs = [tiny_run(tmp_path, model=core(), steps=4, seed=seed) for seed in range(4)]
    folders = [runs / config_hash(config) for config in configs]
    train(configs[0], folders[0])
    broken_off(configs[1], folders[1], steps=2)
    claim = take(claim_path(folders[2]), "theirs")
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    assert main([*tiny, "--over", "seed=0..3", "--dry-run"]) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [folder.name for folder in folders]
    states = ["finished", "at step 2", f"with process {claim._facts['pid']} on ", "new"]
    assert all(state in line for state, line in zip(states, lines, strict=False))
    assert [line.split()[-1] for line in lines[:4]] == [f"seed={seed}" for seed in range(4)]
    assert lines[4] == "4 runs, 1 finished, 3 to do"
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before


def test_runs_that_come_from_a_file_or_are_drawn(tiny, tmp_path, capsys):
    (tmp_path / "runs.yaml").write_text("- {optimizer.lr: 1e-3}\n- {optimizer.lr: 1e-2, clip_norm: none}\n")
    assert main([*tiny, "--from", str(tmp_path / "runs.yaml"), "--over", "seed=0..1", "--dry-run"]) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("new  ")[1] for line in lines[:-1]] == [
        f"lr={lr} clip_norm={clip} seed={seed}" for seed in (0, 1) for lr, clip in (("0.001", "1"), ("0.01", "None"))
    ]
    assert main([*tiny, "--over", "optimizer.lr=log(1e-4..1e-2)", "--random", "3", "--dry-run"]) == exit_codes.DONE
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 runs")
    words = [*tiny, "--zip", "optimizer.lr=1e-3,1e-2", "--zip", "steps=1,2", "--dry-run"]
    assert main(words) == exit_codes.DONE
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 runs")


def test_a_lost_run_is_named_and_the_exit_code_says_so(tiny, tmp_path, capsys):
    assert main([*tiny, "--over", f"data.sources=[gone.txt],[{tmp_path / 'text.jsonl'}]"]) == exit_codes.MODEL
    out = capsys.readouterr().out
    assert "failed: " in out and "gone.txt: no such file" in out
    statuses = [row.status for row in SweepTable.from_json((tmp_path / "out/sweep/results.json").read_text()).rows]
    assert statuses == ["failed", "finished"]


def test_an_interrupt_prints_the_command_that_goes_on(tiny, capsys, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupt)
    assert main([*tiny, "--over", "gradient=TruncatedBPTT(window=2)"]) == exit_codes.INTERRUPTED
    said = capsys.readouterr().err
    assert f"Interrupted. To go on: looplab sweep {tiny[1]} --out {tiny[3]} --over 'gradient=Truncated" in said


WRONG = [
    ([], "a sweep must vary something. Got no --over, --zip or --from. Add, for instance, --over seed=0..2."),
    (["--over", "optimizer.lrr=1"], "optimizer.lrr=1: Unknown config key 'lrr' for RunConfig.optimizer. Did you mean"),
    (["--over", "seed="], "seed: an axis must have at least one value. Got 'seed='."),
    (["--over", "seed=0,0"], "runs must differ. Got equal configurations for seed=0 and seed=0."),
    (["--over", "steps=0"], "steps=0: RunConfig.steps must be at least 1. Got 0."),
    (["--over", "seed=0", "--workers", "0"], "--workers must be from 1 to "),
    (["--over", "seed=0", "--workers", "9999"], "--workers must be from 1 to "),
    (["--over", "seed=0", "--workers", "many"], "--workers must be a number or auto. Got 'many'."),
    (["--over", "seed=0", "--threads", "9999", "--workers", "2"], "--workers must be from 1 to 1, so that workers x"),
    (["--over", "seed=0", "--max-retries", "-1"], "--max-retries must be 0 or more. Got -1."),
    (["--over", "seed=0", "--heartbeat", "0"], "--heartbeat must be positive seconds. Got 0."),
    (["--over", "seed=0", "--address", "a:1"], "--address must be left out for local. Got 'a:1'. Use --executor ray."),
    (["--over", "seed=0", "--name", "runs"], "--name must be the name of a folder, and not runs. Got 'runs'."),
    (["--over", "seed=0", "--name", "a/b"], "--name must be the name of a folder, and not runs. Got 'a/b'."),
    (["--over", "seed=0", "--device", "abacus"], "--device must be one that this PyTorch can use"),
    (["--from", "gone.yaml"], "--from gone.yaml must be a JSON or YAML list of mappings"),
    (["--from", "x.json", "--random", "2"], "--random must be left out beside --from, whose runs are given. Got both."),
    (["--over", "lr=1e-4..1e-2"], "lr: values between 0.0001 and 0.01 must be drawn. Got a grid."),
    (["--over", "seed=0..1", "--random", "9"], "--random must be at most the number of different draws. Got 9"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_mistake_is_one_line_and_code_2_and_leaves_nothing(tiny, tmp_path, capsys, words, message):
    code, said = refused([*tiny, *words], capsys)
    assert code == exit_codes.USAGE
    assert said.startswith(f"sweep: {message}")
    assert not (tmp_path / "out").exists()


def test_a_field_in_the_file_and_as_an_option_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "runs.json").write_text('[{"seed": 1}]')
    code, said = refused([*tiny, "--from", str(tmp_path / "runs.json"), "--over", "seed=0..1"], capsys)
    assert code == exit_codes.USAGE and "a field must be varied once. Got seed in " in said


def test_an_unknown_recipe_gets_a_suggestion(capsys):
    code, said = refused(["sweep", "text-cor", "--over", "seed=0"], capsys)
    assert code == exit_codes.USAGE
    assert said.startswith("sweep: Unknown recipe 'text-cor'. Did you mean 'text-core'?")


def test_a_folder_of_something_else_is_code_7(tiny, tmp_path, capsys):
    (tmp_path / "out").write_text("precious")
    code, said = refused([*tiny, "--over", "seed=0"], capsys)
    assert (code, said) == (
        exit_codes.BUSY,
        f"sweep: {tmp_path / 'out'} must be a folder. Got a file. Choose another --out.",
    )
    (tmp_path / "out").unlink()
    train(tiny_run(tmp_path, steps=1), tmp_path / "out")
    code, said = refused([*tiny, "--over", "seed=0"], capsys)
    assert code == exit_codes.BUSY and "holds a run (run.json). Give --out a folder of sweeps" in said


def test_without_ray_the_error_says_what_to_install(tiny, capsys, monkeypatch):
    import sys

    from looplab.executors import RayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(command, "sweep_pool", lambda *args, **options: RayPool())
    code, said = refused([*tiny, "--over", "seed=0", "--executor", "ray"], capsys)
    assert code == exit_codes.USAGE and "pip install 'looplab[cluster]'" in said


# What it says.


def told(tmp_path, *, terminal, capsys):
    config = tiny_run(tmp_path)
    console = Console(force_terminal=terminal, stderr=True, highlight=False, soft_wrap=True, width=100)
    done = SweptRun(config=config, folder=tmp_path, status="finished", record=record(config, 2.5))
    lost = SweptRun(config=config, folder=tmp_path, status="failed", message="its worker died.\nLast lines")
    with Progress(["a", "b", "c"], console=console) as watcher:
        watcher.advanced(1, Seen(b"", {"host": "alpha", "pid": 7, "step": 3, "steps": 6, "loss": 2.0}))
        watcher.advanced(2, Seen(b"", {"host": "alpha", "pid": 8}))
        watcher.died(1, "killed", again=True)
        watcher.waiting(2, "process 3 on beta")
        watcher.waiting(2, "process 3 on beta")
        watcher.ended(0, done, earlier=True)
        watcher.ended(1, lost, earlier=False)
    return capsys.readouterr().err


def test_elsewhere_than_on_a_terminal_every_event_is_a_line(tmp_path, capsys, monkeypatch):
    assert told(tmp_path, terminal=False, capsys=capsys).splitlines() == [
        "b: its worker died (killed); tried again",
        "c: left to process 3 on beta",
        "[1/3] a: finished earlier  loss 2.5000",
        "[2/3] b: failed  its worker died.",
    ]
    monkeypatch.setattr(command, "EVERY", 0.0)
    first = told(tmp_path, terminal=False, capsys=capsys).splitlines()[0]
    assert first == "0 of 3 runs done; b: step 3/6  loss 2.0000  process 7 on alpha"


def test_on_a_terminal_runs_under_way_are_lines_that_move(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    said = told(tmp_path, terminal=True, capsys=capsys)
    assert "b: step 3/6  loss 2.0000  process 7 on alpha" in said and "c: starting  process 8 on alpha" in said
    assert "\x1b[" in said

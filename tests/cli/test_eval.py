"""`looplab eval`: from the command line to the page, without a network."""

import json
import subprocess
import sys

import pytest
import torch

from interop.eval_task_files import offline  # noqa: F401, a fixture
from looplab.cli import exit_codes, main
from looplab.cli.eval import ProgressLine
from looplab.interop import lm_eval as extra
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder

TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" value", " list"]
doc_to_target: answer
target_delimiter: ""
"""


@pytest.fixture
def task(tmp_path):
    documents = [{"text": f"Return the {word}", "answer": i % 2} for i, word in enumerate("key list name type".split())]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    (tmp_path / "words.yaml").write_text(TASK, encoding="utf-8")
    return tmp_path / "words.yaml"


def run(*words, code=exit_codes.DONE):
    assert main(["eval", *map(str, words)]) == code


def test_a_local_task_is_scored_at_several_depths_and_shown(task, tmp_path, capsys, offline):  # noqa: F811
    out = tmp_path / "out"
    run("text-2x4-sampled", "--tasks", task, "--num-steps", "1,2,4,8", "--out", out)
    printed = capsys.readouterr()
    assert "text-2x4-sampled at 1, 2, 4, 8 applications" in printed.out
    assert f"Report: {out / 'report.html'}" in printed.out
    assert "words  log-likelihoods 8/8  100%" in printed.err
    assert {p.name for p in out.iterdir()} >= {"report.html", "results.json", "tables.tex", "figures", "manifest.json"}
    assert {p.name for p in (out / "figures").iterdir()} == {"depth-words.svg", "depth-words.pdf"}
    result = json.loads((out / "results.json").read_text())
    assert {score["depth"] for score in result["scores"]} == {1, 2, 4, 8}
    assert result["command"].startswith("looplab eval text-2x4-sampled --tasks")
    assert result["tasks"][0]["counts"]["launches"] == 8
    before = (out / "results.json").read_bytes()
    run("text-2x4-sampled", "--tasks", task, "--num-steps", "1,2,4,8", "--out", out, "--quiet")
    again = capsys.readouterr()
    assert again.out == printed.out and again.err == ""
    assert (out / "results.json").read_bytes() == before
    run("text-2x4-sampled", "--tasks", task, "--out", out, "--seed", 3, code=exit_codes.BUSY)
    assert "seed 1234 -> 3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_built_in_tasks_run_as_the_page_says(tmp_path):
    """In a process of its own, where the hub's libraries are told that there is no network."""
    command = [sys.executable, "-m", "looplab.cli", "eval", "text-core", "--tasks", "builtin", "--limit", "4"]
    apart = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=apart, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "looplab_finish_word exact_match" in result.stdout
    assert "Warning" not in result.stderr and "lm_eval" not in result.stderr


def test_an_exit_rule_and_settings_reach_the_record(task, tmp_path, offline):  # noqa: F811
    run(
        "text-core", "--tasks", task, "--exit-rule", "latent", "--exit-threshold", "0.5", "--init", "model",
        "--system-prompt", "Say.", "--num-fewshot", "1", "--limit", "2", "--batch-size", "1", "--out", tmp_path / "out",
        "--quiet",
    )  # fmt: skip
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (result["exit_rule"], result["system_prompt"], result["limit"]) == ("latent(0.5)", "Say.", 2)
    assert result["tasks"][0]["num_fewshot"] == 1
    assert list(result["tasks"][0]["steps"]) == [str(result["depths"][0])]


def test_a_depth_past_the_trained_one_is_said_in_one_line(task, tmp_path, capsys, offline):  # noqa: F811
    from looplab.interop import load

    deepest = max(load("text-core").model.spec.trained_depth.support()) + 1
    run("text-core", "--tasks", task, "--num-steps", deepest, "--out", tmp_path / "out")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert f"num_steps={deepest} is beyond the trained depth" in line
    assert any("beyond" in note for note in json.loads((tmp_path / "out" / "results.json").read_text())["notes"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--tasks ,", exit_codes.USAGE, '--tasks must name tasks. Got none. Try "builtin".'),
        ("--tasks none.yaml", exit_codes.DATA, "no such file. Check the path"),
        ("--num-steps 1,x", exit_codes.USAGE, "--num-steps must be whole numbers, such as 1,2,4,8. Got '1,x'"),
        ("--num-steps 2,2", exit_codes.MODEL, "num_steps must be one depth or several different ones"),
        ("--exit-rule hazzard", exit_codes.USAGE, "Did you mean 'hazard'"),
        ("--exit-threshold 1", exit_codes.USAGE, "--exit-threshold needs --exit-rule"),
        ("--exit-rule hazard --exit-threshold 0.5", exit_codes.MODEL, "no trained gate"),
        ("--kv-rule singel", exit_codes.USAGE, "--kv-rule must be one of"),
        ("--limit 0", exit_codes.USAGE, "limit must be at least 1. Got 0"),
        ("--apply-chat-template", exit_codes.MODEL, "MODEL must have a chat template"),
        ("--device abacus", exit_codes.USAGE, "--device must be one"),
        ("--batch-tokens 0", exit_codes.USAGE, "batch_tokens must be at least 1"),
    ],
)
def test_mistakes_end_as_one_line(options, code, message, tmp_path, capsys, offline):  # noqa: F811
    words = [] if options.startswith("--tasks") else ["--tasks", "builtin"]
    run("text-core", *words, *options.split(), "--out", tmp_path / "out", code=code)
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1 and error.startswith("eval: ")


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    run("text-cor", "--tasks", "builtin", "--out", tmp_path / "out", code=exit_codes.MODEL)
    assert "MODEL must be a checkpoint folder or a built-in name. Got 'text-cor'" in capsys.readouterr().err


def test_a_model_of_grids_is_refused(tmp_path, capsys):
    torch.manual_seed(0)
    save_folder(tmp_path / "trm", build(PRESETS["tiny-trm-attn"]()))
    run(tmp_path / "trm", "--tasks", "builtin", "--out", tmp_path / "out", code=exit_codes.MODEL)
    assert "MODEL must be causal" in capsys.readouterr().err


def test_a_generation_that_has_no_room_is_the_tasks_mistake(tmp_path, capsys, offline):  # noqa: F811
    words = [
        "--tasks",
        "looplab_finish_word",
        "--gen-kwargs",
        "max_gen_toks=256",
        "--limit",
        "1",
        "--out",
        tmp_path / "out",
    ]
    run("text-core", *words, code=exit_codes.DATA)
    assert "max_gen_toks must be below the model's context of 256 tokens. Got 256" in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(extra, "LM", object)
    run("text-core", "--tasks", "builtin", "--out", tmp_path / "out", code=exit_codes.USAGE)
    assert "pip install 'looplab[eval]'" in capsys.readouterr().err


def test_help_does_not_need_the_extra():
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from looplab.cli import main\n"
        "try: main(['eval', '--help'])\nexcept SystemExit as stopped: sys.exit(stopped.code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--apply-chat-template" in result.stdout


def test_progress_is_a_line_at_the_end_and_every_ten_seconds():
    from io import StringIO

    from rich.console import Console

    now = iter([0.0, 1.0, 11.0, 12.0])
    text = StringIO()
    line = ProgressLine(Console(file=text, width=100), clock=lambda: next(now))
    line.started("words")
    for done in (1, 2, 6, 8):
        line.advanced("texts", done, 8)
    assert text.getvalue().splitlines() == ["words  texts 6/8  75%  eta 0:04", "words  texts 8/8  100%  eta 0:00"]

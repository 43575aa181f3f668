"""`looplab generate`: what is written where, and what is refused."""

import json
from dataclasses import replace

import pytest

from looplab.cli import main
from looplab.cli.generate import summary
from looplab.engine.request import DepthUsage, Usage

INDEXED = ["--kv-rule", "depth_indexed"]
SIZES = ["--num-pages", "32", "--min-coda-rows", "1"]


def run(capsys, *words, model="text-core"):
    code = main(["generate", model, *words, *SIZES])
    return code, *capsys.readouterr()


def test_the_text_goes_to_stdout_and_the_sum_to_stderr(capsys):
    code, out, err = run(capsys, "--prompt", "First Citizen:", "--max-tokens", "6")
    assert code == 0 and 6 <= len(out) <= 7
    assert "14 prompt + 6 output tokens; mean 8.00 of 8 steps (8: 5)" in err and "KV rule last_exited" in err
    assert run(capsys, "--prompt", "First Citizen:", "--max-tokens", "6", "--quiet")[1:] == (out, "")


def test_guesses_leave_the_text_as_it_is_and_are_counted(capsys):
    words = ("--prompt", "First Citizen:", "--max-tokens", "6")
    code, out, err = run(capsys, *words, "--draft-steps", "4", "--draft-tokens", "2")
    assert code == 0 and out == run(capsys, *words)[1] and "guesses accepted" in err


def test_the_prompt_may_come_from_a_file(capsys, tmp_path):
    (tmp_path / "p.txt").write_text("First Citizen:")
    from_file = run(capsys, "--prompt-file", str(tmp_path / "p.txt"), "--max-tokens", "6")[1]
    assert from_file == run(capsys, "--prompt", "First Citizen:", "--max-tokens", "6")[1]
    assert run(capsys, "--prompt-file", str(tmp_path / "no.txt"))[0] == 4


def test_several_answers_are_numbered_and_depend_on_the_seed_alone(capsys):
    words = ("--prompt", "a", "--max-tokens", "4", "--n", "2", "--temperature", "1", "--seed", "3")
    first, second = run(capsys, *words)[1], run(capsys, *words)[1]
    assert first == second and first.startswith("[0]") and "\n[1]" in first


def test_json_lines_hold_tokens_steps_and_usage(capsys):
    words = ("--prompt", "abc", "--max-tokens", "4", "--exit-rule", "latent", "--exit-threshold", "0.3", "--json")
    code, out, err = run(capsys, *words)
    (one,) = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "is unknown: run looplab reuse" in err and one["finish_reason"] == "length"
    assert len(one["tokens"]) == len(one["steps"]) == 4 and one["usage"]["depth"]["exit_rule"] == "latent"
    assert "looplab reuse" in one["usage"]["depth"]["warnings"][0]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "generate: give one of --prompt and --prompt-file. Got neither."),
        (["--prompt", "a", "--prompt-file", "b"], 2, "Got both."),
        (["--prompt", "a", "--max-tokens", "600"], 2, "600 output tokens; context 256; lower max_tokens to 255"),
        (["--prompt", "a", "--num-steps", "99"], 2, "num_steps must be in 1..8"),
        (["--prompt", "a", "--num-steps", "2", "--exit-rule", "latent"], 2, "exclude each other"),
        (["--prompt", "a", "--exit-threshold", "0.5"], 2, "--exit-threshold needs --exit-rule"),
        (["--prompt", "a", "--temperature", "3"], 2, "temperature must be in [0, 2]; got 3"),
        (["--prompt", "a", "--exit-rule", "hazard", "--exit-threshold", "0.5"], 3, "has no trained gate"),
        (["--prompt", "a", *INDEXED, "--exit-rule", "latent", "--exit-threshold", "1"], 3, "use last_exited"),
        (["--prompt", "a", "--gate", "nowhere.json"], 3, "no such file"),
        (["--prompt", "a", "--draft-steps", "8"], 3, "draft_steps must be in 1..7"),
        (["--prompt", "a", "--draft-steps", "2", "--num-steps", "2"], 2, "draft_steps must be in 1..1"),
        (["--prompt", "a", "--draft-steps", "1", "--kv-rule", "single"], 3, "use last_exited or depth_indexed"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_a_code(capsys, words, code, message):
    found, out, err = run(capsys, *words)
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


def test_a_model_of_a_task_is_refused(capsys):
    code, _, err = run(capsys, "--prompt", "a", model="par-swaps")
    assert code == 3 and "must have a tokenizer" in err


def test_the_sum_says_depth_savings_and_warnings():
    depth = DepthUsage(
        exit_rule="hazard", threshold=0.5, max_steps=4, prefill_steps=4, decode_tokens=3, histogram=((2, 2), (4, 1)),
        applications=8, full_depth_applications=12, saved_flops_fraction=0.25, kv_rule="single", reuse="unknown",
        warnings=("w",),
    )  # fmt: skip
    said = summary(Usage(prompt_tokens=5, cached_tokens=0, output_tokens=4, depth=depth, seed=7))
    assert said == (
        "5 prompt + 4 output tokens; mean 2.67 of 4 steps (2: 2, 4: 1), 25 % of FLOPs saved; exit rule hazard, "
        "KV rule single, seed 7\nwarning: w"
    )
    guessed = replace(depth, drafted_tokens=10, accepted_tokens=7, draft_rounds=4, warnings=())
    said = summary(Usage(prompt_tokens=5, cached_tokens=0, output_tokens=4, depth=guessed, seed=7))
    assert "70% of 10 guesses accepted, 1.75 per round" in said

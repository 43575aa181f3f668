import dataclasses
import json

import pytest

from looplab.cli import main
from looplab.engine.verdict import read_results
from looplab.interop import load
from looplab.models.base import build
from looplab.models.folder import save_folder, weight_hash
from looplab.models.ouro import tiny_ouro

TEXT = "\n".join(json.dumps({"text": f"{n} " + " ".join(str(n * k) for k in range(9))}) for n in range(9))
SMALL = ("--windows", "8", "--prompt-tokens", "3", "--output-tokens", "2", "--replicates", "50", "--quiet")
RULE = ("--exit-rule", "hazard", "--exit-threshold", "0.5")


@pytest.fixture
def folder(tmp_path):
    config = dataclasses.replace(tiny_ouro(), vocab=259, max_positions=16)
    save_folder(tmp_path / "model", build(config, seed=1))
    (tmp_path / "some.jsonl").write_text(TEXT)
    return tmp_path / "model"


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_verdict_is_written_stored_and_reported(capsys, folder, tmp_path):
    out = tmp_path / "out"
    text = ("--text", tmp_path / "some.jsonl")
    code, said, _ = run(
        capsys, "reuse", folder, *RULE, *text, "--out", out, *SMALL, "--max-delay", "1", "--free-tokens", "3"
    )
    assert code == 0 and "model under hazard(0.5), 8 windows of 3 + 2 tokens" in said
    (result,) = read_results(out)
    assert read_results(folder) == (result,), "the verdict was not kept beside the checkpoint"
    assert result.weights == weight_hash(load(folder).model)
    assert result.rules == ("last_exited", "single", "first")
    assert {v.delay for v in result.verdicts} <= {0, 1} and result.of("single").free.tokens == 3
    bytes_of = [result.of(rule).kv_bytes for rule in result.rules]
    assert bytes_of[0] == 4 * bytes_of[1] == 4 * bytes_of[2]
    page = (out / "report.html").read_text()
    assert 'data-key="verdicts[0].reuse.estimate"' in page and "Where the loss comes from" in page
    assert "single: " in page and "Free generation" in (out / "tables.tex").read_text()
    # One KV rule, into another folder; the other exit rule's result stays.
    more = ("reuse", folder, "--exit-rule", "latent", "--exit-threshold", "0.4", *text, *SMALL, "--kv-rule", "single")
    code, said, _ = run(capsys, *more, "--max-delay", "0", "--free-tokens", "0", "--json", "--out", tmp_path / "b")
    assert code == 0 and json.loads(said)["exit_rule"] == "latent(0.4)"
    assert [one.exit_rule for one in read_results(folder)] == ["hazard(0.5)", "latent(0.4)"]
    word = read_results(tmp_path / "b")[0].of("single").word
    code, *_ = run(capsys, *more, "--max-delay", "0", "--out", tmp_path / "c", "--no-store", "--fail-on", "warning")
    assert code == (0 if word == "reusable" else 6)


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (
            ("--exit-rule", "lookahead"),
            2,
            "reuse: --exit-rule lookahead needs its gate. Got none. Train it with",
        ),
        (("--exit-rule", "full"), 3, "reuse: the exit rule must stop tokens early. Got full"),
        (("--exit-rule", "hazrd"), 2, "Did you mean"),
        (("--kv-rule", "depth_indexed"), 3, "depth_indexed forbids exits; use last_exited"),
        (("--kv-rule", "singl"), 2, "kv_rule must be one of"),
        (("--kv-rule", "first_then_shared(3)"), 3, "needs min_steps of at least 3. Got 1"),
        (("--windows", "4"), 2, "reuse: --windows must be at least 8. Got 4"),
        (("--prompt-tokens", "40"), 4, "must be at most 16 together, the model's context. Got 42"),
        (("--prompt-tokens", "12"), 4, "at least 8 windows of 15 tokens. Got"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, tmp_path, more, code, message):
    rule = () if "--exit-rule" in more else RULE
    words = ("reuse", folder, *rule, "--text", tmp_path / "some.jsonl", *SMALL, *more, "--out", tmp_path / "out")
    if "12" in more:
        (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"text": "a b c"}) for _ in range(9)))
    found, _, error = run(capsys, *words)
    assert (found, message in error, error.count("\n")) == (code, True, 1), error

import json

import pytest

from looplab.cli import main
from looplab.engine.gates import gates_of, load_gate
from looplab.interop import load
from looplab.models.base import build
from looplab.models.folder import save_folder
from looplab.models.huginn import tiny_huginn
from looplab.models.ouro import tiny_ouro

LINES = [json.dumps({"text": f"text {n} of a small file, and some {n * 7919} more words {n * n}"}) for n in range(40)]
SMALL = ("--updates", "2", "--tokens", "64", "--documents", "4", "--replicates", "50", "--quiet")


@pytest.fixture
def folder(tmp_path):
    import dataclasses

    config = dataclasses.replace(tiny_ouro(), vocab=259, max_positions=64)
    save_folder(tmp_path / "model", build(config, seed=1))
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(LINES))
    return path


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_gates_are_trained_kept_and_reported(capsys, folder, text, tmp_path):
    out = folder / "gates"
    code, said, _ = run(capsys, "gate", folder, "--text", text, "--out", out, *SMALL)
    assert code == 0
    assert "Teacher: its own gate, over 4 steps. 2 updates on some.jsonl; compared on" in said
    assert f"Report: {out / 'report.html'}" in said
    model = load(folder).model
    found = gates_of(folder, model)
    assert set(found) == {"lookahead", "preloop", "same_step"}
    assert found["lookahead"].facts.model == "model" and found["lookahead"].facts.trained["updates"] == "2"
    written = json.loads((out / "gates.json").read_bytes())
    assert len(written["rows"]) == 18 and written["held_out"] == "some.jsonl, held out"
    assert 2 <= written["documents"] <= 4 and written["command"].startswith("looplab gate ")
    page = (out / "report.html").read_text()
    assert "Chosen depths on held-out text" in page and 'data-key="rows[0].agreement.estimate"' in page
    assert "Training loss" in (out / "tables.tex").read_text()
    code, again, _ = run(capsys, "gate", folder, "--text", text, "--out", out, "--json", *SMALL)
    assert json.loads(again)["rows"] == written["rows"], "the same command gave other numbers"


def test_a_model_without_a_gate_has_a_threshold_rule_as_teacher(capsys, text, tmp_path):
    import dataclasses

    huginn = dataclasses.replace(tiny_huginn(), vocab=259, padded_vocab=None, max_positions=64)
    save_folder(tmp_path / "huginn", build(huginn))
    out = tmp_path / "out"
    command = ("gate", tmp_path / "huginn", "--text", text, "--out", out, *SMALL)
    code, said, _ = run(capsys, *command, "--threshold", "0.3")
    assert code == 0 and "Teacher: the rule latent" in said
    assert load_gate(out, load(tmp_path / "huginn").model, "preloop").facts.threshold == 0.3
    assert run(capsys, *command)[0] == 2
    code, _, error = run(capsys, *command, "--kind", "lookahead", "--teacher", "hazard")
    assert code == 3 and "--teacher hazard needs a model with a gate of its own" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--kind", "late"), 2, "gate: --kind must be of lookahead, preloop, same_step. Got 'late'"),
        (("--updates", "0"), 2, "gate: --updates must be at least 1. Got 0"),
        (("--text", "nowhere.txt"), 4, "nowhere.txt"),
        (("--threshold", "0.1"), 2, "threshold must be given for a preloop gate of a threshold teacher"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, text, tmp_path, more, code, message):
    given = () if "--text" in more else ("--text", text)
    found, _, error = run(capsys, "gate", folder, "--out", tmp_path / "out", *SMALL, *given, *more)
    assert (found, message in error, error.count("\n")) == (code, True, 1), error


def test_a_model_that_cannot_stop_early_is_refused(capsys, tmp_path):
    code, _, error = run(capsys, "gate", "text-2x4-fixed", "--out", tmp_path / "out", *SMALL)
    assert code == 2 and "threshold must be given" in error
    code, _, error = run(capsys, "gate", "text-2x4-fixed", "--kind", "lookahead", "--out", tmp_path / "out", *SMALL)
    assert code == 3 and "no shorter run of looped lies on the way" in error

"""`looplab audit`: files, exit codes, and the message of every bad input."""

import dataclasses
import fcntl
import json
import re
import shlex

import pyarrow.parquet
import pytest
import torch

from looplab._config import to_dict
from looplab.audit import protocol
from looplab.audit.protocol import AuditPlan
from looplab.audit.result import AuditResult
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.interop import load
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from looplab.recipes.par import par
from looplab.records import Finding, Level
from looplab.tasks.prefix_sum import PrefixSum
from looplab.tasks.state_tracking import StateTracking

SMALL = [
    "--replicates",
    "1000",
    "--max-tokens",
    "24",
    "--grid",
    "1",
    "--controls",
    "none",
    "--probes",
    "none",
    "--quiet",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny byte models: two blocks, one core, dense."""
    home = tmp_path_factory.mktemp("models")
    for name in ("tiny-blocks", "tiny-core", "tiny-dense"):
        save_folder(home / name, build(dataclasses.replace(PRESETS[name](), vocab=259), seed=1))
    return home


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "m.jsonl"
    lines = [json.dumps({"text": f"document {i} says {i * i} and {i * 7919 % 1000}"}) for i in range(60)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def finished(models, text, tmp_path_factory):
    """A finished audit: its folder and its command line."""
    out = tmp_path_factory.mktemp("finished") / "audit-out"
    argv = [str(models / "tiny-blocks"), "--data", f"math={text}", *SMALL, "--out", str(out)]
    assert main(["audit", *argv]) == exit_codes.DONE
    return out, argv


@pytest.fixture
def no_report(monkeypatch):
    """Drawing is tested in report/; here it only takes time."""
    monkeypatch.setattr(command, "write_report", lambda result, folder, beside: folder)


def failed(capsys, code, *argv):
    """The one line on stderr of a command that ends with `code`."""
    assert main(["audit", *map(str, argv)]) == code
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_finished_audit_has_all_its_files(finished):
    out, _ = finished
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "report.html", "results.json", "ledger.json", "tables.tex", "tokens.parquet", "documents.parquet", "probes",
        "figures", "manifest.json",
    }  # fmt: skip
    assert not [name for name in names if name.endswith(".partial") or name.startswith(".tables")]
    result = AuditResult.load(out)
    assert result.domains[0].name == "math"
    tokens = pyarrow.parquet.read_table(out / "tokens.parquet")
    assert len(tokens) == len(result.domains[0].schedules) * result.domains[0].documents.evaluation_tokens
    documents = pyarrow.parquet.read_table(out / "documents.parquet")
    assert len(documents) == len(result.domains[0].schedules) * result.domains[0].documents.evaluation
    ledger = json.loads((out / "ledger.json").read_text())
    assert ledger["ran"]["evaluate"]["row_applications"] == result.counts.applications
    assert ledger["ran"]["evaluate"]["seconds"]["walk"] > 0


def test_the_results_hold_no_time_and_no_absolute_path_but_the_command(finished):
    out, argv = finished
    data = json.loads((out / "results.json").read_text())
    assert data.pop("command").startswith("looplab audit ")
    data["domains"][0]["documents"].pop("source")
    assert str(out.parent.parent) not in json.dumps(data)
    assert '"seconds"' not in json.dumps(data)
    steps = [step for domain in data["domains"] for step in domain["depth_value"]["steps"]]
    assert {step["milliseconds"] for step in steps} == {None}
    assert data["model"]["name"] == "tiny-blocks"
    assert argv


def test_the_same_command_prints_again_without_running(finished, capsys, monkeypatch):
    out, argv = finished
    monkeypatch.setattr(AuditPlan, "measure", lambda *_, **__: pytest.fail("it ran again"))
    before = (out / "results.json").read_bytes()
    assert main(["audit", *argv]) == exit_codes.DONE
    printed = capsys.readouterr().out
    assert printed.startswith("audit of tiny-blocks\nOn math, 8 applications instead of 1 lower the loss by ")
    assert printed.rstrip().endswith(f"Report: {out / 'report.html'}")
    assert (out / "results.json").read_bytes() == before


def test_other_settings_in_the_same_folder_are_refused(finished, capsys):
    out, argv = finished
    message = failed(capsys, exit_codes.BUSY, *argv, "--seed", "1", "--documents", "50")
    assert message == (
        f"audit: {out} holds an audit with other settings (seed 0 -> 1, documents 200 -> 50). "
        "Use another --out or --fresh."
    )


def test_fresh_starts_over(models, text, tmp_path, capsys, no_report):
    argv = [str(models / "tiny-core"), "--data", f"math={text}", *SMALL, "--out", str(tmp_path), "--no-tokens"]
    assert main(["audit", *argv]) == exit_codes.DONE
    assert main(["audit", *argv, "--seed", "1", "--fresh"]) == exit_codes.DONE
    assert AuditResult.load(tmp_path).config.seed == 1
    assert not (tmp_path / "tokens.parquet").exists()
    assert "not identifiable (takes the whole gap by construction)" in capsys.readouterr().out


def test_an_interrupted_audit_leaves_the_manifest_and_nothing_else(models, text, tmp_path, capsys, monkeypatch):
    def interrupted(self, journal, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(AuditPlan, "measure", interrupted)
    argv = [str(models / "tiny-core"), "--data", f"math={text}", *SMALL, "--out", str(tmp_path)]
    assert main(["audit", *argv]) == exit_codes.INTERRUPTED
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]
    told = capsys.readouterr().err.splitlines()[-2:]
    assert told == [
        f"Interrupted. To go on: {shlex.join(['looplab', 'audit', *argv])}",
        "audit: interrupted.",
    ]


def test_a_folder_in_use_is_refused(models, text, tmp_path, capsys):
    (tmp_path / ".lock").write_text("4121")
    with open(tmp_path / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        argv = [models / "tiny-core", "--data", f"math={text}", *SMALL, "--out", tmp_path]
        message = failed(capsys, exit_codes.BUSY, *argv)
    assert message == f"audit: {tmp_path} is in use by process 4121. Wait or choose another --out."


def test_a_finished_audit_may_stand_beside_another(finished, models, text, tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(command, "write_report", lambda result, folder, beside: shown.extend(beside))
    argv = [str(models / "tiny-core"), "--data", f"math={text}", *SMALL, "--beside", str(finished[0])]
    assert main(["audit", *argv, "--out", str(tmp_path / "out")]) == exit_codes.DONE
    assert shown == [AuditResult.load(finished[0])]
    message = failed(capsys, exit_codes.DATA, *argv[:-1], tmp_path / "none", "--out", tmp_path / "other")
    assert message == (
        f"audit: --beside {tmp_path / 'none'}: no results.json there. Give the folder of a finished audit."
    )


def test_a_dry_run_counts_and_runs_nothing(models, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(AuditPlan, "measure", lambda *_, **__: pytest.fail("it ran"))
    argv = [str(models / "tiny-blocks"), "--data", f"math={text}", "--controls", "suffix", "--dry-run"]
    assert main(["audit", *argv, "--out", str(tmp_path / "none")]) == exit_codes.DONE
    printed = capsys.readouterr().out
    assert "64 applications per document (120 one by one), 3,840 in all" in printed
    assert "22 readouts per document, 2 states held at once" in printed
    assert not (tmp_path / "none").exists()


def test_a_dense_model_is_audited_with_its_own_message(models, text, tmp_path, capsys, no_report):
    argv = [str(models / "tiny-dense"), "--data", f"math={text}", "--replicates", "1000", "--probes", "none"]
    assert main(["audit", *argv, "--quiet", "--max-tokens", "24", "--out", str(tmp_path)]) == exit_codes.DONE
    assert "This model has no repeated block; running the dense interventions only." in capsys.readouterr().out


def test_brief_prints_the_verdict_alone(finished, capsys):
    folder, argv = finished
    assert main(["audit", *argv, "--brief"]) == exit_codes.DONE
    result = AuditResult.load(folder)
    told = capsys.readouterr()
    assert told.out.splitlines() == [f"{result.model.name}: {d.verdict.sentence}" for d in result.domains]
    assert not told.err


def test_brief_is_for_one_model(models, tmp_path, capsys):
    argv = [str(models / "tiny-core"), str(models / "tiny-blocks"), "--brief", "--out", str(tmp_path)]
    assert main(["audit", *argv]) == exit_codes.USAGE
    assert "--brief takes one MODEL. Got several, which are compared. Use --quiet." in capsys.readouterr().err


def test_findings_decide_the_exit_code_where_asked(finished):
    result = AuditResult.load(finished[0])
    quiet = dataclasses.replace(result, findings=())
    warned = dataclasses.replace(result, findings=(Finding(kind="audit.x", level=Level.WARNING, message=""),))
    broken = dataclasses.replace(result, findings=(Finding(kind="audit.x", level=Level.FAILURE, message=""),))
    codes = {
        level: [command.exit_code([r], level) for r in (quiet, warned, broken)]
        for level in ("none", "warning", "failure")
    }
    assert codes == {"none": [0, 0, 0], "warning": [0, 6, 6], "failure": [0, 0, 6]}


def test_fail_on_ends_with_six(finished):
    _, argv = finished
    assert main(["audit", *argv, "--fail-on", "warning"]) == exit_codes.FINDING


def test_progress_is_told_line_by_line_without_a_terminal(models, text, tmp_path, capsys, no_report):
    argv = [a for a in SMALL if a != "--quiet"]
    full = [str(models / "tiny-core"), "--data", f"math={text}", *argv, "--out", str(tmp_path)]
    assert main(["audit", *full]) == exit_codes.DONE
    told = capsys.readouterr().err
    assert "repeat(1)        not identifiable: the block has no iteration index" in told
    assert re.search(r"\[1/6\] self-test T2 rollout equals the model's forward +[0-9.e+-]+ \(limit 1e-05\)", told)
    assert re.search(r"\[4/6\] evaluate math  applications [\d,]+/[\d,]+  100%  full  ", told)


def test_a_progress_line_says_how_far_and_how_long():
    line = command.progress_line("evaluate", "text", 18_432, 25_600, "repeat(3)", 9.7)
    assert line == "[4/6] evaluate text  applications 18,432/25,600  72%  repeat(3)  1.9k/s  eta 0:04"
    assert command.progress_line("statistics", "", 0, 1, "", 0.0) == "[5/6] statistics"


BAD_OPTIONS = {
    ("--grid", "0,4,9"): "--grid must be whole numbers from 1 to 8. Got '0,4,9'.",
    ("--grid", "x"): "--grid must be whole numbers from 1 to 8. Got 'x'.",
    ("--num-steps", "12"): (
        "--num-steps 12 needs iteration indices 4..11, but the model has 4. Use --extend 24 to reuse trained indices."
    ),
    ("--replicates", "50"): "--replicates must be at least 1000. Got 50.",
    ("--probes", "lens"): "--probes must be names out of temperature, affine, full_rank. Got 'lens'.",
    ("--level", "1.5"): "--level must be between 0 and 1. Got 1.5.",
    ("--margin-nats", "0"): "--margin-nats must be a number above 0. Got 0.0.",
    ("--init-seeds", "0"): "--init-seeds must be at least 1. Got 0.",
    ("--batch-tokens", "0"): "--batch-tokens must be at least 1. Got 0.",
    ("--data", "m.jsonl"): "--data must be NAME=PATH. Got 'm.jsonl'. Write text=m.jsonl.",
    ("--data", "a/b=m.jsonl"): "--data NAME must be a plain file name. Got 'a/b'. Leave out / and a leading dot.",
    ("--data", "..=m.jsonl"): "--data NAME must be a plain file name. Got '..'. Leave out / and a leading dot.",
    ("--schedule", "[0.0 9.9]"): "schedule [0.0 9.9] names block 9, but the model has blocks 0..1.",
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=" ".join)
def test_a_bad_option_is_refused_by_name(models, text, tmp_path, capsys, options):
    out = tmp_path / "out"
    extra = () if options[0] == "--data" else ("--data", f"math={text}")
    message = failed(capsys, exit_codes.USAGE, models / "tiny-blocks", *extra, *options, "--out", out)
    assert message == f"audit: {BAD_OPTIONS[options]}"
    assert not out.exists()


def test_a_device_that_is_not_there_is_refused(models, text, tmp_path, capsys):
    argv = [models / "tiny-blocks", "--data", f"math={text}", "--device", "abacus", "--out", tmp_path / "out"]
    assert "such as cpu. Got 'abacus'" in failed(capsys, exit_codes.USAGE, *argv)
    assert not (tmp_path / "out").exists()


def test_a_misspelt_schedule_is_answered_with_a_suggestion(models, text, tmp_path, capsys):
    argv = [models / "tiny-blocks", "--data", f"math={text}", "--schedule", "repaet(2)", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.USAGE, *argv)
    assert message.startswith(
        "audit: cannot read schedule 'repaet(2)'. Did you mean 'repeat(2)'? Forms: full, prefix(k), "
    )
    assert message.endswith(" or [0.0 0.1].")


def test_one_application_cannot_be_audited(models, text, tmp_path, capsys):
    argv = [models / "tiny-core", "--data", f"math={text}", "--num-steps", 1, "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.MODEL, *argv)
    assert message == "audit: the full plan must have at least 2 applications. Got 1. Pass --num-steps 2 or more."


def test_an_unknown_model_is_refused(tmp_path, capsys):
    message = failed(capsys, exit_codes.MODEL, "hugin", "--out", tmp_path / "out")
    assert message.startswith("audit: MODEL must be a checkpoint folder or a built-in name. Got 'hugin'.")


def test_pickled_weights_are_refused(models, tmp_path, capsys):
    folder = tmp_path / "X"
    folder.mkdir()
    (folder / "config.json").write_bytes((models / "tiny-core" / "config.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    message = failed(capsys, exit_codes.MODEL, folder, "--out", tmp_path / "out")
    assert message == (
        f"audit: weights must be safetensors. Found only pytorch_model.bin in {folder}. "
        f"Convert it once: looplab convert {folder}/pytorch_model.bin OUT."
    )


@pytest.fixture(scope="module")
def of_task(tmp_path_factory):
    """A model with the tokens and the cells of swaps of five items, as training leaves it."""
    folder = tmp_path_factory.mktemp("models") / "swaps"
    run = par("swaps")
    save_folder(folder, build(run.model, seed=1), tokenizer="task", trained={"task": to_dict(run.data.task)})
    return folder


def test_a_misspelt_task_is_answered_with_a_suggestion(of_task, tmp_path, capsys):
    message = failed(capsys, exit_codes.USAGE, of_task, "--task", "state_trackin", "--out", tmp_path / "out")
    assert message.startswith(
        "audit: --task must name a task. Got 'state_trackin'. Did you mean 'state_tracking'? Known:"
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--data", "math=m.jsonl"), ("--calibration", "math=m.jsonl"), ("--tokenizer", "bytes")]
)
def test_a_task_and_texts_are_not_taken_together(of_task, tmp_path, capsys, option, value):
    argv = [of_task, "--task", "state_tracking", option, value, "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.USAGE, *argv)
    assert message == f"audit: --task takes no {option}: its problems are the documents. Got both. Leave one out."


def test_a_difficulty_without_a_task_is_refused(models, text, tmp_path, capsys):
    argv = [models / "tiny-core", "--data", f"math={text}", "--difficulty", "8", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.USAGE, *argv)
    assert message == "audit: --difficulty is of a task. Got 8 and texts. Add --task NAME."


def test_a_difficulty_that_the_task_does_not_have_is_refused(of_task, tmp_path, capsys):
    message = failed(capsys, exit_codes.USAGE, of_task, "--difficulty", "0", "--out", tmp_path / "out")
    assert message == "audit: difficulty must be at least 1 for state_tracking. Got 0."


def test_a_model_without_the_tokens_of_the_task_is_refused(tmp_path, capsys):
    save_folder(tmp_path / "four", build(dataclasses.replace(PRESETS["tiny-core"](), vocab=4), seed=1))
    argv = [tmp_path / "four", "--task", "state_tracking", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.MODEL, *argv)
    assert message == (
        "audit: MODEL must read the 11 tokens of state_tracking. Got four, which reads 4. "
        "Pass a model of this task, or another --task."
    )


def test_a_model_with_other_answers_than_the_task_is_refused(models, tmp_path, capsys):
    argv = [models / "tiny-core", "--task", "state_tracking", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.MODEL, *argv)
    assert message == (
        "audit: MODEL must answer state_tracking with 5 cells of 5 symbols. Got tiny-core, which answers with 259 "
        "symbols. Pass a model of this task, or another --task."
    )


def test_a_model_of_cells_is_not_audited_on_texts(of_task, text, tmp_path, capsys):
    argv = [of_task, "--data", f"math={text}", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.MODEL, *argv)
    assert message == (
        "audit: domain math must hold problems of a task for this model, which answers with 5 cells at a position. "
        f"Got {text}. Pass --task."
    )


def test_problems_are_never_cut(of_task, tmp_path, capsys):
    argv = [of_task, "--difficulty", "8", "16", "--max-tokens", "9", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.USAGE, *argv)
    assert message == (
        "audit: --max-tokens must be at least 17 for difficulty 16 of state_tracking: a problem is never cut. Got 9. "
        "Leave it out."
    )


def test_a_control_has_no_bytes_to_be_compared_by_on_a_task(of_task, tmp_path, capsys):
    argv = [of_task, "--control", of_task, "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.MODEL, *argv)
    assert message == (
        "audit: --control compares gaps in nats per byte. Got swaps on state_tracking, whose problems have no bytes. "
        "Leave it out."
    )


def test_another_task_than_the_trained_one_is_a_warning(tmp_path, capsys):
    task = StateTracking(group="z10", train_length=4)
    run = par("sums", task)
    folder = tmp_path / "sums"
    save_folder(folder, build(run.model, seed=1), tokenizer="task", trained={"task": to_dict(PrefixSum())})
    argv = ["audit", folder, "--task", "prefix_sum", "--dry-run", "--out", tmp_path / "out"]
    assert main([*map(str, argv)]) == exit_codes.DONE
    opened = protocol._open(load(folder), None, "", "state_tracking")
    assert [finding.kind for finding in opened.findings] == ["audit.other_task"]
    assert protocol._open(load(folder), None, "", "prefix_sum").findings == ()


def test_a_task_audit_is_planned_with_the_options_of_the_checkpoint(of_task, tmp_path, capsys):
    argv = ["audit", str(of_task), "--difficulty", "8", "16", "--documents", "30", "--dry-run"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == exit_codes.DONE
    printed = capsys.readouterr().out.splitlines()
    assert "state_tracking-8: 30 evaluation documents, 30 scored tokens" in printed
    assert "state_tracking-16: 30 evaluation documents, 30 scored tokens" in printed


def data(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"math={path}"


def test_a_missing_file_is_refused(models, tmp_path, capsys):
    message = failed(capsys, exit_codes.DATA, models / "tiny-core", "--data", "math=m.jsonl", "--out", tmp_path / "out")
    assert message == "audit: --data math=m.jsonl: no such file. Give a .txt, .jsonl or .parquet path."


def test_a_broken_line_is_refused(models, tmp_path, capsys):
    lines = ['{"text": "a"}'] * 16 + ['{"body": "b"}']
    given = data(tmp_path / "m.jsonl", "\n".join(lines))
    message = failed(capsys, exit_codes.DATA, models / "tiny-core", "--data", given, "--out", tmp_path / "out")
    assert message == (
        f"audit: {tmp_path / 'm.jsonl'} line 17 must be a JSON object with a string 'text'. Got keys ['body']. "
        "Rename the field or use --text-field."
    )


def test_a_file_that_is_not_utf8_is_refused(models, tmp_path, capsys):
    given = data(tmp_path / "m.txt", b"a" * 1032 + b"\xff")
    message = failed(capsys, exit_codes.DATA, models / "tiny-core", "--data", given, "--out", tmp_path / "out")
    assert message == f"audit: {tmp_path / 'm.txt'} must be UTF-8. Byte 0xff at offset 1032. Re-encode the file."


def test_too_few_documents_are_refused(models, tmp_path, capsys):
    lines = [json.dumps({"text": f"text number {i}"}) for i in range(13)]
    given = data(tmp_path / "m.jsonl", "\n".join([*lines, *lines[:4], '{"text": ""}']))
    message = failed(capsys, exit_codes.DATA, models / "tiny-core", "--data", given, "--out", tmp_path / "out")
    assert re.fullmatch(
        r"audit: domain math needs 20 evaluation and 10 calibration documents\. Got \d+ and \d+ after removing 4 "
        r"duplicates and 1 empty\. Add text or split it by blank lines\.",
        message,
    )


def test_shared_documents_are_refused(models, text, tmp_path, capsys):
    lines = [json.dumps({"text": f"calibration {i}"}) for i in range(11)]
    lines += text.read_text().splitlines()[:3]
    other = data(tmp_path / "c.jsonl", "\n".join(lines))
    argv = [models / "tiny-core", "--data", f"math={text}", "--calibration", other, "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.DATA, *argv)
    assert message == (
        "audit: 3 calibration documents also occur in evaluation (first: line 12). Remove them or drop --calibration."
    )


def test_calibration_for_another_domain_is_refused(models, text, tmp_path, capsys):
    argv = [models / "tiny-core", "--data", f"math={text}", "--calibration", f"web={text}", "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.USAGE, *argv)
    assert message == "audit: --calibration must name a domain of --data (math). Got 'web'."


def test_prompts_that_fill_the_window_are_refused(models, tmp_path, capsys):
    lines = [json.dumps({"text": f"t{i}", "prompt": "p" * 24}) for i in range(200)]
    given = data(tmp_path / "m.jsonl", "\n".join(lines))
    argv = [models / "tiny-core", "--data", given, "--max-tokens", 24, "--out", tmp_path / "out"]
    message = failed(capsys, exit_codes.DATA, *argv)
    assert message == (
        "audit: all 200 documents of math have prompts of 24 tokens or more. Raise --max-tokens or shorten prompts."
    )


def test_a_tokenizer_of_another_model_is_refused(text, tmp_path, capsys):
    save_folder(tmp_path / "small", build(PRESETS["tiny-core"](), seed=1))
    message = failed(
        capsys,
        exit_codes.DATA,
        tmp_path / "small",
        "--data",
        f"math={text}",
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "o",
    )
    assert re.fullmatch(
        r"audit: token id \d+ is outside the model's vocabulary of 64\. The tokenizer belongs to another model\.",
        message,
    )


def test_weights_that_give_no_finite_number_are_refused(models, text, tmp_path, capsys, monkeypatch):
    original = AuditPlan.measure

    def with_broken_weights(self, journal, **more):
        with torch.no_grad():
            next(self.opened.model.parameters()).fill_(float("inf"))
        return original(self, journal, **more)

    monkeypatch.setattr(AuditPlan, "measure", with_broken_weights)
    argv = [models / "tiny-core", "--data", f"math={text}", *SMALL, "--out", tmp_path]
    message = failed(capsys, exit_codes.DATA, *argv)
    assert re.fullmatch(
        r"audit: the full plan gives non-finite logits \(first: document \d+, position 1\)\. Try --dtype float32\.",
        message,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]


def test_a_failed_self_test_prints_no_result(models, text, tmp_path, capsys, monkeypatch):
    original = AuditPlan.measure

    def with_wrong_forward(self, journal, **more):
        model = self.opened.model
        head, calls = model.head, []

        def drifting(hidden):
            calls.append(1)
            return head(hidden) + 0.31 * len(calls)

        object.__setattr__(model, "head", drifting)
        return original(self, journal, **more)

    monkeypatch.setattr(AuditPlan, "measure", with_wrong_forward)
    argv = [models / "tiny-core", "--data", f"math={text}", *SMALL, "--out", tmp_path]
    assert main(["audit", *map(str, argv)]) == exit_codes.SELF_TEST
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.match(r"audit: self-test T1 failed: .* by [\d.]+ \(limit 1e-05\)\. No result is printed\.", printed.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]


def test_several_models_get_folders_of_their_own_and_one_page(models, text, tmp_path, capsys, no_report, monkeypatch):
    shown = []
    monkeypatch.setattr(command, "write_comparison", lambda found, results, out: shown.append((found, results)) or out)
    argv = [str(models / "tiny-blocks"), str(models / "tiny-core"), "--data", f"math={text}", *SMALL]
    assert main(["audit", *argv, "--out", str(tmp_path)]) == exit_codes.DONE
    ((comparison, results),) = shown
    assert comparison.models == ("tiny-blocks", "tiny-core")
    assert [AuditResult.load(tmp_path / name) for name in comparison.models] == results
    assert "2 models side by side" in capsys.readouterr().out
    assert main(["audit", *argv, "--out", str(tmp_path)]) == exit_codes.DONE  # all of it is there
    assert shown[1][0] == comparison


def test_no_model_and_beside_with_several_are_refused(models, tmp_path, capsys):
    assert failed(capsys, exit_codes.USAGE).startswith("audit: MODEL must be a checkpoint folder or a built-in name.")
    several = [models / "tiny-blocks", models / "tiny-core", "--beside", tmp_path]
    assert failed(capsys, exit_codes.USAGE, *several).startswith("audit: --beside takes one MODEL.")


def test_the_self_check_decides_the_exit_code(capsys, monkeypatch):
    class Check:
        passed = True

        def __str__(self):
            return "all of it"

    check = Check()
    monkeypatch.setattr(command, "run_self_check", lambda **more: check)
    assert main(["audit", "--self-check"]) == exit_codes.DONE
    assert capsys.readouterr().out == "all of it\n"
    check.passed = False
    assert main(["audit", "--self-check"]) == exit_codes.SELF_TEST
    assert failed(capsys, exit_codes.USAGE, "text-core", "--self-check").startswith(
        "audit: --self-check takes no MODEL."
    )


def test_times_stand_in_the_result_where_they_are_asked_for(models, text, tmp_path, no_report):
    argv = [
        str(models / "tiny-blocks"),
        "--data",
        f"math={text}",
        *SMALL,
        "--probes",
        "temperature",
        "--time",
        "--keep-partial",
    ]
    assert main(["audit", *argv, "--out", str(tmp_path)]) == exit_codes.DONE
    steps = AuditResult.load(tmp_path).domains[0].depth_value.steps
    assert all(step.milliseconds > 0 for step in steps)
    assert list((tmp_path / "partial").rglob("calibration/*/*.safetensors"))


@pytest.mark.parametrize(("size", "expected"), [("512M", 2**29), ("4G", 2**32), ("1.5GiB", 3 * 2**29), ("1000", 1000)])
def test_sizes_of_memory(size, expected):
    assert command.memory_bytes(size) == expected
    assert command.memory_bytes("auto") > 2**20


def test_memory_that_is_too_small_is_refused_before_anything_runs(models, text, tmp_path, capsys):
    argv = [models / "tiny-blocks", "--data", f"math={text}", "--out", tmp_path / "out", "--memory"]
    message = failed(capsys, exit_codes.DATA, *argv, "10K")
    assert re.fullmatch(
        r"audit: one document needs [\d.]+ MiB and --memory is 10K\. Lower .* or raise --memory\.", message
    )
    message = failed(capsys, exit_codes.USAGE, *argv, "much")
    assert message == "audit: --memory must be a size such as 4G or 512M, or auto. Got 'much'."
    assert not (tmp_path / "out").exists()

"""`looplab audit` on a task: a model trained for a few steps, its answers scored under every schedule and probe.

The direct computation here runs one problem at a time through a plain loop and grades it with the task's interpreter.
"""

import dataclasses
import json
import math
import re

import numpy as np
import pyarrow.parquet
import pytest

from looplab.audit.problems import Problems, prepare_problems
from looplab.audit.result import AuditResult, percent
from looplab.cli import audit as command
from looplab.cli import exit_codes, main
from looplab.interop import load
from looplab.nn.attention import Attention
from looplab.nn.rope import RelativeBias
from looplab.recipes.par import par
from looplab.recurrence.depth import UniformDepth
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.signal import StepEmbedding
from looplab.recurrence.spec import ClampLast
from looplab.report import audit_page
from looplab.report.figures.schedule_map import schedule_map
from looplab.report.latex import tables_tex
from looplab.report.plates import Plate
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking
from looplab.training import train
from looplab.training.config import TaskEvaluation
from reference import audit_task as twin

TASK = StateTracking(group="s3", train_length=3)
SIZES = ["--replicates", "1000", "--documents", "24", "--calibration-documents", "24"]
SMALL = [*SIZES, "--grid", "1,2", "--controls", "suffix", "--quiet"]
SCHEDULES = {
    "full": [0, 1, 2],
    "prefix(1)": [0],
    "prefix(2)": [0, 1],
    "repeat(1)": [0, 0, 0],
    "repeat(2)": [0, 1, 1],
    "suffix(1)": [2],
    "suffix(2)": [1, 2],
}
"""Iterations of the one block."""


def word_of(row):
    return TASK.decode(row.tokens.astype(np.int64))


@pytest.fixture(scope="module", autouse=True)
def no_report():
    """Drawing is tested in report/; here it only takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "write_report", lambda result, folder, beside: folder)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One block x 3 with an iteration embedding, after sixty steps on words of three."""
    folder = tmp_path_factory.mktemp("runs") / "s3"
    attention = Attention(heads=2, kv_heads=2, head_dim=8, position=RelativeBias(max=2), window=2)
    run = par(
        "s3",
        TASK,
        dim=16,
        attention=attention,
        order=ModelLoop(num_steps=3),
        trained_depth=UniformDepth(low=4, high=8),
        signal=StepEmbedding(max=3),
        beyond=ClampLast(),
    )
    run = dataclasses.replace(
        run,
        data=TaskRows(task=TASK, rows=32),
        steps=60,
        save_every=60,
        evaluation=TaskEvaluation(every=60, items=8, difficulties=(3,), depths=(1.0,)),
    )
    train(run, folder)
    return folder / "model"


@pytest.fixture(scope="module")
def audited(trained, tmp_path_factory):
    """Its audit at the trained length and at one that is only tested."""
    out = tmp_path_factory.mktemp("audits") / "out"
    argv = ["audit", str(trained), "--task", "state_tracking", "--difficulty", "3", "5", *SMALL, "--out", str(out)]
    assert main(argv) == exit_codes.DONE
    return AuditResult.load(out), out, argv


@pytest.mark.parametrize("difficulty", [3, 5])
def test_losses_and_exact_matches_are_those_of_one_problem_at_a_time(trained, audited, difficulty):
    result, out, _ = audited
    domain = result.domain(f"state_tracking-{difficulty}")
    model, split = load(trained).model, prepare_problems("d", Problems(task=TASK, difficulty=difficulty)).evaluation
    rows = split.take(domain.documents.evaluation).documents
    words = [word_of(row) for row in rows]
    answers = [TASK.reference(word).answer for word in words]
    assert {name for name in SCHEDULES if name in {s.name for s in domain.schedules}} == set(SCHEDULES)
    for name, iterations in SCHEDULES.items():
        schedule = domain.schedule(name)
        logits = [twin.answer_logits(model, row.tokens, [(0, t) for t in iterations]) for row in rows]
        graded = [twin.grade(z, answer, cells=3) for z, answer in zip(logits, answers, strict=True)]
        beta = schedule.temperature.beta
        tempered = [twin.grade(beta * z, answer, cells=3).loss for z, answer in zip(logits, answers, strict=True)]
        assert schedule.loss().loss.value == pytest.approx(sum(g.loss for g in graded) / len(rows), rel=1e-5)
        assert schedule.loss("temperature").loss.value == pytest.approx(sum(tempered) / len(rows), rel=1e-5)
        score = domain.answers.score(name)
        assert score.exact.value == sum(g.right == 3 for g in graded) / len(rows)
        assert score.cells == pytest.approx(sum(g.right for g in graded) / (3 * len(rows)))
        assert schedule.metrics[0].accuracy == score.exact.value
    documents = pyarrow.parquet.read_table(out / "documents.parquet").to_pydict()
    kept = [
        n
        for n, s, d in zip(documents["right_raw"], documents["schedule"], documents["domain"], strict=True)
        if s == "suffix(2)" and d == domain.name
    ]
    assert kept == [g.right for g in graded]


def test_affine_answers_are_those_of_the_changed_hidden_states(trained, audited):
    result, out, _ = audited
    model, domain = load(trained).model, result.domains[0]
    rows = prepare_problems("d", Problems(task=TASK, difficulty=3)).evaluation.take(24).documents
    change = twin.affine_change(out / "probes" / f"{domain.name}.safetensors", "prefix(1)")
    logits = [twin.answer_logits(model, row.tokens, [(0, 0)], change) for row in rows]
    graded = [twin.grade(z, TASK.reference(word_of(row)).answer, cells=3) for z, row in zip(logits, rows, strict=True)]
    found = domain.schedule("prefix(1)").loss("affine").loss.value
    assert found == pytest.approx(sum(g.loss for g in graded) / len(rows), rel=1e-5)
    assert found != pytest.approx(domain.schedule("prefix(1)").loss().loss.value, rel=1e-3)
    score = domain.answers.score("prefix(1)", "affine")
    assert score.exact.value == sum(g.right == 3 for g in graded) / len(rows)


def test_exact_matches_have_intervals_and_chance(audited):
    result, _, _ = audited
    for domain, difficulty in zip(result.domains, (3, 5), strict=True):
        task = domain.answers.task
        assert (task.difficulty, task.chance, task.cells) == (difficulty, pytest.approx(1 / 6), 3)
        assert task.options["group"] == "s3"
        assert task.trained == (difficulty == 3)
        for score in domain.answers.scores:
            low, high = score.wilson
            assert low <= score.exact.value <= high
            assert score.exact.low <= score.exact.value <= score.exact.high
            assert high - low > 0.1
    warned = [f.where["domain"] for f in result.findings if f.kind == "audit.trained_problems"]
    assert warned == ["state_tracking-3"]


def test_the_table_and_the_text_show_exact_matches_and_chance(audited):
    result, _, _ = audited
    printed = str(result)
    assert "chance 17 %" in printed
    value = f"{100 * result.domains[0].answers.score('full').exact.value:.1f}"
    assert f"full           raw          {value} %" in printed
    page = audit_page(result, drawn={"F12-schedules": Plate("F12-schedules", "", schedule_map(result))})
    for text in (page, tables_tex(result).replace("\\_", "_")):
        assert "Answers on state_tracking-5: state_tracking, difficulty 5" in text
        assert "By chance 17" in text
    number = re.escape(percent(result.domains[1].answers.score("suffix(1)").exact).replace(" %", "\u00a0%"))
    assert re.search(rf'data-key="domains\[1\].answers.scores\[\d+\].exact"[^>]*>{number}', page)


def test_a_model_of_a_task_is_audited_on_it_and_says_so(trained, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["audit", str(trained), *SIZES, "--grid", "1", "--controls", "none", "--probes", "none"]
    assert main([*argv, "--out", str(out)]) == exit_codes.DONE
    assert capsys.readouterr().err.startswith(
        "model was trained on state_tracking: its answers are scored, on state_tracking-3. Choose others with"
    )
    (domain,) = AuditResult.load(out).domains
    assert domain.answers.task.options == json.loads((trained / "config.json").read_text())["trained"]["task"]


def test_a_further_difficulty_in_the_same_folder_leaves_the_first_as_it_is(trained, tmp_path):
    argv = ["audit", str(trained), *SMALL, "--probes", "none", "--out", str(tmp_path / "out"), "--difficulty"]
    assert main([*argv, "3"]) == exit_codes.DONE
    (alone,) = AuditResult.load(tmp_path / "out").domains
    assert main([*argv, "3", "5"]) == exit_codes.DONE
    first, second = AuditResult.load(tmp_path / "out").domains
    assert first == alone
    assert second.answers.task.difficulty == 5


def test_the_fitted_temperature_of_cells_is_the_best_of_all_near_it(trained, audited):
    result, _, _ = audited
    model = load(trained).model
    rows = prepare_problems("d", Problems(task=TASK, difficulty=3)).calibration.take(24).documents
    answers = [TASK.reference(word_of(row)).answer for row in rows]
    logits = [twin.answer_logits(model, row.tokens, [(0, 0), (0, 1), (0, 2)]) for row in rows]
    fit = result.domains[0].schedule("full").temperature
    assert fit.status == "converged"

    def loss(beta):
        return math.fsum(twin.grade(beta * z, a, cells=3).loss for z, a in zip(logits, answers, strict=True))

    best = min((loss(fit.beta * factor), factor) for factor in (0.98, 0.99, 1.0, 1.01, 1.02))
    assert best[1] == 1.0

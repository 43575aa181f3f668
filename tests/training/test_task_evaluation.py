import json

import pytest

from looplab.interop import load
from looplab.models.base import build
from looplab.recipes.par import par
from looplab.recurrence.ledger import Ledger
from looplab.tasks import TASKS
from looplab.tasks.evaluation import evaluate
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking
from looplab.training.config import RunConfig, TaskEvaluation
from looplab.training.task_evaluation import depths_of, graded
from looplab.training.trainer import train

TASK = StateTracking(group="s3", train_length=3)


def small(**fields):
    config = par("small", TASK)
    data = type(config.data)(task=TASK, rows=8)
    evaluation = TaskEvaluation(every=4, items=20, difficulties=(3, 6), depths=(1.0, 2.0))
    changes = {"data": data, "evaluation": evaluation, "steps": 6, "save_every": 2, "log_every": 2}
    return RunConfig(**{name: getattr(config, name) for name in config.__dataclass_fields__} | changes | fields)


def test_the_grid_is_what_separate_evaluations_give():
    model, ledger = build(small().model), Ledger()
    held = graded(TASK, (3,), small().evaluation)
    scores = held.evaluate(model, ledger=ledger)
    single = [evaluate(model, TASK, n, [k], items=20)[0] for n in (3, 6) for k in (n, 2 * n)]
    assert held.cells(model) == single
    assert scores.loss == single[0].loss
    assert [(c["difficulty"], c["num_steps"]) for c in scores.record["cells"]] == [(3, 3), (3, 6), (6, 6), (6, 12)]
    assert ledger.applications[0] == 20 * (6 + 12)


def test_by_default_it_asks_for_longer_problems_too():
    assert graded(TASK, (3,), TaskEvaluation()).difficulties == (3, 6, 12)


def test_depths_that_a_model_lacks_are_left_out():
    spec = build(small().model).spec
    assert depths_of(spec, 3, (1.0, 1.25, 2.0)) == (3, 4, 6)


def test_a_run_on_a_task_is_graded_saved_and_opens_without_a_tokenizer(tmp_path):
    record = train(small(), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [4, 6]
    assert record.loss == evaluations[-1]["cells"][0]["loss"]
    loaded = load(tmp_path / "run" / "model")
    assert loaded.tokenizer is None
    assert loaded.facts["trained"]["task"]["group"] == "s3"


def test_a_resumed_run_has_the_carry_and_the_bits_of_one_that_was_not_stopped(tmp_path):
    whole = train(small(), tmp_path / "whole")
    train(small(steps=4), tmp_path / "cut")
    (tmp_path / "cut" / "record.json").unlink()
    resumed = train(small(), tmp_path / "cut")
    assert resumed.loss == whole.loss
    for name in ("model/model.safetensors", "step_6/carry.safetensors", "step_6/optimizer.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": 2}, "RunConfig.micro_batches must be 1 for ProgressAligned, which keeps states"),
        ({"evaluation": None}, "RunConfig.evaluation must be TaskEvaluation for this data"),
    ],
)
def test_what_a_task_asks_of_the_run_is_checked(unchecked, fields, message):
    with pytest.raises(ValueError, match=message):
        small(**fields)


def test_targets_per_iteration_need_a_task_that_has_them():
    from looplab.recipes.text import text_core

    text = text_core()
    fields = {name: getattr(text, name) for name in text.__dataclass_fields__}
    with pytest.raises(ValueError, match="ProgressAligned needs per-iteration targets; text has none. Use EveryIter"):
        RunConfig(**fields | {"objective": small().objective})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TASKS["capo"](), "ProgressAligned needs per-iteration targets; task 'capo' has none. Use EveryIteration"),
        (
            TASKS["addition"](),
            r"advance by a rule of neighbours .*; those of task 'addition' do not. Use EveryIteration",
        ),
    ],
    ids=["none", "not local"],
)
def test_a_task_without_a_local_rule_is_refused_by_name(task, message):
    with pytest.raises(ValueError, match=message):
        small(data=TaskRows(task=task, rows=8))

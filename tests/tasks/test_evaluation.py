import numpy as np
import pytest
import torch

from looplab.models.base import build
from looplab.recipes.par import par
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.tasks.evaluation import EVAL_KEY, answers_of, evaluate, item_scores, rollout_logits, split_of
from looplab.tasks.state_tracking import StateTracking

TASK = StateTracking(group="s3", train_length=3)


def model(task=TASK, seed=0):
    return build(par("test", task).model, seed=seed)


def test_one_rollout_grades_every_depth_as_separate_runs_do():
    made, ledger = model(), Ledger()
    tokens = torch.tensor(TASK.batch(3, 0, range(4))[0])
    for depth, logits in rollout_logits(made, tokens, (1, 2, 5), ledger=ledger):
        assert torch.equal(logits, forward(made, tokens, num_steps=depth).logits)
    assert ledger.applications == {0: 20}


@pytest.mark.parametrize("classes", [False, True])
def test_cells_count_what_the_grader_counts(classes):
    task = StateTracking(group="s3", train_length=3, classes=classes)
    made = model(task)
    (cell,) = evaluate(made, task, 3, [2], items=50)
    exact = right = 0
    loss = 0.0
    for index in range(50):
        problem = task.sample(3, EVAL_KEY, index, split_of(task, 3))
        example = task.example(problem)
        logits = forward(made, torch.tensor(example.tokens)[None], num_steps=2).logits[0, -1]
        laws = logits.view(task.cells, -1)
        predicted = laws.argmax(-1).numpy().reshape(example.labels[example.answer].shape)
        grade = task.grade(problem, predicted)
        exact, right = exact + grade.exact, right + grade.cells_right
        wanted = torch.tensor(np.atleast_1d(example.labels[-1]))
        loss -= float(laws.log_softmax(-1).gather(1, wanted.view(-1, 1)).sum().detach())
    assert (cell.exact, cell.cells_right, cell.cells_total) == (exact, right, 50 * task.cells)
    assert cell.loss == pytest.approx(loss / 50, rel=1e-5)
    assert cell.interval[0] <= cell.exact_match <= cell.interval[1]
    assert cell.chance == pytest.approx(1 / 6)


def test_items_do_not_depend_on_how_they_are_batched(monkeypatch):
    made = model()
    whole = evaluate(made, TASK, 4, [4], items=30)
    monkeypatch.setattr("looplab.tasks.evaluation.ROW_TOKENS", 20)
    assert evaluate(made, TASK, 4, [4], items=30)[0].exact == whole[0].exact


def test_a_small_space_is_graded_on_what_was_trained():
    assert split_of(TASK, 3) == "train"
    assert split_of(TASK, 6) == "test"
    assert split_of(StateTracking(), 8) == "test"
    assert answers_of(TASK, 3) == slice(3, 4)


def test_scores_of_items_add_up_to_the_cell():
    made = model()
    rows = item_scores(made, TASK, 4, [2, 4], items=30)
    for cell in evaluate(made, TASK, 4, [2, 4], items=30):
        total = rows[cell.num_steps].sum(0)
        assert (cell.exact, cell.cells_right, cell.cells_total) == tuple(total[:3])
        assert cell.loss == pytest.approx(total[3] / 30)
        assert set(rows[cell.num_steps][:, 0]) <= {0.0, 1.0}

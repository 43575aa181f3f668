import pytest
import torch

from contract.zoo import tiny, tokens
from looplab.recurrence.exit import TrainedExit, exit_points, forward_until
from looplab.recurrence.loop import forward
from tolerances import EXACT


def opinionated(name):
    """The tiny model with a halting head that says something, and extras for its rows."""
    model = tiny(name)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.q_head.weight, std=1.0)
    ids = tokens(model, 12, 9)
    extras = {"puzzle_ids": torch.arange(12) % 2} if model.spec.extras else None
    with torch.no_grad():
        q = model.halt(forward(model, ids, num_steps=1, extras=extras).state)
        half = (q[:, 0] - (q[:, 1] if model.spec.halt.rule == "q_halt > q_continue" else 0)).median()
        model.q_head.bias[0] -= half  # so that some rows stop after step 1, and some do not
    return model, ids, extras


@pytest.mark.filterwarnings("ignore:num_steps=. is beyond the trained depth:UserWarning")
@pytest.mark.parametrize("name", ["tiny-trm-attn", "tiny-trm-mlp", "tiny-hrm"])
def test_a_row_stops_after_the_first_supervision_step_whose_score_says_so(name):
    model, ids, extras = opinionated(name)
    with torch.no_grad():
        found = forward_until(model, ids, TrainedExit(), extras=extras, num_steps=4)
        runs = {t: forward(model, ids, num_steps=t, extras=extras) for t in range(1, 5)}
        scores = {t: model.halt(run.state) for t, run in runs.items()}
    rival = model.spec.halt.rule == "q_halt > q_continue"
    for row in range(len(ids)):
        says = [t for t in range(1, 4) if scores[t][row, 0] > (scores[t][row, 1] if rival else 0)]
        want = says[0] if says else 4
        assert found.steps[row].tolist() == [want] * ids.shape[1]
        torch.testing.assert_close(found.logits[row], runs[want].logits[row], **EXACT)
        torch.testing.assert_close(found.state.high[row], runs[want].state.high[row], **EXACT)
        torch.testing.assert_close(found.state.low[row], runs[want].state.low[row], **EXACT)
    assert len(found.steps.unique()) > 1


def test_both_trained_tests_exist_and_differ():
    rules = {name: tiny(name).spec.halt.rule for name in ("tiny-trm-attn", "tiny-hrm")}
    assert rules == {"tiny-trm-attn": "q_halt > 0", "tiny-hrm": "q_halt > q_continue"}


def test_a_supervision_step_is_many_applications():
    model, ids, extras = opinionated("tiny-hrm")
    points = exit_points(model.spec)
    assert tuple(points.values()) == model.spec.marks()
    found = forward_until(model, ids, TrainedExit(), extras=extras)
    assert len(found.plan) == points[int(found.steps.max())]

import json

import pytest

from looplab.recipes import par as recipes
from looplab.studies.trained import TrainedRun


def run(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TrainedRun(recipes.smoke(recipes.par_arm("main")), tmp_path, None)


def step(number, loss, norm=1.0, skipped=False):
    return {"kind": "train", "step": number, "loss": loss, "grad_norm": norm, "skipped": skipped}


def test_losses_and_evaluations_are_read_from_the_metrics(tmp_path):
    lines = [step(1, 3.0), step(2, 2.0), {"kind": "eval", "step": 2, "losses": {"1": 2.5, "8": 2.0}}, step(3, 1.0)]
    found = run(tmp_path, [*lines, {"kind": "eval", "step": 3, "losses": {"1": 2.4, "8": 1.5}}])
    assert [line["step"] for line in found.steps] == [1, 2, 3]
    assert (found.loss(3), found.loss(3, over=2)) == (1.0, 1.5)
    assert (found.held_out(), found.held_out(2)) == ({1: 2.4, 8: 1.5}, {1: 2.5, 8: 2.0})


def test_losses_that_are_not_finite_come_back_as_numbers(tmp_path):
    found = run(tmp_path, [step(1, "nan", "inf", True)])
    assert found.steps[0]["loss"] != found.steps[0]["loss"]
    assert found.steps[0]["grad_norm"] == float("inf")


def test_spikes_are_jumps_of_the_loss_or_the_gradient_and_skipped_steps(tmp_path):
    lines = [step(n, 1.0 + 0.01 * (n % 5)) for n in range(1, 202)]
    lines += [step(202, 1.04), step(203, 1.5), step(204, 1.0, norm=21.0), step(205, "nan", "nan", True), step(206, 1.0)]
    assert run(tmp_path, lines).spikes() == (203, 204, 205)


def test_a_step_that_was_not_made_is_an_error(tmp_path):
    with pytest.raises(IndexError):
        run(tmp_path, [step(1, 3.0)]).held_out()

import math

import pytest
import torch

from looplab.models.base import build
from looplab.objectives import NextToken
from looplab.objectives.every_iteration import EveryIteration
from looplab.records import Level
from looplab.recurrence.gradient import FullBPTT
from looplab.training.divergence import first_non_finite, growth
from looplab.training.step import TrainingStep
from training.test_step import loader
from training.tiny_run import two_blocks


def search(model, objective=None):
    batch, plan, objective = loader().batch(0), model.spec.plan(), objective or NextToken()
    step, counts = TrainingStep(model, objective, FullBPTT()), objective.counts(batch.labels, len(plan))
    return first_non_finite(model, lambda r: step(batch, plan, None, counts, recorder=r), len(plan))


def poison(module, *, call=1):
    """The module's output is NaN from its given call on."""
    calls = []

    def hook(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) >= call else output

    return module.register_forward_hook(hook)


def test_a_parameter_is_named():
    model = build(two_blocks())
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.startswith("core.1"))
    parameter.data.view(-1)[0] = float("inf")
    assert search(model) == f"parameter {name}"


def test_the_iteration_in_which_it_arises_is_named():
    model = build(two_blocks())
    name, module = next((n, m) for n, m in model.named_modules() if n.startswith("core.1.") and not list(m.children()))
    # Block 1 runs applications 3 and 4 of 4.
    poison(module, call=2)
    assert search(model) == f"{name} at iteration 4 of 4"


def test_a_loss_that_reads_every_state_can_be_searched_too():
    model = build(two_blocks())
    poison(model.core[1], call=2)
    assert search(model, EveryIteration()) == "core.1 at iteration 4 of 4"


def test_a_state_that_grows_a_thousandfold_is_a_finding_that_names_the_remedy():
    found = growth(0.5, 501.0, step=7)
    assert (found.kind, found.level, found.value, found.threshold) == (
        "training.state_grows",
        Level.WARNING,
        1002.0,
        1e3,
    )
    assert str(found).startswith(
        "[warning] training.state_grows: step 7: state grows. RMS(h_T) is 501, 1,002 times RMS"
    )
    assert "EndNorm" in found.remedy


@pytest.mark.parametrize("last", [500.0, 0.0, math.nan])
def test_a_state_that_does_not_is_none(last):
    assert growth(0.5, last, step=7) is None


def test_a_state_that_starts_at_zero_has_nothing_to_be_compared_with():
    assert growth(0.0, 500.0, step=7) is None


def test_before_and_after_the_loop_are_named():
    model = build(two_blocks())
    handle = poison(model.embedding)
    assert search(model) == "embedding before the loop"
    handle.remove()
    poison(model.lm_head)
    assert search(model) == "lm_head after the loop"


def test_a_gradient_is_named_when_the_forward_pass_is_sound():
    model = build(two_blocks())
    model.final_norm.weight.grad = torch.full_like(model.final_norm.weight, float("nan"))
    assert search(model) == "gradient of final_norm.weight"


def test_nothing_found_is_said():
    assert search(build(two_blocks())) == "none (the sum overflowed)"


def test_hooks_are_gone_afterwards():
    model = build(two_blocks())
    search(model)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(KeyError):
        first_non_finite(model, lambda r: {}["x"], 1)
    assert not any(module._forward_hooks for module in model.modules())

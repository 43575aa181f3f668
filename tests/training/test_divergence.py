import pytest
import torch

from looplab.models.base import build
from looplab.objectives import NextToken
from looplab.recurrence.gradient import FullBPTT
from looplab.training.divergence import first_non_finite
from looplab.training.step import TrainingStep
from training.test_step import loader
from training.tiny_run import two_blocks


def search(model):
    batch, plan, objective = loader().batch(0), model.spec.plan(), NextToken()
    step = TrainingStep(model, objective, FullBPTT())
    return first_non_finite(
        model, lambda r: step(batch, plan, None, objective.counts(batch.labels), recorder=r), len(plan)
    )


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

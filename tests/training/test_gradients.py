import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from looplab.models.base import PRESETS, build
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, TruncatedBPTT
from looplab.recurrence.loop import run_plan
from looplab.training.gradients import CODA, PRELUDE, StateGradients, part_norms, part_of
from looplab.training.trainer import train
from tolerances import EXACT, SPLIT
from training.tiny_run import core, metrics, tiny_run

CORE = {
    *("core", "injections", "signals", "layer_signals", "updates", "boundary", "thoughts", "bridge", "layers"),
    *("residuals", "routers"),
}
"""Modules of models that belong to the loop."""


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_every_parameter_of_a_model_has_a_known_part(preset):
    tops = {name.split(".")[0] for name, _ in build(PRESETS[preset](), device="meta").named_parameters()}
    assert tops <= CORE | set(PRELUDE) | set(CODA)


def test_a_name_belongs_to_one_part():
    names = ("embedding.weight", "core.0.ffn.up.weight", "injections.0.rule.w.weight", "coda_layers.0.attn.q.weight")
    assert [part_of(name) for name in names] == ["prelude", "core", "core", "coda"]
    assert not set(PRELUDE) & set(CODA)


def test_norms_of_the_parts_make_up_the_whole():
    model = build(core())
    for seed, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, seed + 1.0)
    model.final_norm.weight.grad = None
    found = part_norms(model.named_parameters())
    squares = {part: 0.0 for part in ("prelude", "core", "coda")}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            squares[part_of(name)] += float(parameter.grad.square().sum())
    assert found == pytest.approx({part: math.sqrt(square) for part, square in squares.items()}, rel=1e-6)
    assert found["coda"] == 0.0  # the head is tied to the embedding, and the norm has no gradient
    assert min(found["prelude"], found["core"]) > 0


@pytest.mark.parametrize(
    ("strategy", "first"),
    [(FullBPTT(), 0), (CheckpointApplication(inner=FullBPTT()), 0), (TruncatedBPTT(window=2), 2)],
    ids=["full", "recomputed", "window"],
)
def test_gradients_of_states_are_those_of_autograd(strategy, first):
    model = build(core()).double()
    tokens = torch.arange(10).view(2, 5)
    plan, noise = model.spec.plan(4), torch.ones(2, 5, model.spec.noise_width, dtype=torch.float64)

    def run(recorder):
        context = model.encode(tokens)
        last = run_plan(model, plan, context, model.init_state(context, noise), gradient=strategy, recorder=recorder)
        return model.head(model.coda(last, context)).square().sum()

    recorder = StateGradients()
    run(recorder).backward()
    found = recorder.norms()
    # One state after another is the leaf that the rest of the loop starts from.
    context = model.encode(tokens)
    with torch.no_grad():
        kept = [model.init_state(context, noise)]
        for block, iteration in plan:
            kept.append(model.step(kept[-1], context, block, torch.full((2,), iteration)))
    wanted = {}
    for number, state in enumerate(kept):
        leaf = state.detach().requires_grad_()
        last = run_plan(model, plan[number:], context, leaf)
        (gradient,) = torch.autograd.grad(model.head(model.coda(last, context)).square().sum(), leaf)
        wanted[str(number)] = float(gradient.norm())
    given = [number for number in found if number != "0"]
    assert given == [str(number) for number in range(max(1, first + 1), 5)]
    for number in given:
        assert found[number] == pytest.approx(wanted[number], rel=1e-10)


def test_norms_of_states_change_nothing_and_do_not_depend_on_micro_batches(tmp_path):
    plain = tiny_run(tmp_path, model=core(), gradient=TruncatedBPTT(window=2))
    runs = {
        "plain": plain,
        "norms": dataclasses.replace(plain, state_norms=True),
        "split": dataclasses.replace(plain, state_norms=True, micro_batches=2),
    }
    for name, config in runs.items():
        train(config, tmp_path / name)
    first, second = (load_file(tmp_path / name / "step_6" / "model.safetensors") for name in ("plain", "norms"))
    torch.testing.assert_close(first, second, **EXACT)
    for one, two in zip(*(metrics(tmp_path / name, "train") for name in ("norms", "split")), strict=True):
        steps = range(max(1, one["T"] - one["g"] + 1), one["T"] + 1)
        assert [k for k in one["state_grad_norms"] if k != "0"] == [str(k) for k in steps]
        for k, norm in one["state_grad_norms"].items():
            assert two["state_grad_norms"][k] == pytest.approx(norm, rel=SPLIT["rtol"], abs=SPLIT["atol"])
        total = math.sqrt(sum(norm**2 for norm in one["grad_norms"].values()))
        assert total == pytest.approx(one["grad_norm"], rel=1e-5)
    assert "state_grad_norms" not in metrics(tmp_path / "plain", "train")[0]


def test_rows_at_different_iterations_have_no_norm_per_iteration(tmp_path):
    with pytest.raises(ValueError, match=r"RunConfig.state_norms must be False with depth_per='sequence', where rows"):
        tiny_run(tmp_path, model=core(), depth_per="sequence", state_norms=True)

"""Our LoopFormer against every tensor recorded from the original, by name."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from looplab.models.loopformer import key_map_of
from looplab.models.published import PUBLISHED, assemble
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import Plan
from looplab.recurrence.trace import Recorder
from tolerances import EXACT, PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

HERE = Path(__file__).parent / "loopformer"
IO = load_file(HERE / "io.safetensors")
WEIGHTS = load_file(HERE / "weights.safetensors")
FACTS = json.loads((HERE / "config.json").read_text())
INPUTS = {"input_ids", "targets"}
RECORDED = sorted(set(IO) - INPUTS)


@functools.cache
def model():
    return assemble(PUBLISHED["loopformer"], FACTS, WEIGHTS)


def schedule(grid):
    """How a recorded list of steps is asked for: a number of equal steps, entries of the trained grid, or the list."""
    if grid == "prefix3_of_8":
        return {"plan": model().spec.plan()[:3]}
    if grid == "uneven3":
        sizes = IO["steps_uneven3"].float().expand(len(IO["input_ids"]), -1)
        return {"plan": Plan.of((0, k) for k in range(3)), "extras": {"step_sizes": sizes}}
    return {"num_steps": {"full8": 8, "grid4": 4, "grid2": 2, "one": 1}[grid]}


@functools.cache
def run(grid):
    """Output, states after every loop, and the two codes of every loop; with gradient."""
    codes = {"time": [], "step_size": []}
    (code,) = model().signals
    hooks = [
        getattr(code, name).register_forward_hook(lambda _, __, output, made=made: made.append(output[0]))
        for name, made in codes.items()
    ]
    recorder = Recorder()
    output = forward(model(), IO["input_ids"], recorder=recorder, **schedule(grid))
    for hook in hooks:
        hook.remove()
    return output, torch.stack(recorder.states[1:]), {name: torch.stack(made) for name, made in codes.items()}


def loss(grid):
    return F.cross_entropy(run(grid)[0].logits.flatten(0, 1), IO["targets"].flatten(), ignore_index=-1)


def gradient_norms(grid):
    named = dict(model().named_parameters())
    grads = torch.autograd.grad(loss(grid), list(named.values()), retain_graph=True)
    exported = key_map_of(model().config).export(dict(zip(named, grads, strict=True)))
    return torch.stack([grad.norm() for _, grad in sorted(exported.items())])


def step_sizes(grid):
    """The sizes that the plan of this run stands for."""
    output = run(grid)[0]
    ids = torch.tensor([iteration for _, iteration in output.plan])
    return output.context.step_sizes[0, ids].double()


def reproduced(name):
    """Our value of a recorded tensor."""
    kind, grid = re.fullmatch(r"(time_emb|dt_emb|final_normed|[a-z]+)_(\w+)", name).groups()
    found = {
        "steps": lambda: step_sizes(grid),
        "time_emb": lambda: run(grid)[2]["time"],
        "dt_emb": lambda: run(grid)[2]["step_size"],
        "states": lambda: run(grid)[1],
        "final_normed": lambda: run(grid)[0].hidden,
        "logits": lambda: run(grid)[0].logits,
        "loss": lambda: loss(grid),
        "gradnorm": lambda: gradient_norms(grid),
    }
    return found[kind]().detach()


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_tensor_is_reproduced(name):
    bound = PUBLISHED_GRADIENTS if name.startswith("gradnorm") else PUBLISHED_OUTPUTS
    torch.testing.assert_close(reproduced(name), IO[name], **bound)


def test_the_recorded_lists_of_steps_are_six():
    assert sum(name.startswith("steps_") for name in RECORDED) == 6


def test_export_gives_back_the_names_and_bytes_of_the_file():
    exported = key_map_of(model().config).export(model().state_dict())
    assert exported.keys() == WEIGHTS.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, WEIGHTS[name], **EXACT)

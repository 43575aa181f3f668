"""Answers of one problem at a time: a plain loop over the plan, and losses cell by cell in Python's own arithmetic."""

import math
from typing import NamedTuple

import torch
from safetensors.numpy import load_file


class Graded(NamedTuple):
    loss: float
    right: int


def answer_logits(model, tokens, plan, change=lambda hidden: hidden):
    """Logits at the last position after the applications (block, iteration) of `plan`, float64."""
    with torch.no_grad():
        context = model.encode(torch.tensor([[int(t) for t in tokens]]))
        state = model.init_state(context, None)
        for block, iteration in plan:
            state = model.step(state, context, block, torch.tensor([iteration]))
        hidden = model.coda(state, context)
        return model.head(change(hidden))[0, -1].double()


def affine_change(path, schedule):
    """hidden -> gain * hidden + scale * shift, as a file of probes has it."""
    arrays = load_file(path)
    gain, shift, scale = (torch.from_numpy(arrays[f"{schedule}.{name}"]) for name in ("gain", "shift", "scale"))
    return lambda hidden: (hidden.double() * gain + scale * shift).to(hidden.dtype)


def grade(logits, answer, *, cells):
    """Sum of the cells' cross-entropies, and how many of them have their largest logit at the answer."""
    each = len(logits) // cells
    loss, right = 0.0, 0
    for cell in range(cells):
        z = [float(x) for x in logits[cell * each : (cell + 1) * each]]
        top = max(z)
        loss += top + math.log(sum(math.exp(x - top) for x in z)) - z[answer[cell]]
        right += z.index(top) == answer[cell]
    return Graded(loss, right)

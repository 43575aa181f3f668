"""The lens: what a model would answer after every application of its last block, and when that stops changing.

    a_t              argmax of the readout after application t of the last block, t = 1 .. T
    settled at first a_1 = a_T                       decided: a_1 = a_2 = .. = a_T
    first stay       least t with a_t = .. = a_T     flips:   how often a_t is not a_{t+1}
    rms_t            root mean square of the state   update_t = |s_t - s_{t-1}| / |s_{t-1}|, over that application

The last block is the one the readout is trained behind. In a layer-loop that is the last layer, so t = 1 is its first
application, after all those of the layers before it; in a model-loop t = 1 is the first pass through all layers. Both
have T readouts at `num_steps` = T, and can be set side by side.

Reference: the logit lens as commonly used; asked of layer-loop against model-loop after Loopie, arXiv:2607.16051.
Deviations: the model's own readout alone, with its coda; no translators are fitted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence import state as states
from looplab.recurrence.loop import run_plan
from looplab.recurrence.trace import Recorder


class Lens(NamedTuple):
    """Readouts of one batch along the loop."""

    top: Int[Tensor, "readouts batch seq"]
    """a_t."""
    logits: Float[Tensor, "batch seq vocab"]
    """Of the last readout."""
    rms: Float[Tensor, " readouts"]
    update: Float[Tensor, " readouts"]
    """Mean over tokens."""

    @property
    def settled_at_first(self) -> Bool[Tensor, "batch seq"]:
        """a_1 = a_T."""
        return self.top[0] == self.top[-1]

    @property
    def decided(self) -> Bool[Tensor, "batch seq"]:
        """The answer stands at the first readout and never changes."""
        return (self.top == self.top[-1]).all(0)

    @property
    def first_stay(self) -> Int[Tensor, "batch seq"]:
        """Number of the readout (from 1) at which the final answer appears and stays."""
        stays = (self.top == self.top[-1]).flip(0).long().cumprod(0)
        return self.top.shape[0] + 1 - stays.sum(0)

    @property
    def flips(self) -> Int[Tensor, "batch seq"]:
        """Changes of the answer from one readout to the next."""
        return (self.top[1:] != self.top[:-1]).sum(0)


def lens(model: Any, tokens: Int[Tensor, "batch seq"], num_steps: int) -> Lens:
    """Runs a batch `num_steps` deep and reads it after every application of the last block.

    Args:
        model: One that starts without noise.

    Raises:
        ValueError: The model starts from noise, or runs no application of its last block.
    """
    if model.spec.noise_width:
        raise ValueError(
            f"lens: model must start without noise. {model.spec.name!r} draws some. Take one with another state_init."
        )
    plan = model.spec.plan(num_steps)
    read = [k for k, (block, _) in enumerate(plan, 1) if block == len(model.spec.blocks) - 1]
    if not read:
        raise ValueError(f"lens: num_steps must be at least 1. Got {num_steps}. There is nothing to read before.")
    recorder = Recorder()
    with torch.no_grad():
        context = model.encode(tokens)
        run_plan(model, plan, context, model.init_state(context, None), recorder=recorder)
        top = []
        for k in read:
            logits = model.head(model.coda(recorder.states[k], context))
            top.append(logits.argmax(-1))
        pairs = [(_flat(recorder.states[k - 1]), _flat(recorder.states[k])) for k in read]
    return Lens(
        top=torch.stack(top),
        logits=logits,
        rms=torch.stack([after.square().mean().sqrt() for _, after in pairs]),
        update=torch.stack([((after - before).norm(dim=-1) / before.norm(dim=-1)).mean() for before, after in pairs]),
    )


def _flat(state: Any) -> Float[Tensor, "batch seq channels"]:
    """All tensors of a state side by side."""
    return torch.cat([leaf.flatten(2) for leaf in states.leaves(state)], dim=-1)

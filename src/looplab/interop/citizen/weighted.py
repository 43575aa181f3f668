"""Weighted exits: the logits of every exit of a loop, weighted by the probability that the model's gate stops there.

    logits = sum_t p_t logits_t,   p_t = lambda_t prod_{j<t} (1 - lambda_j),   the last exit takes the rest

Reference: Ouro, arXiv:2510.25741, whose code returns these logits whenever labels are given.
"""

from typing import Any

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.models.base import LoopedLM
from looplab.recurrence.exit import exit_points
from looplab.recurrence.kv import Cache
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import Steps
from looplab.recurrence.trace import Recorder


def weighted_logits(
    model: LoopedLM,
    tokens: Int[Tensor, "batch seq"],
    *,
    num_steps: Steps | Int[Tensor, " batch"] | None = None,
    logits_to_keep: int | None = None,
    cache: Cache | None = None,
    **arguments: Any,
) -> Float[Tensor, "batch kept vocab"]:
    """Logits of all exits, weighted by the probability that the model's gate stops there.

    Args:
        arguments: Further ones of `recurrence.loop.forward`.
    Raises:
        ValueError: No gate of exit probabilities, one depth per row, or a cache where the readout attends to past
            tokens: it would find entries of their last exit only.
    """
    spec = model.spec
    if spec.halt is None or spec.halt.layout != "hazard" or spec.halt.horizon:
        raise ValueError(f"weighted_exit needs a gate of exit probabilities. {spec.name} has none. Leave it out")
    if isinstance(num_steps, Tensor):
        raise ValueError("num_steps must be an int with weighted_exit, which reads every exit. Got one per row")
    if cache is not None and spec.cost.coda.layers:
        raise ValueError(
            f"weighted_exit needs a readout without attention under a cache. Got that of {spec.name}. "
            "Pass use_cache=False"
        )
    recorder = Recorder(max_bytes=2**63)
    out = forward(model, tokens, num_steps=num_steps, cache=cache, recorder=recorder, logits_to_keep=0, **arguments)
    first = 0 if logits_to_keep is None else max(0, tokens.shape[1] - logits_to_keep)
    total: Any = 0.0
    left: Any = 1.0
    *early, _ = exit_points(spec, num_steps).values()
    for applications in early:
        state = recorder.states[applications]
        chance = torch.sigmoid(model.halt(state))[:, first:, None]
        total = total + left * chance * model.head(model.coda(state, out.context)[:, first:])
        left = left * (1 - chance)
    return total + left * model.head(out.hidden[:, first:])

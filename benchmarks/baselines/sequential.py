"""One request after the other, one token at a time: what an engine is compared with in tokens and in time."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from looplab.engine.slots import rule_of
from looplab.recurrence.exit import ReplayExit, forward_until
from looplab.recurrence.loop import forward


class Said(NamedTuple):
    """Tokens of all requests, and the seconds of prompts and of decoding."""

    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    depths: Sequence[Sequence[int]],
    steps: int,
    *,
    kv_rule: str | None = None,
) -> Said:
    """Greedy tokens of every request; `depths` has the steps of every token after the first.

    Args:
        kv_rule: Command-line name; None: last_exited.
    """
    said, prefill, decode = [], 0.0, 0.0
    rule, spec = rule_of(kv_rule or "last_exited"), model.spec
    for prompt, own in zip(prompts, depths, strict=True):
        start = time.perf_counter()
        plan = spec.plan(steps)
        weight = next(model.parameters())
        cache = rule.cache(
            rows=1, capacity=len(prompt) + len(own) + 1, iterations=plan.iterations(), dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip
        with torch.inference_mode():
            out = forward(
                model,
                torch.tensor([list(prompt)], device=weight.device),
                num_steps=steps,
                cache=cache,
                logits_to_keep=1,
            )
            tokens = [int(out.logits[0, -1].argmax())]  # type: ignore[index]
            middle = time.perf_counter()
            for depth in own:
                replay = ReplayExit(depths=torch.tensor([[depth]], device=weight.device))
                last = torch.tensor([tokens[-1:]], device=weight.device)
                step = forward_until(model, last, replay, num_steps=steps, cache=cache)
                tokens.append(int(step.logits[0, -1].argmax()))  # type: ignore[index]
        said.append(tokens)
        prefill, decode = prefill + middle - start, decode + time.perf_counter() - middle
    return Said(said, prefill, decode)

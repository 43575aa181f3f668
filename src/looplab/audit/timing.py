"""How long depth takes here: milliseconds per token of every measured depth, on one launch of evaluation documents.

The longest of full and extend_last is run from the start several times, with the clock read after every application; a
depth costs encoding, its applications, readout and logits, divided by the positions of the launch. Times belong to this
machine and this moment. They are no part of a result unless they are asked for, because equal audits give equal bytes.
"""

import statistics
import time
from collections.abc import Callable

import torch

from looplab.audit.case import EVALUATION, FULL, Case

REPEATS = 5
FAMILIES = ("prefix", "full", "extend_last")


def milliseconds(case: Case, *, repeats: int = REPEATS) -> dict[str, float]:
    """Median milliseconds per token of full, its prefixes and its longest extension, by schedule name."""
    subject, runner = case.subject, case.subject.runner
    depths = {
        row.name: row.applications for row in subject.rows if row.family in FAMILIES and row.name in subject.words
    }
    longest = max(depths, key=lambda name: (depths[name], name == FULL))
    chained = {name: n for name, n in depths.items() if _begins(case, name, longest)}
    shard = max(case.shards(EVALUATION).values(), key=lambda shard: shard.batch.tokens.numel())
    wait = _synchronise(runner.weights.device)
    runs: dict[str, list[float]] = {name: [] for name in chained}
    for turn in range(repeats + 1):
        clock = [_now(wait)]
        context, state = runner.start(shard.batch.tokens, shard.batch.valid, shard.items, extras=shard.batch.extras)
        clock.append(_now(wait))
        for application in subject.words[longest][0]:
            state = runner.rollout((application,), context, state)
            clock.append(_now(wait))
        runner.head(runner.hidden(state, context)[shard.batch.read])
        readout = _now(wait) - clock[-1]
        if turn:  # the first turn warms up
            for name, n in chained.items():
                runs[name].append(clock[1 + n] - clock[0] + readout)
    return {name: 1000 * statistics.median(found) / shard.batch.tokens.numel() for name, found in runs.items()}


def _begins(case: Case, name: str, longest: str) -> bool:
    """Whether the plan of one schedule is the beginning of another's."""
    own, other = case.subject.words[name][0], case.subject.words[longest][0]
    return tuple(own) == tuple(other)[: len(own)]


def _synchronise(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _now(wait: Callable[[], None]) -> float:
    wait()
    return time.perf_counter()

"""Decoding at equal depth against transformers on the same weights: `rivals`.

What is started once per process or model, theirs and ours, is not timed; all sides must say the same tokens.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.baselines import transformers_generate
from benchmarks.cases.engine_load import VOCAB, Numbers
from benchmarks.cases.engine_table import Rows, check_equal, interval
from benchmarks.timing import CLOCKS
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine
from looplab.engine.request import SamplingParams

Prompts, Outputs = Sequence[Sequence[int]], Sequence[int]
Answer = tuple[list[list[int]], float]
PADDED, CONTINUOUS = "generate, padded", "continuous batching"


def rivals(options: argparse.Namespace) -> Rows:
    """Decoding at equal depth against transformers on the same weights; all sides must say the same tokens."""
    dim = int(options.model.split("-")[1])
    rows: Rows = []
    for steps in options.steps:
        native, ours = (one.to(options.device) for one in transformers_generate.twins(dim, VOCAB, steps))
        for launch in options.widths:
            requests, random = launch * options.batches, np.random.default_rng(launch)
            prompts = [tuple(map(int, row)) for row in random.integers(1, VOCAB, (requests, options.prompt))]
            most = 255 - options.prompt
            lengths = {
                "equal": [options.outputs] * requests,
                "exponential": [
                    int(n) for n in np.clip(random.exponential(options.outputs / 2, requests), 2, most)
                ],
            }  # fmt: skip
            longest = max(max(lengths[law]) for law in options.lengths)
            for name in options.rivals:
                with _rival(name, native, launch, options.prompt, longest, options) as answer:
                    for law in options.lengths:
                        rows.append(
                            {"steps": steps, "lengths": law, "W": launch, "against": name}
                            | _raced(name, answer, ours, launch, prompts, lengths[law], options)
                        )
    return rows


def _raced(
    name: str,
    rival: Callable[[Prompts, Outputs], Answer],
    ours: Any,
    launch: int,
    prompts: Prompts,
    outputs: Outputs,
    options: argparse.Namespace,
) -> dict[str, Any]:
    ratios, fastest = [], []
    for pair in range(options.pairs + 1):
        theirs, slow = rival(prompts, outputs)
        mine, fast = _engine(ours, launch, prompts, outputs, options)
        check_equal(f"the engine and {name} of transformers", [mine, theirs])
        if pair:  # the first warms up
            ratios.append(slow / fast)
            fastest.append(fast)
    low, high = interval(ratios)
    return {
        "tokens_s": sum(outputs) / statistics.median(fastest), "ratio": statistics.median(ratios), "low": low,
        "high": high, "longest_over_mean": max(outputs) * len(outputs) / sum(outputs),
    }  # fmt: skip


@contextmanager
def _rival(
    name: str, native: Any, rows: int, prompt: int, longest: int, options: argparse.Namespace
) -> Iterator[Callable[[Prompts, Outputs], Answer]]:
    clock = CLOCKS[options.clock]

    def padded(prompts: Prompts, outputs: Outputs) -> Answer:
        said: list[list[int]] = []
        seconds = 0.0
        for first in range(0, len(prompts), rows):
            part = slice(first, first + rows)
            tokens, took = transformers_generate.padded(native, prompts[part], outputs[part], clock)
            said, seconds = said + tokens, seconds + took
        return said, seconds

    if name == PADDED:
        yield padded
        return
    manager = transformers_generate.Continuous(native, rows=rows, prompt=prompt, output=longest)
    try:
        yield lambda prompts, outputs: manager.answer(prompts, outputs, clock)
    finally:
        manager.close()


def _engine(model: Any, rows: int, prompts: Prompts, outputs: Outputs, options: argparse.Namespace) -> Answer:
    """The engine at full depth, the whole plan per launch, as many residents as rows."""
    config = EngineConfig(
        launch_rows=rows, max_resident=rows, min_coda_rows=1, num_pages=rows * 16 + 1, segments="plan", reuse="off",
        max_waiting=10**6, numerics=options.numerics,
    )  # fmt: skip
    engine = Engine(model, Numbers(), config)  # new, so that no prompt is cached; not timed, as theirs is not
    clock = CLOCKS[options.clock]
    start = clock()
    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in outputs]
    found = engine.generate(prompts, sampling)
    return [list(one.tokens) for one in found], clock() - start


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"rivals": rivals}

"""Where keys and values decide: `prefix`, `pressure` and `long_context`."""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.cases.engine_depth import FULL, REFILL, arms, compared, engine_of
from benchmarks.cases.engine_load import Drive, Run, load_of, model_of, replayed
from benchmarks.cases.engine_table import (
    Rows,
    check_alone,
    check_equal,
    counts,
    facts,
    fractions,
    in_turn,
    latency,
    speed,
)
from benchmarks.timing import CLOCKS
from looplab.nn.cost import CostSpec

PAGE = 16


def prefix(options: argparse.Namespace) -> Rows:
    """Prompts that begin alike: how much of them the cache holds, and what of their reading that saves."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    prompt = options.context // 2
    rows: Rows = []
    for share in options.shares:
        load = load_of(
            "spread", model.spec.default_steps, requests=max(options.requests, 2 * residents), prompt=prompt,
            outputs=options.outputs, seed=0, shared=int(share * prompt),
        )  # fmt: skip

        def once(name: str, load: Any = load) -> Run:
            engine = engine_of(model, width, residents, options, prefix_cache=name == "prefix cache")
            return Drive(engine, load, replayed(engine, load, full=False), clock=CLOCKS[options.clock]).finish()

        runs = in_turn(["no cache", "prefix cache"], once, options.pairs)
        check_equal("with and without prefix cache", [mine[0].tokens for mine in runs.values()])
        for name, mine in runs.items():
            stats, plain = mine[0].stats, runs["no cache"][0].stats
            rows.append(
                {"arm": name, "shared": share, "prompt": prompt}
                | facts(mine[0], load)
                | {
                    "hit_rate": stats.cached_tokens / stats.prompt_tokens,
                    "prefill_applications": stats.prefill_applications,
                    "prefill_saved": plain.prefill_applications - stats.prefill_applications,
                    "evicted_pages": stats.evicted_pages,
                }
                | speed(mine, runs["no cache"])
                | counts(mine[0])
                | latency(mine)
            )
    return rows


def pressure(options: argparse.Namespace) -> Rows:
    """Fewer pages than residents need: who is put back, and what is done twice."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    longest = options.prompt + options.outputs
    load = load_of(
        "spread", model.spec.default_steps, requests=max(options.requests, 2 * residents), prompt=options.prompt,
        outputs=options.outputs, seed=0,
    )  # fmt: skip
    needed = residents * -(-longest // PAGE)
    pages = {f"{share:g} of the pages": max(-(-longest // PAGE), int(share * needed)) + 1 for share in options.pages}
    roomy = next(iter(pages))

    def once(name: str) -> Run:
        engine = engine_of(model, width, residents, options, num_pages=pages[name])
        return Drive(engine, load, replayed(engine, load, full=False), clock=CLOCKS[options.clock]).finish()

    runs = in_turn(list(pages), once, options.pairs)
    check_equal("all numbers of pages", [mine[0].tokens for mine in runs.values()])
    return [
        {"arm": name, "pages": pages[name]}
        | facts(mine[0], load)
        | {"preemptions": mine[0].stats.preemptions, "replayed_tokens": mine[0].stats.replayed_tokens}
        | speed(mine, runs[roomy])
        | fractions(mine[0], load, full=False)
        | counts(mine[0])
        | latency(mine)
        for name, mine in runs.items()
    ]


def long_context(options: argparse.Namespace) -> Rows:
    """A context so long that reading keys and values takes over: what is then left of the speed-up.

    All requests share their prompt, which is read once: the case is about decoding.
    """
    rows: Rows = []
    for context in (options.prompt, options.context):
        positions = -(-(context + options.outputs) // PAGE) * PAGE
        model = model_of(options.model, options.device, options.dtype, positions=positions)
        width, residents = options.rows, options.residents or options.rows + options.rows // 2
        load = load_of(
            "spread", model.spec.default_steps, requests=max(options.requests, 4 * residents), prompt=context,
            outputs=options.outputs, seed=0, shared=context // PAGE * PAGE,
        )  # fmt: skip
        runs = arms(model, load, width, residents, options)
        for name in (FULL, REFILL):
            check_alone(runs[name][0], load, min(1, options.sequential), full=name == FULL)
        rows += [
            {"context": context, "attention_share": attention_share(model.spec.cost, context)} | row
            for row in compared(load, runs)
        ]
    return rows


def attention_share(cost: CostSpec, past: int) -> float:
    """Share of attention over past tokens in the multiply-adds of one iteration."""
    block = cost.blocks[0]
    return 1 - 2 * block.matmul / block.forward(tokens=1, past=past)


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "prefix": prefix,
    "pressure": pressure,
    "long_context": long_context,
}

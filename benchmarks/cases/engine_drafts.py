"""What guessing at few steps gains at full depth: `speculative`.

Arms run the same requests, greedily, in turn; all must say the tokens of plain full depth before a number is printed.
Few requests at a time are where guesses can pay: many fill the launches by themselves.
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.cases.engine_depth import engine_of
from benchmarks.cases.engine_knobs import texts_of
from benchmarks.cases.engine_load import Drive, Load, Run, load_of, model_of
from benchmarks.cases.engine_table import Row, Rows, check_equal, counts, equal_promised, facts, in_turn, latency, speed
from benchmarks.timing import CLOCKS
from looplab.engine.request import DepthParams
from looplab.engine.reuse import cut_windows
from looplab.interop.checkpoint import load

PLAIN = "full depth"


def speculative(options: argparse.Namespace) -> Rows:
    """Guesses at few steps, confirmed at full depth, against full depth without, on a checkpoint and a random model."""
    rows: Rows = []
    opened = load(options.checkpoint, device=options.device)
    requests = max(8, *options.at_once)
    prompts = cut_windows(texts_of(opened), length=options.prompt, windows=requests).tolist()
    rows += _compared(options.checkpoint, opened.model, tuple(map(tuple, prompts)), options)
    model = model_of(options.model, options.device, options.dtype)
    drawn = load_of("equal", 4, requests=requests, prompt=options.prompt, outputs=2, seed=0)
    return rows + _compared(options.model, model, drawn.prompts, options)


def _compared(name: str, model: Any, prompts: tuple[tuple[int, ...], ...], options: argparse.Namespace) -> Rows:
    """One row per number of requests at once and pair (draft_steps, draft_tokens)."""
    most, rows = model.spec.default_steps, []
    outputs = min(options.outputs, (model.spec.max_positions or 256) - options.prompt - 1)
    arms: dict[str, DepthParams] = {PLAIN: DepthParams(draft_steps=0)}
    for steps in options.draft_steps:
        for tokens in options.draft_tokens:
            if steps < most:
                arms[f"{steps} steps, {tokens} tokens"] = DepthParams(draft_steps=steps, draft_tokens=tokens)
    for number in options.at_once:
        part = Load(prompts=prompts[:number], depths=((most,) * (outputs - 1),) * number)
        width = number * (1 + max(options.draft_tokens))  # all guesses fit one launch

        def once(arm: str, part: Load = part, width: int = width) -> Run:
            sizes = {"draft_tokens": max(options.draft_tokens), "min_coda_rows": 1}
            engine = engine_of(model, width, width, options, **sizes)
            return Drive(engine, part, lambda place: arms[arm], clock=CLOCKS[options.clock]).finish()

        runs = in_turn(list(arms), once, options.pairs)
        if equal_promised(model):
            check_equal("guesses and plain full depth", [mine[0].tokens for mine in runs.values()])
        rows += [
            {"arm": arm, "model": name, "at_once": number}
            | facts(mine[0], part)
            | speed(mine, runs[PLAIN])
            | _guesses(mine[0])
            | counts(mine[0])
            | latency(mine)
            for arm, mine in runs.items()
        ]
    return rows


def _guesses(found: Run) -> Row:
    """Share of guesses that were right, how many per round, and the work of full depth over what was executed."""
    stats = found.stats
    return {
        "accepted": stats.accepted_tokens / max(1, stats.drafted_tokens),
        "per_round": stats.accepted_tokens / max(1, stats.draft_rounds),
        "work": stats.chosen / stats.applications,
        "steps_per_launch": stats.chosen / stats.launches["core"],
    }


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"speculative": speculative}

"""The page of a reuse audit: the verdict of every KV rule, where its cost comes from, and who pays it."""

import os
from pathlib import Path

from looplab.engine.verdict import FLIPS, NATS, ReuseResult, sentence
from looplab.report.keyed import Keyed
from looplab.report.sheet import measured, write_sheet
from looplab.report.tables import Cell, Table, amount, count, words


def write_reuse(result: ReuseResult, folder: str | os.PathLike[str]) -> Path:
    """Writes the page and tables.tex, and returns the path of the page."""
    keyed = Keyed(result)
    return write_sheet(
        result,
        folder,
        title="Reuse of exited tokens",
        subject=result.model,
        sentences=[
            f"Tokens stop by {result.exit_rule}. {result.windows} windows of {result.prompt} prompt and "
            f"{result.output} output tokens of {result.text}; full depth is {result.steps} steps.",
            *(sentence(result, rule) for rule in result.rules),
        ],
        tables=[
            verdicts_table(keyed),
            terms_table(keyed),
            depth_table(keyed),
            distance_table(keyed),
            free_table(keyed),
        ],
    )


def verdicts_table(result: Keyed) -> Table:
    """Word, its two measures, and what they cost."""
    rows = [
        (
            words(v.kv_rule),
            count(v.delay),
            words(v.word),
            measured(v.reuse, 4),
            measured(v.flips, percent=True),
            amount(v.mean_depth, 2),
            count(v.kv_bytes),
            count(v.windows_needed),
        )
        for v in result.verdicts
    ]
    columns = (
        "KV rule",
        "delay",
        "verdict",
        "reuse, nats",
        "flips",
        "mean depth",
        "KV bytes per token",
        "windows needed",
    )
    note = (
        f"Reusable: upper bounds of reuse at most {NATS} nats and of flips at most {FLIPS:.0%}. Delay: steps that a "
        "token still runs after the rule fired. Small: 95 % intervals over windows."
    )
    return Table("verdicts", "Verdicts", columns, tuple(rows), note, (0, 2))


def terms_table(result: Keyed) -> Table:
    """The three terms of the total."""
    rows = [
        (
            words(v.kv_rule),
            count(v.delay),
            measured(v.rule, 4),
            measured(v.read, 4),
            measured(v.reuse, 4),
            measured(v.total, 4),
            measured(v.past, 4),
            measured(v.kl, 4),
            measured(v.slope, 5),
        )
        for v in result.verdicts
    ]
    columns = ("KV rule", "delay", "rule", "read", "reuse", "total", "deep reader", "KL", "slope")
    note = (
        "Nats per token. Rule: sharing slots at full depth. Read: reading a token at its exit, deep past. Reuse: what "
        "later tokens lose because earlier ones exited. Total is their sum. Deep reader: what exits of "
        "the past cost a token that runs all steps. Slope: reuse per earlier exit in context."
    )
    return Table("terms", "Where the loss comes from", columns, tuple(rows), note)


def depth_table(result: Keyed) -> Table:
    """Reuse by the depth of the token before."""
    return _strata(result, "by_depth", "Reuse by the depth of the token before", "depth")


def distance_table(result: Keyed) -> Table:
    """Reuse by the distance to the nearest early exit."""
    return _strata(result, "by_distance", "Reuse by the distance to the nearest early exit", "distance")


def free_table(result: Keyed) -> Table:
    """Free generation with and without exits."""
    rows = []
    for v in result.verdicts:
        if v.free.held is None:
            continue
        first = v.free.held.first
        middle = Cell("-", tone="muted") if not first else Cell(str(first[len(first) // 2]), f"{v.free.path}.first")
        rows.append(
            (
                words(v.kv_rule),
                count(v.delay),
                count(v.free.windows),
                count(v.free.tokens),
                count(v.free.diverged),
                middle,
            )
        )
    columns = ("KV rule", "delay", "texts", "tokens each", "diverged", "median first difference")
    note = "Generated from the prompts with the same random numbers, at full depth and with exits."
    return Table("free", "Free generation", columns, tuple(rows), note)


def _strata(result: Keyed, name: str, caption: str, column: str) -> Table:
    rows = [
        (words(v.kv_rule), count(v.delay), words(stratum.name), count(stratum.tokens), amount(stratum.reuse, 4))
        for v in result.verdicts
        for stratum in getattr(v, name)
    ]
    columns = ("KV rule", "delay", column, "tokens", "reuse, nats")
    return Table(name.replace("_", "-"), caption, columns, tuple(rows), "", (0, 2))

"""stability: does training of a deeply looped model fail for want of stability, or of expressiveness?

Arms of `looplab.recipes.stability`: loops x peak rate x stabiliser on bytes of text, models that can express more, and
training contracts. A run has failed if its loss stopped being finite, or if it ends above where it was after 100 steps.
What can be won over the plain loop is `recovered`: its best loss minus that of another kind.

    best loss of a kind at H     at the rate whose mean held-out loss over all seeds is smallest, among the rates at
                                 which every seed came to its end
    best stabiliser at H         that with the smallest mean best loss

Both are chosen on the losses that are then compared, for every kind by the same rule; the stabiliser out of three.

Source: a survey of looped models, in words only. EndNorm of progress-aligned recurrence; LOOM, arXiv:2610.01153;
    Parcae, arXiv:2604.12946.
Deviations: the rule of failure, the choice of rates and every margin are ours.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from looplab.models.base import build
from looplab.recipes import stability as recipes
from looplab.recipes.stability import LOOPS, RATES, STABILISERS
from looplab.records import Claim, Need, Part, Published, StudyPlot, StudyRow
from looplab.recurrence.expected_cost import expected_flops
from looplab.studies import curves, parts, rules
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.claims import DIVERGED, NOT_MEASURED
from looplab.studies.trained import TrainedRun
from looplab.training.config import RunConfig

SIZES = {SMOKE: recipes.SMOKE, CPU: recipes.CPU}
COMPARED = (4, 16)
"""Loops at which expressiveness is tried."""
ALONE = tuple(name for name in STABILISERS if name != "none")
BEST, CONTRACTS, MODELS = "best stabiliser", "contracts", "models"
TITLES = {
    "none": "plain additive re-injection",
    "end_norm": "the size of the state pinned after every loop",
    "loom": "branches weighed by 0.5 / (H sqrt(2))",
    "diagonal": "a decaying linear carry in place of addition",
    "untied": "2 H stored layers, none repeated",
    "wide": "twice the width",
    "window_1": "gradient through the last loop",
    "segments_3": "gradient cut after every third loop, a loss after every loop",
    "every_loop": "a loss after every loop",
}
AXIS = "log2 loops"
FEWEST = 1 / 100
"""Least rate at which there is anything to explain."""
SURVEY = (Published(figure="in words only", source="survey of looped models"),)
OURO = (Published(figure="8 loops spiked, 4 were kept", source="Ouro, arXiv:2510.25741"),)

FAILURE_RULE = (
    f"failed: the loss stopped being finite, or the held-out loss ended above that after {recipes.CPU.early} steps"
)
SPIKE_RULE = "spikes: loss above median + 6 MAD of the steps before, or gradient norm above 20 medians; skipped steps"
LOSS, FLOPS_LOSS = "held-out loss", "held-out loss at the FLOPs of one loop"
BEST_LOSS, BEST_FLOPS_LOSS = "best loss", "best loss at equal FLOPs"
FAILED, SPIKES = "failed", "spikes per 100 steps"
MISSING = f"{NOT_MEASURED} (runs are missing)"
RECOVERED, HIGHEST, DEVIATION = "recovered", "log2 of the highest rate without failure", "deviation of loss"


class Cell(NamedTuple):
    """One arm of the grid."""

    kind: str
    loops: int
    rate: float

    @property
    def name(self) -> str:
        """How the arm is called."""
        return f"{self.kind} H{self.loops} {1000 * self.rate:g}e-3"


def cells(kinds: Iterable[str], loops: Iterable[int], rates: Iterable[float] = RATES) -> tuple[Cell, ...]:
    """A grid."""
    return tuple(Cell(kind, h, rate) for kind in kinds for h in loops for rate in rates)


GRID = (
    *cells(STABILISERS, LOOPS),
    *cells(recipes.EXPRESSIVE, COMPARED),
    *cells(recipes.CONTRACTS, (recipes.DEEPEST,), RATES[1:2]),
)
"""Everything that the claims rest on; contracts at the middle rate."""
FURTHER = (
    *cells(STABILISERS, recipes.FURTHER_LOOPS),
    *cells(recipes.CONTRACTS, (recipes.DEEPEST,), (RATES[0], RATES[2])),
)
SMOKED = (
    Cell("none", 1, RATES[0]), Cell("none", 4, RATES[2]), Cell("loom", 4, RATES[2]), Cell("untied", 4, RATES[2]),
    Cell("segments_3", 4, RATES[2]),
)  # fmt: skip


def at(quantity: str, loops: int) -> str:
    """Name of a quantity of a kind at a number of loops."""
    return f"{quantity}, H = {loops}"


def _trend(kind: str, quantity: str, rule: Any) -> Part:
    points: dict[parts.Cell, float] = {(kind, at(quantity, h)): math.log2(h) for h in LOOPS}
    return parts.trend(points, AXIS, rule=rule, label=f"{kind}, {quantity}")


def _need(quantity: str) -> tuple[Need, ...]:
    return (Need(arms=("none",), quantity=quantity, at_least=FEWEST, reason="too few events"),)


def _claim(number: str, statement: str, unit: str, *found: Part, **fields: Any) -> Claim:
    """A claim about the recipes, so it needs training seeds."""
    fields = {"quote": "", **fields}
    origin = "published" if fields["quote"] else "ours"
    return Claim(
        id=f"stability.{number}",
        origin=origin,
        statement=statement,
        unit=unit,
        scope="recipe",
        parts=found,
        **fields,
    )


CLAIMS = (
    _claim(
        "1",
        "The best stabiliser wins more over the plain loop than untying its layers or doubling its width does.",
        "nats",
        *(
            parts.difference(
                BEST, other, at(RECOVERED, h), rule=rules.greater(), label=f"{BEST} - {other}, H = {h}"
            )
            for h in COMPARED
            for other in recipes.EXPRESSIVE
        ),
        quote="training stability (rather than expressiveness) as the binding constraint",
        guard="each at its rate of smallest mean held-out loss over seeds; the stabiliser likewise, out of three",
        published=SURVEY,
    ),
    _claim(
        "2a",
        "Without a stabiliser, loss and gradient spike more often the more loops there are.",
        "per 100 steps and doubling",
        _trend("none", SPIKES, rules.above(0.0)),
        guard=SPIKE_RULE,
        needs=_need(SPIKES),
        published=OURO,
    ),
    _claim(
        "2b",
        "Without a stabiliser, more runs fail the more loops there are.",
        "rate per doubling",
        _trend("none", FAILED, rules.above(0.0)),
        guard=FAILURE_RULE,
        needs=_need(FAILED),
        published=OURO,
    ),
    *(
        _claim(
            f"3{letter}",
            f"Every stabiliser lowers the rate of {what}.",
            unit,
            *(
                parts.difference("none", kind, quantity, rule=rules.greater(), label=f"none - {kind}")
                for kind in ALONE
            ),
            guard=rule,
            needs=_need(quantity),
            published=OURO,
        )
        for letter, what, quantity, unit, rule in (
            ("a", "spikes", SPIKES, "per 100 steps", SPIKE_RULE), ("b", "failures", FAILED, "rate", FAILURE_RULE),
        )
    ),
    _claim(
        "4",
        "Without a stabiliser, the highest rate without failure falls with the loops.",
        "log2 rate per doubling",
        _trend("none", HIGHEST, rules.below(0.0)),
        needs=_need(FAILED),
        guard=f"log2 of rate / {RATES[0]:g}; where all fail, one step below the lowest; {FAILURE_RULE}",
        published=OURO,
    ),
    _claim(
        "5a",
        "At equal steps and where no run fails, loss falls with the loops, under every stabiliser and without.",
        "nats per doubling",
        *(_trend(kind, BEST_LOSS, rules.below(0.0)) for kind in STABILISERS),
        quote="lack of compute-matched baselines",
        guard="at the best of the rates that every seed ran to its end; read beside 5b",
        published=SURVEY,
    ),
    _claim(
        "5b",
        "At equal training FLOPs loss falls with the loops too, under every stabiliser and without.",
        "nats per doubling",
        *(_trend(kind, BEST_FLOPS_LOSS, rules.below(0.0)) for kind in STABILISERS),
        quote="lack of compute-matched baselines",
        guard="loss where a run has spent the FLOPs of its twin of one loop: early in its schedule",
        published=SURVEY,
    ),
    _claim(
        "6",
        "At 16 loops, loss differs more between training contracts than between models that can express more.",
        "nats",
        parts.difference(CONTRACTS, MODELS, DEVIATION, rule=rules.greater()),
        quote="depends on the training contract, not expressiveness",
        guard="middle rate; contracts: full, window 1, segments of 3, every loop; models: tied, untied, wide",
        published=SURVEY,
    ),
)  # fmt: skip


def _plot(name: str, title: str, quantity: str, y_label: str) -> StudyPlot:
    every = sorted({*LOOPS, *recipes.FURTHER_LOOPS})
    return StudyPlot(
        name=name,
        title=title,
        quantities=tuple(at(quantity, h) for h in every),
        x=tuple(map(float, every)),
        x_label="loops H",
        y_label=y_label,
    )


@STUDIES.register("stability")
class Stability(Study):
    """Loops x rate x stabiliser, with more expressive models and other training contracts beside them."""

    name = "stability"
    question = "Does training of a deeply looped model fail for want of stability, or of expressiveness?"
    references = (
        "LOOM, arXiv:2610.01153 (residual scale)",
        "Parcae, arXiv:2604.12946 (decaying injection)",
        "Ouro, arXiv:2510.25741 (8 loops spiked, 4 were kept)",
    )
    claims = CLAIMS
    columns = (LOSS, FAILED, SPIKES, FLOPS_LOSS, "largest state")
    plots = (
        _plot("F1-failures", "Share of runs that failed, over three peak rates", FAILED, "failed"),
        _plot("F2-spikes", "Spikes per 100 steps, over three peak rates", SPIKES, "per 100 steps"),
        _plot("F3-loss", "Held-out loss at the best rate, at equal steps", BEST_LOSS, "nats per token"),
        _plot("F4-flops", "Held-out loss at the best rate, at the FLOPs of one loop", BEST_FLOPS_LOSS,
              "nats per token"),
        _plot("F5-recovered", "Loss won over the plain loop", RECOVERED, "nats per token"),
    )  # fmt: skip
    notes = (
        f"{FAILURE_RULE[0].upper()}{FAILURE_RULE[1:]}. {SPIKE_RULE[0].upper()}{SPIKE_RULE[1:]}.",
        "Equal in all arms: steps, tokens, data and their order. Parameters are not: a decaying carry has 3 % more "
        "than a plain loop, and untied and wide models many more; that is what they are there for.",
        "LOOM's residual scale alone stands for LOOM. Not measured: swap_s5 of 6 operations.",
        "Gradient norms are clipped at 1 in all arms, as everywhere in these recipes.",
    )
    minutes = 60
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012
    equal = ("data_order", "steps", "tokens")

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """The grid; first all of seed 0."""
        grid = SMOKED if scale == SMOKE else GRID
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in grid)

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """2 and 8 loops, and contracts at the other rates."""
        further = (Cell("none", 2, RATES[0]),) if scale == SMOKE else FURTHER
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in further)

    def trained(self, arm: Arm, run: TrainedRun) -> tuple[StudyRow, ...]:
        """Loss, failure and spikes of one run."""
        ran = len(run.steps)
        found: dict[str, float] = {SPIKES: 100 * len(run.spikes()) / ran, FAILED: 1.0}
        if run.record is not None:
            curve = curves.by_steps(run)
            early = curves.at(curve, float(_size(run.config).early))
            assert early is not None, "there is an evaluation at this step"
            found |= {LOSS: run.record.loss, FAILED: float(run.record.loss > early)}
            matched = curves.at(curves.by_flops(run), _one_loop(_size(run.config)))
            found |= {} if matched is None else {FLOPS_LOSS: matched}
            found["largest state"] = max(line["rms_last"] for line in run.steps)
        return tuple(_row(arm.name, arm.seed, quantity, value) for quantity, value in found.items())

    def combined(self, rows: Sequence[StudyRow]) -> tuple[StudyRow, ...]:
        """Rates and best losses of every kind at every number of loops, and what is won over the plain loop."""
        return tuple(_Grid(rows).rows())


class _Grid:
    """The runs of all cells. Where runs are missing, rows say so instead of a number."""

    def __init__(self, rows: Sequence[StudyRow]):
        self.known = {(row.arm, row.seed, row.quantity): row.value for row in rows if row.value is not None}
        self.seeds = list(dict.fromkeys(row.seed for row in rows))
        self.ran = {row.arm for row in rows}

    def rows(self) -> Iterable[StudyRow]:
        """What claims and figures need of several runs."""
        for kind in STABILISERS:
            for h in LOOPS:
                yield from self._of_kind(kind, h)
            for quantity in (FAILED, SPIKES):
                yield from self._means(kind, quantity, cells((kind,), LOOPS), quantity)
            for h in recipes.FURTHER_LOOPS:
                if self._all_ran(cells((kind,), (h,))):
                    yield from self._of_kind(kind, h)
        for h in COMPARED:
            yield from self._recovered(h)
        middle = RATES[1:2]
        for name, kinds in ((CONTRACTS, ("none", *recipes.CONTRACTS)), (MODELS, ("none", *recipes.EXPRESSIVE))):
            yield from self._deviation(name, cells(kinds, (recipes.DEEPEST,), middle))

    def _of_kind(self, kind: str, h: int) -> Iterable[StudyRow]:
        runs = cells((kind,), (h,))
        for quantity in (FAILED, SPIKES):
            yield from self._means(kind, at(quantity, h), runs, quantity)
        lowest = RATES[0] * RATES[0] / RATES[1]
        for seed in self.seeds:
            safe = [cell.rate for cell in runs if self.known.get((cell.name, seed, FAILED)) == 0.0]
            yield self._row(kind, seed, at(HIGHEST, h), runs, math.log2(max(safe, default=lowest) / RATES[0]))
        best = self._best(kind, h)
        for seed in self.seeds:
            for quantity, name in ((LOSS, BEST_LOSS), (FLOPS_LOSS, BEST_FLOPS_LOSS)):
                value = None if best is None else self.known.get((best.name, seed, quantity))
                yield self._row(kind, seed, at(name, h), runs, value)

    def _means(self, kind: str, name: str, runs: Sequence[Cell], quantity: str) -> Iterable[StudyRow]:
        for seed in self.seeds:
            values = [self.known[cell.name, seed, quantity] for cell in runs if self._has(cell, seed, quantity)]
            yield self._row(kind, seed, name, runs, fmean(values) if len(values) == len(runs) else None)

    def _recovered(self, h: int) -> Iterable[StudyRow]:
        kinds = ("none", *ALONE, *recipes.EXPRESSIVE)
        best = {kind: self._best(kind, h) for kind in kinds}
        tried = [cell for kind in ALONE if (cell := best[kind]) is not None]
        best[BEST] = min(tried, key=self._mean, default=None)
        runs, plain = cells(kinds, (h,)), best["none"]
        for name in (*ALONE, *recipes.EXPRESSIVE, BEST):
            cell = best[name]
            for seed in self.seeds:
                won = None
                if plain is not None and cell is not None:
                    won = self.known[plain.name, seed, LOSS] - self.known[cell.name, seed, LOSS]
                word = cell.name if name == BEST and cell is not None else ""
                yield replace(self._row(name, seed, at(RECOVERED, h), runs, won), word=word)

    def _deviation(self, name: str, runs: Sequence[Cell]) -> Iterable[StudyRow]:
        for seed in self.seeds:
            losses = [self.known[cell.name, seed, LOSS] for cell in runs if self._has(cell, seed, LOSS)]
            yield self._row(name, seed, DEVIATION, runs, stdev(losses) if len(losses) == len(runs) else None)

    def _best(self, kind: str, h: int) -> Cell | None:
        """The cell of the best rate; None where no rate was run to its end by every seed."""
        whole = [cell for cell in cells((kind,), (h,)) if all(self._has(cell, seed, LOSS) for seed in self.seeds)]
        return min(whole, key=self._mean, default=None)

    def _mean(self, cell: Cell) -> float:
        return fmean(self.known[cell.name, seed, LOSS] for seed in self.seeds)

    def _has(self, cell: Cell, seed: int | None, quantity: str) -> bool:
        return (cell.name, seed, quantity) in self.known

    def _all_ran(self, runs: Sequence[Cell]) -> bool:
        return all(cell.name in self.ran for cell in runs)

    def _row(self, arm: str, seed: int | None, quantity: str, runs: Sequence[Cell], value: float | None) -> StudyRow:
        """A number that rests on some runs, or why there is none."""
        if not self._all_ran(runs):
            return _row(arm, seed, quantity, None, MISSING)
        return _row(arm, seed, quantity, value, DIVERGED if value is None else "")


def _arm(cell: Cell, scale: str, seed: int) -> Arm:
    run = recipes.stability(cell.kind, cell.loops, cell.rate, SIZES[scale], seed)
    title = f"{TITLES[cell.kind]}; {cell.loops} loops, peak rate {cell.rate:g}"
    return Arm(name=cell.name, title=title, source=run)


def _size(config: RunConfig) -> recipes.Size:
    return next(size for size in SIZES.values() if size.seq_len == config.data.seq_len)


@functools.cache
def _one_loop(size: recipes.Size) -> float:
    """Training FLOPs of the whole run of the plain loop at H = 1."""
    run = recipes.stability("none", 1, RATES[0], size)
    spec = build(run.model, device="meta").spec
    return run.steps * expected_flops(spec, run.gradient, rows=size.rows, tokens=size.seq_len)


def _row(arm: str, seed: int | None, quantity: str, value: float | None, reason: str = "") -> StudyRow:
    return StudyRow(arm=arm, seed=seed, quantity=quantity, unit="number", value=value, reason=reason)

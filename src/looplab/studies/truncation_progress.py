"""truncation_progress: does cutting the gradient cost the same under progress targets as under a loss at the end?

Cells of `looplab.recipes.truncation_progress`, objective x gradient, are trained on words of 8 operations and graded at
1 to 16 times that length. If what a window takes away is credit for earlier applications, it costs nothing where every
application has a target of its own; if it takes away late states that training never shows, it costs length.

Reference: how much of the loop to back-propagate through is asked by "Truncate or Not", arXiv:2610.26030, at one
    objective; progress-aligned recurrence as reported (no arXiv id known).
Deviations: every objective has labels at all positions; no noise but in progress; the laws of 2610.26030 are not
    refitted here.
"""

from typing import Any

from looplab.recipes import truncation_progress as recipes
from looplab.recipes.par import SWAPS, smoke
from looplab.recipes.truncation_progress import LENGTH, Cell
from looplab.records import Claim, Need, Part, Published, StudyPlot, StudyRow
from looplab.studies import parts, rules
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.grid import GridResult, Line, TaskGrid

FACTORS = (1, 2, 4, 16)
ITEMS = {SMOKE: 8, CPU: 256}
ITEMS_FAR = 100
"""At the last of the factors, where an item costs most."""
EXACT, FAILED_ABOVE_CHANCE, MARGIN = 0.95, 0.05, 0.05
CHANCE = SWAPS.chance(LENGTH)

DECIDING = (
    *(Cell("final", gradient) for gradient in ("full", "window1", "window2", "window4")),
    *(
        Cell("progress", gradient)
        for gradient in ("full", "window1", "segments1", "window2", "window4", "segments3")
    ),
    *(Cell("replay", gradient) for gradient in ("full", "window1", "segments1")),
    Cell("every", "full"),
    *(Cell("settled", gradient) for gradient in ("full", "implicit")),
    *(Cell(objective, "window1", flops=True) for objective in ("final", "progress")),
)  # fmt: skip
"""What claims rest on, and one cell of every other kind."""
GRID = tuple(
    Cell(objective, gradient)
    for objective in recipes.OBJECTIVES
    for gradient in recipes.GRADIENTS
    if gradient != "implicit" or objective == "settled"
)
FURTHER = (
    *(Cell(o, w, flops=True) for o in ("final", "progress") for w in ("window2", "window4")),
    *(Cell(o, "window1", flops=True) for o in ("replay", "every")),
    *(Cell(o, g, "burnin") for o in ("progress", "replay") for g in ("full", "window1", "segments1")),
)
"""Of --full, besides the rest of the grid."""
SMOKED = (
    Cell("final", "full"), Cell("progress", "window1"), Cell("progress", "segments1"), Cell("settled", "implicit"),
)  # fmt: skip
REFUSED = {
    cell: said
    for objective in recipes.OBJECTIVES
    for gradient in recipes.GRADIENTS
    if (said := recipes.refusal(cell := Cell(objective, gradient))) is not None
}
"""Cells that do not exist -> why, in the words of the configuration."""

PAPER = "“Truncate or Not”, arXiv:2610.26030"
OWN_TRIAL = "our trial, one seed, 4 scored iterations after a burn-in"
NEEDS_SCALING = "not measured (needs the scaling part)"
WAITING = {
    "4": ("signs of the truncation effect on text as published", "fact", rules.exact(1.0)),
    "5": ("best window, progress over final, log2", "log2", rules.two_sided(0.5)),
    "6a": ("share of refits with r_b = r_f best, final", "share", rules.law()),
    "6b": ("share of refits with r_b = r_f best, progress", "share", rules.law()),
    "7": ("exponent of forward-only passes, progress minus final", "exponent", rules.two_sided(0.05)),
}
"""Claim -> quantity, unit and rule of what laws fitted over many runs would say."""


def em(factor: int, depth: float = 1.0) -> str:
    """Name of the exact match at a multiple of the trained length."""
    return f"EM at {factor}x" + ("" if depth == 1.0 else f", {depth:g} n")


def _name(objective: str, gradient: str, *, flops: bool = False) -> str:
    return Cell(objective, gradient, flops=flops).name


def _claim(number: str, statement: str, *asked: Part, **fields: Any) -> Claim:
    """A claim about the recipes, so it needs training seeds."""
    fields = {"origin": "ours", "quote": "", "unit": "exact match", **fields}
    return Claim(id=f"truncation_progress.{number}", statement=statement, scope="recipe", parts=asked, **fields)


def _exact(objective: str, factor: int, *gradients: str) -> tuple[Part, ...]:
    return tuple(parts.level(_name(objective, g), em(factor), rule=rules.above(EXACT)) for g in gradients)


def _interaction(factor: int, *, flops: bool = False) -> Part:
    """(What window 1 takes from progress) - (what it takes from a loss at the end)."""
    return parts.interaction(
        ("objective", "window"),
        _name("progress", "full"),
        _name("progress", "window1", flops=flops),
        _name("final", "full"),
        _name("final", "window1", flops=flops),
        em(factor),
        rule=rules.two_sided(MARGIN),
        label=f"objective x window, {em(factor)}",
    )


LEARNED = (Need(arms=(_name("final", "full"),), quantity=em(1), at_least=0.9, reason="task not learned"),)
GRADIENT, FLOPS = ("gradient_applications", "init", "parameters"), ("train_flops", "init", "parameters")

CLAIMS = (
    _claim(
        "1a",
        "With progress targets every gradient is exact at the trained length.",
        *_exact("progress", 1, "full", "window4", "window2", "window1", "segments1"),
        published=(Published(figure="1.000 cut after every application", source=OWN_TRIAL),),
    ),
    _claim(
        "1b",
        "Without replay a window of one application falls behind full back-propagation at four times that length.",
        parts.difference(_name("progress", "full"), _name("progress", "window1"), em(4), rule=rules.greater()),
        guard="equal applications with gradient: the window has eight times the steps",
        equal=GRADIENT,
    ),
    _claim(
        "1c",
        "So does a gradient that is cut after every application, at equal steps.",
        parts.difference(_name("progress", "full"), _name("progress", "segments1"), em(4), rule=rules.greater()),
        published=(Published(figure="0.98 against 0.56 at 4x", source=OWN_TRIAL),),
        equal=(*GRADIENT, "steps", "data_order"),
    ),
    _claim(
        "1d",
        "With replay both reach sixteen times that length, as full back-propagation does.",
        *_exact("replay", 16, "full", "window1", "segments1"),
        guard="levels and no equivalence, which could tell nothing at the ceiling",
        published=(Published(figure="1.000 at 16x cut after every application", source=OWN_TRIAL),),
    ),
    _claim(
        "1e",
        "At equal training FLOPs a window of one application falls behind too.",
        parts.difference(
            _name("progress", "full"), _name("progress", "window1", flops=True), em(4), rule=rules.greater()
        ),
        equal=FLOPS,
    ),
    _claim(
        "2",
        "With a loss after the last iteration alone, windows shorter than the word fail at the trained length.",
        *(
            parts.level(
                _name("final", f"window{window}"), em(1), rule=rules.below(round(CHANCE + FAILED_ABOVE_CHANCE, 4))
            )
            for window in (1, 2, 4)
        ),
        guard="full back-propagation under this loss learns the trained length",
        needs=LEARNED,
    ),
    _claim(
        "3a",
        "What a window of one application costs at the trained length depends on the objective.",
        _interaction(1),
        origin="question",
        quote="does the truncation conclusion still hold after objective alignment",
        needs=LEARNED,
        equal=GRADIENT,
    ),
    _claim(
        "3b",
        "What it costs at four times that length depends on the objective.",
        _interaction(4),
        origin="question",
        quote="does the truncation conclusion still hold after objective alignment",
        needs=LEARNED,
        equal=GRADIENT,
    ),
    _claim(
        "3c",
        "So it does at equal training FLOPs.",
        _interaction(4, flops=True),
        origin="question",
        quote="does the truncation conclusion still hold after objective alignment",
        needs=LEARNED,
        equal=FLOPS,
    ),
    *(
        _claim(
            number,
            statement,
            parts.level(_name("final", "full"), WAITING[number][0], rule=WAITING[number][2]),
            origin="question",
            unit=WAITING[number][1],
            published=(Published(figure=figure, source=PAPER),),
        )
        for number, statement, figure in (
            ("4", "On text a window helps where forward passes are fixed and costs where they are free.", "in words"),
            ("5", "At eight fixed forward passes the best window under progress is another than under a final loss.",
             "a window is best"),
            ("6a", "Where both counts are free, full back-propagation is best under a final loss.", "full is best"),
            ("6b", "Where both counts are free, full back-propagation is best under progress.", "full is best"),
            ("7", "Trained and forward-only passes have other exponents under progress.", "of one objective"),
        )
    ),
)  # fmt: skip


@STUDIES.register("truncation_progress")
class TruncationProgress(Study):
    """Objective x gradient at equal applications with gradient, and at equal training FLOPs."""

    name = "truncation_progress"
    question = "Does cutting the gradient cost the same under progress targets as under a loss at the end?"
    references = (
        "“Truncate or Not”, arXiv:2610.26030",
        "Progress-aligned recurrence as reported; no arXiv id known",
    )
    claims = CLAIMS
    columns = (*(em(factor) for factor in FACTORS), em(4, 1.25))
    plots = (
        StudyPlot(
            name="F1-length",
            title="Exact match against length, as many iterations as operations (trained at 8)",
            quantities=tuple(em(factor) for factor in FACTORS),
            line=CHANCE,
            x=tuple(float(factor * LENGTH) for factor in FACTORS),
            x_label="operations (dashed: chance)",
            y_label="exact match",
        ),
    )
    notes = (
        "Exact match: all five slots of the answer right. Chance is 1/60. All cells and seeds answer the same words.",
        "A window w carries gradient through the last w applications, segments of w through all of them, cut after "
        "every w. At equal applications with gradient a window of 1 has 8 times the steps of full back-propagation; "
        "cells that end in “flops” have as many training FLOPs as full instead.",
        "The fixed-point objective scores the last iteration, since an implicit gradient is that of the last state; "
        "its solver has at most 7 products beside that of the loss, and counts as the last step where it does not "
        "converge.",
        "Objectives differ in noise (progress and replay only), so an effect of the objective alone is not asked for; "
        "what a window takes away is compared within each.",
        "Not in the grid: addition, whose answers stand apart from its digits, where a core that sees a position and "
        "its neighbour cannot read them.",
        *(f"Refused: {cell.name}. {said}" for cell, said in REFUSED.items()),
    )
    minutes = 60
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012
    equal = ("init", "parameters")
    varies = ("objective", "gradient", "model", "steps", "save_every", "evaluation")

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """The cells that claims rest on and one of every other kind; first all of seed 0."""
        cells = SMOKED if scale == SMOKE else DECIDING
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in cells)

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """The rest of the grid and of the second table, and burn-in."""
        if scale == SMOKE:
            return (_arm(Cell("exit", "window2"), scale, 0),)
        cells = [cell for cell in GRID if cell not in DECIDING and cell not in REFUSED] + list(FURTHER)
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in cells)

    def grade(self, arm: Arm, result: GridResult) -> tuple[StudyRow, ...]:
        """Exact match at every length and depth; and what waits for fitted laws."""
        rows = [
            cell.exact_match.row(
                arm.name,
                arm.seed,
                em(cell.length // LENGTH, cell.depth),
                chance=result.chance,
                items=cell.items,
            )
            for cell in result.cells
        ]
        if arm.name == _name("final", "full"):
            rows += [
                StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit=unit, value=None, reason=NEEDS_SCALING)
                for quantity, unit, _ in WAITING.values()
            ]
        return tuple(rows)


def _arm(cell: Cell, scale: str, seed: int) -> Arm:
    run = recipes.truncation_progress(cell, seed)
    lines = tuple(
        Line(
            length=factor * LENGTH,
            items=ITEMS_FAR if factor == FACTORS[-1] and scale == CPU else ITEMS[scale],
            depths=(1.0,) if factor == FACTORS[-1] else (1.0, 1.25),
        )
        for factor in (FACTORS if scale == CPU else (1, 4))
    )
    grid = TaskGrid(task=SWAPS, lines=lines)
    return Arm(name=cell.name, title=cell.title, source=smoke(run) if scale == SMOKE else run, grid=grid)

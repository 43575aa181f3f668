"""par: what makes progress-aligned recurrence apply a rule learned on 8 operations to words of any length?

Arms of `looplab.recipes.par` are trained on swaps of five items, words of 8 operations, and graded at 1 to 16 times
that length (the recipe itself to 64 times) after n, 1.25 n and 2 n iterations.

Source: progress-aligned recurrence as reported (no arXiv id known; figures at second hand).
Deviations: the local core, replay of late states and window targets are ours; so is every number here.
"""

import dataclasses
from typing import Any

from looplab.audit.config import AuditConfig
from looplab.audit.problems import Problems
from looplab.audit.result import AuditResult
from looplab.recipes import par as recipes
from looplab.records import Claim, Part, Published, Rule, StudyPlot, StudyRow
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.grid import GridResult, Line, TaskGrid
from looplab.studies.measured import Rows
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking
from looplab.tasks.written_states import WrittenStates

LENGTH = recipes.LENGTH
FACTORS = (1, 2, 4, 8, 16)
FAR = (32, 64)
"""Factors of the main arm alone."""
DEPTHS = {1.0: "", 1.25: ", 1.25 n", 2.0: ", 2 n"}
"""Iterations in units of the length -> how a quantity says it."""
TRACED = {SMOKE: 4, CPU: 16}
"""Factor of the words whose states are followed."""
FELL = 0.02
"""A fall of exact match that still counts as none."""
BY = 0.2
CHANCE_AT_MOST = 0.05
DISTINCT = "distinct share, temperature"
REPORTED = "progress-aligned recurrence as reported, no arXiv id known (unverified)"

DECIDING = (
    "main", "final_only", "no_anchor", "add", "add_no_anchor", "every_iteration", "add_final_only", "halting",
    "final_lengths", "distillation", "written", "indexed", "no_replay", "no_noise",
)  # fmt: skip
FURTHER = tuple(name for name in recipes.ARMS if name not in DECIDING)
SMOKED = ("main", "final_only", "halting", "written", "indexed")
FULL_SEEDS = 5
"""Seeds of the main arm with --full."""


def em(factor: int, depth: float = 1.0) -> str:
    """Name of the exact match at a multiple of the trained length."""
    return f"EM at {factor}x{DEPTHS[depth]}"


def change(factor: int, depth: float) -> str:
    """Name of the change of exact match from k = n on."""
    return f"change at {factor}x{DEPTHS[depth]}"


AUDITS = {
    SMOKE: AuditConfig(
        grid=(1,), controls=(), probes=("temperature",), documents=20, calibration_documents=20, replicates=1000
    ),
    CPU: AuditConfig(controls=(), probes=("temperature",), documents=400, calibration_documents=200),
}
"""Of the indexed arm."""


def _line(name: str, factor: int, scale: str) -> Line:
    if scale == SMOKE:
        return Line(length=factor * LENGTH, items=8)
    if factor in FAR:
        return Line(length=factor * LENGTH, items=400 if factor == FAR[-1] else 128, depths=(1.0, 1.25))
    return Line(length=factor * LENGTH, items=128 if factor == FACTORS[-1] and name != "main" else 256)


def _grid(name: str, scale: str) -> TaskGrid:
    factors: tuple[int, ...] = FACTORS if scale == CPU else FACTORS[:2]
    if name == "main" and scale == CPU:
        factors += FAR
    if name == "indexed":  # its index ends at the trained length
        factors = FACTORS[:1]
    lines = tuple(_line(name, factor, scale) for factor in factors)
    data = recipes.par_arm(name).data
    assert isinstance(data, TaskRows)
    task = data.task
    if name == "indexed" or isinstance(task, WrittenStates):
        return TaskGrid(task=task, lines=tuple(dataclasses.replace(line, depths=(1.0,)) for line in lines))
    assert isinstance(task, StateTracking)
    task = StateTracking(group=task.group)  # the same words for all arms of a group
    halting = tuple(
        Line(length=factor * LENGTH, items=128 if scale == CPU else 8, depths=(1.25,))
        for factor in (factors if name == "halting" else ())
    )
    traced = Line(length=TRACED[scale] * LENGTH, items=32 if scale == CPU else 4, depths=(1.0, 1.25))
    return TaskGrid(task=task, lines=lines, halting=halting, traced=traced)


def _above(arm: str, quantity: str, threshold: float) -> Part:
    return _one(arm, quantity, Rule(name="above", numbers=(threshold,)))


def _below(arm: str, quantity: str, threshold: float) -> Part:
    return _one(arm, quantity, Rule(name="below", numbers=(threshold,)))


def _one(arm: str, quantity: str, rule: Rule) -> Part:
    return Part(label=f"{arm}, {quantity}", quantity=quantity, arms=(arm,), rule=rule)


def _greater(one: str, other: str, quantity: str) -> Part:
    return Part(
        label=f"{one} - {other}, {quantity}",
        quantity=quantity,
        arms=(one, other),
        rule=Rule(name="greater", numbers=(BY,)),
    )


def _claim(number: str, statement: str, *parts: Part, **fields: Any) -> Claim:
    """A claim about the recipes, so it needs training seeds."""
    fields = {"quote": "", "unit": "exact match", **fields}
    origin = "published" if fields["quote"] else "ours"
    return Claim(id=f"par.{number}", origin=origin, statement=statement, scope="recipe", parts=parts, **fields)


CLAIMS = (
    _claim(
        "1",
        "Trained at length 8, the recipe is right at 16 times that length, with as many iterations as operations.",
        _above("main", em(16), 0.95),
        quote="16x length extrapolation on swap-S5",
        published=(Published(figure="16x", source=REPORTED),),
    ),
    _claim(
        "2",
        "Without progress targets the answers do not extrapolate.",
        _below("final_only", em(4), 0.05),
        _below("every_iteration", em(8), 0.3),
        guard="labels at all positions of a causal model are intermediate values; final_only is the clean arm",
    ),
    _claim(
        "3",
        "With additive injection the hard anchor is needed to learn at all; with concat injection it is not.",
        _above("add", em(1), 0.9),
        _below("add_no_anchor", em(1), 0.05),
        _above("no_anchor", em(1), 0.9),
    ),
    _claim(
        "4",
        f"Twice as many iterations as operations do no harm: exact match falls by less than {FELL:g}.",
        _above("main", change(16, 2.0), -FELL),
    ),
    _claim(
        "5",
        "A trained stopping score stops after exactly n iterations on at least 95 % of words at 4x.",
        _above("halting", "on time at 4x", 0.95),
    ),
    _claim(
        "6",
        "A dense model that writes the states down is at chance at 16 times the trained length.",
        _below("written", em(16), CHANCE_AT_MOST),
        _above("written", em(1), 0.9),
        quote="0.8% for explicit CoT",
        guard="it has learned the trained length",
        published=(Published(figure="0.8 % at 16x", source=REPORTED),),
    ),
    _claim(
        "7",
        "An audit of a trained tracker finds what is there: with an index, distinct iterations are the gain of depth.",
        _above("indexed", DISTINCT, 0.9),
        unit="share",
        guard="after a temperature; the main arm has no index, so there nothing can be told",
    ),
    _claim(
        "8a",
        "With concat injection, dropping the anchor or the progress targets costs at least 0.2 at 8x.",
        _greater("main", "no_anchor", em(8)),
        _greater("main", "final_only", em(8)),
        quote="both are indispensable",
        guard="decided below the ceiling too: the margin is 0.2",
        published=(Published(figure="in words only", source=REPORTED),),
    ),
    _claim(
        "8b",
        "With additive injection, dropping the anchor or the progress targets costs at least 0.2 at 8x.",
        _greater("add", "add_no_anchor", em(8)),
        _greater("add", "add_final_only", em(8)),
        quote="both are indispensable",
        published=(Published(figure="in words only", source=REPORTED),),
    ),
    _claim(
        "9",
        "Distilling its own answers to parts of a word beats the same labels alone by 0.2 at 4x, and is right at 16x.",
        _greater("distillation", "final_lengths", em(4)),
        _above("distillation", em(16), 0.95),
        quote="label-free prefix self-distillation",
        guard="no intermediate label is read; both arms see words of 1 to 8 operations",
        published=(Published(figure="in words only", source=REPORTED),),
    ),
    _claim(
        "10",
        "More iterations do not stand in for progress targets: from n to 2 n they bring less than 0.05 at 4x.",
        _below("final_only", change(4, 2.0), 0.05),
        _below("every_iteration", change(4, 2.0), 0.05),
        quote="not achieved through more iterations",
    ),
    _claim(
        "12",
        "The recipe is right at 64 times the trained length, after n and after 1.25 n iterations.",
        _above("main", em(64), 0.99),
        _above("main", em(64, 1.25), 0.99),
    ),
)


@STUDIES.register("par")
class Par(Study):
    """Arms around one recipe, graded at lengths far beyond training."""

    name = "par"
    question = "What makes progress-aligned recurrence apply a rule learned on 8 operations to words of any length?"
    references = (
        "Progress-aligned recurrence as reported; no arXiv id known",
        "Liu et al., “Transformers Learn Shortcuts to Automata”, arXiv:2210.10749 (word problems)",
    )
    claims = CLAIMS
    columns = (
        *(em(factor) for factor in (*FACTORS, *FAR)), em(16, 2.0), change(16, 1.25),
        "error per application", "first wrong position", "on time at 4x",
    )  # fmt: skip
    plots = (
        StudyPlot(
            name="F1-length",
            title="Exact match against length, as many iterations as operations (trained at 8)",
            quantities=tuple(em(factor) for factor in (*FACTORS, *FAR)),
            line=1 / 60,
            x=tuple(float(factor * LENGTH) for factor in (*FACTORS, *FAR)),
            x_label="operations (dashed: chance)",
            y_label="exact match",
        ),
        *(
            StudyPlot(
                name=name,
                title=title,
                quantities=tuple(f"{quantity} at k = {k}" for k in (1, 2, 4, 8, 16, 32, 64, 128, 160)),
                x=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 160.0),
                x_label="iterations k, words of 128 operations",
                y_label=label,
            )
            for name, title, quantity, label in (
                ("F2-rms", "Size of the state against iterations", "rms", "root mean square"),
                ("F3-margin", "Logit margin against iterations, 1 % quantile over positions", "margin", "logits"),
            )
        ),
        StudyPlot(
            name="F4-halting",
            title="Mean distance between the stop and n against length",
            quantities=tuple(f"halting error at {factor}x" for factor in FACTORS),
            x=tuple(float(factor * LENGTH) for factor in FACTORS),
            x_label="operations",
            y_label="iterations",
        ),
    )
    notes = (
        "Exact match: all five slots of the answer right. Chance is 1/60 for swaps of five: the parity is known.",
        "Intervals are of items (Wilson; paired: Newcombe); the words of the claims use intervals over training seeds "
        "as well. All arms and seeds answer the same words.",
        "The core sees a position and its left neighbour: the locality of the task is built in, and what is shown is "
        "that objective and recurrence extrapolate.",
        "Not measured: par.11, distillation on tasks without clear intermediate states. Prefix distillation reads the "
        "prefixes of a causal model with one answer per row; Sudoku and text offer no such prefixes.",
        "Equal between compared arms: words, order, steps, weights at the start. Iterations per step are not: the "
        "column “mean applications” has them.",
    )
    minutes = 75
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """The arms that claims rest on; first all of seed 0."""
        names = SMOKED if scale == SMOKE else DECIDING
        return tuple(_arm(name, scale, seed) for seed in range(seeds) for name in names)

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """Soft anchors, layouts, positions, groups; and more seeds of the recipe."""
        if scale == SMOKE:
            return (_arm("no_anchor", scale, 0),)
        more = tuple(_arm("main", scale, seed) for seed in range(seeds, FULL_SEEDS))
        return tuple(_arm(name, scale, seed) for seed in range(seeds) for name in FURTHER) + more

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """Parts of the gain of depth, raw and after a temperature."""
        rows = Rows(arm, result)
        return (rows.gap(), *rows.shares(), rows.share("distinct", "temperature"))

    def grade(self, arm: Arm, result: GridResult) -> tuple[StudyRow, ...]:
        """Exact match at every length and depth, what changes with more iterations, and how the states behave."""
        rows = []
        for cell in result.cells:
            factor = cell.length // LENGTH
            rows.append(cell.exact_match.row(arm.name, arm.seed, em(factor, cell.depth)))
            if cell.depth != 1.0:
                rows.append(cell.change.row(arm.name, arm.seed, change(factor, cell.depth)))
        last = result.cell(16 * LENGTH, 1.0)
        if last is not None:
            error = 1 - last.exact_match.value ** (1 / last.length)
            rows.append(_number(arm, "error per application", error))
        for stop in result.halting:
            factor = stop.length // LENGTH
            rows.append(stop.on_time.row(arm.name, arm.seed, f"on time at {factor}x"))
            rows.append(_number(arm, f"halting error at {factor}x", stop.error, "iterations"))
            rows.append(stop.exact_match.row(arm.name, arm.seed, f"EM at {factor}x, halted"))
        for point in result.trace:
            rows.append(_number(arm, f"rms at k = {point.k}", point.rms, "rms"))
            rows.append(_number(arm, f"margin at k = {point.k}", point.margin, "logits"))
        if result.first_wrong is not None:
            rows.append(_number(arm, "first wrong position", result.first_wrong, "position"))
        return tuple(rows)


def _arm(name: str, scale: str, seed: int) -> Arm:
    title, _ = recipes.ARMS[name]
    run = recipes.par_arm(name, seed)
    fields: dict[str, Any] = {"grid": _grid(name, scale)}
    if name == "indexed":
        fields |= {"audit": AUDITS[scale], "problems": Problems(task=recipes.SWAPS, difficulty=LENGTH)}
    return Arm(name=name, title=title, source=recipes.smoke(run) if scale == SMOKE else run, **fields)


def _number(arm: Arm, quantity: str, value: float, unit: str = "rate") -> StudyRow:
    return StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit=unit, value=value)

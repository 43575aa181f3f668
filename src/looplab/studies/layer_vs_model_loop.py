"""layer_vs_model_loop: one layer four times and then the next, or the whole stack four times?

Arms of `looplab.recipes.layer_vs_model_loop` are measured at 1 to 32 iterations on held-out items: quality, whether the
answer stands after the first application of the last layer, and how state and updates grow beyond training.

References: layer-loop and model-loop side by side: Loopie, arXiv:2607.16051; the questions are open.
Deviations: early training only, at a size for one CPU thread.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from looplab.data.packing import PackedText, Packing, load_packed
from looplab.diagnostics.lens import Lens, lens
from looplab.intervals import mean_interval
from looplab.objectives.base import IGNORED
from looplab.recipes import layer_vs_model_loop as recipes
from looplab.recipes.layer_vs_model_loop import NUM_STEPS, Cell
from looplab.records import Claim, Need, Part, Published, StudyPlot, StudyRow
from looplab.studies import parts, rules
from looplab.studies.base import CPU, SMOKE, STUDIES, Arm, Study
from looplab.studies.trained import TrainedRun
from looplab.tasks.base import to_torch
from looplab.tasks.evaluation import EVAL_KEY, split_of
from looplab.training.config import RunConfig

DEPTHS = (1, 2, 4, 8, 16, 32)
BEYOND = (2 * NUM_STEPS, 4 * NUM_STEPS)
ITEMS = {"text": 64, "chase": 128, "sums": 128}
"""Rows that an arm is measured on; at scale smoke one launch."""
ROWS = 32
"""Of one launch."""
TASKS = ("text", "chase")
"""Of the default; --full adds "sums"."""
QUALITY = {"text": "loss", "chase": "answers right", "sums": "answers right"}
MARGIN, SHARE_MARGIN, LOG_MARGIN = 0.01, 0.05, 0.05
LEARNED = {"chase": 0.4, "sums": 0.75}
"""Share of right answers in every arm without which a task counts as not learned. Chance is 1/8 and 1/2; whoever
follows one pointer and guesses the others has 0.36."""
SIZES = {SMOKE: recipes.SMOKE, CPU: recipes.CPU}
SMOKED = (
    Cell("text", "layer", "inject", "sampled"), Cell("text", "model", "inject", "sampled"),
    Cell("chase", "layer", "plain", "fixed"), Cell("chase", "model", "plain", "fixed"),
)  # fmt: skip


def quality(task: str, depth: int) -> str:
    """Name of the quality after some iterations."""
    return f"{QUALITY[task]} at R = {depth}"


def change(depth: int) -> str:
    """Name of the change of quality from the trained depth on."""
    return f"change to R = {depth}"


def decided(depth: int = NUM_STEPS) -> str:
    """Name of the share whose answer stands after the first application of the last layer."""
    return f"decided at first, R = {depth}"


SETTLED, FIRST_STAY = "first answer is the last", "readout at which the answer stays"
RMS_GROWTH, UPDATE_GROWTH = "rms, R = 32 over R = 4", "last update, R = 32 over R = 4"


def cells(task: str, *, order: str = "", state: str = "", law: str = "") -> list[str]:
    """Names of the arms of a task with these choices; an empty one is free."""
    return [
        Cell(task, *choice).name
        for choice in (
            (o, s, w)
            for s in recipes.STATES
            for w in recipes.LAWS
            for o in recipes.ORDERS
            if order in ("", o) and state in ("", s) and law in ("", w)
        )
    ]


def _effect(factor: str, task: str, high: dict[str, str], low: dict[str, str], quantity: str, margin: float) -> Part:
    return parts.effect(
        factor,
        cells(task, **high),
        cells(task, **low),
        quantity,
        rule=rules.two_sided(margin),
        label=f"{factor}, {task}, {quantity}",
    )


def _order(task: str, quantity: str, margin: float) -> Part:
    return _effect("layer-loop", task, {"order": "layer"}, {"order": "model"}, quantity, margin)


def _interaction(task: str, factor: str, high: dict[str, str], low: dict[str, str], quantity: str, m: float) -> Part:
    return parts.interaction(
        ("layer-loop", factor),
        cells(task, order="layer", **high),
        cells(task, order="layer", **low),
        cells(task, order="model", **high),
        cells(task, order="model", **low),
        quantity,
        rule=rules.two_sided(m),
        label=f"layer-loop x {factor}, {task}, {quantity}",
    )


def _growth(quantity: str) -> tuple[Part, ...]:
    return tuple(
        parts.ratio(
            Cell(task, "layer", "plain", "fixed").name,
            Cell(task, "model", "plain", "fixed").name,
            quantity,
            rule=rules.two_sided(LOG_MARGIN),
            label=f"layer / model, {task}, {quantity}",
        )
        for task in TASKS
    )


SAMPLED, INJECT = ({"law": "sampled"}, {"law": "fixed"}), ({"state": "inject"}, {"state": "plain"})
SUDOKU = Published(figure="0.23 against 2.07 points lost on Sudoku, two blocks", source="at second hand (unverified)")
EXTRAPOLATION = "differences in depth extrapolation"
DETERMINED = "answer token is determined at the first iteration"


def _claim(number: str, statement: str, unit: str, *asked: Part, task: str = "", **fields: Any) -> Claim:
    """A question about the recipes, so it needs training seeds."""
    fields = {"quote": "", **fields}
    needs = (_learned(task),) if task in LEARNED else ()
    return Claim(
        id=f"layer_vs_model_loop.{number}",
        origin="question",
        statement=statement,
        unit=unit,
        scope="recipe",
        parts=asked,
        needs=needs,
        **fields,
    )


def _learned(task: str) -> Need:
    return Need(
        arms=tuple(cells(task)),
        quantity=quality(task, NUM_STEPS),
        at_least=LEARNED[task],
        reason="task not learned",
    )


UNITS = {"text": "nats", "chase": "share", "sums": "share"}


def _per_task(number: str, statement: str, task: str, *asked: Part, unit: str = "", **fields: Any) -> Claim:
    said = {"text": "On text", "chase": "On pointer chase", "sums": "On prefix sums"}[task]
    return _claim(number, f"{said}, {statement}", unit or UNITS[task], *asked, task=task, **fields)


CLAIMS = (
    *(
        _per_task(
            f"1{letter}",
            "the order changes what 8 and 16 iterations do to a model trained at 4 or 1 to 8.",
            task,
            *(_order(task, change(depth), MARGIN) for depth in BEYOND),
            quote=EXTRAPOLATION,
            published=(SUDOKU,),
            only="--full" if task == "sums" else "",
        )
        for letter, task in zip("abc", ("text", "chase", "sums"), strict=True)
    ),
    *(
        _per_task(
            f"2{letter}",
            "the order changes how many answers stand after the first application of the last layer.",
            task,
            _order(task, decided(), SHARE_MARGIN),
            unit="share",
            quote=DETERMINED,
        )
        for letter, task in zip("ab", TASKS, strict=True)
    ),
    *(
        _per_task(
            f"2{letter}",
            f"{what} changes how many answers stand after the first application of the last layer.",
            task,
            _effect(factor, task, *levels, decided(), SHARE_MARGIN),
            unit="share",
            quote=DETERMINED,
        )
        for letter, task, (what, factor, levels) in zip(
            "cdef",
            TASKS * 2,
            [("re-injection with a pinned state", "injection", INJECT)] * 2
            + [("sampling the depth in training", "sampled depth", SAMPLED)] * 2,
            strict=True,
        )
    ),
    *(
        _per_task(
            f"{number}{letter}",
            f"what the order does to 16 iterations depends on {what}.",
            task,
            _interaction(task, factor, *levels, change(BEYOND[-1]), MARGIN),
            quote=EXTRAPOLATION,
        )
        for number, what, factor, levels in (
            ("3", "the depth law of training", "sampled depth", SAMPLED),
            ("4", "re-injection", "injection", INJECT),
        )
        for letter, task in zip("ab", TASKS, strict=True)
    ),
    _claim(
        "4c", "Without re-injection the state grows differently beyond training.", "factor", *_growth(RMS_GROWTH)
    ),
    _claim(
        "4d", "Without re-injection updates grow differently beyond training.", "factor", *_growth(UPDATE_GROWTH)
    ),
)  # fmt: skip


@STUDIES.register("layer_vs_model_loop")
class LayerVsModelLoop(Study):
    """Two orders of the same applications, with and without re-injection, at fixed and sampled depth."""

    name = "layer_vs_model_loop"
    question = "Does it matter whether each layer is repeated, or the whole stack?"
    references = ("Loopie, arXiv:2607.16051",)
    claims = CLAIMS
    columns = (
        quality("text", NUM_STEPS), quality("chase", NUM_STEPS), *(change(depth) for depth in BEYOND), decided(),
        SETTLED, FIRST_STAY, RMS_GROWTH, UPDATE_GROWTH,
    )  # fmt: skip
    plots = tuple(
        StudyPlot(
            name=name,
            title=title,
            quantities=tuple(named(depth) for depth in depths),
            line=line,
            x=tuple(map(float, depths)),
            x_label=f"iterations R (trained at {NUM_STEPS}, or at 1 to {2 * NUM_STEPS})",
            y_label=label,
        )
        for name, title, named, label, line, depths in (
            ("F1-loss", "Held-out loss against iterations, text", lambda d: quality("text", d), "nats", None, DEPTHS),
            ("F2-answers", "Right answers against iterations (dashed: chance)", lambda d: quality("chase", d), "share",
             1 / recipes.NODES, DEPTHS),
            ("F3-decided", "Answers that stand after the first application of the last layer", decided, "share", None,
             DEPTHS[1:]),
        )
    )  # fmt: skip
    notes = (
        "Early training: a published comparison at 6B parameters has the model-loop ahead early and the layer-loop "
        "ahead late, so nothing here speaks about long training.",
        "Decided: the answer after the first application of the last layer is that after all its later ones. In a "
        "layer-loop that application comes after all those of the other layers, in a model-loop after one pass.",
        "An application of a layer-loop is one layer, so re-injection and pinning happen three times as often there.",
        "Intervals of quality and shares are of items (t); sizes of states have none.",
        f"Pointer chase: {recipes.NODES} starts a row, each labelled after 1, 2, 3 and 4 hops; answers right is the "
        "share of all of them. The form of the rows was chosen on seed 1000 of one arm (chase-model-plain-fixed).",
    )
    minutes = 60
    seeds = {SMOKE: 1, CPU: 3}  # noqa: RUF012
    varies = ("model", "data", "steps", "save_every", "evaluation")

    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """Both orders of every cell, on text and pointer chase; first all of seed 0."""
        asked = SMOKED if scale == SMOKE else [Cell(*name.split("-")) for task in TASKS for name in cells(task)]
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in asked)

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """Prefix sums."""
        asked = [Cell(*name.split("-")) for name in cells("sums")][: 1 if scale == SMOKE else None]
        return tuple(_arm(cell, scale, seed) for seed in range(seeds) for cell in asked)

    def trained(self, arm: Arm, run: TrainedRun) -> tuple[StudyRow, ...]:
        """Quality, readouts and sizes of states at every depth, on the same held-out items for all arms."""
        if run.record is None:
            return ()
        task, model = arm.name.partition("-")[0], run.model()
        seen = {depth: _measured(model, run.config, task, depth) for depth in DEPTHS}
        at, far = seen[NUM_STEPS], seen[DEPTHS[-1]]
        chance = {"text": None, "chase": 1 / recipes.NODES, "sums": 0.5}[task]
        rows = []
        for depth, found in seen.items():
            rows.append(_mean(arm, quality(task, depth), UNITS[task], found.quality, chance))
            rows.append(_mean(arm, decided(depth), "share", found.decided))
            rows.append(_number(arm, f"rms at R = {depth}", "rms", found.rms))
            rows.append(_number(arm, f"last update at R = {depth}", "share", found.update))
        rows += [_mean(arm, change(depth), UNITS[task], seen[depth].quality - at.quality) for depth in BEYOND]
        return (
            *rows,
            _mean(arm, SETTLED, "share", at.settled),
            _mean(arm, FIRST_STAY, "readouts", at.first_stay),
            _number(arm, RMS_GROWTH, "factor", far.rms / at.rms),
            _number(arm, UPDATE_GROWTH, "factor", far.update / at.update),
        )


class _Measured(NamedTuple):
    """One depth: numbers per item, and sizes of the last state."""

    quality: NDArray[np.float64]
    decided: NDArray[np.float64]
    settled: NDArray[np.float64]
    first_stay: NDArray[np.float64]
    rms: float
    update: float


def _measured(model: Any, config: RunConfig, task: str, depth: int) -> _Measured:
    found, sizes = [], []
    for tokens, labels in _items(config, task):
        read = lens(model, tokens, depth)
        scored = labels != IGNORED
        found.append(
            torch.stack(
                [
                    _per_item(values, scored)
                    for values in (_quality(read, labels, task), read.decided, read.settled_at_first, read.first_stay)
                ]
            )
        )
        sizes.append((float(read.rms[-1].square()), float(read.update[-1])))
    quality, decided, settled, first_stay = torch.cat(found, dim=1).double().numpy()
    squares, updates = (sum(column) / len(sizes) for column in zip(*sizes, strict=True))
    return _Measured(quality, decided, settled, first_stay, rms=squares**0.5, update=updates)


def _quality(read: Lens, labels: Tensor, task: str) -> Tensor:
    """Loss of every position on text, else whether it is right."""
    if task != "text":
        return (read.top[-1] == labels).float()
    flat = functional.cross_entropy(read.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(labels.shape)


def _per_item(values: Tensor, scored: Tensor) -> Tensor:
    return (values.float() * scored).sum(1) / scored.sum(1)


def _items(config: RunConfig, task: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Held-out tokens and labels, the same for all arms of a task."""
    begins = range(0, ITEMS[task] if config.model.dim == recipes.CPU.dim else ROWS, ROWS)
    if isinstance(config.data, PackedText):
        loader = load_packed(
            PackedText(sources=("builtin:heldout",), packing=Packing(seq_len=config.data.seq_len, rows=ROWS)),
            seed=0,
            vocab_size=recipes.BYTES,
        )
        for number, _ in enumerate(begins):
            batch = loader.batch(number)
            yield batch.tokens, batch.labels
        return
    asked, difficulty = config.data.task, recipes.DIFFICULTY[task]
    for begin in begins:
        tokens, labels = asked.batch(difficulty, EVAL_KEY, range(begin, begin + ROWS), split_of(asked, difficulty))
        yield to_torch(tokens), to_torch(labels)


def _arm(cell: Cell, scale: str, seed: int) -> Arm:
    return Arm(name=cell.name, title=cell.title, source=recipes.layer_vs_model_loop(cell, SIZES[scale], seed))


def _mean(arm: Arm, quantity: str, unit: str, values: NDArray[np.float64], chance: float | None = None) -> StudyRow:
    wide, narrow = (mean_interval(values, level=level) for level in (rules.LEVEL, rules.EQUIVALENCE_LEVEL))
    return StudyRow(
        arm=arm.name,
        seed=arm.seed,
        quantity=quantity,
        unit=unit,
        value=wide.estimate,
        low=wide.low,
        high=wide.high,
        low90=narrow.low,
        high90=narrow.high,
        chance=chance,
    )


def _number(arm: Arm, quantity: str, unit: str, value: float) -> StudyRow:
    return StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit=unit, value=value)

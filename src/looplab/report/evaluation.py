"""The page of an evaluation: scores by depth first, a curve for every task, then what was asked and counted.

It depends on the `EvalResult` alone, which is embedded in the page; every number knows its path in results.json.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from looplab.records import EvalResult, dump_json, write_atomic
from looplab.report.figures.base import pdf
from looplab.report.figures.depth_scores import depth_scores, finding
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.plates import Plate
from looplab.report.tables import MINUS, NONE, Cell, Table, amount, count, signed, words

PAGE, TABLES, FIGURES = "report.html", "tables.tex", "figures"
DIGITS = 4
CITATION = "Gao et al., “The Language Model Evaluation Harness”, EleutherAI/lm-evaluation-harness."


def write_evaluation(result: EvalResult, folder: str | os.PathLike[str]) -> Path:
    """Writes report.html, tables.tex and figures/ and returns the path of the page; equal results give equal bytes."""
    folder = Path(folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = plates(result)
    for plate in drawn:
        write_atomic(folder / FIGURES / f"{plate.name}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{plate.name}.pdf", pdf(plate.figure))
    write_atomic(folder / TABLES, evaluation_tex(result))
    write_atomic(folder / PAGE, evaluation_page(result, drawn=drawn))
    return folder / PAGE


def plates(result: EvalResult) -> list[Plate]:
    """One figure for every task and every group with scores of its own."""
    tasks = list(dict.fromkeys(score.task for score in result.scores))
    return [
        Plate(f"depth-{slug}", f"Scores against depth. {finding(result, task)}.", depth_scores(result, task))
        for task, slug in zip(tasks, _slugs(tasks), strict=True)
    ]


def evaluation_page(result: EvalResult, *, drawn: Sequence[Plate] | None = None) -> str:
    """The HTML of an evaluation.

    Args:
        drawn: The figures of `plates(result)`, if they exist already.
    """
    keyed = Keyed(result)
    context = {
        "result": result,
        "plates": plates(result) if drawn is None else drawn,
        "scores": scores_table(keyed),
        "tasks": tasks_table(keyed),
        "counts": counts_table(keyed),
        "settings": settings_table(keyed),
        "versions": versions_table(keyed),
        "citation": CITATION,
        "record": _embedded(result),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("evaluation.html.jinja").render(context)


def evaluation_tex(result: EvalResult) -> str:
    """The text of tables.tex: scores by depth, and the tasks."""
    keyed = Keyed(result)
    head = (
        f"% Evaluation of {' '.join(result.model.split())}, weights {result.weights}. Needs \\usepackage{{booktabs}}.\n"
    )
    return head + "\n".join(render(table) for table in (scores_table(keyed), tasks_table(keyed)))


def scores_table(result: Keyed) -> Table:
    """One row per task and metric, one column per depth."""
    held: EvalResult = result.held
    found: dict[tuple[str, str, str], dict[int, Keyed]] = {}
    for score in result.scores:
        key = (score.held.task, score.held.metric, score.held.filter)
        found.setdefault(key, {})[score.held.depth] = score
    rows = [
        (
            words(task),
            words(metric),
            words("" if kind == "none" else kind),
            words(_better(next(iter(scores.values())).held.higher_is_better)),
            *(_score(scores[depth]) if depth in scores else Cell(NONE, tone="muted") for depth in held.depths),
        )
        for (task, metric, kind), scores in found.items()
    ]
    unit = held.unit.removesuffix("s")
    names = (f"{depth} {unit}{'s' if depth != 1 else ''}" for depth in held.depths)
    columns = ("task", "metric", "filter", "better", *names)
    note = "± one standard error over documents, where lm-eval has one."
    return Table("scores", "Scores by depth", columns, tuple(rows), note, (0, 1, 2, 3)).trimmed()


def tasks_table(result: Keyed) -> Table:
    """What was asked."""
    rows = [
        (
            words(task.name), words(task.origin), words(task.version), words(task.output), count(task.documents),
            count(task.of), count(task.num_fewshot), count(task.truncated), words(_steps(task.held.steps)),
            words(task.settings, "code"),
        )
        for task in result.tasks
    ]  # fmt: skip
    columns = (
        "task", "origin", "version", "output", "documents", "of", "few-shot", "inputs cut", "mean exit step",
        "settings",
    )  # fmt: skip
    return Table("tasks", "Tasks", columns, tuple(rows), "", (0, 1, 2, 3, 8, 9)).trimmed()


def counts_table(result: Keyed) -> Table:
    """What ran, exactly."""
    names = list(dict.fromkeys(name for task in result.held.tasks for name in task.counts))
    rows = [(words(task.name), *(count(task.counts[name]) for name in names)) for task in result.tasks]
    columns = ("task", *(name.replace("_", " ") for name in names))
    shared, alone = result.held.shared
    note = f"A log-likelihood at all depths takes {shared} applications per input; one depth at a time it is {alone}."
    return Table("counts", "Exact counts", columns, tuple(rows), note, (0,))


def settings_table(result: Keyed) -> Table:
    """Everything that the numbers depend on."""
    held: EvalResult = result.held
    names = (
        "architecture", "parameters", "weights", "tokenizer", "dtype", "device", "trained_depth", "default_depth",
        "unit", "exit_rule", "kv_rule", "init", "system_prompt", "chat_template", "fewshot_as_multiturn", "gen_kwargs",
        "limit", "max_length", "batching",
    )  # fmt: skip
    rows = [
        (words(name.replace("_", " ")), words(getattr(result, name), "code"))
        for name in names
        if getattr(held, name) not in ("", None, False)
    ]
    rows += [(words(f"seed of {name}"), words(result.seeds[name])) for name in held.seeds]
    return Table("settings", "Settings", ("setting", "value"), tuple(rows), "", (0, 1))


def versions_table(result: Keyed) -> Table:
    """What it was run with."""
    rows = tuple((words(name), words(result.versions[name])) for name in result.held.versions)
    return Table("versions", "Versions", ("part", "version"), rows, "", (0, 1))


def _score(score: Keyed) -> Cell:
    cell = amount(score.value, DIGITS)
    if score.held.value is None or score.held.stderr is None:
        return cell
    text = f"{cell.text} ±{signed(score.held.stderr, DIGITS).removeprefix(MINUS)}"
    return Cell(text, cell.path, cell.home, cell.order)


def _better(higher: bool | None) -> str:
    return {True: "higher", False: "lower", None: ""}[higher]


def _steps(steps: dict[str, float]) -> str:
    return ", ".join(f"{step:.2f}" for step in steps.values())


def _slugs(names: Sequence[str]) -> list[str]:
    """Names as parts of file names, each its own."""
    plain = [re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "task" for name in names]
    return [slug if plain.count(slug) == 1 else f"{slug}-{i}" for i, slug in enumerate(plain)]


def _embedded(result: EvalResult) -> Markup:
    text = json.dumps(json.loads(dump_json(result)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))

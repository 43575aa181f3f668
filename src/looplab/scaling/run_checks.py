"""Checks of single rows and of the whole table, in a fixed order; each failure is a finding."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from looplab.records import Finding, Level
from looplab.scaling.cost import mean_flops
from looplab.scaling.family import Shape

LIMIT = 0.02
"""Largest relative difference of FLOPs that still counts as equal."""
MOST_NATS = 12.0
"""Loss of a uniform guess over 160,000 tokens: above this it is not nats per token."""
MOST_EPOCHS = 4.0
SHAPE = ("width", "layers_once", "layers_core", "seq_len", "vocab_size", "train_flops", "flops_pairs")

Row = dict[str, Any]


@dataclass
class Checked:
    """Rows that are left, and what was found on the way."""

    rows: list[Row]
    findings: list[Finding] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    sigma: float | None = None

    def find(self, name: str, level: Level, message: str, remedy: str = "", **numbers: float | int) -> None:
        """Adds a finding."""
        known = {key: float(number) for key, number in numbers.items()}
        self.findings.append(
            Finding(kind=f"scaling.{name}", level=level, message=message, remedy=remedy, **known)  # type: ignore[arg-type]
        )

    def drop(self, reason: str, which: Callable[[Row], bool]) -> list[Row]:
        """Takes rows out and counts them."""
        gone = [row for row in self.rows if which(row)]
        if gone:
            self.rows = [row for row in self.rows if not which(row)]
            self.dropped[reason] = self.dropped.get(reason, 0) + len(gone)
        return gone


def check_rows(rows: Sequence[Row], *, test_time: bool) -> Checked:
    """All checks of a table."""
    found = Checked(list(rows))
    for check in (_finite, _duplicates, _physics, _flops, _mixtures, _status):
        check(found)
    if not test_time:
        _depth(found)
    _noise(found)
    _epochs(found)
    _sampled(found)
    if not found.rows:
        found.find("no_runs", Level.FAILURE, "No run is left.", "See what was dropped.")
    return found


def listed(items: Sequence[object], most: int = 3) -> str:
    """The first few, and that there are more."""
    return ", ".join(str(item) for item in items[:most]) + (", .." if len(items) > most else "")


def _finite(found: Checked) -> None:
    lost = found.drop("loss is not finite", lambda r: r["status"] == "finished" and not math.isfinite(r["loss"]))
    if lost:
        ids = listed([row["run_id"] for row in lost])
        found.find(
            "loss_not_finite",
            Level.WARNING,
            f"{len(lost)} runs have no finite loss (ids {ids}): dropped.",
            "Mark them status=diverged to silence this.",
            value=len(lost),
        )
    for name in ("num_steps", "window", "n_once", "n_rec", "tokens", "train_flops"):
        bad = [row["run_id"] for row in found.rows if name in row and not math.isfinite(row[name])]
        if bad:
            found.find("not_finite", Level.FAILURE, f"{name} of {listed(bad)} is not a finite number.", "Correct it.")


def _duplicates(found: Checked) -> None:
    kept: dict[str, Row] = {}
    rows = []
    same = 0
    for row in found.rows:
        earlier = kept.setdefault(row["run_id"], row)
        if earlier is row:
            rows.append(row)
        elif earlier == row or (math.isnan(earlier["loss"]) and math.isnan(row["loss"])):
            same += 1
        else:
            what = "losses" if earlier["loss"] != row["loss"] else "contents"
            found.find(
                "duplicate", Level.FAILURE, f"run {row['run_id']!r} occurs twice with different {what}: remove one."
            )
    found.rows = rows
    if same:
        found.dropped["identical row"] = same
        found.find("identical", Level.INFO, f"kept one of two identical rows, {same} times.", value=same)


def _physics(found: Checked) -> None:
    for place, row in enumerate(found.rows):
        if not 1 <= row["window"] <= row["num_steps"]:
            found.find(
                "window",
                Level.FAILURE,
                f"row {place}: window {row['window']:g} must be 1 to num_steps {row['num_steps']:g}.",
                "A window counts trailing applications that carry gradient.",
            )
        if row["n_rec"] <= 0 or row["n_once"] < 0:
            found.find("parameters", Level.FAILURE, f"row {place}: n_rec must be above 0 and n_once not below it.")
        if row["status"] == "finished" and not row["loss"] > 0:
            found.find("loss", Level.FAILURE, f"row {place}: loss must be above 0. Got {row['loss']:g}.")
        if row["tokens"] < 1000:
            found.find(
                "tokens",
                Level.FAILURE,
                f"row {place}: tokens = {row['tokens']:g} for a {(row['n_once'] + row['n_rec']) / 1e6:.0f} M model.",
                "Tokens are counted singly.",
            )
    high = [row["loss"] for row in found.rows if row["status"] == "finished" and row["loss"] >= MOST_NATS]
    if high:
        found.find(
            "loss_unit",
            Level.FAILURE,
            f"losses between {min(high):.3g} and {max(high):.3g} look like perplexity; nats expected.",
            "Convert, or pass loss_unit='ppl'.",
            value=max(high),
            threshold=MOST_NATS,
        )


def _flops(found: Checked) -> None:
    """Recorded FLOPs against the formula, for rows with their shape."""
    for place, row in enumerate(found.rows):
        if not all(name in row for name in SHAPE) or row["flops_pairs"] not in ("causal", "square"):
            continue
        if not all(isinstance(row[name], int) for name in (*SHAPE[:-1], "tokens", "n_once", "n_rec")):
            continue  # said above
        formula = shape_flops(row)
        ratio = row["train_flops"] / formula
        if row["depth_law"] == "fixed" and float(row["num_steps"]).is_integer() and float(row["window"]).is_integer():
            allowed = 1e-9
        else:
            allowed = LIMIT
        if abs(ratio - 1) <= allowed:
            continue
        head = row["vocab_size"] * row["width"]
        less = {**row, "n_rec": row["n_rec"] - head}, {**row, "n_once": row["n_once"] - head}
        if any(abs(row["train_flops"] / shape_flops(other) - 1) <= LIMIT for other in less):
            found.find(
                "head_counted",
                Level.FAILURE,
                f"row {place}: n_rec + n_once differs from the shape by vocab x width = {head}.",
                "Pass counts without embedding and head.",
            )
            continue
        found.find(
            "flops",
            Level.FAILURE if abs(ratio - 1) > LIMIT else Level.WARNING,
            f"row {place}: recorded {row['train_flops']:.3g}, formula {formula:.3g} (ratio {ratio:.3g}).",
            "Truncation ignored? Pairs 'square'? Leave the shape columns out where one core of equal layers is not "
            "what ran.",
            value=ratio,
            threshold=LIMIT,
        )


def shape_flops(row: Row) -> float:
    """Training FLOPs by the formula of `looplab.scaling.cost`, with attention as wide as the layer."""
    active = row["n_rec_active"] if "n_rec_active" in row else row["n_rec"]
    shape = Shape(
        n_once=row["n_once"],
        n_rec=active,
        **{name: row[name] for name in ("width", "layers_once", "layers_core", "vocab_size")},
    )
    return mean_flops(
        shape,
        row["num_steps"],
        row["window"],
        seq_len=row["seq_len"],
        tokens=row["tokens"],
        pairs=row["flops_pairs"],
    )


def _mixtures(found: Checked) -> None:
    words = {"loss_split": "evaluation splits", "tokenizer": "tokenizers", "flops_pairs": "FLOP conventions"}
    for name, what in words.items():
        counts: dict[str, int] = {}
        for row in found.rows:
            if name in row:
                counts[row[name]] = counts.get(row[name], 0) + 1
        if len(counts) > 1:
            numbers = " and ".join(str(count) for count in sorted(counts.values()))
            reason = "costs" if name == "flops_pairs" else "losses"
            found.find(
                "mixed",
                Level.FAILURE,
                f"{len(counts)} {what} ({numbers} runs): {reason} are not comparable.",
                f"Use --only {name}=...",
                value=len(counts),
                threshold=1,
            )


def _status(found: Checked) -> None:
    for word in sorted({row["status"] for row in found.rows} - {"finished"}):
        gone = found.drop(f"status is {word}", lambda row, word=word: row["status"] == word)  # type: ignore[misc]
        found.find("status", Level.INFO, f"{len(gone)} runs are {word}: dropped, never imputed.", value=len(gone))


def _depth(found: Checked) -> None:
    def elsewhere(row: Row) -> bool:
        # A law of depth has a mean; its readout is trained around it, at a whole number.
        near = 0.5 if row["depth_law"] != "fixed" else 1e-9
        return bool(abs(row["eval_steps"] - row["num_steps"]) > near)

    gone = found.drop("evaluated at another depth", elsewhere)
    if gone:
        found.find(
            "other_depth",
            Level.WARNING,
            f"{len(gone)} rows have eval_steps != num_steps: left out of training laws.",
            "Read them with test_time for a law of evaluation depth.",
            value=len(gone),
        )


def _noise(found: Checked) -> None:
    """Pooled deviation between seeds of one configuration."""
    groups: dict[str, list[float]] = {}
    named = ("num_steps", "window", "depth_law", "n_once", "n_rec", "width", "tokens", "family", "eval_steps")
    data = ("loss_split", "tokenizer")
    for row in found.rows:
        groups.setdefault(json.dumps([row.get(name) for name in (*named, *data)]), []).append(row["loss"])
    seeds = [np.array(losses) for losses in groups.values() if len(losses) > 1]
    if seeds:
        squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in seeds)
        found.sigma = math.sqrt(squares / sum(len(losses) - 1 for losses in seeds))
    else:
        found.find("noise_unknown", Level.INFO, "No configuration was run with two seeds: noise unknown.")


def _epochs(found: Checked) -> None:
    repeats = [row["tokens"] / row["unique_tokens"] for row in found.rows if row["unique_tokens"] > 0]
    many = [repeat for repeat in repeats if repeat > MOST_EPOCHS]
    if many:
        found.find(
            "epochs",
            Level.WARNING,
            f"{len(many)} runs repeat data up to {max(many):.3g} x: laws assume fresh data.",
            value=max(many),
            threshold=MOST_EPOCHS,
        )


def _sampled(found: Checked) -> None:
    means = [
        row
        for row in found.rows
        if not row["depth_law"].startswith("[")
        and (row["depth_law"] != "fixed" or not float(row["num_steps"]).is_integer())
    ]
    if means:
        steps = listed([f"{row['num_steps']:.3g}" for row in means])
        found.find(
            "mean_depth",
            Level.WARNING,
            f"num_steps {steps} is a mean in {len(means)} rows; without depth_law as [[num_steps, window, mass], ..] "
            "the gain is taken at the mean.",
            value=len(means),
        )
    for row in found.rows:
        if row["depth_law"].startswith("["):
            try:
                law = [(float(f), float(b), float(mass)) for f, b, mass in json.loads(row["depth_law"])]
                legal = all(1 <= b <= f and mass >= 0 for f, b, mass in law) and abs(sum(m for *_, m in law) - 1) < 1e-6
            except (ValueError, TypeError):
                legal = False
            if not legal:
                found.find(
                    "depth_law",
                    Level.FAILURE,
                    f"run {row['run_id']!r}: depth_law must list [num_steps, window, mass] with masses of sum 1.",
                )

"""The tables of losses, contrasts and readouts, domain by domain."""

from looplab.audit.result import RAW
from looplab.report.keyed import Keyed
from looplab.report.tables import (
    NBSP,
    NONE,
    Cell,
    Table,
    amount,
    count,
    nats,
    percent,
    percent_of,
    signed,
    span,
    tiny,
    unknown,
    words,
    yes_no,
)

FIXED_FIT = "Temperature is refitted in every bootstrap draw; the wider probes hold their fit fixed."
PHRASES = ("not identifiable", "not measured")


def phrase(reason: str) -> str:
    """The two words that stand where a number would: "not identifiable" or "not measured"."""
    return next((known for known in PHRASES if reason.startswith(known)), PHRASES[0])


def part_nats(part: Keyed) -> Cell:
    """An effect in nats, or the words that stand for it."""
    if part.held.bitwise_equal:
        return Cell("0 (bitwise equal)", part.bitwise_equal.path, part.home, 0.0)
    return unknown(phrase(part.held.reason)) if part.held.reason else nats(part.nats)


def part_share(part: Keyed) -> Cell:
    """A share of the gap, or why it is withheld."""
    if part.held.reason and not part.held.bitwise_equal:
        return unknown(phrase(part.held.reason))
    return percent(part.share) if part.held.share else Cell(NONE, tone="muted")


def decomposition(domain: Keyed) -> Table:
    """Gap and parts under every readout."""
    rows = []
    for found in domain.decompositions:
        blank = Cell("") if found.held.gap_measurable else words("too small to split", "muted")
        rows.append((words("gap"), words(found.probe), words("prefix(1) - full"), nats(found.gap), Cell(""), blank))
        for part in found.parts:
            itself = part.held.plus == part.held.minus
            run = Cell(NONE, tone="muted") if itself else words(f"{part.held.plus} - {part.held.minus}")
            cells = (words(part.name), words(found.probe), run, part_nats(part), part_share(part), words(part.word))
            rows.append(cells)
    note = (
        "application + distinct + composition = gap. Composition holds the distinct iterations of the later blocks too."
    )
    seeds = [p.held.seed_deviation for d in domain.decompositions for p in d.parts if p.held.seed_deviation is not None]
    if seeds:
        note += f" Over noise seeds, shares deviate by at most {100 * max(seeds):.1f} percentage points."
    columns = ("part", "readout", "contrast", "nats", "share of the gap", "word")
    return Table(
        "decomposition", f"Decomposition of the gap on {domain.held.name}", columns, tuple(rows), note, (0, 1, 2, 5)
    )


def contrasts(domain: Keyed) -> Table:
    """Every contrast of two schedules under every readout."""
    found = [contrast for contrast in domain.contrasts if contrast.held.plus != contrast.held.minus]
    return _contrasts(found, "contrasts", f"All contrasts on {domain.held.name}")


def extensions(domain: Keyed) -> Table:
    """What runs past full depth do: positive is worse than full depth."""
    found = [contrast for contrast in domain.contrasts if contrast.held.family.startswith("extend")]
    return _contrasts(found, "extensions", f"Beyond full depth on {domain.held.name}")


def _contrasts(contrasts: list[Keyed], name: str, caption: str) -> Table:
    rows = []
    for found in contrasts:
        margin = (
            amount(found.margin)
            if found.held.margin is not None and not found.held.reason
            else Cell(NONE, tone="muted")
        )
        cells = (
            words(found.name),
            words(found.probe),
            part_effect(found),
            span(found.spread),
            margin,
            yes_no(found.equivalent),
            words(found.reason) if found.held.reason else Cell(""),
        )
        rows.append(cells)
    columns = ("contrast", "readout", "nats", "min .. max", "margin", "equivalent to zero", "why no number")
    note = "Positive: the first schedule is worse. Equivalent: the 90 % interval lies inside the margin."
    return Table(name, caption, columns, tuple(rows), note, (0, 1, 5, 6)).trimmed()


def part_effect(contrast: Keyed) -> Cell:
    """The effect of a contrast, or the words that stand for it."""
    if contrast.held.bitwise_equal:
        return Cell("0 (bitwise equal)", contrast.bitwise_equal.path, contrast.home, 0.0)
    return unknown(phrase(contrast.held.reason)) if contrast.held.reason else nats(contrast.effect)


def losses(domain: Keyed) -> Table:
    """Loss of every schedule that was run, under every readout."""
    probes = list(dict.fromkeys(loss.held.probe for row in domain.schedules for loss in row.losses))
    rows = []
    for row in domain.schedules:
        if row.held.diverged_at is not None:
            text = f"diverged at application {row.held.diverged_at}"
            rows.append((words(row.name), *(unknown(text) for _ in probes), Cell(NONE, tone="muted")))
            continue
        raw = row.losses.where(probe=RAW)
        cells = (
            next((nats(loss.loss) for loss in row.losses.where(probe=probe)), Cell(NONE, tone="muted"))
            for probe in probes
        )
        rows.append((words(row.name), *cells, amount(raw[0].per_byte) if raw else Cell(NONE, tone="muted")))
    columns = ("schedule", *(f"loss, {probe}" for probe in probes), "raw, nats per byte")
    return Table("losses", f"Loss of every schedule on {domain.held.name}, nats per scored token", columns, tuple(rows))


def answers(domain: Keyed) -> Table | None:
    """Exact match of every schedule under every readout that changes answers; None where documents are no problems."""
    if domain.held.answers is None:
        return None
    found = domain.answers
    probes = list(dict.fromkeys(score.held.probe for score in found.scores))
    rows = []
    for schedule in dict.fromkeys(score.held.schedule for score in found.scores):
        cells = [words(schedule)]
        for probe in probes:
            (score,) = found.scores.where(schedule=schedule, probe=probe)
            cells += [percent(score.exact), _wilson(score.wilson), percent_of(score.cells)]
        rows.append(tuple(cells))
    columns = [f"{head}, {probe}" for probe in probes for head in ("exact match", "Wilson", "cells right")]
    task = found.task.held
    note = (
        "Exact match: share of problems with every cell of the answer right, with the document interval. "
        f"By chance {100 * task.chance:.2g} %. Temperature changes no answer."
    )
    caption = f"Answers on {domain.held.name}: {task.name}, difficulty {task.difficulty}"
    return Table("answers", caption, ("schedule", *columns), tuple(rows), note).trimmed()


def _wilson(ends: Keyed) -> Cell:
    """`91.0 .. 99.5 %`; a dash for None."""
    if ends.held is None:
        return Cell(NONE, tone="muted")
    low, high = (signed(100 * end, 1) for end in ends.held)
    return Cell(f"{low} .. {high}{NBSP}%", ends.path, ends.home, ends.held[0])


def gains(domain: Keyed, name: str = "probes", caption: str = "") -> Table:
    """What refitting the readout removes at every prefix; the first rows are the headline."""
    rows = []
    for gain in sorted(domain.gains, key=lambda gain: gain.held.k):
        word = gain.held.word + (" by flattening a wrong answer" if gain.held.flattening else "")
        share = percent(gain.share) if gain.held.share else words("withheld: gap too small", "muted")
        head = (words(gain.probe), words(gain.schedule), nats(gain.gap), nats(gain.gross), nats(gain.gross_full))
        rows.append((*head, nats(gain.net), share, Cell(word, gain.word.path, gain.home)))
    columns = ("readout", "schedule", "gap", "gain there", "gain at full", "net gain", "net share of the gap", "word")
    caption = caption or f"Refitted readouts on {domain.held.name}, nats"
    note = f"Net gain is the gain at the schedule minus the gain at full depth. {FIXED_FIT}"
    return Table(name, caption, columns, tuple(rows), note, (0, 1, 7))


def temperatures(domain: Keyed) -> Table:
    """Every temperature fit."""
    rows = []
    for row in domain.schedules:
        if row.held.temperature is not None:
            fit = row.temperature
            value = words("inf") if fit.held.temperature is None else amount(fit.temperature)
            ends = (amount(fit.low), amount(fit.high))
            rows.append((words(row.name), value, *ends, words(fit.status), amount(fit.in_sample), count(fit.passes)))
    columns = ("schedule", "T", "low", "high", "status", "T in sample", "passes")
    note = "The interval is over refits on resampled calibration documents; a fit at the end of its range has none."
    return Table("temperatures", f"Temperature fits on {domain.held.name}", columns, tuple(rows), note, (0, 4))


def affine_fits(domain: Keyed) -> Table:
    """Every affine fit."""
    rows = []
    for row in domain.schedules:
        if row.held.affine is not None:
            fit = row.affine
            flags = (yes_no(fit.converged), yes_no(fit.convex))
            rows.append((words(row.name), _penalty(fit), *flags, count(fit.iterations)))
    columns = ("schedule", "penalty", "converged", "convex", "iterations")
    return Table("affine", f"Affine fits on {domain.held.name}", columns, tuple(rows), text_columns=(0, 2, 3))


def _penalty(fit: Keyed) -> Cell:
    return words("identity") if fit.held.penalty is None else tiny(fit.penalty)


def full_rank_fits(domain: Keyed) -> Table:
    """Every full-rank fit."""
    rows = []
    for row in domain.schedules:
        if row.held.full_rank is not None:
            fit = row.full_rank
            flags = (yes_no(fit.converged), yes_no(fit.convex))
            head = (words(row.name), words(fit.objective), _penalty(fit))
            rows.append((*head, *flags, count(fit.iterations), count(fit.tokens)))
    columns = ("schedule", "objective", "penalty", "converged", "convex", "iterations", "training tokens")
    note = "Trained on documents that neither calibrate nor evaluate. kl: towards the model's own full-depth output."
    return Table("full-rank", f"Full-rank fits on {domain.held.name}", columns, tuple(rows), note, (0, 1, 3, 4))


def metrics(domain: Keyed) -> Table:
    """Token statistics of every schedule, raw and at its temperature."""
    rows = []
    for row in domain.schedules:
        for found in row.metrics:
            names = (
                "accuracy",
                "confidence",
                "ece",
                "ece_equal_mass",
                "brier",
                "entropy",
                "logit_norm",
                "kl_to_full",
                "agreement_to_full",
            )
            rows.append((words(row.name), words(found.probe), *(amount(getattr(found, name)) for name in names)))
    columns = (
        "schedule",
        "readout",
        "top-1 accuracy",
        "confidence",
        "ECE",
        "ECE, equal mass",
        "Brier",
        "entropy (nats)",
        "logit norm",
        "KL to full (nats)",
        "top-1 agreement with full",
    )
    note = "Temperature never changes top-1. A temperature that lowers the loss may raise ECE."
    return Table("metrics", f"Token statistics on {domain.held.name}", columns, tuple(rows), note, (0, 1))


def comparisons(domain: Keyed) -> Table:
    """The looped model against its dense control."""
    rows = tuple(
        (
            words(found.probe),
            words(found.at),
            count(found.looped_k),
            amount(found.looped_gap_per_byte),
            count(found.dense_k),
            amount(found.dense_gap_per_byte),
            percent(found.difference) if found.held.difference else unknown("not measured"),
            words(found.word),
        )
        for found in domain.control.comparisons
    )
    columns = (
        "readout",
        "compared at",
        "k here",
        "gap here",
        "k dense",
        "gap dense",
        "difference of net shares",
        "specific to recurrence",
    )
    note = "Gaps in nats per byte. Supported only if the interval of the difference lies above 0 at the nearest gap."
    return Table("dense", f"This model against its dense control on {domain.held.name}", columns, rows, note, (0, 1, 7))

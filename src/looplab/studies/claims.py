"""From rows to words: applies each claim's rule, and says why where there is no answer. Reads no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from looplab.records import Claim, ClaimResult, Matched, Part, PartResult, StudyRow
from looplab.studies import rules
from looplab.studies.rules import NOT_RUN, Interval

SMOKE = "smoke"
DIVERGED = "diverged"
"""Why there is no value: the run gave no finite loss. No word is drawn from the runs that are left."""
NOT_MEASURED = "not measured"
"""How the reason of a row begins that was not run."""
ONE_SEED = ("exact", "law")
"""Rules that need no training seeds; nor does a time."""
COMPARES = ("", "ratio", "contrast", "effect", "interaction")
"""Statistics that lay cells side by side, so that a floor or a ceiling hides what they ask; so does no trend."""

Rows = Mapping[int | None, StudyRow]


def decide_claims(
    claims: Sequence[Claim],
    rows: Sequence[StudyRow],
    *,
    scale: str,
    matched: Sequence[Matched] = (),
    equal: Sequence[str] | None = None,
    not_run: Mapping[str, str] | None = None,
) -> tuple[ClaimResult, ...]:
    """The word of every claim.

    Args:
        matched: What arms had to share; one miss makes every claim that compares such arms unidentifiable.
        equal: Names of what every claim asks for that names none of its own; None: all of `matched`.
        not_run: Arm -> why it was not run, such as `not measured (--arms)`.
    """
    asked = [match.name for match in matched] if equal is None else equal
    return tuple(_decide(claim, rows, scale, matched, asked, not_run or {}) for claim in claims)


def _decide(
    claim: Claim,
    rows: Sequence[StudyRow],
    scale: str,
    matched: Sequence[Matched],
    equal: Sequence[str],
    not_run: Mapping[str, str],
) -> ClaimResult:
    if claim.withheld:
        return ClaimResult(claim=claim, parts=(), word=rules.UNIDENTIFIED, reason=claim.withheld)
    found = [_part(part, claim, rows, scale, not_run) for part in claim.parts]
    parts = tuple(part for part, _ in found)
    absent = list(dict.fromkeys(reason for part, reason in found if part.word == NOT_RUN))
    if absent and not (claim.some and any(part.word == rules.SUPPORTED for part in parts)):
        return ClaimResult(claim=claim, parts=parts, word=NOT_RUN, reason="; ".join(absent))
    if scale == SMOKE:
        parts = tuple(replace(part, word=rules.UNIDENTIFIED) for part in parts)
        return ClaimResult(claim=claim, parts=parts, word=rules.UNIDENTIFIED, reason=SMOKE)
    unfit = _unmatched(claim, matched, equal if claim.equal is None else claim.equal) or _unmet(claim, rows)
    if unfit:
        return ClaimResult(claim=claim, parts=parts, word=rules.UNIDENTIFIED, reason=unfit)
    counted = found
    if claim.where_identifiable:
        counted = [pair for pair in found if pair[0].word != rules.UNIDENTIFIED] or found
    word = (rules.any_of if claim.some else rules.all_of)([part.word for part, _ in counted])
    reasons = [f"{part.label}: {reason}" for part, reason in counted if part.word == word and reason]
    return ClaimResult(claim=claim, parts=parts, word=word, reason="; ".join(reasons), flags=_flags(claim, word, parts))


def _flags(claim: Claim, word: str, parts: Sequence[PartResult]) -> tuple[str, ...]:
    turned = [
        part.value is not None
        and part.low is not None
        and part.high is not None
        and rules.reversed_claim(asked.rule, Interval(part.value, part.low, part.high, part.low, part.high))
        for asked, part in zip(claim.parts, parts, strict=True)
        if asked.statistic != "ratio"
    ]
    found = ["reversed"] if word == rules.NOT_SUPPORTED and turned and all(turned) else []
    measured = any(part.rule.name not in ONE_SEED and part.statistic != "time" for part in claim.parts)
    return (*found, *(["one checkpoint"] if claim.scope == "checkpoint" and measured else []))


def _unmatched(claim: Claim, matched: Sequence[Matched], equal: Sequence[str]) -> str:
    """What compared arms of a recipe should share and do not."""
    if claim.scope != "recipe":
        return ""
    missed: dict[str, float] = {}
    for match in matched:
        if match.name in equal and not match.equal:
            apart = [found for part in claim.parts if (found := _apart(match, part.arms)) is not None]
            missed |= {match.name: max(apart)} if apart else {}
    said = ", ".join(name + (f" {factor:.2f}" if factor else "") for name, factor in missed.items())
    return f"arms not matched: {said}" if missed else ""


def _apart(matched: Matched, arms: Sequence[str]) -> float | None:
    """The largest factor between these arms in one seed, 0 for what is no number; None where they agree."""
    by_seed: dict[str, set[str]] = {}
    for label, value in matched.values.items():
        name, _, seed = label.rpartition(", seed ")
        if name in arms:
            by_seed.setdefault(seed, set()).add(value)
    apart = [factor for values in by_seed.values() if (factor := factor_apart(values)) > 1 + matched.tolerance]
    if not apart:
        return None
    return 0.0 if math.inf in apart else max(apart)


def factor_apart(values: set[str]) -> float:
    """Largest over smallest of some numbers, 1 where all are the same text; infinite for what is no number."""
    if len(values) < 2:
        return 1.0
    try:
        numbers = [float(value.replace(",", "")) for value in values]
    except ValueError:
        return math.inf
    return max(numbers) / min(numbers) if min(numbers) > 0 else math.inf


def _unmet(claim: Claim, rows: Sequence[StudyRow]) -> str:
    """The first need of a claim that is not met."""
    for need in claim.needs:
        for arm in need.arms:
            values = [row.value for row in rows if (row.arm, row.quantity) == (arm, need.quantity)]
            known = [value for value in values if value is not None]
            mean = sum(known) / len(known) if known else None
            if mean is None or mean < need.at_least:
                got = "none" if mean is None else f"{mean:.3g}"
                return f"{need.reason}: {arm}, {need.quantity} {got}, {need.at_least:g} needed"
    return ""


def _part(
    part: Part, claim: Claim, rows: Sequence[StudyRow], scale: str, not_run: Mapping[str, str]
) -> tuple[PartResult, str]:
    """The result of one part, and the reason of a word that is no answer."""
    cells = [{r.seed: r for r in rows if (r.arm, r.quantity) == cell} for cell in part.cells]
    missing = [arm for (arm, _), own in zip(part.cells, cells, strict=True) if not own]
    absent = [not_run[arm] for arm in missing if arm in not_run]
    if missing and claim.only and not absent:
        absent = [
            f"{NOT_MEASURED} ({claim.only})" if claim.only == "--full" else f"{NOT_MEASURED} (needs {claim.only})"
        ]
    if missing and not absent:  # rows that several arms make together, one of which was not run
        absent = [reason for reason in not_run.values() if reason != f"{NOT_MEASURED} (--full)"]
    if absent:
        return replace(_empty(part), word=NOT_RUN), absent[0]
    if missing and scale == SMOKE:  # runs a few arms only, and decides nothing
        return _empty(part), rules.UNIDENTIFIED
    assert not missing, f"{claim.id}: no row {part.quantity!r} of {missing}"
    if part.rule.name == "spread":
        return _spread(part, [row for own in cells for row in own.values() if row.value is not None])
    reasons = [row.reason for own in cells for row in own.values() if row.value is None]
    if DIVERGED in reasons:
        return _diverged(part, cells)
    if reasons:
        word = NOT_RUN if reasons[0].startswith(NOT_MEASURED) and scale != SMOKE else rules.UNIDENTIFIED
        return replace(_empty(part), word=word), reasons[0]
    unfit = _guarded(part, cells)
    if unfit:
        return _empty(part), unfit
    if part.statistic == "auc":
        return _auc(part, cells)
    return _measured(part, claim, cells)


def _measured(part: Part, claim: Claim, cells: Sequence[Rows]) -> tuple[PartResult, str]:
    level = 1 - (1 - rules.LEVEL) / len(claim.parts) if claim.some else rules.LEVEL
    seeds = [seed for seed in cells[0] if all(seed in own for own in cells)]
    if not seeds:
        return replace(_empty(part), word=NOT_RUN), f"{NOT_MEASURED} (no seed is in all arms)"
    per_seed = [_statistic(part, [_interval(own[seed]) for own in cells], level) for seed in seeds]
    interval = rules.over_seeds(per_seed, level=level)
    margins = [row.margin for own in cells for row in own.values() if row.margin is not None]
    factors = part.statistic == "ratio" and part.rule.name not in ("equivalent", "two_sided")
    shown = rules.mapped(interval, _exp) if part.statistic == "ratio" else interval
    word = rules.decide(part.rule, shown if factors else interval, margin=min(margins, default=None))
    if part.rule.name == "exact":
        word = rules.all_of([rules.decide(part.rule, each) for each in per_seed])
    values = tuple(each.value for each in per_seed) if claim.scope == "recipe" else ()
    reason = "the threshold lies inside the interval" if word == rules.UNDECIDED else ""
    if claim.scope == "recipe" and len(per_seed) < rules.MIN_SEEDS and not one_seed(part):
        word = rules.UNDECIDED
        reason = f"{len(per_seed)} training {'seed' if len(per_seed) == 1 else 'seeds'}, {rules.MIN_SEEDS} needed"
    elif word == rules.UNDECIDED and values:
        edges = part.rule.numbers or (0.0,)
        centre = interval.value
        if factors:
            edges = tuple(_log(edge) for edge in edges)
        needed = rules.seeds_needed(values, min(abs(centre - edge) for edge in edges))
        enough = needed.isdecimal() and int(needed) <= len(values)  # the spread of seeds is small: items are what lacks
        reason += "; more items would decide" if enough else f"; seeds that would decide: {needed}"
    if part.statistic == "ratio":
        values = tuple(map(_exp, values))
    return _result(part, shown, values, word, level, _note(part, interval, per_seed, cells, word)), reason


def one_seed(part: Part) -> bool:
    """Whether a part can be decided from one training seed."""
    return part.rule.name in ONE_SEED or part.statistic == "time"


def _statistic(part: Part, found: Sequence[Interval], level: float) -> Interval:
    """What the rule decides on, for one seed."""
    if level != rules.LEVEL:
        found = [rules.at_level(each, level) for each in found]
    if part.statistic == "ratio":
        found = [rules.mapped(each, _log) for each in found]
    if part.statistic == "trend":
        return rules.contrast(found, rules.slope_weights(part.at))
    if part.weights:
        return rules.contrast(found, part.weights)
    return found[0] - found[1] if len(found) == 2 else found[0]


def _note(part: Part, interval: Interval, per_seed: Sequence[Interval], cells: Sequence[Rows], word: str) -> str:
    found = []
    if part.rule.name == "two_sided" and word == rules.SUPPORTED:
        found.append("above 0" if interval.value > 0 else "below 0")
    if (part.weights or part.statistic == "trend") and len(per_seed) > 1:
        found.append(f"sign-flip p = {rules.sign_flip([each.value for each in per_seed]):.3g}")
    counts = {row.items for own in cells for row in own.values() if row.items is not None}
    if counts:
        kind = "repetitions" if part.statistic == "time" else "items"
        found.append(f"{'-'.join(str(n) for n in sorted({min(counts), max(counts)}))} {kind}")
    return ", ".join(found)


def _guarded(part: Part, cells: Sequence[Rows]) -> str:
    """Why these cells cannot be compared."""
    rows = [row for own in cells for row in own.values()]
    if part.statistic == "time":
        fewest = min((row.items for row in rows if row.items is not None), default=rules.REPETITIONS)
        short = fewest < rules.REPETITIONS
        return f"too few events: {fewest} repetitions, {rules.REPETITIONS} needed" if short else ""
    if part.statistic == "ratio" and any(row.value is not None and row.value <= 0 for row in rows):
        return "no contrast: a ratio needs positive values"
    if part.statistic not in COMPARES or len(cells) < 2:
        return ""
    values = [[row.value for row in own.values() if row.value is not None] for own in cells]
    means = [math.fsum(own) / len(own) for own in values]
    chances = [next(iter(own.values())).chance for own in cells]
    return rules.guard(means, chances, [row.items for row in rows if row.chance is not None])


def _diverged(part: Part, cells: Sequence[Rows]) -> tuple[PartResult, str]:
    rows = [row for own in cells for row in own.values()]
    lost = sum(row.reason == DIVERGED for row in rows)
    seeds = [seed for seed in cells[0] if all(seed in own and own[seed].value is not None for own in cells)]
    note = ""
    if seeds and part.statistic != "auc":
        per_seed = [_statistic(part, [_interval(own[seed]) for own in cells], rules.LEVEL) for seed in seeds]
        mean = math.fsum(each.value for each in per_seed) / len(per_seed)
        note = f"mean of the others: {_exp(mean) if part.statistic == 'ratio' else mean:.4g}"
    return replace(_empty(part), word=rules.UNDECIDED, note=note), f"{lost} of {len(rows)} runs diverged"


def _auc(part: Part, cells: Sequence[Rows]) -> tuple[PartResult, str]:
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    clusters = []
    for place, cluster in enumerate(part.clusters):
        mine = cells[3 * place : 3 * place + 3]
        for seed in mine[0]:
            if all(seed in own for own in mine):
                for column, own in zip(columns, mine, strict=True):
                    value = own[seed].value
                    assert value is not None
                    column.append(value)
                clusters.append(cluster)
    first, second, outcome = columns
    interval = rules.auc_difference(first, second, [value > 0.5 for value in outcome], clusters)
    if interval is None:
        return _empty(part), "no contrast: all runs have one outcome, or are of one cluster"
    word = rules.decide(part.rule, interval)
    note = f"{len(outcome)} runs, {len(set(clusters))} clusters"
    reason = "the threshold lies inside the interval" if word == rules.UNDECIDED else ""
    return _result(part, interval, (), word, rules.LEVEL, note), reason


def _spread(part: Part, rows: Sequence[StudyRow]) -> tuple[PartResult, str]:
    """Between-arm spread, on the logarithm of factors."""
    found = [Interval(*(math.log(x) if row.unit == "factor" else x for x in _interval(row))) for row in rows]
    interval, word = rules.spread(found)
    if interval is None:
        return _empty(part), f"{len(found)} of {len(part.arms)} arms have the quantity, 2 needed"
    reason = "" if word == rules.SUPPORTED else "the spread may be 0"
    return _result(part, interval, (), word), reason


def _empty(part: Part) -> PartResult:
    return PartResult(
        label=part.label, value=None, low=None, high=None, level=rules.LEVEL, seeds=(), word=rules.UNIDENTIFIED
    )


def _result(
    part: Part,
    interval: Interval,
    seeds: tuple[float, ...],
    word: str,
    level: float = rules.LEVEL,
    note: str = "",
) -> PartResult:
    narrow = part.rule.name == "equivalent"
    return PartResult(
        label=part.label,
        value=interval.value,
        low=interval.low90 if narrow else interval.low,
        high=interval.high90 if narrow else interval.high,
        level=level if not narrow else rules.EQUIVALENCE_LEVEL if level == rules.LEVEL else 2 * level - 1,
        seeds=seeds,
        word=word,
        note=note,
    )


def _interval(row: StudyRow) -> Interval:
    """A row's interval; a fact has no width."""
    assert row.value is not None
    ends = (row.low, row.high, row.low90, row.high90)
    return Interval(row.value, *(row.value if end is None else end for end in ends))


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf

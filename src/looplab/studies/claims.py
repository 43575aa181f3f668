"""From rows to words: applies each claim's rule, and says why where there is no answer. Reads no model."""

import math
from collections.abc import Sequence
from dataclasses import replace

from looplab.records import Claim, ClaimResult, Matched, Part, PartResult, StudyRow
from looplab.studies import rules
from looplab.studies.base import SMOKE
from looplab.studies.rules import Interval

DIVERGED = "diverged"
"""Why there is no value: the run gave no finite loss. No word is drawn from the runs that are left."""


def decide_claims(
    claims: Sequence[Claim], rows: Sequence[StudyRow], *, scale: str, matched: Sequence[Matched] = ()
) -> tuple[ClaimResult, ...]:
    """The word of every claim.

    Args:
        matched: What the arms had to share; one miss makes every claim that compares such arms unidentifiable.
    """
    return tuple(_decide(claim, rows, scale, matched) for claim in claims)


def _decide(claim: Claim, rows: Sequence[StudyRow], scale: str, matched: Sequence[Matched]) -> ClaimResult:
    found = [_part(part, claim, rows, scale) for part in claim.parts]
    parts = tuple(part for part, _ in found)
    if scale == SMOKE:
        parts = tuple(replace(part, word=rules.UNIDENTIFIED) for part in parts)
        return ClaimResult(claim=claim, parts=parts, word=rules.UNIDENTIFIED, reason="smoke")
    missed = [m.name for m in matched if any(_missed(m, part.arms) for part in claim.parts)]
    if missed and claim.scope == "recipe":
        reason = f"arms not matched: {', '.join(missed)}"
        return ClaimResult(claim=claim, parts=parts, word=rules.UNIDENTIFIED, reason=reason)
    counted = found
    if claim.where_identifiable:
        counted = [pair for pair in found if pair[0].word != rules.UNIDENTIFIED] or found
    word = rules.all_of([part.word for part, _ in counted])
    reasons = [f"{part.label}: {reason}" for part, reason in counted if part.word == word and reason]
    return ClaimResult(claim=claim, parts=parts, word=word, reason="; ".join(reasons))


def _missed(matched: Matched, arms: Sequence[str]) -> bool:
    """Whether these arms are compared and, in some seed, do not share this."""
    if matched.equal or len(arms) == 1:
        return False
    by_seed: dict[str, set[str]] = {}
    for label, value in matched.values.items():
        name, _, seed = label.rpartition(", seed ")
        if name in arms:
            by_seed.setdefault(seed, set()).add(value)
    return any(len(values) > 1 for values in by_seed.values())


def _part(part: Part, claim: Claim, rows: Sequence[StudyRow], scale: str) -> tuple[PartResult, str]:
    """The result of one part, and the reason of a word that is no answer."""
    mine = {arm: [r for r in rows if (r.arm, r.quantity) == (arm, part.quantity)] for arm in part.arms}
    missing = [arm for arm, own in mine.items() if not own]
    if missing and scale == SMOKE:  # runs a few arms only, and decides nothing
        return _empty(part), rules.UNIDENTIFIED
    assert not missing, f"{claim.id}: no row {part.quantity!r} of {missing}"
    if part.rule.name == "spread":
        return _spread(part, [row for own in mine.values() for row in own if row.value is not None])
    diverged = [row for own in mine.values() for row in own if row.reason == DIVERGED]
    if diverged:
        runs = sum(map(len, mine.values()))
        return replace(_empty(part), word=rules.UNDECIDED), f"{len(diverged)} of {runs} runs diverged"
    reason = next((row.reason for own in mine.values() for row in own if row.value is None), None)
    if reason is not None:
        return _empty(part), reason
    sides = [{row.seed: _interval(row) for row in own} for own in mine.values()]
    per_seed = list(sides[0].values())
    if len(sides) == 2:
        per_seed = [sides[0][seed] - sides[1][seed] for seed in sides[0]]
    interval = rules.over_seeds(per_seed)
    margins = [row.margin for own in mine.values() for row in own if row.margin is not None]
    word = rules.decide(part.rule, interval, margin=min(margins, default=None))
    values = tuple(each.value for each in per_seed) if claim.scope == "recipe" else ()
    reason = "the threshold lies inside the interval" if word == rules.UNDECIDED else ""
    if claim.scope == "recipe" and len(per_seed) < rules.MIN_SEEDS:
        word = rules.UNDECIDED
        reason = f"{len(per_seed)} training {'seed' if len(per_seed) == 1 else 'seeds'}, {rules.MIN_SEEDS} needed"
    elif word == rules.UNDECIDED and values:
        edges = part.rule.numbers or (0.0,)
        needed = rules.seeds_needed(values, min(abs(interval.value - edge) for edge in edges))
        reason += f"; seeds that would decide: {needed}"
    return _result(part, interval, values, word), reason


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


def _result(part: Part, interval: Interval, seeds: tuple[float, ...], word: str) -> PartResult:
    narrow = part.rule.name == "equivalent"
    return PartResult(
        label=part.label,
        value=interval.value,
        low=interval.low90 if narrow else interval.low,
        high=interval.high90 if narrow else interval.high,
        level=rules.EQUIVALENCE_LEVEL if narrow else rules.LEVEL,
        seeds=seeds,
        word=word,
    )


def _interval(row: StudyRow) -> Interval:
    """A row's interval; a fact has no width."""
    assert row.value is not None
    ends = (row.low, row.high, row.low90, row.high90)
    return Interval(row.value, *(row.value if end is None else end for end in ends))

"""How the loss gap of depth splits: contrasts between schedules, the telescoping decomposition, probe gains.

    gap          G = Q(prefix(1))   - Q(full)
    application  A = Q(prefix(1))   - Q(repeat(1))       count 1 -> M, one distinct unit
    distinct     D = Q(repeat(1))   - Q(repeat(kmid))    count fixed, distinct 1 -> kmid in the first run
    composition  C = Q(repeat(kmid)) - Q(full)           later runs replace repeats of u_kmid;  A + D + C = G
    gain(s)        = Q(s) - Q_probe(s)                   net at k: gain(prefix(k)) - gain(full)

The same holds with Q_probe in place of Q. Every quantity is a linear form of losses, so its replicates are that form of
the shared replicates; a share is the ratio inside each replicate, and is withheld unless the lower bound of its gap
exceeds the gap floor. Two quantities count as equal (equivalent to zero) by two one-sided tests within a margin fixed
before the run. What the model cannot tell apart has a reason and never a number.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: shares need a measurable gap, probe gains are net of full depth, calibration documents are kept apart.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from looplab._types import Float
from looplab.audit.bootstrap import TEMPERATURE, Losses, estimate
from looplab.audit.config import AuditConfig
from looplab.audit.result import (
    RAW,
    Contrast,
    Decomposition,
    Estimate,
    Part,
    ProbeGain,
    ScheduleEntry,
)
from looplab.audit.schedules import (
    NO_INDEX,
    NO_LAYER_VIEW,
    NOT_WRITTEN,
    ONE_KIND,
    RUNS_ONCE,
    WHOLE_GAP,
    same_plan,
)
from looplab.audit.verdict import part_word, probe_word
from looplab.records import Finding, Level

FULL = "full"
GROUPS = {"layer_major": "order", "pass_major": "order", "extend_last": "extend", "extend_cycle": "extend"}
"""Families that share the name of their contrast with full."""
Pair = tuple[str, str]
Combination = dict[tuple[str, str], float]
"""A linear form of losses, keyed by (readout, schedule)."""


def identify(rows: Sequence[ScheduleEntry], *, units: int, kmid: int) -> dict[Pair, str]:
    """Why contrasts carry no information, keyed by (plus, minus) schedule names; a pair that is missing does.

    Two schedules cannot be told apart if their words are equal. `units` is M.
    """
    reasons: dict[Pair, str] = {}
    for plus in rows:
        for minus in rows:
            if NOT_WRITTEN in (plus.reason, minus.reason):
                reasons[plus.name, minus.name] = NOT_WRITTEN
            elif plus.name != minus.name and plus.word == minus.word:
                known = (row.reason for row in (plus, minus) if row.reason in (NO_INDEX, NO_LAYER_VIEW))
                reasons[plus.name, minus.name] = next(known, same_plan(minus.name))
    if kmid == 1:
        reasons[_at("repeat", 1, units), _at("repeat", 1, units)] = RUNS_ONCE
    if kmid == units:
        reasons[FULL, FULL] = ONE_KIND
    return reasons


def _struck_out(rows: Sequence[ScheduleEntry]) -> dict[str, str | None]:
    """Rows that coincide with a schedule of another family, with the reason.

    Their words differ from those of other schedules, but a contrast with them says nothing of its own: where repeat(k)
    is the full plan, prefix(k) - repeat(k) is the depth curve under another name.
    """
    families = {row.name: row.family for row in rows}
    return {row.name: row.reason for row in rows if row.same_as and families[row.same_as] != row.family}


def _at(family: str, k: int, units: int) -> str:
    return FULL if k == units else f"{family}({k})"


def structural_pairs(units: int, kmid: int) -> dict[str, Pair]:
    """application, distinct and composition as (plus, minus) schedule names."""
    first, middle = _at("repeat", 1, units), _at("repeat", kmid, units)
    return {"application": ("prefix(1)", first), "distinct": (first, middle), "composition": (middle, FULL)}


def difference(readout: str, plus: str, minus: str) -> Combination:
    """Q(plus) - Q(minus)."""
    return {(readout, plus): 1.0, (readout, minus): -1.0}


def gain(probe: str, schedule: str) -> Combination:
    """Q(schedule) - Q_probe(schedule)."""
    return {(RAW, schedule): 1.0, (probe, schedule): -1.0}


def combine(*terms: tuple[float, Combination]) -> Combination:
    """The weighted sum of linear forms; losses that cancel are left out."""
    total: Combination = {}
    for weight, form in terms:
        for key, factor in form.items():
            total[key] = total.get(key, 0.0) + weight * factor
    return {key: factor for key, factor in total.items() if factor}


def _margin(gap: float, config: AuditConfig) -> float:
    return max(0.0, min(config.margin_nats, config.margin_share * gap))


def equivalence_margin(losses: Losses, readout: str, config: AuditConfig) -> float | None:
    """delta of the equivalence tests under one readout; None where its gap is missing or too small."""
    if any((readout, name) not in losses.points for name in ("prefix(1)", FULL)):
        return None
    gap = losses.estimate(difference(readout, "prefix(1)", FULL), config.level)
    return _margin(gap.value, config) if gap.low > config.gap_floor else None


def equivalent(effect: Estimate, margin: float | None) -> bool | None:
    """Whether two one-sided tests at 5 % place the effect within the margin; None without a margin."""
    return None if margin is None else -margin < effect.low90 and effect.high90 < margin


def share_rows(losses: Losses, part: Combination, whole: Combination) -> Float[np.ndarray, " replicates"]:
    """part / whole in every replicate that both have."""
    shared = min(len(losses.rows(part)), len(losses.rows(whole)))
    return losses.rows(part)[:shared] / losses.rows(whole)[:shared]


def _share(losses: Losses, part: Combination, whole: Combination, level: float) -> Estimate:
    point = losses.point(part) / losses.point(whole)
    return estimate(point, share_rows(losses, part, whole), units=losses.documents, level=level)


def no_number(plus: str, minus: str, reasons: Mapping[Pair, str | None], unmeasured: Mapping[str, str]) -> str | None:
    """Why Q(plus) - Q(minus) has no number, as it is printed; None where it has one."""
    reason = reasons.get((plus, minus)) or (same_plan(minus) if plus == minus else None)
    if reason:
        return f"not identifiable: {reason}"
    missing = next((name for name in (plus, minus) if name in unmeasured), None)
    return None if missing is None else f"not measured: {unmeasured[missing]}"


def contrasts(
    losses: Losses,
    rows: Sequence[ScheduleEntry],
    *,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> tuple[Contrast, ...]:
    """Every schedule against full, prefix against the others at the same k, and the mean of the permutes.

    A contrast of a row that is struck out has that row's reason.

    Args:
        losses: Losses of every row that has a number, under the row's own name.
        rows: The schedule map.
        reasons: Contrasts that carry no information (`identify`).
        unmeasured: Schedules without a number, with the reason, such as "diverged at application 3".
    """
    struck = _struck_out(rows)
    table = {
        (plus, minus): reasons.get((plus, minus)) or struck.get(plus) or struck.get(minus)
        for _, _, plus, minus in _pairs(rows)
    }
    return tuple(
        contrast
        for readout in losses.readouts
        for contrast in _contrasts(losses, rows, readout, table, unmeasured, config)
    )


def _contrasts(
    losses: Losses,
    rows: Sequence[ScheduleEntry],
    readout: str,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> Iterator[Contrast]:
    margin = equivalence_margin(losses, readout, config)
    permutes = []
    for family, k, plus, minus in _pairs(rows):
        reason = no_number(plus, minus, reasons, unmeasured)
        if family == "permute-full" and reason is None:
            permutes.append(plus)
            continue
        if family == "permute-full" and any(r.family == "permute" and r.reason is None for r in rows):
            continue
        yield _contrast(losses, readout, family, k, plus, minus, reason, margin, config)
    if permutes:
        yield _permute_contrast(losses, readout, permutes, margin, config)


def _pairs(rows: Sequence[ScheduleEntry]) -> Iterator[tuple[str, int | None, str, str]]:
    """(family, k, plus, minus) of every contrast that is reported."""
    names = {row.name for row in rows}
    for row in rows:
        if row.name == FULL:
            continue
        yield f"{GROUPS.get(row.family, row.family)}-full", row.k, row.name, FULL
        if row.family == "prefix":
            for other in ("repeat", "suffix", "same", "regrid"):
                if f"{other}({row.k})" in names:
                    yield f"prefix-{other}", row.k, row.name, f"{other}({row.k})"


def _contrast(
    losses: Losses,
    readout: str,
    family: str,
    k: int | None,
    plus: str,
    minus: str,
    reason: str | None,
    margin: float | None,
    config: AuditConfig,
) -> Contrast:
    effect = losses.estimate(difference(readout, plus, minus), config.level) if reason is None else None
    return Contrast(
        name=f"{plus} - {minus}",
        plus=plus,
        minus=minus,
        probe=readout,
        family=family,
        k=k,
        effect=effect,
        spread=None,
        margin=margin,
        equivalent=None if effect is None else equivalent(effect, margin),
        bitwise_equal=effect is not None and losses.bitwise_equal(readout, plus, minus),
        reason=reason,
    )


def _permute_contrast(
    losses: Losses, readout: str, names: Sequence[str], margin: float | None, config: AuditConfig
) -> Contrast:
    singles = [losses.point(difference(readout, name, FULL)) for name in names]
    mean: Combination = {**{(readout, name): 1 / len(names) for name in names}, (readout, FULL): -1.0}
    effect = losses.estimate(mean, config.level)
    return Contrast(
        name="permute - full",
        plus="permute",
        minus=FULL,
        probe=readout,
        family="permute-full",
        k=None,
        effect=effect,
        spread=(min(singles), max(singles)),
        margin=margin,
        equivalent=equivalent(effect, margin),
        bitwise_equal=all(losses.bitwise_equal(readout, name, FULL) for name in names),
        reason=None,
    )


def decompositions(
    losses: Losses,
    *,
    units: int,
    kmid: int,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> tuple[Decomposition, ...]:
    """The telescoping decomposition under every readout, raw first; none where prefix(1) or full was not measured.

    Args:
        units: M.
        kmid: Leading units with the block sequence of the first.
    """
    if "prefix(1)" in unmeasured or FULL in unmeasured:
        return ()
    terms = structural_pairs(units, kmid)
    return tuple(_decomposition(losses, readout, terms, reasons, unmeasured, config) for readout in losses.readouts)


def _decomposition(
    losses: Losses,
    readout: str,
    terms: Mapping[str, Pair],
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> Decomposition:
    whole = difference(readout, "prefix(1)", FULL)
    gap = losses.estimate(whole, config.level)
    measurable = gap.low > config.gap_floor
    margin = _margin(gap.value, config)
    identifiable = [pair for pair in terms.values() if no_number(*pair, reasons, {}) is None]
    parts = []
    for name, (plus, minus) in terms.items():
        reason = no_number(plus, minus, reasons, unmeasured)
        if reason is None and len(identifiable) == 1:
            reason = f"not identifiable: {WHOLE_GAP}"
        parts.append(_part(losses, readout, name, plus, minus, reason, whole, measurable, margin, config))
    return Decomposition(probe=readout, gap=gap, gap_measurable=measurable, margin=margin, parts=tuple(parts))


def _part(
    losses: Losses,
    readout: str,
    name: str,
    plus: str,
    minus: str,
    reason: str | None,
    whole: Combination,
    measurable: bool,
    margin: float,
    config: AuditConfig,
) -> Part:
    nats = share = within = deviation = None
    if reason is None:
        part = difference(readout, plus, minus)
        nats = losses.estimate(part, config.level)
        if measurable:
            share = _share(losses, part, whole, config.level)
            within = equivalent(nats, margin)
            deviation = _seed_deviation(losses, part, whole)
    return Part(
        name=name,
        plus=plus,
        minus=minus,
        nats=nats,
        share=share,
        seed_deviation=deviation,
        equivalent=within,
        bitwise_equal=nats is not None and losses.bitwise_equal(readout, plus, minus),
        word=part_word(nats=nats, share=share, equivalent=within, margin=margin, reason=reason),
        reason=reason,
    )


def _seed_deviation(losses: Losses, part: Combination, whole: Combination) -> float | None:
    parts, wholes = losses.seeds(part), losses.seeds(whole)
    if parts is None or wholes is None or not all(wholes):
        return None
    return statistics.stdev(p / w for p, w in zip(parts, wholes, strict=True))


def gap_findings(parts: Iterable[Decomposition], domain: str, config: AuditConfig) -> tuple[Finding, ...]:
    """`audit.gap_too_small` for every decomposition whose shares are withheld."""
    return tuple(
        Finding(
            kind="audit.gap_too_small",
            level=Level.WARNING,
            message=f"The {part.probe} gap on {domain} is not clearly above {config.gap_floor} nats; no shares.",
            remedy="Read the effects in nats, or use more documents.",
            value=part.gap.value,
            low=part.gap.low,
            high=part.gap.high,
            threshold=config.gap_floor,
            where={"domain": domain, "probe": part.probe},
        )
        for part in parts
        if not part.gap_measurable
    )


def measured_prefixes(
    losses: Losses, grid: Iterable[int], units: int, reasons: Mapping[Pair, str | None]
) -> Iterator[int]:
    """Values of k whose gap to full has a number."""
    for k in sorted(set(grid)):
        if k < units and (RAW, f"prefix({k})") in losses.points and not reasons.get((f"prefix({k})", FULL)):
            yield k


def probe_gains(
    losses: Losses, *, grid: Sequence[int], units: int, reasons: Mapping[Pair, str | None], config: AuditConfig
) -> tuple[ProbeGain, ...]:
    """What each probe removes at prefix(k), net of what it removes at full, for every measured k below M."""
    return tuple(
        _probe_gain(losses, probe, k, config)
        for probe in losses.readouts
        if probe != RAW
        for k in measured_prefixes(losses, grid, units, reasons)
    )


def net_gain(probe: str, k: int) -> tuple[Combination, Combination]:
    """The net gain at prefix(k), and the gap it is a share of."""
    return combine((1.0, gain(probe, f"prefix({k})")), (-1.0, gain(probe, FULL))), difference(RAW, f"prefix({k})", FULL)


def _probe_gain(losses: Losses, probe: str, k: int, config: AuditConfig) -> ProbeGain:
    schedule = f"prefix({k})"
    net, whole = net_gain(probe, k)
    gap = losses.estimate(whole, config.level)
    share = _share(losses, net, whole, config.level) if gap.low > config.gap_floor else None
    fitted = losses.tables[schedule].temperature
    return ProbeGain(
        probe=probe,
        schedule=schedule,
        k=k,
        gap=gap,
        gross=losses.estimate(gain(probe, schedule), config.level),
        gross_full=losses.estimate(gain(probe, FULL), config.level),
        net=losses.estimate(net, config.level),
        share=share,
        word=probe_word(share),
        flattening=probe == TEMPERATURE and fitted is not None and fitted.replicates.status == "uniform",
    )

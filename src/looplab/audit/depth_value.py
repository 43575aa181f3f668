"""How many loops to pay for: gain against cost of every further step of depth.

    depths   prefix(k) on the grid, full, then extend_last(a) for a > M, in the order of their applications
    gain     Q(before) - Q(after) of neighbouring depths; net of a probe: Q_probe(before) - Q_probe(after)
    enough   smallest k with  upper 90 % bound of Q(i) - Q(j) < margin     for all measured k <= i < j <= M
    safe     largest a with   upper 90 % bound of Q(b) - Q(full) < margin  for all measured M < b <= a

Whoever stops at k gives up the best of all later depths, not only the last one, so `enough` asks about each of them;
and about every single step behind k, so that nobody stops where the next unit still pays. Both are one-sided tests at
5 %, taken in a fixed order from full depth and ended by the first that fails: the chance of naming too few units, or
too many past full, is at most 5 % however many depths were run. An interval around zero that is wider than the margin
decides nothing.

The margin is that of the audit's equivalence tests, min(margin_nats, margin_share * gap); where the gap from the first
unit to full is missing or not clearly above `gap_floor`, a share of it means nothing and margin_nats stands alone. Two
depths are always different functions, so all this has numbers where shares are not identifiable, as for one index-free
core. For a dense model it is a table of cutting layers.

Reference: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987 (two one-sided tests); Maurer, Hothorn and
Lehmacher, Biometrie in der chemisch-pharmazeutischen Industrie 6, 1995 (tests in a fixed order).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import stats

from looplab._types import Float
from looplab.audit.bootstrap import Losses
from looplab.audit.card import is_dense
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import FULL, difference
from looplab.audit.result import RAW, DepthStart, DepthStep, DepthValue, Estimate, ScheduleEntry
from looplab.audit.schedules import FullPlan
from looplab.recurrence.depth import DepthSampler
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec

FAMILIES = ("prefix", "full", "extend_last")
MOST = 100
"""No number of further documents is given where more than this many times the present ones would be needed."""
EQUIVALENT, GAINS, HARMS, UNDECIDED = "equivalent to zero", "gains", "harms", "undecided"


def depth_value(
    losses: Losses,
    rows: Sequence[ScheduleEntry],
    *,
    domain: str,
    full: FullPlan,
    spec: LoopSpec,
    unmeasured: Mapping[str, str],
    trained_units: tuple[int, int] | None,
    config: AuditConfig,
    context_tokens: int,
    itemsize: int,
    milliseconds: Mapping[str, float] | None = None,
) -> DepthValue | None:
    """Gain and cost of every step from one measured depth to the next; None with fewer than two, or without full.

    FLOPs are exact at `context_tokens` and floored to one token (without sliding windows or per-row layers nothing is
    lost: causal attention costs 2 width (T + 1) per token). KV bytes follow the model's rule with one iteration per
    application, also for those that reuse a trained index; a model that is not causal has no cache and 0.

    Args:
        losses: Losses of every row that has a number, under the row's own name.
        rows: The schedule map; other families than `FAMILIES` are passed over.
        unmeasured: Schedules without a number, with the reason, such as "diverged at application 3".
        trained_units: Smallest and largest number of units whose readout was trained; None if unknown.
        context_tokens: Tokens of one sequence, for attention.
        itemsize: Bytes of one cached number.
        milliseconds: Schedule name -> measured milliseconds per token.
    """
    depths = sorted((row for row in rows if row.family in FAMILIES), key=lambda row: row.applications)
    measured = [row for row in depths if (RAW, row.name) in losses.points]
    if len(measured) < 2 or (RAW, FULL) not in losses.points:
        return None
    margin = _margin(losses, config)
    price = _Price(spec, context_tokens, itemsize)
    times = milliseconds or {}
    start = measured[0]
    within = [row for row in measured if row.applications <= len(full.plan)]
    beyond = [] if is_dense(full) else [row for row in depths if row.applications > len(full.plan)]
    stop = _stop(losses, within, margin, config)
    reach = _reach(losses, beyond, margin, config)
    said = [_stop_sentence(domain, stop, full, margin, losses.documents)]
    if not is_dense(full):
        said.append(_reach_sentence(reach, spec, full, margin, unmeasured))
    return DepthValue(
        start=DepthStart(
            schedule=start.name,
            units=start.units,
            applications=start.applications,
            loss=losses.estimate({(RAW, start.name): 1.0}, config.level),
            flops=price.flops(start),
            kv_bytes=price.kv_bytes(start),
            milliseconds=times.get(start.name),
        ),
        steps=tuple(
            _step(losses, before, after, price, times, margin, config, beyond=after.applications > len(full.plan))
            for before, after in pairwise(measured)
        ),
        context_tokens=context_tokens,
        itemsize=itemsize,
        enough=None if stop.undecided else stop.row.units,
        safe_until=None if not beyond else full.M if reach.safe is None else reach.safe.units,
        trained=trained_units,
        sentence=" ".join(said),
    )


def step_word(gain: Estimate, margin: float) -> str:
    """equivalent to zero (two one-sided tests within `margin`, which wins), gains, harms or undecided."""
    if -margin < gain.low90 and gain.high90 < margin:
        return EQUIVALENT
    return GAINS if gain.low > 0 else HARMS if gain.high < 0 else UNDECIDED


def documents_needed(gain: Estimate, margin: float, documents: int) -> int | None:
    """About how many more documents make an undecided gain decided; None where it takes more than `MOST` times as many.

    The fewest documents of which half of all samples would decide, if gain and spread are as they look now: the gain of
    a sample is normal around `gain`, intervals shrink as 1 / sqrt(documents), and a sample decides if its interval is
    clear of zero or its 90 % interval inside the margin. (For a gain of 0 the 90 % interval must be well narrower than
    the margin: if just as wide, next to no sample would have it inside.)
    """
    sizes = np.arange(documents + 1, MOST * documents + 1)
    shrink = np.sqrt(documents / sizes)
    half, half90 = (gain.high - gain.low) / 2 * shrink, (gain.high90 - gain.low90) / 2 * shrink
    inside = np.maximum(margin - half90, 0.0)
    clear = np.maximum(half, inside)
    error = half90 / stats.norm.ppf(0.95)
    open_between = _within(gain.value, error, clear) - _within(gain.value, error, inside)
    deciding = np.flatnonzero(open_between <= 0.5)
    return None if len(deciding) == 0 else int(deciding[0]) + 1


def _within(
    value: float, error: Float[np.ndarray, " sizes"], bound: Float[np.ndarray, " sizes"]
) -> Float[np.ndarray, " sizes"]:
    """Probability that a normal number lies in (-bound, bound)."""
    return stats.norm.cdf((bound - value) / error) - stats.norm.cdf((-bound - value) / error)


def _margin(losses: Losses, config: AuditConfig) -> float:
    if (RAW, "prefix(1)") not in losses.points:
        return config.margin_nats
    gap = losses.estimate(difference(RAW, "prefix(1)", FULL), config.level)
    if not gap.low > config.gap_floor:
        return config.margin_nats
    return min(config.margin_nats, config.margin_share * gap.value)


class _Price(NamedTuple):
    spec: LoopSpec
    tokens: int
    itemsize: int

    def flops(self, row: ScheduleEntry) -> int:
        pairs = "causal" if self.spec.causal else "square"
        return self.spec.cost.forward(_executions(row), tokens=self.tokens, pairs=pairs) // self.tokens  # type: ignore[arg-type]

    def kv_bytes(self, row: ScheduleEntry) -> int:
        if not self.spec.causal:
            return 0
        rule = self.spec.kv_rule
        return self.spec.cost.kv_bytes_per_token(
            type(rule).__name__, _executions(row), itemsize=self.itemsize, size=rule.size
        )


def _executions(row: ScheduleEntry) -> Counter[int]:
    return Counter(block for block, _ in Plan.parse(row.plan))


def _step(
    losses: Losses,
    before: ScheduleEntry,
    after: ScheduleEntry,
    price: _Price,
    times: Mapping[str, float],
    margin: float,
    config: AuditConfig,
    *,
    beyond: bool,
) -> DepthStep:
    gains = {
        readout: losses.estimate(difference(readout, before.name, after.name), config.level)
        for readout in losses.readouts
    }
    gain = gains.pop(RAW)
    word = step_word(gain, margin)
    return DepthStep(
        before=before.name,
        after=after.name,
        units=after.units,
        applications=after.applications,
        added=after.applications - before.applications,
        beyond=beyond,
        loss=losses.estimate({(RAW, after.name): 1.0}, config.level),
        gain=gain,
        net=gains,
        word=word,
        margin=margin,
        more_documents=documents_needed(gain, margin, losses.documents) if word == UNDECIDED else None,
        flops=price.flops(after),
        added_flops=price.flops(after) - price.flops(before),
        kv_bytes=price.kv_bytes(after),
        milliseconds=times.get(after.name),
    )


class _Stop(NamedTuple):
    row: ScheduleEntry
    """The shallowest depth that is enough."""
    shallower: ScheduleEntry | None
    """The depth before it, which failed; None if there is none."""
    lost: Estimate | None
    """The most that stopping at `shallower` loses against a later depth."""
    shown: bool
    """That loss is shown to exceed the margin."""
    undecided: bool
    """Nothing below full depth is enough, nor is the step to it shown to pay."""


def _stop(losses: Losses, within: Sequence[ScheduleEntry], margin: float, config: AuditConfig) -> _Stop:
    enough = within[-1]
    for i in reversed(range(len(within) - 1)):
        lost = [losses.estimate(difference(RAW, within[i].name, row.name), config.level) for row in within[i + 1 :]]
        if any(each.high90 >= margin for each in lost):
            most = max(lost, key=lambda each: each.value)
            shown = most.low90 > margin
            return _Stop(enough, within[i], most, shown, undecided=enough is within[-1] and not shown)
        enough = within[i]
    return _Stop(enough, None, None, shown=False, undecided=len(within) < 2)


class _Reach(NamedTuple):
    safe: ScheduleEntry | None
    """The deepest depth past full that is safe; None if there is none."""
    above: Estimate | None
    """Its loss above full."""
    failed: ScheduleEntry | None
    """The first that is not shown to be safe; None if all are."""
    excess: Estimate | None
    """Its loss above full; None if it has no number."""


def _reach(losses: Losses, beyond: Sequence[ScheduleEntry], margin: float, config: AuditConfig) -> _Reach:
    safe, above = None, None
    for row in beyond:
        if (RAW, row.name) not in losses.points:
            return _Reach(safe, above, row, None)
        excess = losses.estimate(difference(RAW, row.name, FULL), config.level)
        if excess.high90 >= margin:
            return _Reach(safe, above, row, excess)
        safe, above = row, excess
    return _Reach(safe, above, None, None)


def _nats(effect: Estimate, sign: int = 1) -> str:
    value, low, high = (round(sign * x, 3) + 0.0 for x in (effect.value, effect.low, effect.high))
    return f"{value:.3f} nats [{min(low, high):.3f}, {max(low, high):.3f}]"


def _documents_to_side(effect: Estimate, margin: float, documents: int) -> int | None:
    """About how many more documents place an effect on one side of the margin, in half of all samples."""
    half = effect.high90 - effect.value if effect.value < margin else effect.value - effect.low90
    distance = abs(margin - effect.value)
    times = (half / distance) ** 2 if distance > 0 else math.inf
    return None if times > MOST else max(1, math.ceil(times * documents) - documents)


def more_documents_text(more: int | None) -> str:
    """How many documents would decide, as a sentence."""
    if more is None:
        return f"More than {MOST} times as many documents would be needed to decide."
    return f"About {more:,} more {'document' if more == 1 else 'documents'} would decide."


def _stop_sentence(domain: str, stop: _Stop, full: FullPlan, margin: float, documents: int) -> str:
    name = "layers" if is_dense(full) else "units"
    k, whole = stop.row.units, full.M
    rest = f"going on to any measured depth up to {whole} gains less than {margin:.3f} nats"
    if stop.lost is None or stop.shallower is None:
        if stop.undecided:
            return f"On {domain}, no depth below all {whole} {name} was measured."
        return f"On {domain}, pay for {k} of {whole} {name}: {rest}."
    less = stop.shallower.units
    if stop.undecided:
        return (
            f"On {domain}, it is undecided whether fewer than {whole} {name} are enough: stopping at {less} costs "
            f"{_nats(stop.lost)}, and the margin is {margin:.3f}. "
            + more_documents_text(_documents_to_side(stop.lost, margin, documents))
        )
    if k == whole:
        return f"On {domain}, pay for all {whole} {name}: stopping at {less} costs {_nats(stop.lost)}."
    if stop.shown:
        return f"On {domain}, pay for {k} of {whole} {name}: {rest}."
    return f"On {domain}, {k} of {whole} {name} are enough: {rest}. Whether {less} would be is undecided."


def _reach_sentence(reach: _Reach, spec: LoopSpec, full: FullPlan, margin: float, unmeasured: Mapping[str, str]) -> str:
    past = "the trained depth" if _longest_trained(spec) == len(full.plan) else "full depth"
    if reach.safe is None and reach.failed is None:
        return f"Nothing beyond {past} was run (--extend)."
    safe = ""
    if reach.safe is not None and reach.above is not None:
        lower = f" and lowers the loss by {_nats(reach.above, -1)}" if reach.above.high < 0 else ""
        safe = f"Running past {past} is safe up to {reach.safe.units} units{lower}"
        if reach.failed is None:
            return f"{safe}; nothing deeper was run."
    assert reach.failed is not None
    at = f"at {reach.failed.units}"
    if reach.excess is None:
        why = unmeasured.get(reach.failed.name, "not measured")
        return f"{safe}; {at}: {why}." if safe else f"Running past {past} is not shown to be safe: {at} units, {why}."
    above = f"{at}{'' if safe else ' units'} the loss is {_nats(reach.excess)} above full depth"
    if reach.excess.low90 > margin:
        return f"{safe}; {above}." if safe else f"Running past {past} is not safe: {above}."
    open_end = f"{above}, which the margin of {margin:.3f} leaves undecided."
    return f"{safe}; {open_end}" if safe else f"Whether running past {past} is safe is undecided: {open_end}"


def _longest_trained(spec: LoopSpec) -> int | None:
    """Applications of the longest plan of training; None if unknown."""
    depth = spec.trained_depth
    if not isinstance(depth, DepthSampler):
        return None
    longest = max(depth.support())
    return longest if depth.of_prefix else len(spec.order.plan(longest, len(spec.blocks)))

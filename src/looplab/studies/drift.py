"""How the temperature that a readout wants moves with the depth at which it is read.

    tau_k = log T(k)
    shift(k) = |tau_k - tau_K| is asked as |T(k) - T(K)|, K the trained depth
    step share, below K   (tau_{K-1} - tau_K) / (tau_1 - tau_K)       above K   (tau_{K+1} - tau_K) / (tau_far - tau_K)

A step share is 1 where the temperature jumps at the trained depth, and 1 / (K - 1) on a straight line. It is not
identifiable where the interval of its denominator contains 0. Depths above the full plan are `extend_last`: the last
unit again.

    naive slope   least squares of -Q(prefix(k)) on k / M, in nats per whole plan
    controlled gap   Q_T(repeat(1)) - Q_T(full): what full count and a refitted temperature leave of the gap

Intervals: temperatures have their own, of refits on resampled calibration documents; a difference takes the worst case
of two, a share the extremes of its corners, a slope the root of the sum of squares of its terms. There is no 90 %
interval of a temperature, so the 95 % one stands for both.

All of this is our own definition.
"""

import math
from collections.abc import Sequence

from looplab.audit.result import ScheduleResult, TemperatureFit
from looplab.records import StudyRow
from looplab.studies.measured import NOT_MEASURED, TOO_SMALL, Rows
from looplab.studies.rules import Interval, contrast, mapped, slope_weights

NO_DRIFT = "the temperature does not move between the ends"
BOUNDARY = "the temperature lies at a boundary"


class DriftRows(Rows):
    """Builds the rows of one arm that was audited at every depth, and beyond its plan."""

    @property
    def full(self) -> int:
        """M, units of the full plan."""
        return self.result.model.units

    def temperature(self, k: int) -> StudyRow:
        """T(k)."""
        found = self._tau(k)
        quantity = f"T, k = {k}"
        if found is None:
            return self._unknown(quantity, "factor", self._reason(k))
        return self._interval(quantity, "factor", mapped(found, math.exp))

    def shift(self, k: int, trained: int) -> StudyRow:
        """|T(k) - T(K)|."""
        one, other = self._tau(k), self._tau(trained)
        quantity = f"distance of T, k = {k}"
        if one is None or other is None:
            return self._unknown(quantity, "factor", self._reason(k, trained))
        return self._interval(quantity, "factor", _size(mapped(one, math.exp) - mapped(other, math.exp)))

    def step_share(self, trained: int, far: int) -> StudyRow:
        """Share of the drift between the trained depth and a far one that happens in the step next to the trained."""
        side = "below" if far < trained else "above"
        quantity = f"step share, {side}"
        near = trained - 1 if far < trained else trained + 1
        ends = [self._tau(k) for k in (near, far, trained)]
        if any(end is None for end in ends):
            return self._unknown(quantity, "share", self._reason(near, far, trained))
        first, last, home = (end for end in ends if end is not None)
        whole = last - home
        if whole.low <= 0 <= whole.high:
            return self._unknown(quantity, "share", NO_DRIFT)
        return self._interval(quantity, "share", _quotient(first - home, whole))

    def naive_slope(self) -> StudyRow:
        """Nats gained per whole plan, as truncation makes it look."""
        depths = range(1, self.full + 1)
        schedules = [self._schedule(k) for k in depths]
        losses = [schedule.loss().loss for schedule in schedules if schedule is not None and schedule.losses]
        if len(losses) < len(depths):
            return self._unknown("naive slope", "nats", NOT_MEASURED)
        found = [Interval(q.value, q.low, q.high, q.low90, q.high90) for q in losses]
        weights = [-w for w in slope_weights([k / self.full for k in depths])]
        return self._interval("naive slope", "nats", contrast(found, weights))

    def controlled_gap(self) -> StudyRow:
        """What is left of the gap with the full count of applications and a refitted temperature."""
        part = self._part("application", "temperature")
        whole = self.domain.decomposition("temperature").gap if self.domain.decompositions else None
        if part is None or part.nats is None or whole is None:
            return self._unknown("controlled gap", "nats", TOO_SMALL)
        left = Interval(*(getattr(whole, end) for end in Interval._fields)) - Interval(
            *(getattr(part.nats, end) for end in Interval._fields)
        )
        return self._interval("controlled gap", "nats", left)

    def _tau(self, k: int) -> Interval | None:
        """log T(k) with its interval."""
        schedule = self._schedule(k)
        fit = None if schedule is None else schedule.temperature
        return None if fit is None else _log(fit)

    def _reason(self, *depths: int) -> str:
        """Why one of these depths has no temperature."""
        run = all(self._schedule(k) is not None for k in depths)
        return BOUNDARY if run else NOT_MEASURED

    def _schedule(self, k: int) -> ScheduleResult | None:
        name = "full" if k == self.full else f"prefix({k})" if k < self.full else f"extend_last({k})"
        return next((found for found in self.domain.schedules if found.name == name), None)

    def _interval(self, quantity: str, unit: str, found: Interval) -> StudyRow:
        return self._new(quantity, unit, **found._asdict())


def _log(fit: TemperatureFit) -> Interval | None:
    ends = (fit.temperature, fit.low, fit.high)
    if any(end is None or not 0 < end < math.inf for end in ends):
        return None
    value, low, high = (math.log(end) for end in ends if end is not None)
    return Interval(value, low, high, low, high)


def _size(found: Interval) -> Interval:
    """Of a difference, without its sign."""

    def ends(low: float, high: float) -> tuple[float, float]:
        return (0.0 if low < 0 < high else min(abs(low), abs(high))), max(abs(low), abs(high))

    return Interval(abs(found.value), *ends(found.low, found.high), *ends(found.low90, found.high90))


def _quotient(part: Interval, whole: Interval) -> Interval:
    """Extremes over the corners of both intervals; that of the whole leaves 0 out."""

    def ends(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
        corners = [a / b for a in one for b in other]
        return min(corners), max(corners)

    return Interval(
        part.value / whole.value,
        *ends((part.low, part.high), (whole.low, whole.high)),
        *ends((part.low90, part.high90), (whole.low90, whole.high90)),
    )

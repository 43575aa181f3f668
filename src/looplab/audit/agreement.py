"""How far two shares from different documents lie apart.

    low  = (a - b) - sqrt((a - a_low)^2 + (b_high - b)^2)         high = (a - b) + sqrt((a_high - a)^2 + (b - b_low)^2)

Domains share no document and are drawn apart, so their intervals are independent and combine without the replicates.

Reference: Zou and Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008.
"""

import math

from looplab.audit.result import Estimate


def share_difference(one: Estimate, other: Estimate) -> Estimate:
    """`one - other`, both from documents that are independent of each other; every interval from its own kind."""

    def ends(low: str, high: str) -> dict[str, float]:
        below = math.hypot(one.value - getattr(one, low), getattr(other, high) - other.value)
        above = math.hypot(getattr(one, high) - one.value, other.value - getattr(other, low))
        return {low: one.value - other.value - below, high: one.value - other.value + above}

    return Estimate(
        value=one.value - other.value,
        **ends("low", "high"),
        **ends("low90", "high90"),
        **ends("plain_low", "plain_high"),
    )

"""Positive controls of the audit: models whose audit is known beforehand, and what must be found on them.

P1 planted_temperature   P2 planted_affine    P3 tracker, on swaps       P3b progress, on a task       P4 identity
P5 trivial_repeat, which searches what is unprinted        P6 count_only        P7 composition_only

base        claims and outcomes            letters     texts of a known law
known       models of a known truth        rules       what moves their states
self_check  all of it: `run_self_check`
"""

from looplab.audit.positive_controls.base import ControlOutcome
from looplab.audit.positive_controls.self_check import SelfCheck, run_self_check

__all__ = ["ControlOutcome", "SelfCheck", "run_self_check"]

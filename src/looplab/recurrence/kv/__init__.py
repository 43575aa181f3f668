"""Key-value caches of looped models: one file per rule that says what a query reads of a past token."""

from looplab.recurrence.kv.anchor import Anchor
from looplab.recurrence.kv.average import Average
from looplab.recurrence.kv.base import Cache, KVRule, KVView
from looplab.recurrence.kv.depth_indexed import CopyLast, DepthIndexed, Skip
from looplab.recurrence.kv.depth_indexed import Refuse as RefuseMissing
from looplab.recurrence.kv.first import First
from looplab.recurrence.kv.modulo import Modulo
from looplab.recurrence.kv.single import Single

__all__ = [
    "Anchor",
    "Average",
    "Cache",
    "CopyLast",
    "DepthIndexed",
    "First",
    "KVRule",
    "KVView",
    "Modulo",
    "RefuseMissing",
    "Single",
    "Skip",
]

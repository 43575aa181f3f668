"""Injections: how the context enters an application. One file per choice."""

from looplab.recurrence.injection.add import Add, Constant, LearnedScalar, Weight
from looplab.recurrence.injection.base import INJECTIONS, Every, FirstOnly, Injection, Reinjection, SkipFirst, When
from looplab.recurrence.injection.concat import Concat
from looplab.recurrence.injection.diagonal import Diagonal
from looplab.recurrence.injection.gated import Gated
from looplab.recurrence.injection.none import NoInjection
from looplab.recurrence.injection.orthogonal import Orthogonal

__all__ = [
    "INJECTIONS",
    "Add",
    "Concat",
    "Constant",
    "Diagonal",
    "Every",
    "FirstOnly",
    "Gated",
    "Injection",
    "LearnedScalar",
    "NoInjection",
    "Orthogonal",
    "Reinjection",
    "SkipFirst",
    "Weight",
    "When",
]

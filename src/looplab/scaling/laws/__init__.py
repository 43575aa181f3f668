"""Scaling laws, one file per law; forms of the gain in `gains`."""

from looplab.scaling.laws.base import Law
from looplab.scaling.laws.chinchilla import Chinchilla
from looplab.scaling.laws.forward_backward import ForwardBackward
from looplab.scaling.laws.gains.additive import Additive
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.gains.decay import Decay
from looplab.scaling.laws.gains.power import Power
from looplab.scaling.laws.gains.table import Table
from looplab.scaling.laws.gains.tilt import Tilt
from looplab.scaling.laws.iso_depth import IsoDepth
from looplab.scaling.laws.ouro import Ouro
from looplab.scaling.laws.parcae import Parcae
from looplab.scaling.laws.points import Points

__all__ = [
    "Additive",
    "Chinchilla",
    "Decay",
    "ForwardBackward",
    "Gain",
    "IsoDepth",
    "Law",
    "Ouro",
    "Parcae",
    "Points",
    "Power",
    "Table",
    "Tilt",
]

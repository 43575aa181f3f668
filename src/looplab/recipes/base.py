"""The table of recipes: functions that return a complete RunConfig."""

from collections.abc import Callable

from looplab._registry import Registry
from looplab.training.config import RunConfig

RECIPES: Registry[Callable[[], RunConfig]] = Registry("recipe", package="looplab.recipes")

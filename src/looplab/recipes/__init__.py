"""Recipes: complete run configurations as functions. `RECIPES["text-core"]()` is a RunConfig."""

from looplab.recipes.base import RECIPES

__all__ = ["RECIPES"]

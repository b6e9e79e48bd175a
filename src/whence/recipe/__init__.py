"""How a model is trained, so that it can be done again."""

from whence.recipe.recipe import Recipe, training_device
from whence.recipe.stage import StageRecipe

__all__ = ["Recipe", "StageRecipe", "training_device"]

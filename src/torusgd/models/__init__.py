"""The networks: the records' own, small ones that train anywhere, torchvision's, timm's, and a user's by import path.

Initial weights are a function of the recipe's seed alone.
"""

from .registry import MODELS, build_model, head_of, is_built_in, model_of

__all__ = ["MODELS", "build_model", "head_of", "is_built_in", "model_of"]

"""The networks: the records' own, small ones that train anywhere, torchvision's, and a user's by import path."""

from .build import MODELS, build_model

__all__ = ["MODELS", "build_model"]

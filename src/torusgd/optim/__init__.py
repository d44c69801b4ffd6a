"""Optimizers for large batches: SGD, LARS, AdamW, LAMB; their updates can be cut into shards without a change of bits.

Norms by blocks, and an optimizer over slices, are what a sharded update stands on.
"""

from .adam import AdamW, Lamb
from .groups import build_optimizer, parameter_kinds, rate_factors
from .lars import VARIANTS, Lars, Variant, lars, layer_rates
from .norms import BLOCK, block_norms, layer_norms, norms_from_blocks
from .sgd import Sgd, set_hyperparameters

__all__ = [
    "BLOCK", "VARIANTS", "AdamW", "Lamb", "Lars", "Sgd", "Variant", "block_norms", "build_optimizer", "lars",
    "layer_norms", "layer_rates", "norms_from_blocks", "parameter_kinds", "rate_factors", "set_hyperparameters",
]  # fmt: skip

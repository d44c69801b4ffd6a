"""torusgd: training image classifiers with large mini-batches, to the same weights on any number of workers.

Each of these is usable alone: `StreamSampler`, `BatchSizeSchedule`, `Schedule` and `NoiseScale` in your own loop,
`Lars` as any torch optimiser, `polish` on any model with batch norm, `ddp_hook` with DistributedDataParallel,
`ShardedUpdate` in its place, `Replicas` and `GradientAudit` to find the rank that went wrong, `exact_all_reduce` in any
script of torch.distributed.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BatchSizeSchedule": "data.sampler", "GradientAudit": "integrations.gradient_audit", "Lars": "optim",
    "NoiseScale": "integrations.gradient_noise", "Recipe": "recipe.schema", "Replicas": "integrations.replicas",
    "Schedule": "recipe.schedule", "ShardedUpdate": "gradients.sharded_update", "StreamOrder": "data.order",
    "StreamSampler": "data.sampler", "ddp_hook": "gradients.ddp_hook", "exact_all_reduce": "comm.fixed_point",
    "load_recipe": "recipe.load", "polish": "step.polish",
}  # fmt: skip
__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names are looked up below


def __getattr__(name: str) -> Any:
    # On first use: `torusgd --help` needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'torusgd' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)

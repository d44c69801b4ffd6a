"""All-reduce algorithms by name."""

import torch.distributed as dist

from .native import Native
from .work import AllReduce, Work

__all__ = ["AllReduce", "Work", "native"]


def native(group: dist.ProcessGroup | None = None) -> AllReduce:
    """The backend's all_reduce; on one rank, or without torch.distributed, a no-op."""
    return Native(group)

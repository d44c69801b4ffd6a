"""Connects the ranks of a group for all-reduces: an engine for their device, and the groups that it needs."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .base import Engine
from .gloo import GlooEngine
from .native import NativeAllReduce
from .nccl import NcclEngine
from .staged import StagedEngine


@dataclass(frozen=True)
class Connection:
    """An engine over some ranks, the backend's own all_reduce over the same, and a Gloo group for agreements."""

    engine: Engine
    native: NativeAllReduce
    control: dist.ProcessGroup
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.control)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.control)

    def close(self) -> None:
        """Ends the engine and destroys the groups; every rank calls it, with nothing on its way."""
        self.engine.close()
        for group in self.groups:
            dist.destroy_process_group(group)


def connect(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu", timeout: float | None = None
) -> Connection:
    """Connects the ranks of `group` (None: all ranks), each of which calls it.

    Gloo carries CPU tensors. CUDA tensors go over NCCL where the group has it, else over Gloo by way of the host.
    `timeout` is how many seconds a message may take; None: what `group` allows.
    """
    target = torch.device(device)
    control = new_group(group, "gloo", timeout)
    if target.type == "cpu":
        return Connection(GlooEngine(control), NativeAllReduce(group), control, (control,))
    if "nccl" not in dist.get_backend_config(group):
        return Connection(StagedEngine(GlooEngine(control), target), NativeAllReduce(group), control, (control,))
    own = new_group(group, "nccl", timeout)
    return Connection(NcclEngine(own, target), NativeAllReduce(group), control, (control, own))


def new_group(group: dist.ProcessGroup | None, backend: str, timeout: float | None) -> dist.ProcessGroup:
    """A new group of the same ranks, so that its messages have connections of their own.

    Without a `timeout` it has that of `group`: torch's own is half an hour, whatever the default group has.
    """
    limit = _timeout_of(group) if timeout is None else timedelta(seconds=timeout)
    if group is None or group == dist.group.WORLD:
        return dist.new_group(timeout=limit, backend=backend)
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=True)


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    parent = dist.group.WORLD if group is None else group
    assert parent is not None
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(parent) else "cpu")
    limit: timedelta = parent._get_backend(device).options._timeout
    return limit

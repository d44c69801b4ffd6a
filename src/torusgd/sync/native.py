"""The backend's own all_reduce behind the common interface."""

import torch
import torch.distributed as dist

from .work import Done, Work, check_tensor


class _NativeWork:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def done(self) -> bool:
        return self._work.is_completed()


class Native:
    """`torch.distributed.all_reduce` on `group` (None: the default one); it makes no group of its own."""

    name = "native"
    explanation = "allreduce native: the backend's own"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1

    def start(self, tensor: torch.Tensor) -> Work:
        """See `AllReduce`."""
        check_tensor(tensor)
        if self._alone or tensor.numel() == 0:
            return Done()
        return _NativeWork(dist.all_reduce(tensor, group=self.group, async_op=True))

    def close(self) -> None:
        """Nothing to end."""

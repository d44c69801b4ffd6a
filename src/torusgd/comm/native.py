"""The backend's own all_reduce behind the common interface."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .base import CommTimeout, ConnectionLost, Done, Work, check_tensor
from .profile import Profile


class BackendWork:
    """A collective of the backend, on tensors of a device."""

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work, self._is_timed = work, device.type == "cpu"
        self._ended: float | None = None
        if self._is_timed:
            work.get_future().add_done_callback(self._note_end)

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        try:
            if limit is None or not self._is_timed:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if limit is not None and str(error).startswith("Operation timed out"):
                raise CommTimeout("no answer in time") from None
            raise ConnectionLost(str(error)) from error
        self._note_end()

    def done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def ended(self) -> float | None:
        """See `Work`."""
        return self._ended

    def _note_end(self, _: object = None) -> None:
        if self._is_timed and self._ended is None:
            self._ended = time.perf_counter()


class NativeAllReduce:
    """`torch.distributed.all_reduce` on `group` (None: the default one); it makes no group of its own."""

    name = "native"
    explanation = "allreduce native: the backend's own"
    profile: Profile | None = None
    """nothing is chosen here"""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1

    def start(self, tensor: torch.Tensor) -> Work:
        """See `AllReduce`."""
        check_tensor(tensor)
        if self._alone or tensor.numel() == 0:
            return Done()
        return BackendWork(dist.all_reduce(tensor, group=self.group, async_op=True), tensor.device)

    def close(self) -> None:
        """Nothing to end."""

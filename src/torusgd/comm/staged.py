"""CUDA tensors over Gloo: each is copied to pinned memory of the host, summed there, and copied back."""

import queue
import threading

import torch

from .algorithms import Algorithm
from .base import CommTimeout, Work
from .gloo import GlooEngine
from .rounds import Round


class _Staged:
    """The work of one tensor: `begin` on the engine's thread, `wait` on the caller's."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, copied: torch.cuda.Event) -> None:
        self._tensor, self._host, self._copied = tensor, host, copied
        self._begun = threading.Event()
        self._work: Work | None = None
        self._error: Exception | None = None
        self._returned = False

    def begin(self, engine: GlooEngine, how: Algorithm | list[list[Round]]) -> None:
        """Starts the sum as soon as the host has the values."""
        try:
            self._copied.synchronize()
            self._work = engine.run(self._host, how) if isinstance(how, Algorithm) else engine.carry(self._host, how)
        except Exception as error:
            self._error = error
        self._begun.set()

    def wait(self, limit: float | None = None) -> None:
        if not self._begun.wait(limit):
            raise CommTimeout("no answer in time")
        if self._error is not None:
            raise RuntimeError(f"all-reduce failed: {self._error}") from self._error
        assert self._work is not None
        self._work.wait(limit)
        if not self._returned:
            self._returned = True
            self._tensor.copy_(self._host, non_blocking=True)

    def done(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.done())

    def ended(self) -> float | None:
        return None if self._work is None else self._work.ended()


class StagedEngine:
    """Carries out plans on CUDA tensors by a Gloo engine, in call order."""

    def __init__(self, engine: GlooEngine, device: torch.device) -> None:
        self.device = device
        self._engine = engine
        self._stream = torch.cuda.Stream(device)
        self._waiting: queue.SimpleQueue[tuple[_Staged, Algorithm | list[list[Round]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._begin_all, daemon=True)
        self._thread.start()

    def run(self, tensor: torch.Tensor, plan: Algorithm) -> Work:
        """See `Engine`."""
        return self._stage(tensor, plan)

    def carry(self, tensor: torch.Tensor, routes: list[list[Round]]) -> Work:
        """See `Engine`."""
        return self._stage(tensor, routes)

    def _stage(self, tensor: torch.Tensor, how: Algorithm | list[list[Round]]) -> Work:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        work = _Staged(tensor, host, self._stream.record_event())
        self._waiting.put((work, how))
        return work

    def _begin_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            work, how = item
            work.begin(self._engine, how)

    def close(self) -> None:
        """Ends the thread and the engine."""
        self._waiting.put(None)
        self._thread.join()
        self._engine.close()

"""Stands in for CUDA's streams and events in a process without a GPU, and notes what is launched on which stream.

Work on CPU tensors is done when its call returns, so a stream's order is the order of the calls: what is left to look
at is which stream waits for which.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch


class FakeStream:
    def __init__(self, name: str, trace: list[str]) -> None:
        self.name, self._trace = name, trace

    def wait_stream(self, other: "FakeStream") -> None:
        self._trace.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None, query=lambda: True)


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Inside it `torch.cuda` hands out such streams; gives the notes."""
    trace: list[str] = []
    current = [FakeStream("caller", trace)]
    made = iter(range(100))

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fakes = {
        "Stream": lambda device: FakeStream(f"order {next(made)}", trace),
        "current_stream": lambda device: current[-1],
        "stream": use,
        "synchronize": lambda device: None,
    }
    record = patch.object(torch.Tensor, "record_stream", lambda tensor, stream: trace.append(f"{stream.name} holds"))
    with patch.multiple(torch.cuda, **fakes), record:
        yield trace

"""Stands in for CUDA's streams and events in a process without a GPU; work is done when its call returns.

What is left to look at is which stream was the current one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: "FakeStream") -> None:
        pass

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None, query=lambda: True)


@contextmanager
def fake_cuda() -> Iterator[list[FakeStream]]:
    """Inside it `torch.cuda` hands out such streams; gives the current one, last, and those before it."""
    current, made = [FakeStream("caller")], iter(range(100))

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fakes: dict[str, Any] = {
        "Stream": lambda device: FakeStream(f"order {next(made)}"),
        "current_stream": lambda device: current[-1],
        "stream": use,
        "synchronize": lambda device: None,
    }
    with patch.multiple(torch.cuda, **fakes), patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
        yield current

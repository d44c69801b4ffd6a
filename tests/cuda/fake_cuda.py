"""A GPU's streams, events and graphs as CUDA's guide describes them, on the CPU: work is done at once, under the vector
clock of its stream, and as a graph once more. Whoever uses memory that another stream may be using is found out."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torusgd.cuda import form, graphs
from torusgd.cuda.graphs import MainStream, ReadyEvents, SideStream

CPU = torch.device("cpu")
refuse = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing\nand more"))
Memory = tuple[int, int]
"""a storage, and the number of a part of it"""


def again(work: Callable[[], None], *memory: Any) -> Any:
    """A graph of work that is not done while it is captured."""
    return SimpleNamespace(replay=work)


class Recording(TorchDispatchMode):
    """Notes the operators that are called, with what they were given, and what those that write found there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[Any, Any, Any, Any]]()
        self.before = list[tuple[Tensor, Tensor]]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        known, keywords = function._schema.arguments, keywords or {}
        given = {each.name: value for each, value in zip(known, arguments, strict=False)} | keywords
        for each in known:
            if each.alias_info is not None and each.alias_info.is_write:
                self.before += [(x, x.clone()) for x in _tensors(given.get(each.name))]
        result = function(*arguments, **keywords)
        memory = [{x.untyped_storage().data_ptr() for x in _tensors(value)} for value in (given, result)]
        if not (function.is_view and memory[0] >= memory[1]):  # a conversion counts as a view, and may be none
            self.calls.append((function, arguments, keywords, result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def recorded(work: Callable[[], None], *memory: Any) -> Any:
    """A graph as CUDA has it: the operators that the work calls now, in memory that stays, and nothing of Python. The
    capture itself changes nothing."""
    with ExitStack() as stack:
        modes = stack.enter_context(_disable_current_modes())
        recording = stack.enter_context(Recording())
        for mode in modes:  # above it, so that it sees what their rules call
            stack.enter_context(mode)
        work()
    for tensor, value in reversed(recording.before):
        tensor.detach().copy_(value)

    def replay() -> None:
        with _disable_current_modes(), torch.no_grad():
            for function, arguments, keywords, result in recording.calls:
                found = function(*arguments, **keywords)
                for there, new in zip(_tensors(result), _tensors(found), strict=True):
                    if there.data_ptr() != new.data_ptr():
                        there.copy_(new)

    return SimpleNamespace(replay=replay)


class FakeStream:
    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu, self.known = gpu, Counter[int]()

    def wait_event(self, event: "FakeEvent") -> None:
        if not self._gpu.ignores(self, event):
            self.known |= event.known

    def tick(self) -> None:
        self.known[id(self)] += 1


class FakeEvent:
    def __init__(self, external: bool = False) -> None:
        self.known, self.is_external = Counter[int](), external

    def record(self, stream: FakeStream) -> None:
        self.known = stream.known.copy()
        stream.tick()


class FakeGpu:
    """What torch has of a GPU; `graph` makes a graph of the work of a pass."""

    def __init__(self, graph: Callable[..., Any] = again) -> None:
        self.main = self.current = FakeStream(self)
        self.main.tick()
        self.captured = list[object]()
        self.ignores: Callable[[FakeStream, FakeEvent], bool] = lambda stream, event: False
        self._graph = graph
        self._pools = iter(range(1000))

    def capture(self, work: Callable[[], None], *memory: Any) -> Any:
        self.captured.append(work)
        return self._graph(work)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        stream.tick()
        yield
        self.current = before

    @contextmanager
    def streams(self, count: int = 1, overlaps: bool = False) -> Iterator["FakeGpu"]:
        """The GPU form on a CPU finds this GPU's streams, and with `overlaps` its events."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "Stream": lambda device=None: FakeStream(self),
                "Event": FakeEvent,
                "stream": self.stream,
                "current_stream": lambda device=None: self.current,
                "current_device": lambda: 0,
                "default_generators": [Mock()],  # of random numbers
                "graph_pool_handle": lambda: next(self._pools),
            }.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(graphs, "CudaGraph", self.capture)
            made = [MainStream(CPU)] if count == 1 else [SideStream(CPU) for _ in range(count)]
            patch.setattr(form, "pass_streams", lambda device, count: made)
            patch.setattr(form, "ready_events", ReadyEvents if overlaps else lambda device, buckets: None)
            yield self


class Races(TorchDispatchMode):
    """Notes the operators that use memory that another stream may be using; `parts` share a storage as memory each."""

    def __init__(self, gpu: FakeGpu, parts: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._gpu = gpu
        self._starts: dict[int, list[int]] = {}
        for part in parts:
            self._starts.setdefault(part.untyped_storage().data_ptr(), []).append(part.data_ptr())
        self._uses: dict[Memory, dict[tuple[int, bool], int]] = {}
        """of each memory, by stream and whether it wrote there, when it did so last"""
        self.found: set[str] = set()
        self.at_once = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords, schema = keywords or {}, function._schema
        given = [*zip(schema.arguments, arguments, strict=False)]
        given += [(each, keywords[each.name]) for each in schema.arguments if each.name in keywords]
        result, before = function(*arguments, **keywords), set[Memory]()
        if function.is_view:
            return result
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in (each for each in tree_leaves(value) if isinstance(each, Tensor)):
                for memory in self._memory_of(tensor):
                    before.add(memory)
                    self._use(str(function), memory, is_written)
        for tensor in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            for memory in self._memory_of(tensor):
                if memory not in before:  # new, or free since its last use
                    self._uses.pop(memory, None)
                    self._use(str(function), memory, True)
        return result

    def _memory_of(self, tensor: Tensor) -> list[Memory]:
        storage = tensor.untyped_storage().data_ptr()
        starts = self._starts.get(storage)
        if starts is None or not tensor.numel():
            return [(storage, 0)]
        begin = tensor.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first, last = (bisect_right(starts, at) for at in (begin, begin + reach * tensor.element_size()))
        return [(storage, part) for part in range(first, last + 1)]

    def _use(self, name: str, memory: Memory, is_written: bool) -> None:
        stream = self._gpu.current
        known, uses = stream.known, self._uses.setdefault(memory, {})
        for (other, was_written), when in uses.items():
            if other != id(stream) and known[other] < when:
                self.at_once += 1
                if is_written or was_written:
                    self.found.add(name)
        uses[id(stream), is_written] = known[id(stream)]

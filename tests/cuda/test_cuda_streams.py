"""Passes on several CUDA streams: the same bits, no two at one memory, and what torch is asked for.

Streams are stand-ins that keep vector clocks; every operator of whole steps is looked at, with the memory that it reads
and writes.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cuda.test_graphs import Again, Here, graphed
from tests.cuda.test_run_ahead import SGD, all_steps, left, make_trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torusgd.cuda import cuda_streams
from torusgd.cuda.cuda_streams import CudaGraph, GraphMemory, MainStream, SideStream

MAIN = "main"


@dataclass
class Clocks:
    """Of each stream, by name, what it knows of the others: how far each had come."""

    known: dict[str, Counter[str]] = field(default_factory=lambda: {MAIN: Counter({MAIN: 1})})
    current: str = MAIN


class Beside(Here):
    """A stream whose work is done at once, as late or as early as its events would have let it."""

    def __init__(self, clocks: Clocks, name: str, waits: bool = True, is_waited_for: bool = True) -> None:
        super().__init__()
        self._clocks, self._name = clocks, name
        self._waits, self._is_waited_for = waits, is_waited_for
        self._released = Counter[str]()
        clocks.known[name] = Counter()

    def release(self) -> None:
        self._released = self._clocks.known[MAIN].copy()
        self._clocks.known[MAIN][MAIN] += 1

    def run(self, work: Callable[[], None]) -> None:
        known = self._clocks.known
        if self._waits:
            known[self._name] |= self._released
        known[self._name][self._name] += 1
        self._clocks.current = self._name
        work()
        self._clocks.current = MAIN

    def join(self) -> None:
        if self._is_waited_for:
            self._clocks.known[MAIN] |= self._clocks.known[self._name]


Memory = tuple[int, int]
"""a storage, and the number of a part of it"""


class Races(TorchDispatchMode):
    """Notes the operators that use memory which another stream may be using at the same time.

    Args:
        clocks: Of the streams.
        parts: Tensors that share one storage, as separate memory each.
    """

    def __init__(self, clocks: Clocks, parts: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._clocks = clocks
        self._starts: dict[int, list[int]] = {}
        for part in parts:
            self._starts.setdefault(part.untyped_storage().data_ptr(), []).append(part.data_ptr())
        self._uses: dict[Memory, dict[tuple[str, bool], int]] = {}
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
        stream = self._clocks.current
        known, uses = self._clocks.known[stream], self._uses.setdefault(memory, {})
        for (other, was_written), when in uses.items():
            if other != stream and known[other] < when:
                self.at_once += 1
                if is_written or was_written:
                    self.found.add(name)
        uses[stream, is_written] = known[stream]


def races(*changes: str, **stream: bool) -> tuple[Races, str]:
    """What is found in the steps of the tiny recipe on two streams, and a hash of what they leave."""
    clocks = Clocks()
    trainer = graphed(*changes, streams=[Beside(clocks, name, **stream) for name in ("first", "second")])
    with Races(clocks) as found:
        all_steps(trainer)
    return found, left(trainer)


def test_passes_on_two_streams_have_the_bits_of_one_and_share_no_memory_that_either_writes() -> None:
    changes = (SGD, "precision=bfloat16")  # with 16-bit copies of the weights
    plain = make_trainer(False, *changes)
    all_steps(plain)
    found, hashed = races(*changes)
    assert hashed == left(plain)
    assert found.found == set()
    assert found.at_once > 100, "both read the weights at the same time"


@pytest.mark.parametrize("change", [{"waits": False}, {"is_waited_for": False}])
def test_a_stream_that_does_not_wait_is_found_out(change: dict[str, bool]) -> None:
    assert races(SGD, **change)[0].found


class Generator:
    """As torch's generator of a GPU: its state can be exchanged for that of another."""

    def __init__(self, state: str = "usual") -> None:
        self.state = state

    def clone_state(self) -> "Generator":
        return Generator("own")

    def graphsafe_get_state(self) -> "Generator":
        return Generator(self.state)

    def graphsafe_set_state(self, other: "Generator") -> None:
        self.state = other.state


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for what torch has of a GPU; `done` tells what they were asked for."""
    done, generator = list[str](), Generator()

    class Stream:
        def __init__(self, device: Any = None) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            done.append(f"{here(self)} waits")

    class Event:
        def record(self, stream: Any) -> None:
            done.append(f"{here(stream)} tells")

    def here(stream: Any) -> str:
        return "main" if stream is state.current else "side"

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    @contextmanager
    def graph(captured: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        yield

    state = SimpleNamespace(done=done, generator=generator, current=Stream())
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": inside,
        "graph": graph,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: done.append("replayed")),
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "current_stream": lambda device=None: state.current,
        "set_stream": lambda stream: done.append(f"current is {here(stream)}"),
        "default_generators": [generator],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    tables = SimpleNamespace(fill=lambda: done.append("filled"))
    monkeypatch.setattr(cuda_streams, "tables_aside", lambda device: nullcontext(tables))
    return state


def test_work_of_a_stream_begins_after_its_release_and_draws_from_its_own_generator(gpu: SimpleNamespace) -> None:
    stream = SideStream(torch.device("cuda", 0))
    stream.release()
    stream.run(lambda: gpu.done.append(gpu.generator.state))
    stream.join()
    assert gpu.done == ["main tells", "side waits", "begin", "own", "end", "side tells", "main waits"]
    assert gpu.generator.state == "usual"


def test_a_capture_takes_along_the_nodes_that_hooks_have_made_on_other_streams(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it torch refuses every capture of a network whose plain passes have hooks."""
    override = "set_override_stale_capture_stream"  # torch 2.11 lacks it, and needs it not
    monkeypatch.setattr(torch.autograd.graph, override, gpu.done.append, raising=False)
    CudaGraph(lambda: gpu.done.append("captured"), GraphMemory()).replay()
    assert gpu.done == [True, "captured", "filled", "replayed"]


def test_a_capture_that_fails_says_why_and_leaves_torch_as_it_was(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own end of it fails too, and then neither gives back its stream nor ends the use of the pool."""

    @contextmanager
    def graph(*arguments: Any, **keywords: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def end(device: int, pool: Any) -> None:
        gpu.done.append(f"pool {pool} of {device} ended")

    def work() -> None:
        raise RuntimeError("aten::nonzero waits for the GPU")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    with pytest.raises(RuntimeError, match="aten::nonzero waits"):
        SideStream(torch.device("cuda", 0)).capture(work)
    assert gpu.done == ["current is main", "pool (0, 1) of 0 ended"]
    assert gpu.generator.state == "usual"


@pytest.mark.parametrize("kind", [MainStream, SideStream])
def test_graphs_share_memory_while_one_of_them_lives_and_then_take_new_memory(
    kind: type[MainStream], gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses a capture in a pool whose graphs have all ended, as when a process builds one run after another."""
    handles = iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(cuda_streams, "_of_main_streams", cuda_streams._Memories())
    pools = list[int]()

    @contextmanager
    def graph(captured: Any, pool: int, **others: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    stream = kind(torch.device("cuda", 0))
    first = stream.capture(lambda: None)
    second = stream.capture(lambda: None)
    del first
    third = stream.capture(lambda: None)
    del second, third
    last = stream.capture(lambda: None)
    assert pools == [0, 0, 0, 1]
    assert last is not None


def test_runs_on_the_stream_of_all_else_share_memory(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    for kind, are_one in ((MainStream, True), (SideStream, False)):
        graphs = [kind(torch.device("cuda", 0)).capture(lambda: None) for _ in range(2)]
        assert (graphs[0]._memory is graphs[1]._memory) == are_one  # type: ignore[attr-defined]


def test_a_stream_of_the_tests_is_one_of_the_program() -> None:
    assert {name for name in vars(SideStream) if not name.startswith("_")} <= set(dir(Here(Again)))

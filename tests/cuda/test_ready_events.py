"""All-reduces that leave while a captured pass still runs: the same bits, one order on all ranks, no races.

In the place of a GPU's streams and events stand those of `test_graphs` and `test_cuda_streams`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.cuda.test_cuda_streams import MAIN, Beside, Clocks, Races
from tests.cuda.test_graphs import Here, Refused, graphed
from tests.cuda.test_run_ahead import SGD, STEPS, all_steps, left, make_trainer
from torch import Tensor

from torusgd.comm.groups import alone, group_of
from torusgd.cuda import ready_events as ready_module
from torusgd.cuda.device_sum import DeviceGradientSum
from torusgd.cuda.graphs import GraphedNetwork, device_network
from torusgd.cuda.ready_events import ready_events
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run import build as build_module
from torusgd.run.build import Trainer

MESSAGES = "messages"
SMALL = RuntimeOptions(buckets=0.002)
Notes = list[tuple[str, int]]


class Told:
    """As the events of a GPU; notes what is recorded, and what waits for it."""

    def __init__(self) -> None:
        self.notes: Notes = []

    def record(self, bucket: int) -> None:
        self.notes.append(("ready", bucket))

    @contextmanager
    def after(self, bucket: int) -> Iterator[None]:
        self.notes.append(("leaves", bucket))
        yield


def noting_messages(trainer: Trainer, notes: Notes) -> None:
    """Notes the buckets and control vectors that leave."""
    run = trainer.step
    send, send_control = run.reducer._send, run.control.send

    def bucket(index: int) -> Any:
        notes.append(("bucket", index))
        return send(index)

    def control(*arguments: Any) -> Any:
        notes.append(("control", 0))
        return send_control(*arguments)

    run.reducer._send = bucket  # type: ignore[method-assign]
    run.control.send = control  # type: ignore[method-assign]


def on_ranks(streams: int) -> tuple[str, Notes, Notes]:
    told, sent = Told(), Notes()
    # The second rank can't capture its passes.
    group = group_of()
    here = [Here(Refused) if group.rank else Here() for _ in range(streams)]
    trainer = graphed(SGD, streams=here, ready=told, world=group, options=SMALL)
    noting_messages(trainer, sent)
    with warnings.catch_warnings(action="ignore"):
        all_steps(trainer)
    return left(trainer), told.notes, sent


@pytest.mark.parametrize("streams", [1, 2])
def test_messages_leave_in_one_order_whether_a_rank_captures_its_passes_or_not(streams: int) -> None:
    plain = make_trainer(False, SGD)
    all_steps(plain)
    (captured, notes, sent), (usual, no_notes, sent_too) = run_ranks(2, on_ranks, streams)
    assert captured == usual == left(plain)
    assert sent == sent_too
    buckets = 1 + max(bucket for _, bucket in sent)
    assert buckets > 3
    messages = [("bucket", bucket) for bucket in range(buckets)] + [("control", 0)]
    assert sent == [("control", 0), *STEPS * messages], "the first measures the scales"
    # Stand-ins for graphs do their work at once, so all is ready before the first message leaves.
    step = [(what, bucket) for what in ("ready", "leaves") for bucket in range(buckets)]
    assert notes == step * (len(notes) // len(step))
    assert notes
    assert no_notes == []


class Early(Told):
    """Events of vector clocks: a stream of messages knows what had come before them, if it waits for them."""

    def __init__(self, clocks: Clocks, waits: bool = True) -> None:
        super().__init__()
        self._clocks, self._waits = clocks, waits
        self._told: dict[int, Counter[str]] = {}
        clocks.known[MESSAGES] = Counter()

    def record(self, bucket: int) -> None:
        known, stream = self._clocks.known, self._clocks.current
        self._told[bucket] = known[stream].copy()
        known[stream][stream] += 1

    @contextmanager
    def after(self, bucket: int) -> Iterator[None]:
        known = self._clocks.known
        if self._waits:
            known[MESSAGES] |= self._told[bucket]
        known[MESSAGES][MESSAGES] += 1
        self._clocks.current = MESSAGES
        yield
        self._clocks.current = MAIN


def races(waits: bool = True, releases: bool = True) -> tuple[Races, str]:
    """Of steps on two streams, whose messages are read and written on a third one."""
    clocks = Clocks()
    streams = [Beside(clocks, name) for name in ("first", "second")]
    trainer = graphed(SGD, streams=streams, ready=Early(clocks, waits), options=SMALL)
    reducer, network = trainer.step.reducer, trainer.step.forward_backward
    assert isinstance(network, GraphedNetwork)

    def send(index: int) -> Any:
        message = reducer.sum.message(index)  # type: ignore[attr-defined]
        message.add_(0)  # as an all-reduce does it in place
        known = clocks.known[MESSAGES].copy()

        def wait() -> None:
            clocks.known[MAIN] |= known

        return SimpleNamespace(wait=wait)

    reducer._send = send  # type: ignore[method-assign]
    if not releases:
        replay = network._replay

        def hasty(*arguments: Any) -> Tensor:
            for each in streams:
                each.release = lambda: None  # type: ignore[method-assign]
            try:
                return replay(*arguments)
            finally:
                for each in streams:
                    del each.release

        network._replay = hasty  # type: ignore[method-assign]
    assert isinstance(reducer.sum, DeviceGradientSum)
    with Races(clocks, reducer.sum._messages) as found:
        all_steps(trainer)
    return found, left(trainer)


def test_messages_beside_a_pass_use_no_memory_that_it_writes() -> None:
    plain = make_trainer(False, SGD)
    all_steps(plain)
    found, weights = races()
    assert found.found == set()
    assert weights == left(plain)
    assert races(waits=False)[0].found
    assert races(releases=False)[0].found


def test_a_parameter_without_a_gradient_does_not_hold_back_its_bucket() -> None:
    weights = []
    for ready in (None, Told()):
        trainer = graphed(SGD, streams=[Here()], ready=ready, options=SMALL)
        network = trainer.step.forward_backward
        assert isinstance(network, GraphedNetwork)
        network._leaves = [torch.ones(3, requires_grad=True), *network._leaves[1:]]  # nothing is computed by it
        all_steps(trainer)
        weights.append(left(trainer))
    assert weights[0] == weights[1]


class Gpu:
    """Stand-ins for what torch has of a GPU; graphs are done when something waits for them, or never."""

    def __init__(self, waits: bool) -> None:
        self.waits, self.work = waits, list[Callable[[], None]]()

    def stream(self, device: Any = None) -> Any:
        return SimpleNamespace(wait_event=self.wait_event, wait_stream=self.wait_event)

    def wait_event(self, event: Any) -> None:
        if self.waits:
            while self.work:
                self.work.pop(0)()

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        yield

    def graph(self, work: Callable[[], None], pool: Any) -> Any:
        return SimpleNamespace(replay=lambda: self.work.append(work))


@pytest.mark.parametrize("waits", [True, False])
def test_events_are_used_where_a_trial_shows_that_they_are_waited_for(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(waits)
    for name, value in {
        "Stream": gpu.stream,
        "current_stream": gpu.stream,
        "stream": gpu.inside,
        "Event": lambda external: SimpleNamespace(record=lambda stream: None),
        "graph_pool_handle": lambda: (0, 1),
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(ready_module, "CudaGraph", gpu.graph)
    assert (ready_events(torch.device("cpu"), 3) is not None) == waits


def test_a_torch_without_such_events_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    assert ready_events(torch.device("cpu"), 3) is None


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_events_within_graphs_are_waited_for_and_bits_stay(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    assert ready_events(gpu, 1) is not None

    def early(*arguments: Any, overlaps: bool) -> Any:
        return device_network(*arguments, overlaps=True)

    hashes = []
    try:
        for ahead in (False, True):
            options = RuntimeOptions(buckets=0.002, cuda_streams=streams if ahead else 1)
            monkeypatch.setattr(build_module, "device_network", early)
            trainer = make_trainer(ahead, SGD, world=alone(gpu), options=options)
            all_steps(trainer)
            hashes.append(left(trainer))
    finally:
        torch.use_deterministic_algorithms(False)
    assert hashes[0] == hashes[1]

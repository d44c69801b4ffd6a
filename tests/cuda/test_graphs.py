"""Passes captured once and replayed, on one stream or several, all-reduces leaving meanwhile: the same bits, one order
of messages on all ranks, no two streams that use memory at once which either writes; on the GPU of `fake_cuda`."""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakValueDictionary

import pytest
import torch
from tests.comm.gloo_world import alike, on_ranks
from tests.cuda.fake_cuda import CPU, FakeEvent, FakeGpu, FakeStream, Races, again, recorded, refuse
from tests.cuda.trainers import SGD, STEPS, all_steps, left, make_trainer, on_gpu, plain_bits, steps_of_all

from torusgd.arithmetic import passes, portable
from torusgd.comm.groups import group_of
from torusgd.cuda import form, graphs
from torusgd.cuda.graphs import CapturedPasses, GraphedNetwork, MainStream, SideStream, ready_events
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer

SMALL_BUCKETS = RuntimeOptions(buckets=0.002)


def network_of(trainer: Trainer) -> GraphedNetwork:
    assert isinstance(trainer.step.forward_backward, GraphedNetwork)
    return trainer.step.forward_backward


@pytest.mark.parametrize(("graph", "changes"), [
    (again, (SGD, "model.options={dropout: 0.3}")), (recorded, (SGD, "data.augment={mixup: 0.2}")),
    (recorded, (SGD, "precision=float16", "virtual_workers=2", "loss_scale={initial: 512, growth_interval: 3}")),
])  # fmt: skip
def test_replayed_passes_have_the_bits_of_plain_ones(graph: Callable[..., Any], changes: tuple[str, ...]) -> None:
    gpu = FakeGpu(graph)
    with gpu.streams():
        steps_of_all([make_trainer(True, *changes), make_trainer(False, *changes)])
    assert len(gpu.captured) == 4, "two graphs for each of the two stages"


@pytest.mark.parametrize("changes", [
    ("optimizer.name=lars", "virtual_workers=2"), (SGD, "data.augment={mixup: 0.2}"), (SGD, "stages.0.extra_pass=true"),
    (SGD, "model.options={dropout: 0.0}"),
])  # fmt: skip
def test_portable_passes_of_a_plain_step_replayed_have_the_bits_of_plain_ones(
    changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them those whose pairs are counted, whose gradients measure the scales, and an extra pass; with dropout."""
    monkeypatch.setattr(passes, "compiled", lambda: "not asked for")  # a GPU has torch's operators alone
    gpu = FakeGpu(recorded)
    with gpu.streams(), portable():
        captured, plain = (make_trainer(each, "precision=portable", *changes) for each in (True, False))
        assert isinstance(captured.step.forward_backward, CapturedPasses)
        reports = steps_of_all([captured, plain])
    assert reports[1]["lost_pairs"] is not None
    assert len(gpu.captured) == 2, "a graph for each of the stages"


def test_extra_passes_come_before_replayed_ones_and_leave_nothing_where_there_are_none() -> None:
    """An audit compares what each pass adds to the statistics, those of no extra pass too."""
    stages = ", ".join(f"{{until: {n}st, images_per_worker: 3, extra_pass: {extra}}}"
                       for n, extra in ((2, "false"), (4, "true"), (STEPS, "false")))  # fmt: skip
    added = list[list[torch.Tensor]]()
    with FakeGpu().streams() as gpu, portable():
        for captured in (True, False):
            trainer, found = (
                make_trainer(captured, "precision=portable", SGD, f"stages=[{stages}]"),
                list[torch.Tensor](),
            )
            run: Any = trainer.step
            add = run.control.add
            run.control.add = lambda passed, loss, add=add, found=found: (
                found.append(passed.clone()),
                add(passed, loss),
            )
            all_steps(trainer)
            added.append(found)
    assert len(gpu.captured) == 1
    assert all(map(torch.equal, *added))
    assert {bool(each.chunk(2)[1].any()) for each in added[0]} == {False, True}


def draw_on_the_host(trainer: Trainer) -> None:
    """Its network draws a random number in each pass; the draw would be repeated by a graph."""
    trainer.network.model.register_forward_pre_hook(lambda model, images: (images[0] * (random.random() < 2),))


@pytest.mark.parametrize("arithmetic", [nullcontext, portable])
@pytest.mark.parametrize(("graph", "why", "attempts"), [
    (refuse, "without a CUDA graph, more slowly: operation not permitted", 2),  # one a stage
    (again, "draws random numbers on the host", 0),
])  # fmt: skip
def test_a_network_that_cannot_be_captured_goes_on_without(graph: Any, why: str, attempts: int, arithmetic) -> None:
    gpu, is_portable = FakeGpu(graph), arithmetic is portable
    changes = (SGD, "precision=portable") if is_portable else (SGD,)
    with gpu.streams(1 if is_portable else 2), arithmetic():
        trainers = [make_trainer(each, *changes) for each in (True, False)]
        if not attempts:
            draw_on_the_host(trainers[0])
        with pytest.warns(UserWarning, match=why):
            steps_of_all(trainers)
    assert len(gpu.captured) == attempts


@on_ranks(2)
def test_a_graph_begins_once_the_weights_of_a_sharded_update_are_there() -> None:
    """Modules' hooks wait for them, and a graph calls none; one that was captured would copy them in each replay."""
    under_way = list[int]()

    def capture(work: Callable[[], None]) -> Any:
        def replay() -> None:
            under_way.append(len(update._gather._works))
            work()

        under_way.append(len(update._gather._works))
        return SimpleNamespace(replay=replay)

    with FakeGpu(graph=capture).streams(), portable():
        options = RuntimeOptions(update="sharded", buckets=0.002)
        trainer = make_trainer(True, "precision=portable", SGD, world=group_of(), options=options)
        update: Any = trainer.step.update
        all_steps(trainer)
    assert len(under_way) > 2
    assert not any(under_way)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [("optimizer.name=lars", "virtual_workers=2"), (SGD, "data.augment={mixup: 0.2}")])
def test_on_a_gpu_portable_passes_are_captured_and_leave_the_cpus_bits(changes: tuple[str, ...]) -> None:
    """Dropout's draws among them."""
    with on_gpu() as gpu, portable(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        trainers = [
            make_trainer(graphs, "precision=portable", *changes, world=world)
            for graphs, world in ((False, None), (True, gpu), (False, gpu))
        ]
        steps_of_all(trainers)
    passes = trainers[1].step.forward_backward
    assert isinstance(passes, CapturedPasses)
    assert len(passes._passes) == 2
    assert all(found is not None and found[0].graphs[False] for found in passes._passes.values()), "both stages"


@pytest.mark.gpu
def test_on_a_gpu_a_portable_network_that_draws_by_itself_is_not_captured() -> None:
    with on_gpu() as gpu, portable():
        draw_on_the_host(trainer := make_trainer(True, "precision=portable", SGD, world=gpu))
        with pytest.warns(UserWarning, match="draws random numbers on the host"):
            all_steps(trainer)


def accumulator(leaf: torch.Tensor) -> Any:
    """Autograd's node for the gradient of a leaf; it lives as long as a pass that somebody holds."""
    node = leaf.expand_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def test_a_capture_follows_a_pass_with_sums_of_which_nothing_is_left() -> None:
    """Kernels are compiled in the pass before, not while it is captured; no node on its stream remains."""
    found = list[tuple[bool, bool]]()

    def capture(work: Callable[[], None]) -> Any:
        found.append((sums.called, "of a plain pass" in accumulator(leaf).metadata))
        return again(work)

    with FakeGpu(graph=capture).streams():
        trainer = make_trainer(True, SGD, "virtual_workers=2")
        parts: Any = network_of(trainer)._parts
        leaf, forward = parts.parameters[0], parts.network.forward
        sums = parts.reducer.sum.end_worker = Mock(wraps=parts.reducer.sum.end_worker)

        def noted_forward(*arguments: Any) -> torch.Tensor:
            loss = forward(*arguments)
            accumulator(leaf).metadata["of a plain pass"] = True
            return loss

        parts.network.forward = noted_forward
        all_steps(trainer)
    assert found == [(True, False)] * 4


def races(*changes: str, ignores: Callable[[FakeGpu, FakeStream, FakeEvent], bool] | None = None) -> tuple[Races, str]:
    """What is found in the steps of the tiny recipe on two streams, and a hash of what they leave."""
    gpu = FakeGpu()
    if ignores is not None:
        gpu.ignores = lambda stream, event: ignores(gpu, stream, event)
    with gpu.streams(2):
        trainer = make_trainer(True, *changes)
        with Races(gpu) as found:
            all_steps(trainer)
    return found, left(trainer)


def test_passes_on_two_streams_have_the_bits_of_one_and_share_no_memory_that_either_writes() -> None:
    changes = (SGD, "precision=bfloat16")
    found, hashed = races(*changes)
    assert hashed == plain_bits(*changes)
    assert found.found == set()
    assert found.at_once > 100, "both read the weights at the same time"


@pytest.mark.parametrize("of_main", [True, False])
def test_a_stream_that_does_not_wait_is_found_out(of_main: bool) -> None:
    """Control: the main stream is not joined to the passes, or they are not to it."""
    assert races(SGD, ignores=lambda gpu, stream, event: (stream is gpu.main) == of_main)[0].found


@on_ranks(2)
def test_messages_leave_in_one_order_whether_a_rank_captures_its_passes_or_not() -> None:
    group = group_of()
    for streams in (1, 2):
        gpu = FakeGpu(graph=refuse if group.rank else again)  # the second rank can't capture its passes
        with gpu.streams(streams, overlaps=True), warnings.catch_warnings(action="ignore"):
            trainer = make_trainer(True, SGD, world=group, options=SMALL_BUCKETS)
            run: Any = trainer.step
            notes = Mock(**{"bucket.side_effect": run.reducer._send, "control.side_effect": run.control.send})
            run.reducer._send, run.control.send = notes.bucket, notes.control
            all_steps(trainer)
        sent = [(name, given[0] if name == "bucket" else 0) for name, given, _ in notes.mock_calls]
        assert left(trainer) == plain_bits(SGD)
        last_passes = sum(len(each.graphs[True]) for each in network_of(trainer)._passes.values() if each)
        assert (last_passes == 0) == (group.rank == 1)
        buckets = 1 + max(bucket for _, bucket in alike(sent))
        assert buckets > 3
        messages = [("bucket", bucket) for bucket in range(buckets)] + [("control", 0)]
        assert sent == [("control", 0), *STEPS * messages], "the first measures the scales"


def early_races(ignores_ready: bool = False, releases: bool = True) -> tuple[Races, str]:
    """Of steps on two streams, whose messages are read and written on a third one."""
    gpu = FakeGpu()
    gpu.ignores = lambda stream, event: ignores_ready and event.is_external
    with gpu.streams(2, overlaps=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(form.GpuForm, "_overlaps", property(lambda self: True))
        if not releases:
            patch.setattr(SideStream, "release", lambda self: None)
        trainer = make_trainer(True, SGD, options=SMALL_BUCKETS)
        reducer: Any = trainer.step.reducer

        def send(index: int) -> Any:
            reducer.sum.message(index).add_(0)  # as an all-reduce does it in place
            there = FakeEvent()
            there.record(gpu.current)
            return SimpleNamespace(wait=lambda: gpu.current.wait_event(there))

        reducer._send = send
        with Races(gpu, reducer.sum._messages) as found:
            all_steps(trainer)
    return found, left(trainer)


def test_messages_beside_a_pass_use_no_memory_that_it_writes() -> None:
    found, weights = early_races()
    assert found.found == set()
    assert weights == plain_bits(SGD)
    assert early_races(ignores_ready=True)[0].found
    assert early_races(releases=False)[0].found


def test_a_parameter_without_a_gradient_does_not_hold_back_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, parameters = set(), vars(graphs.PassParts)["parameters"].fget
    # Nothing is computed by the first.
    others = property(lambda parts: [torch.ones(3, requires_grad=True), *parameters(parts)[1:]])
    monkeypatch.setattr(graphs.PassParts, "parameters", others)
    for overlaps in (False, True):
        monkeypatch.setattr(form.GpuForm, "_overlaps", overlaps)
        with FakeGpu().streams(overlaps=True):
            trainer = make_trainer(True, SGD, options=SMALL_BUCKETS)
            all_steps(trainer)
        weights.add(left(trainer))
    assert len(weights) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_events_are_used_if_a_trial_shows_them_waited_for(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready_events(CPU, 3) is None, "without a GPU there are no such events"
    under_way = list[Callable[[], None]]()

    def wait(event: object) -> None:
        while waits and under_way:
            under_way.pop(0)()

    with FakeGpu().streams():
        monkeypatch.setattr(FakeStream, "wait_event", lambda stream, event: wait(event))
        monkeypatch.setattr(FakeStream, "wait_stream", lambda stream, other: wait(other), raising=False)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        # A graph that is done when something waits for it, or never.
        capture = Mock(side_effect=lambda work, _: SimpleNamespace(replay=partial(under_way.append, work)))
        monkeypatch.setattr(graphs, "CudaGraph", capture)
        assert (ready_events(CPU, 3) is not None) == waits


@pytest.mark.parametrize("kind", [MainStream, SideStream])
def test_graphs_share_memory_while_one_of_them_lives_and_then_take_new_memory(
    kind: type[MainStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses a capture in a pool whose graphs have all ended, as when a process builds one run after another."""
    with FakeGpu().streams():
        monkeypatch.setattr(graphs, "_memories", WeakValueDictionary())
        monkeypatch.setattr(graphs, "CudaGraph", lambda work, memory, stream: SimpleNamespace(memory=memory))
        streams = [kind(CPU), kind(CPU)]
        captured: list[Any] = [stream.capture(lambda: None) for stream in (streams[0], streams[0], streams[1])]
        pools = [each.memory.pool for each in captured]
        assert pools[0] == pools[1]
        assert (pools[0] == pools[2]) == (kind is MainStream), "all that runs on the main stream shares"
        captured.clear()
        last: Any = streams[0].capture(lambda: None)
        assert last.memory.pool not in pools


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_events_in_graphs_are_waited_for_and_bits_stay(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form.GpuForm, "_overlaps", property(lambda self: True))
    with on_gpu() as gpu:
        assert ready_events(gpu.device, 1) is not None
        hashes = set()
        for cuda_graphs, number in ((False, 1), (True, streams)):
            options = RuntimeOptions(buckets=0.002, cuda_streams=number)
            trainer = make_trainer(cuda_graphs, SGD, world=gpu, options=options)
            all_steps(trainer)
            hashes.add(left(trainer))
    assert len(hashes) == 1

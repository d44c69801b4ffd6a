"""Passes that are captured once and replayed: the same bits, whichever pass of a step, stage or precision it is.

In the place of CUDA graphs, work that is done again: it finds in the graph's own memory what a replay would.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from torusgd.train.forward_backward import WholeNetwork
from torusgd.train.graphs import CudaGraph, GraphedNetwork

from .test_run_ahead import SGD, STEPS, all_steps, left, make_trainer, told


class Again:
    """As a CUDA graph: nothing is done while it is captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Refused:
    def __init__(self, work: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def graphed(capture: Callable[..., object], *overrides: str) -> tuple[object, list[object]]:
    trainer, captured = make_trainer(True, *overrides), []
    network = trainer.step.forward_backward
    assert isinstance(network, WholeNetwork)

    def note(work: Callable[[], None]) -> object:
        captured.append(work)
        return capture(work)

    reducer, shadow = trainer.step.reducer, network._shadow
    leaves = [slot.tensor if shadow is None else shadow.leaf(slot.tensor) for slot in reducer.layout.held]
    trainer.step.forward_backward = GraphedNetwork(network, reducer, torch.device("cpu"), leaves, note)
    return trainer, captured


@pytest.mark.parametrize(
    "changes",
    [
        (SGD, "model.options={dropout: 0.3}"),
        (SGD, "data.augment={mixup: 0.2}"),
        (SGD, "precision=float16", "virtual_workers=2", "loss_scale={initial: 512, growth_interval: 3}"),
    ],
)
def test_replayed_passes_have_the_bits_of_plain_ones(changes: tuple[str, ...]) -> None:
    plain = make_trainer(False, *changes)
    trainer, captured = graphed(Again, *changes)
    assert list(map(told, all_steps(trainer))) == list(map(told, all_steps(plain)))
    assert left(trainer) == left(plain)
    assert len(captured) == 2, "a graph for each of the two stages"


def test_a_network_that_cannot_be_captured_goes_on_without() -> None:
    plain = make_trainer(False, SGD)
    trainer, captured = graphed(Refused, SGD)
    with pytest.warns(UserWarning, match="without a CUDA graph, more slowly: operation not permitted when stream is"):
        assert len(all_steps(trainer)) == STEPS
    all_steps(plain)
    assert left(trainer) == left(plain)
    assert len(captured) == 2, "one attempt a stage"


def test_a_capture_takes_along_the_nodes_that_hooks_have_made_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it torch refuses every capture of a network whose plain passes have hooks."""
    done: list[object] = []
    monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", done.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: done.append("replayed")))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **keywords: nullcontext())
    CudaGraph(lambda: done.append("captured")).replay()
    assert done == [True, "captured", "replayed"]

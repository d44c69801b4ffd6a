"""Passes that are captured once and replayed: the same bits, whichever pass of a step, stage or precision it is.

In the place of CUDA graphs, work that is done again: it finds in the graph's own memory what a replay would.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.cuda.test_run_ahead import SGD, STEPS, all_steps, left, make_trainer, take, told
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.groups import Group
from torusgd.cuda.cuda_streams import Graph, PassStream
from torusgd.cuda.graphs import GraphedNetwork
from torusgd.gradients.reducer import Reducer
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer
from torusgd.step.forward_backward import WholeNetwork


class Again:
    """As a CUDA graph: nothing is done while it is captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Recorded(TorchDispatchMode):
    """As a CUDA graph of torusgd's operators: a replay gives them the numbers and the memory of the capture."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        with self:
            work()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace == "torusgd":
            return self._calls.append((function, arguments, keywords or {}))
        assert function.is_view, f"{function} is not done again"
        return function(*arguments, **(keywords or {}))

    @torch.no_grad()
    def replay(self) -> None:
        for function, arguments, keywords in self._calls:
            function(*arguments, **keywords)


class Refused:
    def __init__(self, work: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


class Here:
    """As the stream of all else: what it is given is done at once.

    Args:
        make: Makes a graph of work.
    """

    def __init__(self, make: Callable[[Callable[[], None]], Graph] = Again) -> None:
        self._make, self.captured = make, list[object]()

    def capture(self, work: Callable[[], None]) -> Graph:
        self.captured.append(work)
        return self._make(work)

    def release(self) -> None:
        pass

    def run(self, work: Callable[[], None]) -> None:
        work()

    def join(self) -> None:
        pass


def graphed(
    *overrides: str,
    streams: Sequence[PassStream],
    ready: Any = None,
    world: Group | None = None,
    options: RuntimeOptions | None = None,
    capture: Callable[[Callable[[], None]], Graph] = Recorded,
) -> Trainer:
    """A trainer of the tiny recipe whose passes these streams take in turn; with events, all-reduces leave early.

    Its updates are captured too.
    """
    trainer = make_trainer(True, *overrides, world=world, options=options)
    run, network = trainer.step, trainer.step.forward_backward
    assert isinstance(network, WholeNetwork)
    assert trainer.ahead is not None
    trainer.ahead._update._capture = capture
    leaves = [
        slot.tensor if network.shadow is None else network.shadow.leaf(slot.tensor) for slot in run.reducer.layout.held
    ]
    run.forward_backward = GraphedNetwork(
        network,
        run.reducer,
        run.control,
        run.batch_norm,
        torch.device("cpu"),
        leaves,
        streams,
        ready is not None,
        ready,
    )
    return trainer


def noting(network: WholeNetwork, reducer: Reducer, leaf: torch.Tensor) -> list[str]:
    """What passes leave behind that matters to a capture, in order: sums of a bucket, and nodes of autograd."""
    notes: list[str] = []
    end_worker, forward = reducer.sum.end_worker, network.forward

    def noted_sum(bucket: int) -> None:
        notes.append("sum")
        end_worker(bucket)

    def noted_forward(*arguments: Any) -> torch.Tensor:
        loss = forward(*arguments)
        accumulator(leaf).metadata["of a plain pass"] = True
        return loss

    reducer.sum.end_worker = noted_sum  # type: ignore[method-assign]
    network.forward = noted_forward  # type: ignore[method-assign]
    return notes


def accumulator(leaf: torch.Tensor) -> Any:
    """Autograd's node for the gradient of a leaf; it lives as long as a pass that somebody holds."""
    node = leaf.expand_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def test_a_capture_follows_a_pass_with_sums_of_which_nothing_is_left() -> None:
    """Kernels are compiled in the pass before, not while it is captured; no node on its stream remains."""
    found = list[tuple[bool, bool]]()

    def capture(work: Callable[[], None]) -> Again:
        found.append(("sum" in notes, "of a plain pass" in accumulator(leaf).metadata))
        return Again(work)

    trainer = graphed(SGD, "virtual_workers=2", streams=[Here(capture)])
    network = trainer.step.forward_backward
    assert isinstance(network, GraphedNetwork)
    leaf = network._leaves[0]
    notes = noting(network._network, trainer.step.reducer, leaf)
    all_steps(trainer)
    assert found == [(True, False)] * 4


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
    stream = Here()
    trainer = graphed(*changes, streams=[stream])
    assert list(map(told, all_steps(trainer))) == list(map(told, all_steps(plain)))
    assert left(trainer) == left(plain)
    assert len(stream.captured) == 4, "two graphs for each of the two stages"


class HandedOver(TorchDispatchMode):
    """Counts what the host hands over: replays, and operators that are in no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_replaying = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        is_nothing = (
            function.is_view or "empty" in function.name() or (isinstance(result, Tensor) and not result.numel())
        )
        if not self._is_replaying and not is_nothing:
            self.counts[function.overloadpacket.__name__] += 1
        return result

    def capture(self, work: Callable[[], None]) -> Graph:
        def replay() -> None:
            self.counts["replay"] += 1
            self._is_replaying = True
            work()
            self._is_replaying = False

        return Again(replay)


@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars"])
@pytest.mark.parametrize("passes", [1, 3])
def test_what_the_host_hands_over_in_a_step_of_replayed_passes(passes: int, change: str) -> None:
    """Of the messages' copies to a GPU nothing is seen here: one more a pass. The report's is a clone here."""
    host = HandedOver()
    changes = ("precision=bfloat16", "data.augment={flip: 0.5}", f"virtual_workers={passes}")
    trainer = graphed(change, *changes, streams=[Here(host.capture)], capture=host.capture)
    for index in range(5):
        take(trainer, index)
    assert trainer.ahead is not None
    trainer.step.forward_backward.shadow.are_of(STEPS - 1)  # type: ignore[attr-defined]  # which is handed over again
    host.counts.clear()
    with host:
        trainer.ahead._launch(STEPS - 1, trainer.membership)
    of_passes = {"replay": 2, "copy_": 1}
    of_step = {"zero_": 2, "copy_": 2, "replay": 1, "clone": 1}
    expected = Counter({name: passes * count for name, count in of_passes.items()}) + Counter(of_step)
    assert host.counts == expected
    assert sum(of_passes.values()) + 1 <= 4
    assert sum(of_step.values()) <= 6


def test_a_network_that_cannot_be_captured_goes_on_without() -> None:
    plain = make_trainer(False, SGD)
    streams = [Here(Refused), Here(Refused)]
    trainer = graphed(SGD, streams=streams)
    with pytest.warns(UserWarning, match="without a CUDA graph, more slowly: operation not permitted when stream is"):
        assert len(all_steps(trainer)) == STEPS
    all_steps(plain)
    assert left(trainer) == left(plain)
    assert sum(len(stream.captured) for stream in streams) == 2, "one attempt a stage"

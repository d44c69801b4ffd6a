"""Updates that are captured once and replayed: the same bits, whichever numbers a step has, and few calls of the host.

In the place of a CUDA graph, operators that are given again what they were given while it was captured.
"""

import warnings
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.cuda.test_cuda_streams import Beside, Clocks, Races
from tests.cuda.test_graphs import Here, Recorded, Refused, graphed
from tests.cuda.test_run_ahead import (
    AVERAGED,
    SGD,
    STEPS,
    all_steps,
    grow_once,
    left,
    make_trainer,
    redo_alike,
    take,
    told,
)
from torch import Tensor

from torusgd.comm.base import Done
from torusgd.comm.groups import alone, group_of
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer

MOMENTA = f"stages=[{{until: 3st, images_per_worker: 3}}, {{until: {STEPS}st, images_per_worker: 3, momentum: 0.5}}]"
GROWING = ("precision=float16", "virtual_workers=2", "loss_scale={initial: 512, growth_interval: 3}")


def captured(*changes: str, capture: Any = Recorded) -> Trainer:
    """A trainer whose updates are captured, and nothing else."""
    trainer = make_trainer(True, *changes)
    assert trainer.ahead is not None
    trainer.ahead._update._capture = capture
    return trainer


def graphs_of(trainer: Trainer) -> int:
    assert trainer.ahead is not None
    return sum(graph is not None for graph in trainer.ahead._update._graphs.values())


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        ((SGD,), 1),
        (("optimizer.name=lars",), 1),
        ((SGD, AVERAGED), 1),
        ((SGD, "precision=bfloat16"), 1),
        ((SGD, MOMENTA), 2),
        ((SGD, *GROWING), 2),
    ],
)
def test_replayed_updates_have_the_bits_of_plain_ones(changes: tuple[str, ...], graphs: int) -> None:
    plain, trainer = make_trainer(False, *changes), captured(*changes)
    assert list(map(told, all_steps(trainer))) == list(map(told, all_steps(plain)))
    assert left(trainer) == left(plain)
    assert graphs_of(trainer) == graphs


@pytest.mark.parametrize("change", ["precision=float32", "precision=bfloat16"])
def test_a_step_that_a_replay_refuses_changes_nothing(change: str) -> None:
    """Nor do those after it; then it is measured and redone, with copies of the right weights."""
    ahead = captured(SGD, change)
    redo_alike(make_trainer(False, SGD, change), ahead)
    assert graphs_of(ahead) == 1


def test_passes_of_a_refused_step_make_no_copies_beside_one_another() -> None:
    """The step is the only one that was handed over, so that its passes, taken again, are no new step's."""
    clocks = Clocks()
    trainer = graphed(SGD, "precision=bfloat16", streams=[Beside(clocks, name) for name in ("first", "second")])
    trainer.step.next_look = lambda steps: steps
    trainer.step.checkpoint_due = lambda steps: steps == 5
    with Races(clocks) as found:
        stats = all_steps(trainer)
    assert [each.save for each in stats] == [index == 4 for index in range(STEPS)]
    assert found.found == set()


def test_a_skipped_step_takes_the_graph_of_a_lower_loss_scale() -> None:
    changes = (SGD, "precision=float16", "virtual_workers=1", "loss_scale={initial: 1024, growth_interval: 9}")
    trainers = [make_trainer(False, *changes), captured(*changes)]
    for trainer in trainers:
        grow_once(trainer, by=float("inf"))
    plain, ahead = (list(map(told, all_steps(trainer))) for trainer in trainers)
    assert [bool(step["skipped"]) for step in plain] == [False] * 4 + [True] + [False] * 2
    assert [step["loss_scale"] for step in ahead] == [step["loss_scale"] for step in plain]
    assert left(trainers[0]) == left(trainers[1])
    assert graphs_of(trainers[1]) == 2


def test_updates_that_cannot_be_captured_go_on_without() -> None:
    plain, trainer = make_trainer(False, SGD), captured(SGD, capture=Refused)
    with pytest.warns(UserWarning, match="updates run without a CUDA graph, .*: operation not permitted") as warned:
        all_steps(trainer)
    all_steps(plain)
    assert left(trainer) == left(plain)
    assert len(warned) == 1


def test_an_update_of_torchs_operators_on_a_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the rates as numbers, which a graph would keep."""
    flat = make_trainer(True, SGD).step.update.flat
    assert flat.can_be_captured
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for capability, can_be in (((7, 0), False), ((9, 0), True)):
        monkeypatch.setattr("torusgd.optim.flat.has_kernels", lambda given: given >= (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert flat.can_be_captured == can_be


class Alone:
    """Of one rank."""

    name = "alone"

    def start(self, tensor: Tensor) -> Done:
        return Done()

    def close(self) -> None:
        pass


def on_ranks() -> list[Any]:
    """Comparisons in steps between those that are handed over send longer records."""
    trainer = graphed(SGD, streams=[Here()], world=group_of(), options=RuntimeOptions(drift_every=3))
    control, run = trainer.step.control, trainer.step
    lies = control.on_device.data_ptr()
    all_steps(trainer)
    timings, fingerprints = run.stragglers.message(run.stragglers.every), run.drift.message(0)
    assert timings.numel()
    assert fingerprints.numel()
    control.send(Alone(), timings, fingerprints)
    return [left(trainer), graphs_of(trainer), lies == control.on_device.data_ptr()]


def test_on_ranks_the_record_stays_where_graphs_know_it_to_be() -> None:
    trainer = make_trainer(False, SGD)
    all_steps(trainer)
    with warnings.catch_warnings(action="error"):
        assert run_ranks(2, on_ranks) == [[left(trainer), 1, True]] * 2


CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@pytest.mark.gpu
@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_the_host_calls_four_times_a_pass_and_six_a_step(streams: int, passes: int, change: str) -> None:
    """On one rank, which sends nothing."""
    one = f"stages=[{{until: {STEPS}st, images_per_worker: 3}}]"
    changes = (change, "precision=bfloat16", "data.augment={flip: 0.5}", f"virtual_workers={passes}", one)
    gpu, options = alone(torch.device("cuda", 0)), RuntimeOptions(cuda_streams=streams)
    try:
        trainer = make_trainer(True, *changes, world=gpu, options=options)
        for index in range(3):
            take(trainer, index)
        assert trainer.ahead is not None
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            for index in (STEPS - 2, STEPS - 1):
                trainer.ahead._launch(index, trainer.membership)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    on_gpu = torch.autograd.DeviceType.CUDA
    calls = [event.name for event in profile.events() if event.device_type != on_gpu and event.name.startswith(CALLS)]
    assert graphs_of(trainer) == 1
    assert calls
    assert len(calls) <= 2 * (6 + 4 * passes), sorted(calls)

"""Steps handed to the device in advance: the same bits as one by one, whatever happens, and what they ask of the host.

The form that a GPU takes, on the CPU, where each of its operators is made of torch's own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.cuda.test_host_reads import counted
from tests.run.runs import TINY, events, run_here
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.base import NoLiveness
from torusgd.comm.groups import Group, alone, group_of
from torusgd.cuda.graphs import GraphedNetwork
from torusgd.data.loader import Loader
from torusgd.data.order import StreamOrder
from torusgd.data.pipeline import allocate_by_torch
from torusgd.data.to_device import BytePipeline, can_normalise_later
from torusgd.errors import RunError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run import build as build_module
from torusgd.run import run as run_module
from torusgd.run.build import Trainer, build, open_data
from torusgd.run.job import Job
from torusgd.step.journal import synchronous
from torusgd.step.stats import StepStats
from torusgd.weights import weights_sha256

STEPS = 7
LONG = f"stages=[{{until: 3st, images_per_worker: 3}}, {{until: {STEPS}st, images_per_worker: 4}}]"
AVERAGED = "average={half_life: 2st, every: 3}"
SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3}"


def never() -> bool:
    return False


def make_trainer(
    ahead: bool,
    *overrides: str,
    world: Group | None = None,
    stop: Callable[[], bool] = never,
    options: RuntimeOptions | None = None,
) -> Trainer:
    """A trainer of the tiny recipe, whose weights nobody looks at before its end."""
    changed = load_recipe("digits", [*TINY, LONG, "rate={lr: 0.05}", *overrides]).recipe
    recipe = changed.resolve(precision="float32", memory_format="contiguous")
    world, liveness = world or alone(), NoLiveness()
    job = Job(recipe, options or RuntimeOptions(), world.device.type, Path("nowhere"))
    data = open_data(job, world.device, liveness)
    if ahead and can_normalise_later(recipe.data.augment):  # as on a GPU, which normalises the images itself
        pipeline = BytePipeline(data.training.source, recipe.data, recipe.seed, data.training.allocate)
        data.loader.close()
        data = replace(
            data, training=pipeline, loader=Loader(pipeline, StreamOrder(96, recipe.seed), threads=1, ahead=4)
        )
    trainer = build(job, data, world, liveness, stop, ahead=ahead)
    trainer.step.next_look = lambda steps: len(trainer.step.schedule)
    return trainer


def take(trainer: Trainer, index: int) -> StepStats | None:
    workers = trainer.step.recipe.virtual_workers
    return (trainer.ahead or trainer.step).run(trainer.membership, synchronous(index, workers))


def all_steps(trainer: Trainer) -> list[StepStats]:
    return [stats for index in range(STEPS) if (stats := take(trainer, index)) is not None]


def left(trainer: Trainer) -> str:
    """A hash of all that the next step needs."""
    return weights_sha256(trainer.step.state.state_dict(STEPS, keep=True))


def told(stats: StepStats) -> dict[str, Any]:
    """All of a step but its times."""
    return {key: value for key, value in vars(stats).items() if key not in ("times", "entry")}


@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars", AVERAGED, "precision=bfloat16"])
def test_a_run_ahead_is_the_run_one_by_one(change: str) -> None:
    trainers = [make_trainer(ahead, change) for ahead in (False, True)]
    plain, ahead = (list(map(told, all_steps(trainer))) for trainer in trainers)
    assert plain == ahead
    assert left(trainers[0]) == left(trainers[1])


def grow_once(trainer: Trainer, by: float) -> None:
    """The fifth step's gradients are so many times as large, however often it is taken."""
    forward = trainer.step.forward_backward.forward

    def larger(step: Any, *arguments: Any) -> torch.Tensor:
        loss = forward(step, *arguments) * (by if step.index == 4 else 1.0)
        trainer.step.forward_backward._loss = loss  # type: ignore[attr-defined]
        return loss

    trainer.step.forward_backward.forward = larger  # type: ignore[method-assign]


def redo_alike(one: Trainer, other: Trainer) -> None:
    """Both measure and redo the fifth step, whose sums leave their range, and go on with the same bits."""
    for trainer in (one, other):
        grow_once(trainer, by=2.0**12)
    plain, ahead = (list(map(told, all_steps(trainer))) for trainer in (one, other))
    assert plain == ahead
    assert [step["redone"] for step in plain][:5] == [0, 0, 0, 0, 1]
    assert left(one) == left(other)


def test_a_sum_out_of_its_range_is_measured_and_redone_with_the_same_bits() -> None:
    redo_alike(*(make_trainer(ahead, SGD) for ahead in (False, True)))


def test_a_skipped_step_halves_the_loss_scale_of_those_after_it() -> None:
    changes = (SGD, "precision=float16", "virtual_workers=1", "loss_scale={initial: 1024, growth_interval: 2}")
    trainers = [make_trainer(ahead, *changes) for ahead in (False, True)]
    for trainer in trainers:
        grow_once(trainer, by=float("inf"))
    plain, ahead = (list(map(told, all_steps(trainer))) for trainer in trainers)
    assert [bool(step["skipped"]) for step in plain] == [False] * 4 + [True] + [False] * 2
    assert [step["loss_scale"] for step in ahead] == [step["loss_scale"] for step in plain]
    assert left(trainers[0]) == left(trainers[1])


def test_an_error_leaves_what_the_last_good_step_left() -> None:
    trainers = [make_trainer(ahead, SGD) for ahead in (False, True)]
    for trainer in trainers:
        grow_once(trainer, by=float("nan"))
        with pytest.raises(RunError, match=r"step 4: .* not finite"):
            all_steps(trainer)
    assert left(trainers[0]) == left(trainers[1])


def test_a_wish_to_stop_leaves_the_steps_before_it() -> None:
    asked: list[bool] = []
    trainer = make_trainer(True, SGD, stop=lambda: bool(asked))
    for index in range(3):
        take(trainer, index)
    asked.append(True)
    # The device has been given two more steps, which are taken; the next one is not.
    assert [take(trainer, index) is not None for index in (3, 4, 5)] == [True, True, False]
    plain = make_trainer(False, SGD)
    for index in range(5):
        take(plain, index)
    assert left(plain) == left(trainer)


def on_ranks() -> list[str]:
    trainer = make_trainer(True, SGD, world=group_of())
    all_steps(trainer)
    return [left(trainer), *(trainer.step.reducer.names[:1])]


def test_ranks_that_run_ahead_have_the_bits_of_one() -> None:
    trainer = make_trainer(False, SGD)
    all_steps(trainer)
    assert run_ranks(2, on_ranks) == [[left(trainer), trainer.step.reducer.names[0]]] * 2


def test_evaluations_and_checkpoints_see_the_weights_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = run_here(tmp_path / "plain", LONG, "evaluate.every=3st")
    monkeypatch.setattr(run_module, "build", partial(build, ahead=True))
    ahead, _ = run_here(tmp_path / "ahead", LONG, "evaluate.every=3st")
    assert ahead["weights_sha256"] == plain["weights_sha256"]
    of_plain, of_ahead = (
        [(event.get("step"), event.get("loss"), event.get("top1")) for event in events(tmp_path / name)]
        for name in ("plain", "ahead")
    )
    assert of_plain == of_ahead


@pytest.mark.parametrize("change", ["data.augment={mixup: 0.2}", "data.augment={flip: 0.5}"])
def test_images_for_a_gpu_are_pinned_as_bytes_or_not(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other memory a copy makes the host wait, which no operator shows."""

    def allocate_pinned(*arguments: Any) -> Any:
        return allocate_by_torch(*arguments)

    monkeypatch.setattr(build_module, "allocate_pinned", allocate_pinned)
    recipe = load_recipe("digits", [*TINY, change]).recipe.resolve(precision="float32", memory_format="contiguous")
    data = open_data(Job(recipe, RuntimeOptions(), "cuda", Path("nowhere")), torch.device("cuda", 0), NoLiveness())
    data.close()
    assert isinstance(data.training, BytePipeline) == ("flip" in change)
    assert data.training.allocate is data.held_out.allocate is allocate_pinned


class Operators(TorchDispatchMode):
    """Counts operators outside the network's passes, and those of torusgd everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.in_network = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        is_nothing = (
            function.is_view or "empty" in function.name() or (isinstance(result, Tensor) and not result.numel())
        )
        if not self.in_network and not is_nothing:
            self.counts[str(function.overloadpacket)] += 1
        return result

    def around(self, function: Callable[..., Any], in_network: bool) -> Callable[..., Any]:
        """The same function, inside of which one is, or is not, in the network."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            before, self.in_network = self.in_network, in_network
            try:
                return function(*arguments, **keywords)
            finally:
                self.in_network = before

        return call


@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars", "precision=float16"])
def test_a_step_asks_for_nothing_and_has_two_operators_a_bucket_and_six(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the network's own passes, one pass a step; of the budget of eight LARS, three kernels, takes all."""
    trainer = make_trainer(True, change, "virtual_workers=1")
    take(trainer, 0)  # measures its scales, and is taken as on a CPU
    run, operators = trainer.step, Operators()
    passes = run.forward_backward
    monkeypatch.setattr(passes, "forward", operators.around(passes.forward, in_network=True))
    monkeypatch.setattr(passes, "backward", operators.around(passes.backward, in_network=True))
    monkeypatch.setattr(run.reducer, "add", operators.around(run.reducer.add, in_network=False))
    assert trainer.ahead is not None
    with operators:
        trainer.ahead._launch(1, trainer.membership)
    assert sum(operators.counts.values()) <= 2 * len(run.reducer.layout.buckets) + 6
    with counted() as reads:
        trainer.ahead._launch(2, trainer.membership)
    assert reads == {}


def handed_over(trainer: Trainer, take_step: Callable[[int], object]) -> list[int]:
    """Of each step, how many the device is given when it is taken."""
    assert trainer.ahead is not None
    launch, counts = trainer.ahead._launch, [0] * STEPS

    def counted_launch(*arguments: Any) -> None:
        counts[now] += 1
        launch(*arguments)

    trainer.ahead._launch = counted_launch  # type: ignore[method-assign]
    for now in range(STEPS):
        take_step(now)
    return counts


HANDED_OVER = [0, 3, 1, 1, 1, 0, 0]
"""steps 1 to 3 together, of both stages; the others one by one, each two steps before it is taken"""


def test_steps_are_handed_over_two_in_advance() -> None:
    trainer = make_trainer(True, SGD)
    assert handed_over(trainer, partial(take, trainer)) == HANDED_OVER


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [SGD, "optimizer.name=lars"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_a_run_ahead_has_the_bits_of_one_by_one_and_waits_for_events_only(
    streams: int, precision: str, optimizer: str
) -> None:
    """Captured passes, kernels, 16-bit copies and images as bytes are in the one and not in the other."""
    gpu, changes = alone(torch.device("cuda", 0)), (optimizer, f"precision={precision}", "model.options={dropout: 0.3}")
    try:
        plain = make_trainer(False, *changes, world=gpu)
        all_steps(plain)
        ahead = make_trainer(True, *changes, world=gpu, options=RuntimeOptions(cuda_streams=streams))

        def take_step(index: int) -> None:
            # By then both stages have been captured, and what is made once has been made.
            torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")
            take(ahead, index)

        assert handed_over(ahead, take_step) == HANDED_OVER, "something was handed over while nobody might wait"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert left(plain) == left(ahead)
    passes = ahead.step.forward_backward
    assert isinstance(passes, GraphedNetwork)
    assert len(passes._passes) == 2 * streams
    assert all(each is not None and each.graphs for each in passes._passes.values()), "all stages, on all streams"

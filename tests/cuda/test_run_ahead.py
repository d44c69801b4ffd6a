"""Steps launched in advance: the bits of one by one, whatever happens, and few calls of the host."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.cuda.fake_cuda import FakeGpu, Races
from tests.cuda.test_host_reads import counted
from tests.cuda.trainers import SGD, STEPS, all_steps, left, make_trainer, on_gpu, plain_bits, steps_of_all, take
from tests.messages import refused, refuses
from tests.run.runs import events, run_here
from tests.step.test_watch import OddSteps
from tests.step.trainers import Sent, job_of
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.base import Liveness
from torusgd.comm.groups import group_of
from torusgd.cuda import form
from torusgd.cuda.graphs import GraphedNetwork
from torusgd.cuda.sums import KernelSum
from torusgd.data.pipeline import allocate_by_torch
from torusgd.data.to_device import BytePipeline
from torusgd.errors import RunError
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run import build
from torusgd.run import open_data as data_module
from torusgd.run.build import Trainer
from torusgd.run.open_data import open_data
from torusgd.step.watch import Requests

MOMENTA = "stages=[{until: 4st, images_per_worker: 3}, {until: 10st, images_per_worker: 3, momentum: 0.5}]"
SCALED = ("precision=float16", "virtual_workers=2", "loss_scale={initial: 512, growth_interval: 3}")
GROWING = (*SCALED, "stages=[{until: 10st, images_per_worker: 3}]")
CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
# Of several virtual workers steps 1, 3 and 4: 0 is measured, and in 2, 5 and 6 the noise scale is due.
LAUNCHES = [0, 1, 0, 2, 0, 0, 0]


def grow_once(trainer: Trainer, by: float) -> None:
    passes: Any = trainer.step.forward_backward
    forward = passes.forward

    def larger(step: Any, *arguments: Any) -> torch.Tensor:
        loss = forward(step, *arguments) * (by if step.index == 4 else 1.0)
        passes._loss = loss
        return loss

    passes.forward = larger


def launches(trainer: Trainer, take_step: Callable[[int], object]) -> list[int]:
    """Of each step, how many the device is given when it is taken."""
    ahead: Any = trainer.ahead
    ahead._launch, counts = Mock(wraps=ahead._launch), [0]
    for now in range(STEPS):
        take_step(now)
        counts.append(ahead._launch.call_count)
    return [after - before for before, after in pairwise(counts)]


def in_both_forms(*changes: str, by: float = 1.0) -> list[Trainer]:
    """Plain and ahead; the fifth step's gradients are so many times as large, however often it is taken."""
    trainers = [make_trainer(False, *changes), make_trainer(True, *changes)]
    for trainer in trainers if by != 1.0 else ():
        grow_once(trainer, by)
    return trainers


@pytest.mark.parametrize("changes", [
    (SGD,), ("optimizer.name=lars",), (SGD, "average={half_life: 2st, every: 3}"), (SGD, "precision=bfloat16"),
    (SGD, MOMENTA), (SGD, *GROWING),
])  # fmt: skip
def test_steps_in_advance_are_those_one_by_one(changes: tuple[str, ...]) -> None:
    steps_of_all(in_both_forms(*changes))


@pytest.mark.parametrize("change", ["precision=float32", "precision=bfloat16"])
def test_a_sum_out_of_its_range_is_measured_and_redone_with_the_same_bits(change: str) -> None:
    """The refused step, and those launched after it, have changed nothing."""
    assert [step["redone"] for step in steps_of_all(in_both_forms(SGD, change, by=2.0**12))][:5] == [0, 0, 0, 0, 1]


def test_a_skipped_step_halves_the_loss_scale_of_those_after_it() -> None:
    changes = (SGD, "precision=float16", "virtual_workers=1", "loss_scale={initial: 1024, growth_interval: 9}")
    trainers = in_both_forms(*changes, by=float("inf"))
    reports = list(map(all_steps, trainers))  # the skipped step's losses are NaN, which is not equal to itself
    assert [bool(step["skipped"]) for step in reports[0]] == [False] * 4 + [True] + [False] * 2
    assert len({tuple(step["loss_scale"] for step in report) for report in reports}) == 1
    assert len(set(map(left, trainers))) == 1


def test_an_error_leaves_what_the_last_good_step_left() -> None:
    trainers = in_both_forms(SGD, by=float("nan"))
    for trainer in trainers:
        refuses("gradients that are not finite", all_steps, trainer, about="step 4", kind=RunError)
    assert len(set(map(left, trainers))) == 1


def test_a_wish_to_stop_leaves_the_steps_before_it() -> None:
    wishes: list[bool] = []
    trainer = make_trainer(True, SGD, "virtual_workers=1", stop=lambda: bool(wishes))
    plain = make_trainer(False, SGD, "virtual_workers=1")
    for index in range(3):
        take(trainer, index)
    wishes.append(True)
    # The device has been given two more steps, which are taken; the next one is not.
    assert [take(trainer, index) is not None for index in (3, 4, 5)] == [True, True, False]
    assert all(take(plain, index) for index in range(5))
    assert left(plain) == left(trainer)


def test_a_watcher_that_is_due_sees_its_steps_one_by_one() -> None:
    watchers, one = (OddSteps(0), OddSteps(0)), "virtual_workers=1"
    plain, ahead = (make_trainer(bool(number), SGD, one, watchers=[each]) for number, each in enumerate(watchers))
    all_steps(plain)
    assert launches(ahead, partial(take, ahead)) == [0, 0, 1, 0, 1, 0, 1]
    seen = [[step for name, step in each.calls if name == "before_accept"] for each in watchers]
    assert seen == [[*range(STEPS)], [0, 1, 3, 5]], "the first is measured"
    assert left(plain) == left(ahead)


def test_before_a_first_update_nothing_is_launched_and_there_is_no_momentum() -> None:
    """A float16 run may skip its first steps, and be stopped, saved and resumed in either form then."""
    infinite = "loss_scale={initial: 1.0e38, growth_interval: 1000}"
    trainers = [make_trainer(each, SGD, "precision=float16", "virtual_workers=1", infinite) for each in (False, True)]
    for trainer in trainers:
        for index in range(3):
            take(trainer, index)
    states = [set(trainer.step.update.state(keep=True)) for trainer in trainers]
    assert states == [set(), set()]


@pytest.mark.parametrize(("workers", "counts"), [(4, LAUNCHES), (1, [0, 3, 1, 1, 1, 0, 0])])
def test_steps_are_launched_two_in_advance(workers: int, counts: list[int]) -> None:
    """Those of one virtual worker, which have no noise scale, all but the first: 1 to 3 together, of both stages."""
    trainer = make_trainer(True, SGD, f"virtual_workers={workers}")
    assert launches(trainer, partial(take, trainer)) == counts


@on_ranks(2)
def test_on_ranks_the_bits_are_those_of_one_and_the_record_never_moves() -> None:
    """Comparisons in steps between those that are launched in advance send longer records."""
    with FakeGpu().streams(), warnings.catch_warnings(action="error"):
        trainer = make_trainer(True, SGD, world=group_of(), options=RuntimeOptions(drift_every=3))
        control: Any = trainer.step.control
        lies = control.message.data_ptr()
        all_steps(trainer)
    longest = {str(number): torch.zeros(each.words) for number, each in enumerate(trainer.step.watchers)}
    control.send(Sent(), {name: words.long() for name, words in longest.items()})
    assert control.message.data_ptr() == lies
    assert left(trainer) == plain_bits(SGD)


def test_a_checkpoint_that_is_due_during_a_launched_step_is_of_its_weights() -> None:
    """The step is launched, refused, and taken again."""
    gpu, liveness = FakeGpu(), Liveness()
    with gpu.streams(2):
        trainer = make_trainer(True, SGD)
        requests = Requests(lambda: False, liveness, looks=range(STEPS), save_due=lambda steps: steps == 5)
        object.__setattr__(trainer.step, "watchers", [requests, *trainer.step.watchers[1:]])
        with Races(gpu) as found:
            stats = all_steps(trainer)
    assert [each["save"] for each in stats] == [index == 4 for index in range(STEPS)]
    assert found.found == set()


def test_evaluations_and_checkpoints_see_the_weights_of_their_step(tmp_path: Path) -> None:
    change = ("stages=[{until: 3st, images_per_worker: 3}, {until: 7st, images_per_worker: 4}]", "evaluate.every=3st")
    plain, _ = run_here(tmp_path / "plain", *change)
    ahead, _ = run_here(tmp_path / "ahead", *change, options=RuntimeOptions(cuda_graphs=True))
    assert ahead["weights_sha256"] == plain["weights_sha256"]
    found = [
        [[e.get(key) for key in ("step", "loss", "top1")] for e in events(tmp_path / n)] for n in ("plain", "ahead")
    ]
    assert found[0] == found[1]
    lines = [[json.loads(line) for line in (tmp_path / n / "records.jsonl").open()] for n in ("plain", "ahead")]
    states = [[each["tensors"] for each in part if each["record"] == "state"] for part in lines]
    assert (states[0][0], states[0][-1]) == (states[1][0], states[1][-1]), "whoever verifies it may take either form"


@pytest.mark.parametrize(("capability", "why"), [
    ((7, 5), "they need a GPU of compute capability 8.0"), ((9, 0), "no compiler"),
])  # fmt: skip
def test_where_kernels_do_not_run_there_are_no_graphs_and_a_warning_says_why(capability, why, monkeypatch, capsys):
    monkeypatch.setattr(form, "_trial", form._trial.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(form, "plan_buckets", Mock(side_effect=OSError("no compiler\nfor it")))
    job = Mock(recipe=Mock(reduction="exact", precision="float32"), options=RuntimeOptions(cuda_graphs=True))
    assert build._on_gpu(job, Mock(device=torch.device("cuda", 0), rank=0, size=1)) == (None, None)
    said = capsys.readouterr().err
    assert f"Triton's kernels don't run here: {why}" in said
    assert "no CUDA graphs" in said
    with refused("graphs uncompiled", "cuda_graphs"):
        build._on_gpu(job, Mock(device=torch.device("cuda", 0), rank=1, size=2))


def test_plain_sums_are_torchs_where_the_kernels_give_others_or_arithmetic_is_portable(monkeypatch, capsys):
    monkeypatch.setattr(form, "_trial", form._trial.__wrapped__)
    recipe, world = Mock(reduction="exact", precision="float32"), Mock(device=torch.device("cpu"), rank=0)
    assert getattr(form.plain_sum(recipe, world), "args", [None])[0] is KernelSum
    assert form.plain_sum(Mock(reduction="exact", precision="portable"), world) is None
    monkeypatch.setattr(KernelSum, "_mean", staticmethod(lambda sums, factors, scale, out: out[0].add_(1.0)))
    assert form.plain_sum(recipe, world) is None
    assert "their sums are not" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["data.augment={mixup: 0.2}", "data.augment={flip: 0.5}"])
def test_images_for_a_gpu_are_pinned_as_bytes_or_not(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other memory a copy makes the host wait, which no operator shows."""
    allocate_pinned = Mock(side_effect=allocate_by_torch)
    monkeypatch.setattr(data_module, "allocate_pinned", allocate_pinned)
    data = open_data(replace(job_of(change), device="cuda"), torch.device("cuda", 0), Liveness())
    data.close()
    assert isinstance(data.training, BytePipeline) == ("flip" in change)
    assert data.training.allocate is data.held_out.allocate is allocate_pinned


class Launched(TorchDispatchMode):
    """Counts what the host launches: replays, and operators that are in no graph and in no pass of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_off = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        is_nothing = (
            function.is_view
            or function.namespace == "profiler"
            or "empty" in function.name()
            or (isinstance(result, Tensor) and not result.numel())
        )
        if not self._is_off and not is_nothing:
            self.counts[function.overloadpacket.__name__] += 1
        return result

    def off(self, function: Callable[..., Any], is_off: bool = True) -> Callable[..., Any]:
        """The same function, inside of which nothing is counted, or everything is."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            before, self._is_off = self._is_off, is_off
            try:
                return function(*arguments, **keywords)
            finally:
                self._is_off = before

        return call

    def graph(self, work: Callable[[], None], *memory: Any) -> Any:
        """A graph whose replay counts as one call."""

        def replay() -> None:
            self.counts["replay"] += 1
            self.off(work)()

        return type("Counted", (), {"replay": staticmethod(replay)})


@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars", "precision=float16"])
def test_a_plainly_launched_step_reads_nothing_and_has_two_operators_a_bucket_and_seven(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the network's own passes, one pass a step."""
    trainer = make_trainer(True, change, "virtual_workers=1")
    take(trainer, 0)  # measures its scales, and is taken as on a CPU
    run, launched = trainer.step, Launched()
    passes = run.forward_backward
    monkeypatch.setattr(passes, "forward", launched.off(passes.forward))
    monkeypatch.setattr(passes, "backward", launched.off(passes.backward))
    monkeypatch.setattr(run.reducer, "add", launched.off(run.reducer.add, is_off=False))
    assert trainer.ahead is not None
    with launched:
        trainer.ahead._launch(1, trainer.membership)
    del launched.counts["cat"]  # of numbers, which lie on a GPU's host
    assert launched.counts["add_gradients"] == launched.counts["add_bounds"] == len(run.reducer.layout.buckets)
    assert sum(launched.counts.values()) == 2 * len(run.reducer.layout.buckets) + 7, launched.counts
    with counted() as reads:
        trainer.ahead._launch(2, trainer.membership)
    assert reads == {}


@pytest.mark.parametrize("change", [SGD, "optimizer.name=lars"])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_of_replayed_passes_is_four_calls_a_pass_and_nine(passes: int, change: str) -> None:
    """Seven of the nine are seen here, and three of the four: on a GPU the report and the messages are copied too, the
    verdict is two kernels, and an update by LARS three, which makes eleven."""
    host = Launched()
    changes = ("precision=bfloat16", "data.augment={flip: 0.5}", f"virtual_workers={passes}")
    with FakeGpu(graph=host.graph).streams():
        trainer = make_trainer(True, change, *changes)
        for index in range(5):
            take(trainer, index)
        assert trainer.ahead is not None
        host.counts.clear()
        with host:
            trainer.ahead._launch(STEPS - 1, trainer.membership)
    del host.counts["cat"]  # of numbers on the host
    of_pass = {"replay": 2, "copy_": 1}
    of_step = {"zero_": 2, "copy_": 2, "verdict": 1, "mean": 1, "update": 1}
    assert host.counts == Counter({name: passes * count for name, count in of_pass.items()}) + Counter(of_step)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [SGD, "optimizer.name=lars"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_steps_in_advance_have_the_plain_bits_and_wait_for_events_only(
    streams: int, precision: str, optimizer: str
) -> None:
    """Captured passes and kernels are in the one and not in the other; a third has kernels alone."""
    changes = (optimizer, f"precision={precision}", "model.options={dropout: 0.3}")
    with on_gpu() as gpu:
        plain, by_kernels = (make_trainer(False, *changes, world=gpu, by_kernels=each) for each in (False, True))
        steps_of_all([plain, by_kernels])
        ahead = make_trainer(True, *changes, world=gpu, options=RuntimeOptions(cuda_streams=streams))

        def take_step(index: int) -> None:
            # By then both stages have been captured, and what is made once has been made: the noise scale is due.
            torch.cuda.set_sync_debug_mode("error" if index > 3 else "default")
            take(ahead, index)

        assert launches(ahead, take_step) == LAUNCHES, "something was launched while nobody might wait"
    assert left(plain) == left(ahead)
    passes = ahead.step.forward_backward
    assert isinstance(passes, GraphedNetwork)
    assert len(passes._passes) == 2 * streams
    assert all(each is not None and each.graphs for each in passes._passes.values()), "all stages, on all streams"


@pytest.mark.gpu
@pytest.mark.parametrize(("change", "rest"), [(SGD, 9), ("optimizer.name=lars", 11)])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_gpu_the_host_calls_six_times_a_pass(streams: int, passes: int, change: str, rest: int) -> None:
    """On one rank, which sends nothing: two graphs, two copies of images, and two numbers for torch's generator."""
    one = f"stages=[{{until: {STEPS}st, images_per_worker: 3}}]"
    changes = (change, "precision=bfloat16", "data.augment={flip: 0.5}", f"virtual_workers={passes}", one)
    with on_gpu() as gpu:
        trainer = make_trainer(True, *changes, world=gpu, options=RuntimeOptions(cuda_streams=streams))
        for index in range(3):
            take(trainer, index)
        assert trainer.ahead is not None
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(2):  # no step in which the noise scale is due
                trainer.ahead._launch(STEPS - 1, trainer.membership)
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    of_host = [event.name for event in profile.events() if event.device_type != DeviceType.CUDA]
    calls = [name for name in of_host if name.startswith(CALLS)]
    assert 0 < len(calls) <= 2 * (rest + 6 * passes), Counter(calls)

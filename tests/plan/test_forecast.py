"""Recipes on clusters: a run's own schedule, sweeps and their knee, the search, and relaxed synchrony under delays."""

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from tests.messages import refuses
from torusgd.plan import forecast, load_cluster, load_software, program_for, step_time, workload_of
from torusgd.plan.cluster import Cluster
from torusgd.plan.forecast import Forecast, PlannedStage, RunTime, Workload, staged, with_communication
from torusgd.plan.model_cost import ModelCost
from torusgd.plan.relaxed import measured_delays, relaxed_forecasts
from torusgd.plan.search import device_counts, fixed_batch, knee_of, search_settings, sweep
from torusgd.plan.timeline import StepTime
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule

ABCI = load_cluster("abci")
EVERY_EPOCH = ["evaluate.every=1ep"]


def workload(name: str, *overrides: str) -> Workload:
    return workload_of(load_recipe(name, overrides).recipe)


def test_steps_are_the_schedules_own_and_those_of_published_rows_come_in_stages_and_whole_batches() -> None:
    recipe = load_recipe("sony-224s").recipe
    found, schedule = workload_of(recipe), Schedule(recipe, 1_281_167)
    assert (sum(stage.steps for stage in found.stages), found.images) == (len(schedule), schedule.stop)
    assert [stage.images for stage in found.stages] == [stage.images_per_worker for stage in recipe.stages]
    assert found.cost.parameters == 25_557_032
    # Fujitsu's 15 steps an epoch; 39 of NVIDIA's, of which 38.5 batches hold all images.
    stages = staged(90, (16, 32), 2176)
    assert [stage.steps for stage in stages] == [math.ceil(30 * 1281167 / 34816), math.ceil(60 * 1281167 / 69632)]
    assert [stage.steps for stage in staged(90, (42,), 2048, whole_epochs=True)] == [90 * 15]
    assert [stage.steps for stage in staged(72, (65,), 512, whole_epochs=True)] == [72 * 39]
    assert [stage.steps for stage in staged(72, (65,), 512)] == [math.ceil(72 * 1281167 / 33280)]


@pytest.mark.parametrize(("name", "cluster", "software", "seconds", "overrides"), [
    pytest.param("resnet50-27ep", "hgx-a100-80gb", "composer", 1427, ["stages.22.until=27ep"], marks=pytest.mark.slow),
    ("resnet50-16ep", "dgx-a100", "ffcv", 14.9 * 60, EVERY_EPOCH),
    ("resnet50-16ep", "dgx-a100", "ffcv", 77.2 * 60, [*EVERY_EPOCH, "stages.1.until=88ep", "stages.0.until=71ep"]),
])  # fmt: skip
def test_published_runs_take_about_as_long_as_published(name, cluster, software, seconds: float, overrides) -> None:
    """Records: tests/plan/test_published.py."""
    recipe, machine = load_recipe(name, overrides).recipe, load_cluster(cluster)
    program = program_for(recipe, RuntimeOptions(workers=8), machine, load_software(software))
    found = forecast(workload_of(recipe), machine, program, 8)
    assert found.run.seconds == pytest.approx(seconds, rel=0.1)
    assert found.low < found.run.seconds < found.high


def test_a_recipe_says_its_precision_and_width_on_the_wire_and_needs_the_size_of_the_data() -> None:
    recipes = (load_recipe("sony-122s", [f"reduction={kind}"]).recipe for kind in ("exact", "float16"))
    profile, runtime = load_software("torusgd"), RuntimeOptions(workers=4)
    exact, half = (program_for(recipe, runtime, ABCI, profile) for recipe in recipes)
    assert (exact.communication.wire_bits, half.communication.wire_bits, half.precision) == (32, 16, "float16")
    refuses("a plan without data", workload, "folder")
    assert workload("folder", "data.train_images=1000", "data.classes=5").train_images == 1000
    refuses("a plan of frozen layers", workload, "resnet50", "model.freeze=[body]", about="model.freeze:")


def test_devices_share_virtual_workers() -> None:
    found, program = workload("fujitsu-74s"), load_software("mxnet-fujitsu")
    whole, third = (forecast(found, ABCI, program, devices) for devices in (2048, 683))
    assert third.run.steps[0].compute == pytest.approx(3 * whole.run.steps[0].compute, rel=0.01)
    # 683 * 3 places for 2,048 workers: all but one are used.
    assert third.efficiency > whole.efficiency
    refuses("more devices than virtual workers", forecast, found, ABCI, program, 2049, about="devices = 2049:")


def test_a_slow_device_takes_fewer_virtual_workers_where_the_shares_follow_the_speed() -> None:
    """Compute alone: 12 virtual workers on 3 devices of which one is half as fast, 5/5/2 against 4/4/4."""
    link = ABCI.inside.model_copy(update={"alpha": 0.0, "bandwidth": 1e18})
    equal = ABCI.model_copy(update={"inside": link, "between": link})
    mixed = equal.model_copy(update={"speeds": (1.0, 1.0, 0.5)})
    planned = workload("resnet50", "virtual_workers=12")

    def compute(cluster: Cluster, shares: Literal["speed", "even"]) -> float:
        recipe = load_recipe("resnet50", ["virtual_workers=12"]).recipe
        program = program_for(recipe, RuntimeOptions(workers=3, shares=shares), cluster, load_software("torusgd"))
        return forecast(planned, cluster, program, 3).run.steps[0].compute

    one = compute(equal, "speed") / 4
    assert compute(equal, "even") == pytest.approx(4 * one)
    assert compute(mixed, "even") == pytest.approx(8 * one)
    assert compute(mixed, "speed") == pytest.approx(5 * one)
    software = program_for(load_recipe("resnet50").recipe, RuntimeOptions(workers=3), mixed, load_software("torusgd"))
    assert software.shares == "speed"
    floats = load_recipe("resnet50", ["reduction=float32"]).recipe
    assert program_for(floats, RuntimeOptions(workers=3), mixed, software).shares == "even"
    assert 0.5 < forecast(planned, mixed, software, 3).efficiency < 1.0


def test_the_parts_add_up_and_the_largest_limits() -> None:
    found = forecast(workload("sony-224s"), ABCI, load_software("nnl-fp16"), 2176)
    for step in found.run.steps:
        assert step.seconds == pytest.approx(sum(v for k, v in vars(step).items() if k != "hidden"))
    assert found.run.seconds == pytest.approx(found.run.start + found.run.training + found.run.evaluation)
    assert found.images_per_second == pytest.approx(workload("sony-224s").images / found.run.training)
    planned, program = workload("fujitsu-74s"), load_software("mxnet-fujitsu")
    assert forecast(planned, ABCI, program, 1).efficiency == pytest.approx(1)
    assert forecast(planned, ABCI, program, 2048).run.steps[0] == step_time(planned.cost, ABCI, program, 2048, 40)
    for limit, limited in {
        "communication": with_communication(program, message=1e-3),
        "input": program.model_copy(update={"input_rate": 50.0}),
        "kernel launches": program.model_copy(update={"launch": 1e-3}),
    }.items():
        assert forecast(planned, ABCI, limited, 2048).limit.startswith(limit)


def test_start_up_extra_passes_and_held_out_images_are_priced() -> None:
    program = load_software("mxnet-v30").model_copy(update={"start": {8: 12.0, 64: 5.0}})
    assert [program.start_on(devices) for devices in (1, 8, 36, 64, 4096)] == [12.0, 12.0, 8.5, 5.0, 5.0]
    assert load_software("caffe2").start_on(64) == 2.0
    found = forecast(workload("resnet50", "virtual_workers=64"), load_cluster("hgx-h100"), program, devices=64)
    assert found.run.start == 5.0
    program, cluster = load_software("composer"), load_cluster("hgx-a100-80gb")

    def evaluation(size: int) -> float:
        return forecast(workload("resnet50", f"evaluate.image_size={size}"), cluster, program, 8).run.evaluation

    assert evaluation(176) < 0.9 * evaluation(224)
    # Torusgd's devices take 10 chunks in turn, at the speed of training, and evaluate again after the polish.
    own, sizes = load_software("torusgd"), ["data.train_images=2000", "data.eval_images=1000"]

    def evaluated(devices: int, *changes: str, crowding: float = 1.0) -> float:
        crowded = cluster.model_copy(update={"crowding": {devices: crowding}})
        planned = workload("resnet50", *sizes, "data.classes=9", "evaluate={every: null}", *changes)
        return forecast(planned, crowded, own, devices).run.evaluation

    one = evaluated(10)
    assert [evaluated(devices) for devices in (5, 6, 32)] == pytest.approx([2 * one, 2 * one, one])
    assert evaluated(10, crowding=3.0) == pytest.approx(3 * one)
    polish = "polish={images_per_batch: 100, images: 2000}"
    assert evaluated(10, polish) == pytest.approx(4 * one, rel=0.01)
    assert evaluated(10, polish[:-1] + ", steps: 10}", "virtual_workers=10") == pytest.approx(12 * one, rel=0.01)
    works = (workload("fujitsu-74s", *changes) for changes in ([], ["stages.1.extra_pass=true"]))
    usual, extra = (forecast(work, ABCI, load_software("mxnet-fujitsu"), 2048) for work in works)
    assert extra.run.steps[0] == usual.run.steps[0]
    assert extra.run.steps[1].forward == pytest.approx(2 * usual.run.steps[1].forward)
    assert extra.run.steps[1].backward == usual.run.steps[1].backward
    assert extra.run.seconds > usual.run.seconds


def test_a_sweep_has_a_knee_and_falling_rates_a_device() -> None:
    found, program = workload("fujitsu-74s"), load_software("mxnet-fujitsu")
    curve = sweep(found, ABCI, lambda devices: program, [4, 64, 1024, 16384])
    rates = [f.images_per_second / f.devices for f in curve.forecasts]
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(rates))
    assert curve.knee in [f.devices for f in curve.forecasts]
    assert [f.batches[0] for f in curve.forecasts][:3] == [81920] * 3
    assert knee_of([(1, 100.0), (2, 190.0), (4, 360.0), (8, 600.0), (16, 900.0)]) == 4
    assert knee_of([(8, 100.0)]) == 8


@pytest.mark.parametrize(("limit", "workers"), [(64, 48), (1, 1), (100_000, 3456), (97, 97), (5, 1000)])
def test_device_counts_end_at_the_limit_and_share_evenly(limit: int, workers: int) -> None:
    counts = device_counts(limit, workers)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, limit)
    assert all(workers / (n * math.ceil(workers / n)) >= 0.95 for n in counts[:-1] if n <= workers)
    assert len(counts) <= 5 * math.log2(limit + 1) + 2


def test_the_search_never_makes_it_slower_cuts_the_batch_anew_and_splits_heavy_layers() -> None:
    found, program = workload("sony-122s"), load_software("nnl-fp16")
    result = search_settings(found, ABCI, program, 3456)
    assert result.forecast.run.seconds < result.before.run.seconds
    assert {choice.setting for choice in result.choices} >= {"all-reduce"}
    assert all(choice.saves > 0 for choice in result.choices)
    assert search_settings(found, ABCI, program, 3456).choices == result.choices
    # What was found can't be bettered by any single change that was tried.
    for name in ("ring", "halving-doubling", "doubling"):
        other = with_communication(result.software, algorithm=name)
        assert forecast(result.workload, ABCI, other, 3456).run.seconds >= result.forecast.run.seconds * (1 - 1e-3)
    # 4 passes of 8 images launch four times the kernels of one pass of 32.
    found = workload("fujitsu-74s", "virtual_workers=8192", "stages.0.images_per_worker=10")
    result = search_settings(found, ABCI, load_software("mxnet-fujitsu"), 2048)
    assert result.workload.stages[0].workers < 8192
    assert result.workload.stages[0].images * result.workload.stages[0].workers == 81920
    assert result.choices[-1].setting == "images a worker"
    found, slow = workload("you-alexnet-11min"), load_cluster("aws-c4.8xlarge")
    result = search_settings(found, slow, load_software("intel-caffe"), 64)
    assert "linear layers" in {choice.setting for choice in result.choices}


def test_what_the_search_finds_for_torusgd_is_what_its_flags_plan() -> None:
    recipe = load_recipe("resnet50").recipe
    found, options = fixed_batch(workload_of(recipe), 64), RuntimeOptions(workers=64)
    result = search_settings(found, ABCI, program_for(recipe, options, ABCI, load_software("torusgd")), 64)
    chosen = {choice.setting: choice.value for choice in result.choices}
    assert chosen.keys() == {"buckets", "update"}
    assert chosen["update"] == "sharded"
    flags = RuntimeOptions(workers=64, buckets=float(chosen["buckets"].removesuffix(" MiB")), update="sharded")
    same = program_for(recipe, flags, ABCI, load_software("torusgd"))
    assert forecast(result.workload, ABCI, same, 64).run.seconds == result.forecast.run.seconds


STEP = StepTime(**{field.name: 0.0 for field in fields(StepTime)} | {"forward": 0.4, "backward": 0.6})


def planned(step: StepTime = STEP, ranks: int = 100, share: int = 1) -> tuple[Workload, Forecast]:
    workload = Workload(ModelCost.__new__(ModelCost), (PlannedStage(10, 4, ranks * share),), 4000, 100, 0)
    run = RunTime(0.0, 10 * step.seconds, 0.0, (step,))
    rate = workload.images / run.training
    return workload, Forecast(ranks, (400,), run, run.seconds, run.seconds, rate, 1.0, 1.0, 0.0, "")


def test_relaxed_forms_gain_by_exponential_delays_and_without_any_nothing_but_the_exchange() -> None:
    """A step of 1 + Exp(1) s on 100 ranks: full 16.2 gradients a second, the best cutoff (69) 31.9."""
    full, cutoff, backup, local = relaxed_forecasts(*planned(), ["cutoff", "backup:4", "local:16"], "exponential")
    harmonic = np.cumsum(1 / np.arange(1, 101))[-1]
    assert full.seconds == pytest.approx(1 + harmonic, rel=0.02)
    assert full.images_per_second == pytest.approx(4 * 16.2, rel=0.02)
    assert cutoff.images_per_second == pytest.approx(4 * 31.9, rel=0.02)
    assert cutoff.share == pytest.approx(0.69, abs=0.03)
    assert (backup.share, local.share) == (0.96, 1)
    assert backup.seconds == pytest.approx(1 + harmonic - (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.02)
    assert 2 < local.seconds < full.seconds
    assert cutoff.speedup == pytest.approx(31.9 / 16.2, rel=0.03)
    step = replace(STEP, exposed=0.5, update=0.1, jitter=0.2)
    full, cutoff, local = relaxed_forecasts(*planned(step, ranks=8, share=2), ["cutoff", "local:5"], "constant:0")
    assert (cutoff.share, cutoff.speedup) == (1, 1)
    assert (full.seconds, local.seconds) == pytest.approx((1.6, 1.6 - 0.5 * 4 / 5))


def test_delays_that_a_run_had_are_what_its_ranks_are_late_by() -> None:
    """Of ten steps one takes 3 s more, at two batches; the first tenth of the run is warm-up."""
    late = [3.0 * (number % 10 == 0) for number in range(50)]
    own = [(50.0, 4)] * 11 + [(1.0 + each, 4) for each in late] + [(2.0 + each, 8) for each in late]
    times = {"data_seconds": 0.1, "sync_seconds": 0.2, "update_seconds": 0.3}
    steps = [{"step_seconds": seconds + sum(times.values()), "batch": batch, **times} for seconds, batch in own]
    delays = measured_delays(steps)
    assert sorted(delays.amounts)[89:91] == pytest.approx([0.0, 3.0])
    full, cutoff = relaxed_forecasts(*planned(ranks=4), ["cutoff"], delays)
    assert full.seconds == pytest.approx(1 + 3 * (1 - 0.9**4), rel=0.03)
    assert cutoff.seconds < full.seconds
    refuses("delays of a short run", measured_delays, steps[:29], about="--delays:")
    refuses("delays of a damaged run", measured_delays, [*steps, {**steps[0], "sync_seconds": -9.0}], about="--delays:")


@pytest.mark.parametrize("form", ["", "gossip", "backup", "backup:100", "local:0", "local:99999999999", "cutoff:3"])
def test_a_wrong_form_is_one_line(form: str) -> None:
    about = f"--synchrony {form}:"
    refuses(f"a planned form: {form}", relaxed_forecasts, *planned(), [form], "exponential", about=about)

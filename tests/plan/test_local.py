"""This machine as a cluster: a measured network and a measured run of one worker."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.messages import refuses
from tests.plan.measured import measured_run, network, timing
from torusgd.comm.tuning.profile import Crowd, Profile
from torusgd.gradients.layout import best_buckets
from torusgd.plan import forecast, load_software, program_for, workload_of
from torusgd.plan.cluster import Cluster, Communication, Software, local_cluster
from torusgd.plan.forecast import Workload, with_communication
from torusgd.plan.model_cost import Routine
from torusgd.plan.program import measured_software
from torusgd.plan.step_script import Send, compose
from torusgd.plan.timeline import phases, step_work
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

RECIPE = load_recipe("digits", ["data.train_images=1000", "data.classes=10"]).recipe


def plan_from(folder: Path, measured: Profile) -> tuple[Workload, Cluster, Software]:
    workload, cluster = workload_of(RECIPE), local_cluster(measured)
    program = program_for(RECIPE, RuntimeOptions(workers=2), cluster, load_software("torusgd"))
    return workload, cluster, measured_software(RECIPE, workload, cluster, program, measured_run(folder, 0.2))


def test_hosts_become_nodes_and_measured_sums_go_before_formulas_on_the_same_ranks() -> None:
    cluster, alone = local_cluster(network((0, 0, 1, 1, 2, 2))), local_cluster(network((0, 0)))
    assert (cluster.devices_per_node, cluster.between.alpha, cluster.inside.alpha) == (2, 1e-3, 1e-5)
    assert (cluster.between.bandwidth, cluster.inside.bandwidth) == pytest.approx((1e8, 1e10))
    assert alone.between == alone.inside
    timings = (timing(4096, "native", 0.05), timing(4096, "ring", 0.03))
    cluster, communication = local_cluster(network((0, 1, 2), timings=timings)), Communication(algorithm="auto")
    assert [phase.seconds for phase in phases(cluster, communication, 3, 4096)] == [pytest.approx(0.03)]
    assert phases(cluster, communication, 8, 4096)[0].seconds != pytest.approx(0.03)


def test_one_worker_is_predicted_as_it_was_measured_and_what_a_step_does_once_is_not_divided(tmp_path: Path) -> None:
    workload, cluster, program = plan_from(tmp_path / "one", network())
    assert forecast(workload, cluster, program, 1).run.steps[0].seconds == pytest.approx(0.2)
    two = forecast(workload, cluster, program, 2).run.steps[0]
    assert two.compute == pytest.approx(0.18 / 2, rel=1e-6)
    assert two.communication > 0
    workload, cluster, program = plan_from(tmp_path / "one", network(crowding=(Crowd(ranks=2, slowdown=1.5),)))
    alone, two = (forecast(workload, cluster, program, n).run.steps[0] for n in (1, 2))
    assert (alone.update, two.update) == pytest.approx((0.02, 1.5 * 0.02))
    assert two.compute == pytest.approx(1.5 * 0.18 / 2)


@pytest.mark.parametrize("routine", [Routine(extra_pass=True), Routine(local_steps=4)], ids=str)
def test_a_run_is_measured_by_its_first_stage_and_its_routine_is_counted_once(tmp_path: Path, routine: Routine) -> None:
    """A later stage of the same batch, as of larger images, takes longer."""
    workload, cluster, run = workload_of(RECIPE), local_cluster(network((0,))), measured_run(tmp_path / "one", 0.2)
    with (run / "events.jsonl").open("a") as lines:
        lines.write(9 * '{"stage": 1, "batch": 96, "step_seconds": 0.9, "update_seconds": 0.02}\n')
    workload = replace(workload, stages=(replace(workload.stages[0], routine=routine),))
    program = measured_software(RECIPE, workload, cluster, load_software("torusgd"), run)
    assert forecast(workload, cluster, program, 1).run.steps[0].seconds == pytest.approx(0.2)


def test_buckets_are_those_that_a_run_rebuilds() -> None:
    sizes = [1 << power for power in (12, 14, 16, 18, 20)]
    timings = tuple(timing(size, name, 1e-5 + 1e-8 * size) for size in sizes for name in ("native", "ring"))
    workload, measured = workload_of(RECIPE), network(timings=timings)
    software, cluster = with_communication(load_software("torusgd"), algorithm="auto"), local_cluster(measured)
    work = step_work(workload.cost, cluster, software, 2, 16)

    def sent(software: Software) -> list[float]:
        script = compose(workload.cost, cluster, software, 2, 16, 1, work)
        return [action.bytes for action in script if isinstance(action, Send) and action.content == "gradients"]

    numels = [gradient.values for gradient in workload.cost.gradients]
    rebuilt = best_buckets(measured, numels, (work.ready - work.backward).tolist())
    assert sent(software) == [4 * bucket.length for bucket in rebuilt]
    assert len(rebuilt) > 1 == len(sent(with_communication(software, algorithm="ring")))


def test_a_band_holds_the_steps_of_the_run_that_was_measured(tmp_path: Path) -> None:
    workload, cluster, quiet = plan_from(tmp_path / "one", network())
    measured_run(tmp_path / "one", 0.2, disturbed=(1.0, 2.5, 1.0, 0.5))
    disturbed = measured_software(RECIPE, workload, cluster, load_software("torusgd"), tmp_path / "one")
    assert quiet.quartiles == (0.2, 0.2)
    assert disturbed.quartiles == pytest.approx((0.175, 0.275))
    bands = [forecast(workload, cluster, each, 1) for each in (quiet, disturbed)]
    reach = [each.high / each.run.seconds for each in bands]
    assert reach[0] < 1.3
    assert 0.455 / 0.2 < reach[1] < 2.5


WRONG: dict[str, dict[str, Any]] = {
    "of two workers": {"ranks": 2}, "too short": {"batch": 50}, "shrunk to one worker": {"more": {"sync_seconds": 0.1}},
    "of portable arithmetic": {"recipe": "digits-portable"}, "of another network": {"changes": ["model.options={}"]},
    "with other images": {"changes": ["data.augment.noise=0.1"]}, "with negative times": {"disturbed": (-1.0,) * 4},
    "with longer updates than steps": {"update": 0.3}, "with times that are none": {"disturbed": (math.nan,) * 4},
    "with text for times": {"more": {"step_seconds": "x"}}, "without times": {"disturbed": (0.0,) * 4, "update": 0.0},
    "with an average": {"changes": ["average={half_life: 1ep}"]}, "with a clip": {"changes": ["clip_grad_norm=1.0"]},
}  # fmt: skip


def test_runs_that_can_not_be_planned_from(tmp_path: Path) -> None:
    plan = partial(
        measured_software, RECIPE, workload_of(RECIPE), local_cluster(network((0,))), load_software("torusgd")
    )
    for name, change in WRONG.items():
        folder = measured_run(tmp_path / "one", 0.2, **change)
        refuses(f"a measured run {name}", plan, folder, about=f"measured run {folder}:", TMP=tmp_path)
    graphs = measured_run(tmp_path / "one", 0.2, update=0.0)
    words = "a measured run of CUDA graphs", plan, graphs
    refuses(*words, takes_graphs=False, about=f"measured run {graphs}:", TMP=tmp_path)
    assert plan(graphs).measured_on
    assert plan(
        measured_run(tmp_path / "one", 0.2, changes=["seed=7", "rate.lr=1.0", "stages.0.until=9ep"])
    ).measured_on
    refuses("a measured run that is none", plan, tmp_path, about=f"measured run {tmp_path}:", TMP=tmp_path)

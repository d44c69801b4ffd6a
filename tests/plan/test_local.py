"""This machine as a cluster: a measured network and a measured run of one worker."""

import json
from pathlib import Path

import pytest
from tests.messages import refused

from torusgd.comm.tuning.profile import Crowd, Link, Profile, Timing
from torusgd.gradients.layout import best_buckets
from torusgd.plan import forecast, load_software, program_for, workload_of
from torusgd.plan.cluster import Communication, Software, local_cluster
from torusgd.plan.forecast import with_communication
from torusgd.plan.network import phases
from torusgd.plan.program import measured_software
from torusgd.plan.step_script import Send, compose
from torusgd.plan.timeline import step_work
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

LINK = Link(latency=1e-3, latency_error=0.0, per_byte=1e-8, per_byte_error=0.0)
FAST = Link(latency=1e-5, latency_error=0.0, per_byte=1e-10, per_byte_error=0.0)


def profile(hosts: tuple[int, ...], timings: tuple[Timing, ...] = ()) -> Profile:
    inside = FAST if len(set(hosts)) < len(hosts) else None
    between = LINK if len(set(hosts)) > 1 else None
    return Profile(backend="gloo", hosts=hosts, message=1e-5, inside=inside, between=between, timings=timings)


def run(folder: Path, batch: int, seconds: float, world_size: int = 1, update: float = 0.02) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"world_size": world_size}))
    lines = [
        {"step": n, "batch": batch, "step_seconds": 9.0 if n == 1 else seconds, "update_seconds": update}
        for n in range(1, 6)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"event": "evaluation"}]))
    return folder


def test_hosts_and_links_become_nodes_and_links() -> None:
    cluster = local_cluster(profile((0, 0, 1, 1, 2, 2)))
    assert cluster.devices_per_node == 2
    assert (cluster.between.alpha, cluster.between.bandwidth) == (1e-3, pytest.approx(1e8))
    assert (cluster.inside.alpha, cluster.inside.bandwidth) == (1e-5, pytest.approx(1e10))
    assert local_cluster(profile((0, 0))).between == local_cluster(profile((0, 0))).inside


def test_measured_sums_go_before_formulas_on_the_same_ranks() -> None:
    timings = tuple(
        Timing(size=size, algorithm=name, grid=None, chunks=1, median=median)
        for size, name, median in ((4096, "native", 0.05), (4096, "ring", 0.03))
    )
    cluster, communication = local_cluster(profile((0, 1, 2), timings)), Communication(algorithm="auto")
    assert [phase.seconds for phase in phases(cluster, communication, 3, 4096)] == [pytest.approx(0.03)]
    assert phases(cluster, communication, 8, 4096)[0].seconds != pytest.approx(0.03)


def test_one_worker_is_predicted_as_it_was_measured(tmp_path: Path) -> None:
    recipe = load_recipe("digits", ["data.train_images=1000", "data.classes=10"]).recipe
    workload, cluster = workload_of(recipe), local_cluster(profile((0, 1)))
    folder = run(tmp_path / "one", batch=96, seconds=0.2)
    program = program_for(recipe, RuntimeOptions(workers=2), cluster, load_software("torusgd"))
    program = measured_software(workload, cluster, program, folder)
    assert forecast(workload, cluster, program, 1).steps[0].seconds == pytest.approx(0.2)
    two = forecast(workload, cluster, program, 2).steps[0]
    assert two.compute == pytest.approx(0.18 / 2, rel=1e-6)
    assert two.communication > 0


def test_buckets_are_those_that_a_run_rebuilds() -> None:
    timings = tuple(
        Timing(size=1 << power, algorithm=name, grid=None, chunks=1, median=1e-5 + 1e-8 * (1 << power))
        for power in (12, 14, 16, 18, 20)
        for name in ("native", "ring")
    )
    workload = workload_of(load_recipe("digits", ["data.train_images=1000", "data.classes=10"]).recipe)
    measured, software = profile((0, 1), timings), with_communication(load_software("torusgd"), algorithm="auto")
    cluster = local_cluster(measured)
    work = step_work(workload.cost, cluster, software, 2, 16)

    def sent(software: Software) -> list[float]:
        script = compose(workload.cost, cluster, software, 2, 16, 1, work)
        return [action.bytes for action in script if isinstance(action, Send) and action.content == "gradients"]

    numels = [gradient.values for gradient in workload.cost.gradients]
    rebuilt = best_buckets(measured, numels, (work.ready - work.backward).tolist())
    assert sent(software) == [4 * bucket.length for bucket in rebuilt]
    assert len(rebuilt) > 1 == len(sent(with_communication(software, algorithm="ring")))


def test_what_a_step_does_once_is_divided_by_no_number_of_ranks_and_is_crowded(tmp_path: Path) -> None:
    recipe = load_recipe("digits", ["data.train_images=1000", "data.classes=10"]).recipe
    crowded = profile((0, 1)).model_copy(update={"crowding": (Crowd(ranks=2, slowdown=1.5),)})
    workload, cluster = workload_of(recipe), local_cluster(crowded)
    folder = run(tmp_path / "one", batch=96, seconds=0.2)
    program = program_for(recipe, RuntimeOptions(workers=2), cluster, load_software("torusgd"))
    program = measured_software(workload, cluster, program, folder)
    alone, two = (forecast(workload, cluster, program, n).steps[0] for n in (1, 2))
    assert (alone.update, two.update) == (pytest.approx(0.02), pytest.approx(1.5 * 0.02))
    assert two.compute == pytest.approx(1.5 * 0.18 / 2)


@pytest.mark.parametrize(
    ("batch", "world_size", "name"), [(96, 2, "a measured run of two workers"), (50, 1, "a measured run too short")]
)
def test_runs_that_can_not_be_planned_from(tmp_path: Path, batch: int, world_size: int, name: str) -> None:
    recipe = load_recipe("digits", ["data.train_images=1000", "data.classes=10"]).recipe
    folder = run(tmp_path / "one", batch, 0.2, world_size)
    with refused(name, f"measured run {folder}:", TMP=tmp_path):
        measured_software(workload_of(recipe), local_cluster(profile((0,))), load_software("torusgd"), folder)
    with refused("a measured run that is none", f"measured run {tmp_path}:", TMP=tmp_path):
        measured_software(workload_of(recipe), local_cluster(profile((0,))), load_software("torusgd"), tmp_path)

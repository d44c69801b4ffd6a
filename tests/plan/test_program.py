"""What is planned: a software profile with what the recipe and the runtime options say of it."""

from typing import Any

import pytest

from tests.messages import refused
from torusgd.plan import as_torusgd, load_cluster, load_software, program_for, step_time
from torusgd.plan.cluster import Buckets, Cluster, Software
from torusgd.plan.forecast import Workload, workload_of
from torusgd.plan.program import resolve_model_parallel
from torusgd.plan.step_script import Send, compose
from torusgd.plan.timeline import step_work
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe

VGG = load_recipe("intel-aws-vgga-16").recipe
ABCI, AWS = load_cluster("abci"), load_cluster("aws-c4.8xlarge")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workload_of(VGG)


def program(software: str = "torusgd", cluster: Cluster = ABCI, recipe: Recipe = VGG, **options: object) -> Software:
    runtime = RuntimeOptions.model_validate({"workers": 16, **options})
    return program_for(recipe, runtime, cluster, load_software(software))


def test_the_profile_torusgd_has_the_defaults_of_the_runtime_options() -> None:
    defaults = RuntimeOptions(workers=16).model_dump(exclude={"software"})
    assert program(**defaults) == program()


def test_messages_of_a_gpu_follow_each_other_and_those_of_other_programs_stay() -> None:
    found = [
        program(name, where).communication.pipelined for name in ("torusgd", "mxnet-fujitsu") for where in (ABCI, AWS)
    ]
    assert found == [False, True, True, True]


def test_a_portable_step_takes_two_and_a_half_times_float32s() -> None:
    changes = ("virtual_workers=16", "data.source=mnist")
    recipes = (load_recipe("fashion", [*changes, f"precision={each}"]).recipe for each in ("float32", "portable"))
    plain, own = (program(recipe=recipe) for recipe in recipes)
    assert (own.precision, plain.math / own.math, own.launch / plain.launch) == ("float32", 2.5, 2.5)


def test_a_published_profile_keeps_what_the_user_does_not_give() -> None:
    published = load_software("pcl-dnn")
    kept = program("pcl-dnn")
    assert kept.communication == published.communication
    assert (kept.sharded_update, kept.weights_first) == (True, True)
    changed = program("pcl-dnn", update="replicated", model_parallel=1)
    assert (changed.sharded_update, changed.communication.linear_groups) == (False, None)
    assert changed.communication.buckets == published.communication.buckets


def test_options_mean_what_they_mean_in_a_run() -> None:
    ours = program(allreduce="torus:halving/ring", buckets=2.0, update="sharded", model_parallel=4)
    how = ours.communication
    assert (how.algorithm, how.grids) == ("torus:halving/ring", ((4, 4),))
    assert how.buckets == Buckets(rule="torusgd", option=2.0)
    assert (ours.sharded_update, how.gather_ahead, how.linear_groups) == (True, True, 4)


def test_further_streams_make_a_link_quicker_that_one_connection_does_not_fill(workload: Workload) -> None:
    slow = AWS.model_copy(update={"between": AWS.between.model_copy(update={"stream": AWS.between.bandwidth / 8})})

    def seconds(streams: int, cluster: Cluster) -> float:
        profile = program(cluster=cluster, allreduce="ring", streams=streams)
        return step_time(workload.cost, cluster, profile, 16, 16).seconds

    one, four, many = (seconds(streams, slow) for streams in (1, 4, 64))
    assert one > four > many == seconds(1, AWS)


def test_exact_sums_of_many_virtual_workers_have_twice_the_bytes(workload: Workload) -> None:
    recipes = (VGG.model_copy(update={"virtual_workers": count, "reduction": "exact"}) for count in (8191, 8192))
    few, many = (program(recipe=recipe, workers=64, update="sharded") for recipe in recipes)
    assert (few.communication.wire_bits, many.communication.wire_bits) == (32, 64)
    cost, work = workload.cost, step_work(workload.cost, ABCI, few, 64, 1)

    def sent(program: Software, content: str) -> float:
        script = compose(cost, ABCI, program, 64, 1, 1, work)
        return sum(send.bytes for send in script if isinstance(send, Send) and send.content == content)

    assert sent(many, "gradients") == 2 * sent(few, "gradients") > 0
    assert sent(many, "weights") == sent(few, "weights") > 0


@pytest.mark.parametrize(
    ("cluster", "devices", "grid"), [(ABCI, 16, (4, 4)), (ABCI, 24, (6, 4)), (ABCI, 4, (2, 2)), (AWS, 12, (3, 4))]
)
def test_a_torus_without_a_grid_has_nodes_by_devices_a_node_else_the_squarest(cluster, devices, grid) -> None:
    assert program(cluster=cluster, workers=devices, allreduce="torus").communication.grids == (grid,)


def test_a_rehearsal_has_the_compute_of_a_profile_and_the_messages_of_torusgd() -> None:
    profile, own = load_software("pcl-dnn"), load_software("torusgd")
    ours = as_torusgd(profile)
    assert (ours.math, ours.memory, ours.launch) == (profile.math, profile.memory, profile.launch)
    assert (ours.sharded_update, ours.weights_first, ours.norm_group) == (False, False, 1)
    costs = {"message", "contention"}
    assert ours.communication.model_dump(exclude=costs) == own.communication.model_dump(exclude=costs)
    assert ours.communication.message == profile.communication.message > 0


def test_auto_takes_the_model_parallel_ranks_of_the_shortest_step(workload: Workload) -> None:
    profile = as_torusgd(load_software("pcl-dnn"))

    def seconds(ranks: int) -> float:
        runtime = RuntimeOptions(workers=16, allreduce="ring", model_parallel=ranks)
        return step_time(workload.cost, AWS, program_for(VGG, runtime, AWS, profile), 16, 16).seconds

    auto = RuntimeOptions(workers=16, allreduce="ring", model_parallel="auto")
    chosen = resolve_model_parallel(VGG, workload, auto, AWS, profile).model_parallel
    times = {ranks: seconds(ranks) for ranks in (1, 2, 4, 8, 16)}
    assert isinstance(chosen, int)
    assert times[chosen] == min(times.values()) < 0.8 * times[1]
    blocks = VGG.model_copy(update={"column_blocks": 2})
    assert resolve_model_parallel(blocks, workload, auto, AWS, profile).model_parallel == 2
    four = auto.model_copy(update={"model_parallel": 4})
    assert resolve_model_parallel(VGG, workload, four, AWS, profile) is four


WRONG: dict[str, dict[str, Any]] = {
    "--allreduce magic:": {"allreduce": "magic"}, "--allreduce ring:halving:": {"allreduce": "ring:halving"},
    "allreduce torus:magic:": {"allreduce": "torus:magic"}, "--model-parallel 3:": {"model_parallel": 3},
    "--grid 4x4:": {"grid": "4x4"}, "--grid 4x3:": {"grid": "4x3", "allreduce": "torus"},
}  # fmt: skip


def test_what_does_not_fit_is_one_line() -> None:
    for about, options in WRONG.items():
        with refused(f"a plan with {about}", about):
            program(**options)

"""What is planned: files of clusters, and a software profile with what recipe and runtime options say of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.messages import refuses
from tests.plan.measured import VGG, vgg
from torusgd.plan import as_torusgd, load_cluster, load_software, program_for, step_time
from torusgd.plan import cluster as files
from torusgd.plan.cluster import Buckets, Cluster, Software, calibrated, tree_of
from torusgd.plan.program import resolve_model_parallel
from torusgd.plan.step_script import Send, compose
from torusgd.plan.timeline import step_work
from torusgd.recipe.load import load_recipe, parse_yaml
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe

ABCI, AWS = load_cluster("abci"), load_cluster("aws-c4.8xlarge")


def program(software: str = "torusgd", cluster: Cluster = ABCI, recipe: Recipe = VGG, **options: object) -> Software:
    runtime = RuntimeOptions.model_validate({"workers": 16, **options})
    return program_for(recipe, runtime, cluster, load_software(software))


def test_the_profile_torusgd_has_a_runs_defaults_pipelines_but_on_a_gpu_and_is_slower_where_portable() -> None:
    assert program(**RuntimeOptions(workers=16).model_dump(exclude={"software"})) == program()
    found = [
        program(name, where).communication.pipelined for name in ("torusgd", "mxnet-fujitsu") for where in (ABCI, AWS)
    ]
    assert found == [False, True, True, True]
    changes = ("virtual_workers=16", "data.source=mnist")
    recipes = (load_recipe("fashion", [*changes, f"precision={each}"]).recipe for each in ("float32", "portable"))
    plain, own = (program(recipe=recipe) for recipe in recipes)
    assert (own.precision, plain.math / own.math, own.launch / plain.launch) == ("float32", 2.5, 2.5)


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [("hgx-h100", "bfloat16"), ("abci", "float16"), ("p100-fdr", "float16"), ("aws-c5.18xlarge", "float32")],
)
def test_auto_is_planned_as_the_precision_that_a_run_takes_there(cluster: str, precision: str) -> None:
    where, recipe = load_cluster(cluster), load_recipe("resnet50").recipe
    assert recipe.precision == "auto"
    assert program(recipe=recipe, cluster=where).precision == precision
    plain = load_recipe("resnet50", ["precision=float32"]).recipe
    assert program(recipe=plain, cluster=where).precision == "float32"
    assert program("mxnet-v30", recipe=recipe, cluster=where).precision == "float16"  # a published program's own


def test_a_device_without_a_peak_of_the_precision_is_refused() -> None:
    refuses("a plan in a precision without a peak", ABCI.device.peak_of, "bfloat16", about="V100-SXM2-16GB:")


def test_an_optimizers_state_and_averages_take_memory_and_time() -> None:
    changes = [[], ["optimizer={name: adamw}"], ["optimizer={name: adamw}", "average={half_life: 1ep}"]]
    sgd, adam, averaged = (program(recipe=load_recipe("fashion", each).recipe) for each in changes)
    assert [each.held_values for each in (sgd, adam, averaged)] == [2, 3, 4]
    assert [each.update_bytes for each in (sgd, adam, averaged)] == [24, 32, 40]


def test_options_mean_what_they_mean_in_a_run_and_a_published_profile_keeps_what_is_not_given() -> None:
    ours = program(allreduce="torus:halving/ring", buckets=2.0, update="sharded", model_parallel=4)
    how = ours.communication
    assert (how.algorithm, how.grids) == ("torus:halving/ring", ((4, 4),))
    assert how.buckets == Buckets(rule="torusgd", option=2.0)
    assert (ours.sharded_update, how.gather_ahead, how.linear_groups) == (True, True, 4)
    published = load_software("pcl-dnn")
    kept = program("pcl-dnn")
    assert kept.communication == published.communication
    assert (kept.sharded_update, kept.weights_first) == (True, True)
    changed = program("pcl-dnn", update="replicated", model_parallel=1)
    assert (changed.sharded_update, changed.communication.linear_groups) == (False, None)
    assert changed.communication.buckets == published.communication.buckets
    profile, own = load_software("pcl-dnn"), load_software("torusgd")
    ours = as_torusgd(profile)
    assert (ours.math, ours.memory, ours.launch) == (profile.math, profile.memory, profile.launch)
    assert (ours.sharded_update, ours.weights_first, ours.norm_group) == (False, False, 1)
    costs = {"message", "contention"}
    assert ours.communication.model_dump(exclude=costs) == own.communication.model_dump(exclude=costs)
    assert ours.communication.message == profile.communication.message > 0


def test_further_streams_make_a_link_quicker_that_one_connection_does_not_fill() -> None:
    slow = AWS.model_copy(update={"between": AWS.between.model_copy(update={"stream": AWS.between.bandwidth / 8})})

    def seconds(streams: int, cluster: Cluster) -> float:
        profile = program(cluster=cluster, allreduce="ring", streams=streams)
        return step_time(vgg().cost, cluster, profile, 16, 16).seconds

    one, four, many = (seconds(streams, slow) for streams in (1, 4, 64))
    assert one > four > many == seconds(1, AWS)


def test_exact_sums_of_many_virtual_workers_have_twice_the_bytes() -> None:
    recipes = (VGG.model_copy(update={"virtual_workers": count, "reduction": "exact"}) for count in (8191, 8192))
    few, many = (program(recipe=recipe, workers=64, update="sharded") for recipe in recipes)
    assert (few.communication.wire_bits, many.communication.wire_bits) == (32, 64)
    cost, work = vgg().cost, step_work(vgg().cost, ABCI, few, 64, 1)

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


def test_auto_takes_the_model_parallel_ranks_of_the_shortest_step() -> None:
    workload, profile = vgg(), as_torusgd(load_software("pcl-dnn"))

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
        refuses(f"a plan with {about}", program, **options, about=about)


MINE = """
{name: mine, source: my own, backend: nccl, devices_per_node: 4, inside: {alpha: 10e-6, bandwidth: 25e9},
 device: {name: L40S, peak: {bfloat16: 362e12, float32: 91e12}, memory_bandwidth: 864e9, memory: 48e9},
 between: {alpha: 30e-6, bandwidth: 3.1e9}}
"""


def test_clusters_and_profiles_that_ship_say_where_they_come_from_and_calibration_multiplies_stated_values() -> None:
    for name in files.names_in("clusters"):
        cluster = load_cluster(name)
        assert (cluster.name, len(cluster.source) > 60) == (name, True)
    for name in files.names_in("software"):
        software = load_software(name)
        ours = name.startswith("torusgd")
        assert (software.name, software.program is None, len(software.source) > 60) == (name, ours, True)
        assert 0 < software.error < 0.5
    tree = tree_of("software", "nnl-fp16")
    ones = {parameter.name: 1.0 for parameter in files.load_parameters()}
    assert calibrated("software", "nnl-fp16", tree, ones) == tree
    twice = calibrated("software", "nnl-fp16", tree, {**ones, "nnl": 2.0})
    assert (twice["math"], twice["launch"]) == (2 * tree["math"], tree["launch"])
    assert tree == tree_of("software", "nnl-fp16")


WRONG_KEYS: dict[str, dict[str, object]] = {
    "device": {"device": None}, "devices_per_node = 0:": {"devices_per_node": 0}, "bandwith:": {"bandwith": 1},
    "taper = 2.0:": {"taper": 2.0}, "speeds.1 = 1e-09:": {"speeds": [1.0, 1e-9]},
    "between.bandwidth:": {"between": {"alpha": 1e-6}},
    "between.alpha = -1.0:": {"between": {"alpha": -1.0, "bandwidth": 1e9}},
    'inside.bandwidth = "fast":': {"inside": {"alpha": 1e-6, "bandwidth": "fast"}},
    "between.alpha = 1000000000.0:": {"between": {"alpha": 1e9, "bandwidth": 1e9}},
    "between.bandwidth = 1.0:": {"between": {"alpha": 1e-6, "bandwidth": 1.0}},
    "inside.efficiency = 1e-09:": {"inside": {"alpha": 1e-6, "bandwidth": 1e9, "efficiency": 1e-9}},
}  # fmt: skip

WRONG_OF_SOFTWARE: dict[str, dict[str, object]] = {
    "jitter = 1000000.0": {"jitter": 1e6}, "error = 1000000.0": {"error": 1e6}, "start": {"start": {}},
    "input_rate = 1e-308": {"input_rate": 1e-308}, "update_bytes = 1e+300": {"update_bytes": 1e300},
    "communication.statistic_bytes = 1e+300": {"communication": {"statistic_bytes": 1e300}},
    "evaluation.seconds = 1e+300": {"evaluation": {"seconds": 1e300}}, "name": {"name": "red \x1b[31m"},
}  # fmt: skip


def test_wrong_keys_and_names_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for key, change in WRONG_KEYS.items():
        path.write_text(yaml.safe_dump({**parse_yaml(MINE, "mine"), **change}))
        refuses(f"a cluster: {key}", load_cluster, str(path), about=f"cluster {path}: {key}", TMP=tmp_path)
    for name in ("abic", "no/such.yaml", "local"):  # files that are no mapping: tests/recipe/test_recipe.py
        refuses(f"no cluster {name}", load_cluster, name, about=f"cluster {name}:")
    refuses("no software zzz", load_software, "zzz", about="software zzz:")
    for key, value in WRONG_OF_SOFTWARE.items():
        path.write_text(yaml.safe_dump({"name": "mine", "source": "my own", **value}))
        refuses(f"a profile: {key}", load_software, str(path), about=f"software {path}: {key}", TMP=tmp_path)

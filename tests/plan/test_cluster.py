"""Cluster files and software profiles: those that ship, and mistakes in a user's own, one line with the key."""

from pathlib import Path

import yaml

from tests.messages import refused
from torusgd.plan import cluster as files
from torusgd.plan.cluster import calibrated, load_cluster, load_software, tree_of
from torusgd.recipe.load import parse_yaml

CLUSTERS = [
    *("abci", "aws-c4.8xlarge", "cori", "dgx-a100", "dgx1", "dgx2h", "endeavor", "hgx-a100-80gb", "hgx-h100"),
    *("p100-50gbe", "p100-fdr", "p40-100gbe", "stampede2-knl", "stampede2-skx", "v100-10gbe"),
]

MINE = """
name: mine
source: my own
backend: nccl
device: {name: L40S, peak: {bfloat16: 362e12, float32: 91e12}, memory_bandwidth: 864e9, memory: 48e9}
devices_per_node: 4
inside: {alpha: 10e-6, bandwidth: 25e9}
between: {alpha: 30e-6, bandwidth: 3.1e9}
"""


def test_the_clusters_of_the_published_results_ship_and_they_and_every_profile_say_where_they_come_from() -> None:
    assert files.cluster_names() == sorted(CLUSTERS)
    for name in files.cluster_names():
        cluster = load_cluster(name)
        assert (cluster.name, len(cluster.source) > 60) == (name, True)
    for name in files.software_names():
        software = load_software(name)
        assert (software.name, software.program is None, len(software.source) > 60) == (name, name == "torusgd", True)
        assert 0 < software.error < 0.5


def test_calibration_multiplies_stated_values_only() -> None:
    tree = tree_of("software", "nnl-fp16")
    ones = {parameter.name: 1.0 for parameter in files.load_parameters()}
    assert calibrated("software", "nnl-fp16", tree, ones) == tree
    twice = calibrated("software", "nnl-fp16", tree, {**ones, "nnl": 2.0})
    assert (twice["math"], twice["launch"]) == (2 * tree["math"], tree["launch"])
    assert tree == tree_of("software", "nnl-fp16")


WRONG: dict[str, dict[str, object]] = {
    "device": {"device": None}, "devices_per_node = 0:": {"devices_per_node": 0}, "bandwith:": {"bandwith": 1},
    "taper = 2.0:": {"taper": 2.0}, "speeds.1 = 1e-09:": {"speeds": [1.0, 1e-9]},
    "between.bandwidth:": {"between": {"alpha": 1e-6}},
    "between.alpha = -1.0:": {"between": {"alpha": -1.0, "bandwidth": 1e9}},
    'inside.bandwidth = "fast":': {"inside": {"alpha": 1e-6, "bandwidth": "fast"}},
    "between.alpha = 1000000000.0:": {"between": {"alpha": 1e9, "bandwidth": 1e9}},
    "between.bandwidth = 1.0:": {"between": {"alpha": 1e-6, "bandwidth": 1.0}},
    "inside.efficiency = 1e-09:": {"inside": {"alpha": 1e-6, "bandwidth": 1e9, "efficiency": 1e-9}},
}  # fmt: skip


def test_wrong_keys_and_names_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for key, change in WRONG.items():
        path.write_text(yaml.safe_dump({**parse_yaml(MINE, "mine"), **change}))
        with refused(f"a cluster: {key}", f"cluster {path}: {key}", TMP=tmp_path):
            load_cluster(str(path))
    for name in ("abic", "no/such.yaml", "local"):  # files that are no mapping: tests/recipe/test_recipe.py
        with refused(f"no cluster {name}", f"cluster {name}:"):
            load_cluster(name)
    with refused("no software zzz", "software zzz:"):
        load_software("zzz")

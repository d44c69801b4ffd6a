"""The benchmark of all-reduces: a record for each algorithm and size, the same on all ranks."""

import json
from pathlib import Path

import pytest
from tests.comm.gloo_world import run_ranks, write_profile
from tests.messages import refused

from torusgd.comm.algorithms import NAMES
from torusgd.comm.tuning.bench import Record, bench_allreduce
from torusgd.errors import UserError

SIZES = (4, 4096, 100_000)


def records(profile: Path) -> list[dict]:
    return [record.as_dict() for record in bench_allreduce(SIZES, repetitions=3, profile=profile)]


def test_a_record_for_each_algorithm_and_size_alike_on_all_ranks(tmp_path):
    first, *others = run_ranks(4, records, write_profile(tmp_path, 4))
    assert others == [first] * 3
    assert json.loads(json.dumps(first)) == first
    assert [(r["bytes"], r["algorithm"]) for r in first] == [(size, name) for size in SIZES for name in NAMES]
    for record in first:
        assert record["ranks"] == 4
        assert record["n"] == 3
        assert 0 < record["min_s"] <= record["median_s"] <= record["max_s"]
        if record["algorithm"] in ("torus", "hierarchical"):
            assert record["grid"] == [2, 2]
        if record["algorithm"] in ("native", "ring"):
            assert record["grid"] is None


def mistakes() -> list[str]:
    told = []
    for options in ({"sizes": [3]}, {"algorithms": ["tree"]}, {"algorithms": ["torus"], "grid": (3, 3)}):
        try:
            bench_allreduce(**options)
        except UserError as error:
            told.append(str(error))
    return told


def test_mistakes_are_told():
    for told in run_ranks(2, mistakes):
        assert [line.split(":")[0] for line in told] == ["sizes 3", "allreduce tree", "grid 3x3"]
    with refused("a benchmark of one rank", "bench allreduce"):
        bench_allreduce()


def test_bus_bandwidth():
    record = Record("ring", 1000, 4, None, "ring", 1e-3, 1e-3, 1e-3, 5)
    assert record.bus_bandwidth == pytest.approx(1.5e6)

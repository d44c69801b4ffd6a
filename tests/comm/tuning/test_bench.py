"""The benchmark of all-reduces: a record for each algorithm and size, the same on all ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.comm.gloo_world import on_ranks, run_ranks, write_profile
from tests.messages import refused

from torusgd.comm.algorithms import NAMES
from torusgd.comm.tuning.bench import Record, bench_allreduce
from torusgd.errors import UserError

SIZES = (4, 4096, 100_000)


def records(profile: Path) -> list[dict]:
    return json.loads(json.dumps([asdict(record) for record in bench_allreduce(SIZES, repetitions=3, profile=profile)]))


def test_a_record_for_each_algorithm_and_size_alike_on_all_ranks(tmp_path):
    first, *others = run_ranks(4, records, write_profile(tmp_path, 4))
    assert others == [first] * 3
    assert [(r["bytes"], r["algorithm"]) for r in first] == [(size, name) for size in SIZES for name in NAMES]
    for record in first:
        assert (record["ranks"], record["n"]) == (4, 3)
        assert 0 < record["min_s"] <= record["median_s"] <= record["max_s"]
        if record["algorithm"] in ("torus", "hierarchical"):
            assert record["grid"] == [2, 2]
        if record["algorithm"] in ("native", "ring"):
            assert record["grid"] is None


@on_ranks(2)
def test_mistakes_are_told():
    wrong: dict[str, dict[str, Any]] = {
        "sizes 3": {"sizes": [3]},
        "allreduce tree": {"algorithms": ["tree"]},
        "grid 3x3": {"algorithms": ["torus"], "grid": (3, 3)},
    }
    for about, options in wrong.items():
        with pytest.raises(UserError, match=f"^{about}:"):
            bench_allreduce(**options)


def test_of_one_rank_there_is_nothing_to_measure():
    with refused("a benchmark of one rank", "bench allreduce"):
        bench_allreduce()


def test_bus_bandwidth():
    record = Record("ring", 1000, 4, None, "ring", 1e-3, 1e-3, 1e-3, 5)
    assert record.bus_bandwidth == pytest.approx(1.5e6)

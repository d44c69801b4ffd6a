"""Hybrid parallelism sends what Das et al.'s formula says, at the interfaces of emulated hosts."""

import json
import runpy
from pathlib import Path

import pytest

from tests.rehearse.marks import needs_lab
from torusgd.rehearse.lab import Host, Lab

pytestmark = needs_lab
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "hybrid.py"


@pytest.mark.slow
def test_bytes_are_those_of_the_formula():
    program = runpy.run_path(str(PROGRAM))
    ranks, images, parts = 4, 48, "1,2,4"
    with Lab([Host(latency=0.0005, rate=4e9)] * ranks) as lab:
        told = lab.run(
            [str(PROGRAM), "--rank", "--images", str(images), "--model-parallel", parts, "--repetitions", "1"],
            timeout=240,
        )[0]
    line = next(line for line in told.splitlines() if line.startswith("told: "))
    found = {record["model_parallel"]: record["bytes"] for record in json.loads(line.removeprefix("told: "))}
    want = {m: program["volume"](ranks, images, m) for m in found}
    assert set(found) == {1, 2, 4}
    for m, sent in found.items():
        assert sent == pytest.approx(want[m], rel=0.05), (found, want)

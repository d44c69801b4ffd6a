"""Hybrid parallelism sends what Das et al.'s formula says, at the interfaces of emulated hosts."""

import json

import pytest
from benchmarks.rehearse.hybrid import volume

from tests.rehearse.marks import needs_lab
from torusgd.rehearse.lab import Host, Lab

pytestmark = needs_lab


@pytest.mark.slow
def test_bytes_are_those_of_the_formula():
    ranks, images = 4, 48
    words = ["--rank", "--images", str(images), "--model-parallel", "1,2,4", "--repetitions", "1"]
    with Lab([Host(latency=0.0005, rate=4e9)] * ranks) as lab:
        told = lab.run(["-m", "benchmarks.rehearse.hybrid", *words], timeout=240)[0]
    line = next(line for line in told.splitlines() if line.startswith("told: "))
    found = {record["model_parallel"]: record["bytes"] for record in json.loads(line.removeprefix("told: "))}
    assert found == {m: pytest.approx(volume(ranks, images, m), rel=0.05) for m in (1, 2, 4)}

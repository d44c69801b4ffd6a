"""Triton's kernels compile for GPUs that are not here, and their assembly rounds as they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the extra triton")

ELEMENTS_OF_A_THREAD = 32
"""4,096 of a block over 128 threads"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_and_join_no_more_roundings_than_foreach(capability: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    ran = subprocess.run(
        [sys.executable, script, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert {kind for _, _, kind in lines} == {"exact"}
    fused = [int(count) // ELEMENTS_OF_A_THREAD for name, count, _ in lines if name == "_momentum"]
    # SGD: decay and step; Nesterov: the look ahead too; every variant of LARS: decay alone; then SGD without momentum.
    assert fused == [2, 3, *[1] * (len(fused) - 3), 2]
    assert {count for name, count, _ in lines if name in ("_follow", "_mean", "_add_statistics", "_rates")} == {"0"}

"""A run in a real Slurm, on two nodes, that is queued again at its time limit: the same hash as without."""

import json
import sys
from pathlib import Path

import pytest
from tests.train.runs import TINY, sets, train

from .slurm_cluster import ask, can_run, slurm_cluster, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_run(), reason="needs root and Debian's slurm-wlm"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "train.sh"
PICTURES = "image_size: 8, channels: 1, mean: [0.5], std: [0.25]"


def settings(pause: float) -> list[str]:
    """800 steps of 12 images on two ranks, each image after so many seconds: with 0.02 more than one job has."""
    source = f"data={{source: 'tests.train.slow:Slow', options: {{pause: {pause}}}, {PICTURES}}}"
    stages = "stages=[{until: 800st, images_per_worker: 3}]"
    return sets(*TINY, source, stages, "evaluate.every=null")


def test_queued_again_at_the_time_limit(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "job.log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torusgd").write_text(f'#!/bin/sh\nexec {sys.executable} -m torusgd "$@"\n')
    (tmp_path / "bin" / "torusgd").chmod(0o755)
    with slurm_cluster(tmp_path / "slurm") as environment:
        environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
        given = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--overcommit"]
        # The signal may come a minute before its time, so 30 to 90 s after the start.
        given += ["--time=2", "--signal=USR1@30", f"--output={log}"]
        job = ask(
            environment, "sbatch", "--parsable", *given, str(EXAMPLE), "digits", *settings(0.02), "--out", str(out)
        )
        assert job.isdigit(), job

        def state() -> str:
            return ask(environment, "squeue", "-h", "-j", job, "-o", "%T")

        wait_until(lambda: state() in ("COMPLETED", "FAILED", ""), 600, "the job is done")
        record = ask(environment, "scontrol", "show", "job", job)
    assert (out / "summary.json").exists(), log.read_text() + record
    summary = json.loads((out / "summary.json").read_text())
    assert "Restarts=0" not in record, "the time limit was reached and the job was queued again"
    assert summary["world_size"] == 2
    assert summary["weights_sha256"] == train(tmp_path / "alone", *settings(0.0), "--workers", 2)["weights_sha256"]

"""Slurm: `srun torusgd train` is a rank of a run, and a run that has to stop is queued again.

Its variables become those by which ranks of any launcher meet. Imports no torch: it runs before the first command.
"""

import os
import re
import shutil
import subprocess
from collections.abc import MutableMapping

from ..errors import RunError, UserError

# Ports at which ranks meet, below those that the kernel gives to connections.
_FIRST_PORT, _PORTS = 15000, 15000
_SECONDS = 30.0


def adopt_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Says in torch's variables what Slurm says of this task, if it is one of several of a job step.

    A batch script and a step of one task stay as they are: there `torusgd train` starts ranks of its own. So does a
    task for which somebody has set RANK already. UserError if Slurm's variables make no sense.
    """
    if "RANK" in environment or "SLURM_STEP_ID" not in environment:
        return
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "1")
    if size < 2:
        return
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    rank, local = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    environment.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))
    if tasks := environment.get("SLURM_STEP_TASKS_PER_NODE"):
        environment["LOCAL_WORLD_SIZE"] = str(tasks_of_node(tasks, _number(environment, "SLURM_NODEID", "0")))
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "")))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + (job + 97 * step) % _PORTS))
    # Times that the ranks have started: of a job that was queued again, `--fresh` deletes nothing.
    environment.setdefault("TORCHELASTIC_RESTART_COUNT", str(restarts(environment)))


def restarts(environment: MutableMapping[str, str] = os.environ) -> int:
    return _number(environment, "SLURM_RESTART_COUNT", "0")


def first_host(nodes: str) -> str:
    """The first name of a list as Slurm writes it.

    >>> first_host("gpu[03-05,9],login1"), first_host("rack[2-3]n[01-16]-ib"), first_host("a,b")
    ('gpu03', 'rack2n01-ib', 'a')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST = {nodes!r}: names no host; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_of_node(tasks: str, node: int) -> int:
    """The tasks of a node, out of Slurm's list for all of them.

    >>> [tasks_of_node("4(x2),3", node) for node in range(3)]
    [4, 4, 3]
    """
    counts: list[int] = []
    for item in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if found is None:
            break
        counts += [int(found[1])] * min(int(found[2] or 1), node + 1)
    if not 0 <= node < len(counts):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE = {tasks!r}: says nothing of node {node}")
    return counts[node]


def check_requeue() -> None:
    """UserError if nobody can queue this job again."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("scontrol") is None:
        raise UserError("--requeue: this is no job of Slurm, or it has no scontrol here; leave it out")


def requeue() -> None:
    """Has Slurm queue this job again, which ends it; RunError if Slurm won't."""
    command = ["scontrol", "requeue", job := os.environ["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        line = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        line = str(error)
    if line:
        raise RunError(f"--requeue: Slurm doesn't queue job {job} again ({line}); the checkpoint is good")


def _number(environment: MutableMapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isdigit():
        raise UserError(f"{name} = {text!r}: must be a number, as Slurm sets it")
    return int(text)

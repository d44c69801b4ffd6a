"""Runs in a real Slurm of two nodes, here: queued again at the time limit, joined, and with a node that is lost."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commands import put_command, ran
from tests.launch.driven import kill
from tests.polling import until
from tests.run.processes import Process, descendants, open_files, results, summary
from tests.run.runs import TINY, sets, train

from torusgd.launch.local import TOKEN

HAS_SLURM = os.getuid() == 0 and all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "srun"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_SLURM, reason="needs root and Debian's slurm-wlm"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "train.sh"
PICTURES = "image_size: 8, channels: 1, mean: [0.5], std: [0.25]"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=20
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables of the environment that lead to Slurm's daemons on this machine, without accounts and keys."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, first = one.getsockname()[1], other.getsockname()[1]
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir(parents=True)
    text = CONFIGURATION.format(
        host=socket.gethostname(), folder=folder, user="root", cpus=os.cpu_count(),
        port=port, first=first, second=first + 1,  # the nodes' must follow each other
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}
    daemons = []
    try:
        for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            with open(folder / f"{command[-1].strip('-')}.out", "wb") as out:
                daemons.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        until(lambda: ask(environment, "sinfo", "-h", "-o", "%T %D") == "idle 2", "idle nodes", timeout=60, pause=0.5)
        yield environment
    finally:
        for daemon in daemons[::-1]:
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:  # a node that waits for its last step
                daemon.kill()
                daemon.wait()


def lose_node(folder: Path, environment: dict[str, str], name: str) -> None:
    """Kills all of a node at once, as a loss of power does, and tells the controller, which would take minutes."""
    log = str(folder / f"slurmd.{name}.log")  # that its daemon and those of its job steps hold open
    lost = [int(each.name) for each in Path("/proc").glob("[0-9]*") if log in open_files(int(each.name))]
    kill(*{child for pid in lost for child in (pid, *descendants(pid))})
    ask(environment, "scontrol", "update", f"nodename={name}", "state=down", "reason=lost")


def ask(environment: dict[str, str], *command: str) -> str:
    done = ran(command, code=None, env=environment)
    return (done.stdout or done.stderr).strip()


def settings(pause: float) -> list[str]:
    """800 steps of 12 images on two ranks, each image after so many seconds: with 0.02 more than one job has."""
    source = f"data={{source: 'tests.run.slow:Slow', options: {{pause: {pause}}}, {PICTURES}}}"
    stages = "stages=[{until: 800st, images_per_worker: 3}]"
    return sets(*TINY, source, stages, "evaluate.every=null")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of the environment that lead to a cluster, and to the command."""
    put_command(tmp_path / "bin" / "torusgd", f'exec {sys.executable} -m torusgd "$@"')
    with slurm_cluster(tmp_path / "slurm") as environment:
        yield {**environment, "PATH": f"{tmp_path / 'bin'}:{environment['PATH']}"}


def test_a_machine_joins_by_srun_is_lost_and_another_joins(tmp_path: Path, slurm, recipe, undisturbed) -> None:
    out, gate = tmp_path / "run", tmp_path / "gate"
    gate.touch()

    def srun(node: str, *words: str | Path) -> Process:
        flags = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--nodelist={node}", "torusgd"]
        return Process(tmp_path / "told", "srun", *flags, *words, environment=slurm)

    gated = sets("data.source=tests.run.slow:Gated", f"data.options={{gate: '{gate}', pause: 0.15}}")
    root = srun("n1", "train", recipe, "--out", out, "--workers", "1", "--listen", "127.0.0.1:0", *gated)
    where = until(lambda: re.search(r"torusgd join (\S+)", root.err), "it listens", root, timeout=180)[1]
    join = ["join", where, "--token-file", out / TOKEN, "--workers", "1"]
    srun("n2", *join)
    until(lambda: "rank 1 joins; ranks 0, 1 go on" in root.err, "it joins", root, timeout=180)
    lose_node(tmp_path / "slurm", slurm, "n2")
    until(lambda: "; rank 0 goes on" in root.err, "it goes on", root, timeout=180)
    second = srun("n1", *join)
    until(lambda: "rank 2 joins; ranks 0, 2 go on" in root.err, "another one joins", root, timeout=180)
    gate.unlink()
    assert (root.end(), second.end()) == (0, 0), root.output
    told = summary(out)
    assert results(told) == undisturbed
    assert (told["world_size"], told["lost_ranks"], told["restarts"], told["resumed_from"]) == (2, [1], 0, 0)


def test_queued_again_at_the_time_limit(tmp_path: Path, slurm: dict[str, str]) -> None:
    out, log = tmp_path / "run", tmp_path / "job.log"
    given = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--overcommit"]
    # The signal may come a minute before its time, so 30 to 90 s after the start.
    given += ["--time=2", "--signal=USR1@30", f"--output={log}"]
    job = ask(slurm, "sbatch", "--parsable", *given, str(EXAMPLE), "digits", *settings(0.02), "--out", str(out))
    assert job.isdigit(), job

    def state() -> str:
        return ask(slurm, "squeue", "-h", "-j", job, "-o", "%T")

    until(lambda: state() in ("COMPLETED", "FAILED", ""), "the job is done", timeout=600, pause=0.5)
    record = ask(slurm, "scontrol", "show", "job", job)
    assert (out / "summary.json").exists(), log.read_text() + record
    told = summary(out)
    assert "Restarts=0" not in record, "the time limit was reached and the job was queued again"
    assert told["world_size"] == 2
    assert told["weights_sha256"] == train(tmp_path / "alone", *settings(0.0), "--workers", "2")["weights_sha256"]

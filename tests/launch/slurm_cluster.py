"""A cluster of Slurm on this machine: a controller and two nodes, its real daemons, without its accounts and keys."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.commands import ran
from tests.polling import until
from tests.run.processes import children, open_files

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


def can_run() -> bool:
    """Whether the daemons are here, and may be started."""
    return os.getuid() == 0 and all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "srun"))


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables of the environment that lead to a cluster of two nodes."""
    with ExitStack() as sockets:
        ports = []
        for _ in range(3):
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    ports[2] = ports[1] + 1  # the nodes' must follow each other
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir(parents=True)
    text = CONFIGURATION.format(
        host=socket.gethostname(), folder=folder, user="root", cpus=os.cpu_count(),
        port=ports[0], first=ports[1], second=ports[2],
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
    for pid in lost:
        lost += [child for child in children(pid) if child not in lost]
    for pid in lost:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ask(environment, "scontrol", "update", f"nodename={name}", "state=down", "reason=lost")


def ask(environment: dict[str, str], *command: str) -> str:
    done = ran(command, code=None, env=environment)
    return (done.stdout or done.stderr).strip()

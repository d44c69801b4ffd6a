"""The lab itself: hosts, the wire between them, and runs of a Python program on every rank, whom it starts."""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RunError, UserError
from ..signals import die_with_parent
from .wire import INTERFACE, enter, why_not

_PREFIX = 16  # bits of an address that all hosts have in common
_PORT = 29_500
_START = 60.0  # seconds in which a helper starts
_SETTINGS = {
    # No packet is lost here, so that the plainest control fills the link, as it does on every kernel, and no packet
    # need be sent twice to probe for a loss (see also `netns.open_tun`).
    "tcp_congestion_control": "reno",
    "tcp_early_retrans": "0",
    # Windows of several packets of 60,000 bytes from the first moment on.
    "tcp_rmem": "4096 4194304 16777216",
    "tcp_wmem": "4096 1048576 16777216",
}
MTU = 60_000  # bytes of a packet: few and large ones, since each costs the process that carries them the same


class Host(NamedTuple):
    """One machine of the lab, whose ranks talk over its own loopback.

    `latency` is in seconds, one way, to a host like itself (between unlike ones: the mean); `rate` in bits/s each way.
    """

    ranks: int = 1
    latency: float = 0.0
    rate: float = 10e9


class _Helper:
    """A process of this package that takes lines on its input, answers in JSON, and ends when its input does."""

    def __init__(self, module: str, *message: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C is for the lab's owner alone, which then ends this
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.write(json.dumps([os.getpid(), *message]))

    def write(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()

    def answer(self, seconds: float) -> Any:
        if not select.select([self._output], (), (), max(0.0, seconds))[0]:
            raise RunError("the network lab: no end within the time allowed")
        if line := self._output.readline():
            if isinstance(found := json.loads(line), str):
                raise RunError(f"the network lab can't be made: {found}")
            return found
        raise RunError("the network lab: its helper ended; see its message above")

    def end(self) -> None:
        self._input.close()
        self._process.wait()
        self._output.close()


class LabRanks:
    """The ranks of one run: `processes` are their ids, in rank order."""

    def __init__(self, command: Sequence[str], ranks: list[tuple[str, dict[str, str]]], folder: Path) -> None:
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(len(ranks))]
        described = [(*rank, str(output)) for rank, output in zip(ranks, self._outputs, strict=True)]
        self._spawner = _Helper("lab", list(command), described)
        self.processes: list[int] = self._spawner.answer(_START)

    def wait(self, timeout: float) -> list[int]:
        """Exit codes in rank order (negative: the signal); RunError after `timeout` seconds."""
        codes: list[int] = self._spawner.answer(timeout)
        self.end()
        return codes

    def outputs(self) -> list[str]:
        return [path.read_text(errors="replace") if path.exists() else "" for path in self._outputs]

    def end(self) -> None:
        self._spawner.end()


class Lab:
    """Hosts on one machine, for a `with` statement; needs root (`why_not` names what is missing).

    Ranks are numbered host by host and find a launcher's variables set, RANK to MASTER_PORT. Nothing outlives the lab,
    even if it is killed. `settings` are the kernel's below /proc/sys/net/ipv4; `mtu` are the bytes of a packet;
    after a pause a host may send `burst` bytes at once, at least a packet (a token bucket).

    >>> with Lab([Host(latency=5e-3, rate=1e9)] * 16) as lab:  # doctest: +SKIP
    ...     outputs = lab.run(["train.py", "--steps", "3"], timeout=120)
    """

    def __init__(
        self, hosts: Sequence[Host], settings: Mapping[str, str] | None = None, mtu: int = MTU, burst: int = 0
    ) -> None:
        self.hosts = tuple(hosts)
        self._settings, self._mtu = {**_SETTINGS, **(settings or {})}, mtu
        self._burst = max(burst, mtu + 4096)  # with some room for headers
        self.addresses = [f"10.{77 + host // 65_000}.{host // 250}.{1 + host % 250}" for host in range(len(hosts))]
        self._runs: list[LabRanks] = []

    def __enter__(self) -> "Lab":
        if reason := why_not():
            raise RunError(reason)
        self._folder = tempfile.TemporaryDirectory(prefix="torusgd-lab-")
        links = [(host.latency, host.rate / 8) for host in self.hosts]
        self._wire = _Helper("wire", links, self.addresses, _PREFIX, self._mtu, self._burst, self._settings)
        self._spaces: list[str] = self._wire.answer(_START)
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self._runs:
            ranks.end()
        self._wire.end()
        self._folder.cleanup()

    def cut(self, host: int) -> None:
        """Drops every packet from and to a host from now on, as if its cable was pulled."""
        self._wire.write(str(host))

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> LabRanks:
        """Starts a Python program (`[script, argument, ...]` or `["-m", module, argument, ...]`) on every rank."""
        positions = [(host, local) for host, spec in enumerate(self.hosts) for local in range(spec.ranks)]
        common = {
            "WORLD_SIZE": len(positions), "MASTER_ADDR": self.addresses[0], "MASTER_PORT": _PORT + len(self._runs),
            "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        ranks = []
        for rank, (host, local) in enumerate(positions):
            own = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.hosts[host].ranks}
            variables = {**common, **own, **(environment or {})}
            ranks.append((self._spaces[host], {name: str(value) for name, value in variables.items()}))
        started = LabRanks(command, ranks, Path(tempfile.mkdtemp(dir=self._folder.name)))
        self._runs.append(started)
        return started

    def run(self, command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> list[str]:
        """The outputs of a program on every rank; RunError if one failed, or after `timeout` seconds."""
        ranks = self.start(command, environment)
        try:
            codes = ranks.wait(timeout)
        except RunError as error:
            raise RunError(f"{error}; rank 0 said: {ranks.outputs()[0][-2000:]}") from None
        finally:
            ranks.end()
        if bad := [rank for rank, code in enumerate(codes) if code]:
            text = ranks.outputs()[bad[0]][-4000:].strip()
            raise RunError(f"{len(bad)} of {len(codes)} ranks failed; rank {bad[0]} ended with {codes[bad[0]]}: {text}")
        return ranks.outputs()


# Run as a module, the file starts the ranks of a lab: it imports torch once, then forks a process a rank, each in its
# host's namespace. It reads one JSON line from standard input: the parent's process id, the command, and the namespace,
# environment and output file of each rank. It prints the process ids, and when all ranks have ended their exit codes,
# as JSON; it kills the ranks if its input ends before.
def _start(command: list[str], space: str, environment: dict[str, str], output: str) -> int:
    spawner = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent(spawner)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(target, stream)
        enter(space)
        os.environ.update(environment)
        # As the interpreter itself would run the command.
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own end would run exit handlers of the parent that it was forked from.
        os._exit(code)


def main() -> None:
    parent, command, ranks = json.loads(sys.stdin.readline())
    die_with_parent(parent)
    import torch.distributed  # noqa: F401 - imported here once rather than in every rank

    processes = [_start(command, *rank) for rank in ranks]
    print(json.dumps(processes), flush=True)
    codes: dict[int, int] = {}
    # One select waits for the end of any rank and of the input, without a signal handler.
    watch = {os.pidfd_open(process): process for process in processes}
    while watch:
        ready = select.select([0, *watch], (), ())[0]
        if 0 in ready:
            for process in watch.values():
                os.kill(process, signal.SIGKILL)
            return
        for handle in ready:
            process = watch.pop(handle)
            os.close(handle)
            codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps([codes[process] for process in processes]), flush=True)


if __name__ == "__main__":
    main()

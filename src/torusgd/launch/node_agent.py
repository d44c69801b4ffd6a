"""A machine that joins a run: an agent, which starts ranks here, does what the launcher says, and goes with it."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..data.registry import open_sources
from ..errors import RunError, UserError, as_run_error, printable, warn
from ..ranks import join
from ..ranks.gpus import free_local_rank
from ..ranks.join import Channel, pass_on
from ..ranks.liveness import BEAT_SECONDS
from ..ranks.rank import LOOPBACK, RankSpec, start_rank
from ..run.job import Job
from ..run.open_data import LauncherArrays
from ..run.survival import TrainRank
from ..signals import held_back
from ..text import plural, version_of
from .local import limits_of

CONNECT_SECONDS = 10.0


def join_run(address: tuple[str, int], token: bytes, data: Path | None, workers: int | None) -> int:
    """Brings ranks (None: as many as there are cores) to a run whose launcher listens at an address, until it or they
    end; the command's exit code. UserError if this machine can't take part, RunError if the run is gone.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers > join.MOST_RANKS:
        raise UserError(f"--workers {workers}: one machine may bring {join.MOST_RANKS} ranks at most")
    where = f"{address[0]}:{address[1]}"
    with ExitStack() as held:
        link = _connect(address, token, join.NODE)
        interface = join.interface_of(link.getsockname()[0])
        channel = Channel(link, CONNECT_SECONDS)
        held.callback(channel.close)
        try:
            channel.send(workers=workers, host=socket.gethostname(), version=version_of())
            welcome = _answer(channel)
            if "end" in welcome:
                return _ended(where, welcome)
            with _understood():
                channel.silent = float(welcome["silent"])
                job = Job.from_dict(welcome["job"], data)
            # From here on, since listing the images may take longer than the launcher waits for a word.
            threading.Thread(target=_beat, args=(channel,), daemon=True, name="torusgd-beat").start()
            lists = LauncherArrays()
            open_sources(job.recipe.data, job.data, job.recipe.seed, lists)
            job = replace(job, lists=tuple(lists.paths))
            store = serve_link(partial(_connect, address, token, join.STORE))
            held.callback(join.hang_up, store)
            own_ranks = _Ranks(job, store.getsockname()[1], interface)
            held.callback(own_ranks.kill)
            warn(f"joins {job.recipe.name} at {where} with {plural(workers, 'rank')}, or as many as it takes")
            channel.send(ready=True)
            return _serve(channel, own_ranks, where)
        except join.ChannelClosed as error:
            raise RunError(f"the run at {where} is gone: {error}; the ranks here have ended") from None


def serve_link(connect: Callable[[], socket.socket]) -> socket.socket:
    """Listens on loopback; each connection is passed on to the launcher's store, to which `connect` gives another."""
    listening = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)

    def join_up(near: socket.socket) -> None:
        try:
            pass_on(near, connect())
        except (UserError, RunError):  # the rank finds its connection closed
            join.hang_up(near)

    def accept() -> None:
        for near, _ in join.accepted(listening):
            threading.Thread(target=join_up, args=(near,), daemon=True, name="torusgd-store-link").start()

    threading.Thread(target=accept, daemon=True, name="torusgd-store-port").start()
    return listening


class _Ranks:
    """The ranks on this machine, by the number that the launcher has given to their start."""

    def __init__(self, job: Job, port: int, interface: str) -> None:
        self._job, self._port, self._interface = job, port, interface
        self._processes, self._local = dict[int, BaseProcess](), dict[int, int]()

    def start(self, number: int, rank: int, size: int, attempt: int) -> None:
        self._local[number] = local = free_local_rank({self._local[each] for each in self._processes})
        spec = RankSpec(
            rank, size, self._port, attempt, self._job.device, self._job.options.ranks_per_gpu, limits_of(self._job),
            TrainRank(self._job, size), joins=True, interface=self._interface, local=local, stops_run=False,
        )  # fmt: skip
        with held_back():
            self._processes[number] = start_rank(spec)

    def wait(self, channel: Channel) -> tuple[bool, dict[int, int]]:
        """What happens within a second: whether messages have come, and exit codes by number."""
        numbers: dict[Any, int] = {process.sentinel: number for number, process in self._processes.items()}
        happened = connection.wait([channel.fileno(), *numbers], BEAT_SECONDS)
        ended = {numbers[each]: self._processes.pop(numbers[each]) for each in happened if each in numbers}
        for process in ended.values():
            process.join()
        return channel.fileno() in happened, {number: process.exitcode or 0 for number, process in ended.items()}

    def kill(self, number: int | None = None) -> None:
        """Ends one of them, or all."""
        for each in [*self._processes] if number is None else self._processes.keys() & {number}:
            process = self._processes.pop(each)
            process.kill()
            process.join()


def _serve(channel: Channel, own_ranks: _Ranks, where: str) -> int:
    """Does what the launcher says, until it says that all is over; the exit code."""
    while True:
        has_messages, exits = own_ranks.wait(channel)
        for number, code in exits.items():
            channel.send(exit=number, code=code)
        for message in channel.receive() if has_messages else ():
            if "start" in message:
                own_ranks.start(*_numbers(message, "start", "rank", "size", "attempt"))
            elif "kill" in message:
                own_ranks.kill(*_numbers(message, "kill"))
            elif "end" in message:
                return _ended(where, message)
        channel.check_silence()


def _ended(where: str, message: Mapping[str, Any]) -> int:
    (code,), line = _numbers(message, "code"), f"the run at {where}: {message['end']}"
    if code in (1, 2):
        raise (UserError if code == 2 else RunError)(line)
    warn(printable(line))
    return code


@contextmanager
def _understood() -> Iterator[None]:
    """What no launcher of torusgd sends ends the connection."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise join.ChannelClosed("it sends no messages of torusgd") from None


def _numbers(message: Mapping[str, Any], *keys: str) -> list[int]:
    with _understood():
        numbers = [message[key] for key in keys]
        if not all(type(each) is int and 0 <= each < 1 << 31 for each in numbers):
            raise ValueError
        return numbers


def _answer(channel: Channel) -> dict[str, Any]:
    """The first message that is not empty."""
    while True:
        channel.check_silence()
        is_ready = connection.wait([channel.fileno()], BEAT_SECONDS)
        for message in filter(None, channel.receive() if is_ready else ()):
            return message


def _beat(channel: Channel) -> None:
    with suppress(join.ChannelClosed):
        while True:
            channel.send()
            time.sleep(BEAT_SECONDS)


def _connect(address: tuple[str, int], token: bytes, purpose: str) -> socket.socket:
    where = f"{address[0]}:{address[1]}"
    with as_run_error(f"{where}: no run can be reached there"):
        link = socket.create_connection(address, CONNECT_SECONDS)
    try:
        join.prove_to_listener(link, token, purpose)
    except join.Refused as error:
        join.hang_up(link)
        raise UserError(f"{where}: doesn't take this machine: {error}; is --token-file a copy of the run's?") from None
    return link

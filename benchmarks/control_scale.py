"""The control path at the size of a cluster: thousands of ranks' heartbeats, roll call and failures through one store.

    python benchmarks/control_scale.py --ranks 3456 --processes 8 --seconds 30

Each rank is a real `Heartbeat` with a thread and a connection of its own, so the store serves as many clients as a run
of that size would have; only training is left out. Rank 0 calls the roll, the others follow it, as under torchrun. All
of it shares this machine's cores, so its times are upper bounds of what a cluster sees, where each rank has its own.

Measured: the time for all to meet, from one beat to the next, what a roll call takes, when a rank that was killed is
named by all others (with a heartbeat limit of --limit s), and how long a failure takes to be known.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import threading
import time
from datetime import timedelta
from typing import Any, ClassVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from torusgd.comm.liveness import LateRank
from torusgd.launch import heartbeat
from torusgd.launch.failures import Failure, FailureChannel, FailureKind
from torusgd.launch.heartbeat import Heartbeat
from torusgd.launch.roll_call import BEAT_SECONDS, Limits, Watch

WAIT = timedelta(seconds=300)


def main() -> None:
    """Runs the measurement and prints it as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3456)
    parser.add_argument("--processes", type=int, default=8, help="that the ranks are spread over")
    parser.add_argument("--seconds", type=float, default=30.0, help="of beating before a rank is killed")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds without a heartbeat")
    arguments = parser.parse_args()
    _allow_files()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    hosts = [
        context.Process(target=_host, args=(number, arguments, store.port, answers))
        for number in range(arguments.processes + 1)
    ]
    for host in hosts:
        host.start()
    found = [answers.get(timeout=1200) for _ in hosts[1:]]
    for host in hosts:
        host.join()
    caller = next(each for each in found if each["number"] == 0)
    intervals = sorted(interval for each in found for interval in each["intervals"])
    print(
        json.dumps(
            {
                "ranks": arguments.ranks,
                "processes": arguments.processes,
                "seconds_until_all_had_met": round(max(each["met"] for each in found), 1),
                "beat_interval_median_99_max": [
                    round(intervals[int(share * (len(intervals) - 1))], 2) for share in (0.5, 0.99, 1.0)
                ],
                "roll_call_ms_median_max": [
                    round(1e3 * statistics.median(caller["looks"]), 1), round(1e3 * max(caller["looks"]), 1)
                ],
                "named_before_anybody_was_lost": sum(each["wrongly"] for each in found),
                "lost_rank_named_by": sum(len(each["named"]) for each in found),
                "lost_rank_named_after_s": [
                    round(pick(time for each in found for time in each["named"]), 1) for pick in (min, max)
                ],
                "failure_known_after_s_max": round(max(each["known"] for each in found), 2),
                "memory_MiB_a_rank": round(sum(each["memory"] for each in found) / arguments.ranks, 2),
                "cpu_s": round(sum(each["cpu"] for each in found), 1),
            },
            indent=1,
        )
    )  # fmt: skip


class _TimedWatch(Watch):
    """The roll call, timed; seconds of each."""

    looks: ClassVar[list[float]] = []

    def look(self) -> list[LateRank]:
        """See `Watch`."""
        begin = time.perf_counter()
        late = super().look()
        self.looks.append(time.perf_counter() - begin)
        return late


def _host(number: int, arguments: argparse.Namespace, port: int, answers: Any) -> None:
    """A process with its share of the ranks; the last process has one, which is killed half-way."""
    size, many = arguments.ranks, arguments.processes
    mine = [size - 1] if number == many else range(number, size - 1, many)
    _allow_files()
    threading.stack_size(256 * 1024)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = PrefixStore("attempt-0", TCPStore("127.0.0.1", port, None, False, wait_for_workers=False, timeout=WAIT))
    limits = Limits(beat=arguments.limit, start=WAIT.total_seconds(), stuck=1e9)
    heartbeat.Watch = _TimedWatch  # type: ignore[misc]
    _meet(store, "started", many + 1, 1)
    began = time.monotonic()
    beats = {
        rank: Heartbeat(store, rank, limits, () if rank else range(size), follows=0 if rank else None) for rank in mine
    }
    _meet(store, "met", size, len(beats))
    met = time.monotonic() - began
    time.sleep(3 * BEAT_SECONDS)
    first = _numbers(beats)
    _TimedWatch.looks.clear()
    end, step = time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end:
        step += 1
        for each in beats.values():
            each.progress("train", step, 0)
        time.sleep(BEAT_SECONDS)
    now = _numbers(beats)
    intervals = [arguments.seconds / max(1, now[rank] - then) for rank, then in first.items()]
    wrongly = sum(bool(each.late()) for each in beats.values())
    _meet(store, "beaten", many + 1, 1)
    if number == many:
        os.kill(os.getpid(), signal.SIGKILL)
    named = _wait_for_name(size - 1, beats, arguments.limit)
    known = _fail(FailureChannel(store, size), beats)
    used = resource.getrusage(resource.RUSAGE_SELF)
    answers.put(
        {
            "number": number, "met": met, "intervals": intervals, "wrongly": wrongly, "known": known, "named": named,
            "looks": list(_TimedWatch.looks), "memory": (used.ru_maxrss - memory) / 1024,
            "cpu": used.ru_utime + used.ru_stime,
        }
    )  # fmt: skip
    _meet(store, "done", many, 1)
    answers.close()
    answers.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)  # hundreds of threads would take as many seconds to end one by one


def _meet(store: PrefixStore, name: str, size: int, count: int) -> None:
    if store.add(name, count) == size:
        store.set(f"all {name}", "")
    store.wait([f"all {name}"], WAIT)


def _numbers(beats: dict[int, Heartbeat]) -> dict[int, int]:
    """Of the last beat of each rank, as the rank that calls the roll has read it; nothing in other processes."""
    watch = beats[0].watch if 0 in beats else None
    return {rank: beat.number for rank, beat in watch.beats.items() if beat} if isinstance(watch, Watch) else {}


def _wait_for_name(victim: int, beats: dict[int, Heartbeat], limit: float) -> list[float]:
    """Seconds after which each rank of this process knows that the victim, of another process, is lost."""
    named, killed = dict[int, float](), time.monotonic()
    while len(named) < len(beats) and time.monotonic() < killed + limit + 60:
        for rank, each in beats.items():
            if rank not in named and [late.rank for late in each.late()] == [victim]:
                named[rank] = time.monotonic() - killed
        time.sleep(0.1)
    return list(named.values())


def _fail(failures: FailureChannel, beats: dict[int, Heartbeat]) -> float:
    """Seconds until all ranks of this process have reported a failure and know the one that is the cause."""
    failed = time.monotonic()
    for rank in beats:
        kind = FailureKind.RUN_ERROR if rank == 1 else FailureKind.RANK_LOST
        failures.report(Failure(kind, rank, "a", "a disk is full" if rank == 1 else "lost the others"))
    for _ in beats:
        while not failures.causes():
            time.sleep(0.01)
    return time.monotonic() - failed


def _allow_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()

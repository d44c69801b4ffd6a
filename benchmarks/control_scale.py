"""The control path at the size of a cluster: thousands of ranks' heartbeats, roll call and failures through one store.

    python benchmarks/control_scale.py --ranks 3456 --processes 8 --seconds 30

Each rank is a real `Heartbeat` with a thread and a connection of its own, so the store serves as many clients as a run
of that size would have; only training is left out. Rank 0 calls the roll, the others follow it, as under torchrun. All
of it shares this machine's cores, so its times are upper bounds of what a cluster sees, where each rank has its own.

Measured: the time for all to meet, the delay from one beat to the next, what a round of the roll call takes, when a
frozen rank is named by all others (with a heartbeat limit of --limit s), and how long a failure takes to be known.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from torusgd.launch.failures import Failure, FailureChannel, FailureKind
from torusgd.launch.heartbeat import Heartbeat
from torusgd.launch.roll_call import BEAT_SECONDS, Limits, Watch

WAIT = timedelta(seconds=300)


def main() -> None:
    """Runs the measurement and prints it as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3456)
    parser.add_argument("--processes", type=int, default=8, help="that the ranks are spread over")
    parser.add_argument("--seconds", type=float, default=30.0, help="of beating before a rank freezes")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds without a heartbeat")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    hosts = [
        context.Process(target=_host, args=(number, arguments, store.port, answers))
        for number in range(arguments.processes)
    ]
    for host in hosts:
        host.start()
    found = [answers.get() for _ in hosts]
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
                "named_before_anybody_froze": sum(each["wrongly"] for each in found),
                "frozen_rank_named_by": sum(len(each["named"]) for each in found),
                "frozen_rank_named_after_s": [
                    round(pick(time for each in found for time in each["named"]), 1) for pick in (min, max)
                ],
                "failure_known_after_s_max": round(max(each["known"] for each in found), 2),
                "memory_MiB_a_rank": round(sum(each["memory"] for each in found) / arguments.ranks, 2),
                "cpu_s": round(sum(each["cpu"] for each in found), 1),
            },
            indent=1,
        )
    )  # fmt: skip


class _Timed(Watch):
    """The roll call, timed."""

    looks: list[float]

    def look(self) -> list[Any]:
        """See `Watch`."""
        begin = time.perf_counter()
        late = super().look()
        self.looks.append(time.perf_counter() - begin)
        return late


def _host(number: int, arguments: argparse.Namespace, port: int, answers: Any) -> None:
    """A process with its share of the ranks; the last rank of all freezes half-way."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    threading.stack_size(256 * 1024)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    root = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False, timeout=WAIT)
    store, size = PrefixStore("attempt-0", root), arguments.ranks
    limits = Limits(beat=arguments.limit, start=WAIT.total_seconds(), stuck=1e9)
    began = time.monotonic()
    beats: dict[int, Heartbeat] = {}
    for rank in range(number, size, arguments.processes):
        watched, follows = (range(size), None) if rank == 0 else ((), 0)
        beats[rank] = Heartbeat(store, rank, limits, watched, follows=follows)
        if rank == 0:
            beats[0].watch.__class__, beats[0].watch.looks = _Timed, []  # type: ignore[union-attr]
        if store.add("here", 1) == size:
            store.set("all here", "")
    store.wait(["all here"], WAIT)
    met = time.monotonic() - began
    for heartbeat in beats.values():
        heartbeat.progress("train", 0, 0)
    intervals = _beat_for(arguments.seconds, beats)
    wrongly = sum(bool(heartbeat.late()) for heartbeat in beats.values())

    named = _freeze(size - 1, beats, arguments.limit)
    known = _fail(FailureChannel(store, size), beats)
    if store.add("done", 1) == arguments.processes:
        store.set("all done", "")
    store.wait(["all done"], WAIT)
    for heartbeat in beats.values():
        heartbeat._stop.set()
    for heartbeat in beats.values():
        heartbeat._thread.join()
    used = resource.getrusage(resource.RUSAGE_SELF)
    answers.put(
        {
            "number": number, "met": met, "intervals": intervals, "wrongly": wrongly, "known": known,
            "looks": beats[0].watch.looks if number == 0 else [],  # type: ignore[union-attr]
            "named": named, "memory": (used.ru_maxrss - memory) / 1024,
            "cpu": used.ru_utime + used.ru_stime,
        }
    )  # fmt: skip


def _freeze(victim: int, beats: dict[int, Heartbeat], limit: float) -> list[float]:
    """Seconds after which each rank of this process knows that the victim, of whatever process, is frozen."""
    if victim in beats:
        beats.pop(victim)._stop.set()  # its thread sends a last beat, which says nothing of an end
    named, frozen = dict[int, float](), time.monotonic()
    while len(named) < len(beats) and time.monotonic() < frozen + limit + 60:
        for rank, heartbeat in beats.items():
            if rank not in named and [late.rank for late in heartbeat.late()] == [victim]:
                named[rank] = time.monotonic() - frozen
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


def _beat_for(seconds: float, beats: dict[int, Heartbeat]) -> list[float]:
    """Seconds from each round of each rank's thread to its next, each rank making progress meanwhile."""
    last = {rank: (heartbeat._rounds, time.monotonic()) for rank, heartbeat in beats.items()}
    intervals, end, step = [], time.monotonic() + seconds, 0
    while time.monotonic() < end:
        time.sleep(BEAT_SECONDS / 10)
        step += 1
        for rank, heartbeat in beats.items():
            heartbeat.progress("train", step, 0)
            rounds, at = last[rank]
            if heartbeat._rounds != rounds:
                intervals.append((time.monotonic() - at) / (heartbeat._rounds - rounds))
                last[rank] = heartbeat._rounds, time.monotonic()
    return intervals


if __name__ == "__main__":
    main()

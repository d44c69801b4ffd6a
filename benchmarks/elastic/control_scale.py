"""The control path at the size of a cluster: thousands of ranks' heartbeats, roll call and failures through one store.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks elastic control-scale --processes 10 --group'

For each connection torch asks the resolver for the name of its other end. Where thousands ask at once some answers are
lost, and each of these costs 5 s. In a network of its own (as root) there is no resolver to wait for.

Rank 0 has a real `Heartbeat` and calls the roll, as under torchrun. Each other rank has a connection of its own to the
store, its beats and a real `Follower`, but not a thread: a few processes take turns for all of them, since thousands of
Python threads would measure the two cores that they share and not the store. Training is left out.

Measured: the time for all to meet, from one beat to the next, what a roll call takes, when a rank that was killed is
named by all others (with a heartbeat limit of --limit s), and how long a failure takes to be known. With --group all
ranks first make the group of a run, a tree of meshes over Gloo with a Python thread for each rank and one of Gloo's for
each process: how long that takes, and a sum of one number over all ranks, which is what agrees on a step.

Needs: root, for a network of its own.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from torusgd.comm import groups
from torusgd.comm import store_keys as keys
from torusgd.comm.base import LateRank
from torusgd.comm.groups import Group, build
from torusgd.ranks import liveness
from torusgd.ranks.failures import Failure, FailureChannel, FailureKind
from torusgd.ranks.liveness import BEAT_SECONDS, Beat, Follower, Heartbeat, Limits, Watch
from torusgd.ranks.rank import serve_store

from ..record import sample

WAIT = timedelta(seconds=300)
_SUMS = 5


def main() -> None:
    """Runs the measurement and prints it as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3456)
    parser.add_argument("--processes", type=int, default=8, help="that the ranks are spread over")
    parser.add_argument("--seconds", type=float, default=30.0, help="of beating before a rank is killed")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds without a heartbeat")
    parser.add_argument("--group", action="store_true", help="make the group of a run, too")
    arguments = parser.parse_args()
    _allow_files()
    store = serve_store()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    hosts = [
        context.Process(target=_host, args=(number, arguments, store.port, answers))
        for number in range(arguments.processes + 2)
    ]
    for host in hosts:
        host.start()
    found = [answers.get(timeout=1200) for _ in hosts[1:]]  # one is killed
    for host in hosts:
        host.join()
    caller = next(each for each in found if each["number"] == 0)
    intervals = sorted(interval for each in found for interval in each["intervals"])
    sample(f"{arguments.ranks} ranks, roll call, ms", [1e3 * each for each in caller["looks"]])
    sample(f"{arguments.ranks} ranks, from one beat to the next, s", intervals)
    if arguments.group:
        sums = [max(each) for each in zip(*(host["sums"] for host in found), strict=True)]
        sample(f"{arguments.ranks} ranks, until the group was made, s", [max(host["built"] for host in found)])
        sample(f"{arguments.ranks} ranks, a sum of one number, ms", [1e3 * each for each in sums])
    print(
        json.dumps(
            {
                "ranks": arguments.ranks,
                "processes": arguments.processes,
                **(
                    {
                        "seconds_until_the_group_was_made": round(max(host["built"] for host in found), 1),
                        "sum_of_one_number_ms": [round(1e3 * each) for each in sums],
                        "most_sockets_of_a_process": max(host["sockets"] for host in found),
                    }
                    if arguments.group
                    else {}
                ),
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
                "cpu_s": round(sum(each["cpu"] for each in found), 1),
            },
            indent=1,
        )
    )  # fmt: skip


def _in_group(ranks: Sequence[int], size: int, port: int) -> dict[str, Any]:
    """Makes the group of all ranks, with a thread for each of this process; what that and a few sums take."""
    began, built, sums = time.monotonic(), list[float](), [list[float]() for _ in range(_SUMS)]
    _share_polling()

    def be(rank: int) -> Group:
        group = build(
            PrefixStore("group", _connected(port)), range(size), rank,
            device=torch.device("cpu"), timeout=WAIT.total_seconds(),
        )  # fmt: skip
        built.append(time.monotonic() - began)
        for times in sums:
            group.barrier()
            begin, total = time.monotonic(), torch.ones(1, dtype=torch.int64)
            group.all_reduce(total)
            times.append(time.monotonic() - begin)
            assert total.item() == size
        return group

    with ThreadPoolExecutor(len(ranks)) as pool:
        made = list(pool.map(be, ranks))
        sockets = sum(os.path.realpath(f"/dev/fd/{each}").startswith("/proc") for each in os.listdir("/dev/fd"))
        list(pool.map(Group.close, made))
    return {"built": max(built), "sums": [max(times) for times in sums], "sockets": sockets}


def _share_polling() -> None:
    """Lets all ranks of this process share one thread of Gloo, and its Python threads ask for the lock seldom.

    A rank's thread of Gloo looks at its sockets 100 times a second, and a Python thread that waits for the lock asks
    for it 200 times a second. For the hundreds of ranks of one process that alone would take more than its cores have.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [ProcessGroupGloo.create_default_device()], 2

    def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)

    patch.object(groups, "ProcessGroupGloo", gloo).start()
    sys.setswitchinterval(1.0)


class _TimedWatch(Watch):
    """The roll call, timed; seconds of each."""

    looks: ClassVar[list[float]] = []

    def look(self) -> list[LateRank]:
        """See `Watch`."""
        begin = time.perf_counter()
        late = super().look()
        self.looks.append(time.perf_counter() - begin)
        return late


class _Rank:
    """A rank that follows the roll call: what its heartbeat's thread does, without the thread."""

    def __init__(self, port: int, rank: int, limits: Limits) -> None:
        own = _connected(port)
        self.rank, self.late, self.follower = rank, list[LateRank](), Follower(own, 0, limits)
        self.failures, self._beats, self._number = FailureChannel(own, 0), PrefixStore(keys.BEATS, own), 0

    def turn(self) -> None:
        """A beat, and a look at what the roll call has found."""
        self._number += 1
        self._beats.set(
            keys.BEAT.format(rank=self.rank), json.dumps(asdict(Beat(self._number, "a", "train", self._number)))
        )
        self.late = self.follower.look()


def _host(number: int, arguments: argparse.Namespace, port: int, answers: Any) -> None:
    """Process 0 is rank 0, with a real heartbeat; the last is the rank that is killed; the others share the rest."""
    size, many = arguments.ranks, arguments.processes
    _allow_files()
    store = _connected(port)
    limits = Limits(beat=arguments.limit, start=WAIT.total_seconds(), stuck=1e9)
    patch.object(liveness, "Watch", _TimedWatch).start()
    _meet(store, "started", many + 2)
    began = time.monotonic()
    mine = [size - 1] if number > many else range(number, size - 1, many) if number else []
    answer: dict[str, Any] = {"number": number}
    if arguments.group:
        answer |= _in_group(mine or [0], size, port)
        _meet(store, "grouped", many + 2)
        began = time.monotonic()
    caller = Heartbeat(store, 0, limits, range(size)) if number == 0 else None
    ranks = [_Rank(port, rank, limits) for rank in mine]
    _meet(store, "met", many + 2)
    answer["met"] = time.monotonic() - began
    _turns(ranks, 5 * BEAT_SECONDS)
    first = _numbers(caller)
    _TimedWatch.looks.clear()
    _turns(ranks, arguments.seconds)
    now = _numbers(caller)
    answer["intervals"] = [arguments.seconds / max(1, now[rank] - then) for rank, then in first.items()]
    answer["looks"] = list(_TimedWatch.looks)
    answer["wrongly"] = sum(bool(rank.late) for rank in ranks) + bool(caller and caller.late())
    if number > many:
        os.kill(os.getpid(), signal.SIGKILL)
    killed, named = time.monotonic(), dict[int, float]()
    while len(named) < len(ranks) and time.monotonic() < killed + arguments.limit + 60:
        _turns(ranks, BEAT_SECONDS)
        known = [rank.rank for rank in ranks if [late.rank for late in rank.late] == [size - 1]]
        named |= {rank: time.monotonic() - killed for rank in known if rank not in named}
    failed = time.monotonic()
    for rank in ranks:
        kind = FailureKind.RUN_ERROR if rank.rank == 1 else FailureKind.RANK_LOST
        rank.failures.report(Failure(kind, rank.rank, "a", "a disk is full" if rank.rank == 1 else "lost the others"))
    for rank in ranks:
        while not rank.failures.causes():
            time.sleep(0.01)
    used = resource.getrusage(resource.RUSAGE_SELF)
    answers.put(
        {
            **answer, "named": list(named.values()), "known": time.monotonic() - failed,
            "cpu": used.ru_utime + used.ru_stime,
        }
    )  # fmt: skip
    _meet(store, "done", many + 1)
    if caller is not None:
        caller.close()


def _connected(port: int) -> PrefixStore:
    return PrefixStore("attempt-0", TCPStore("127.0.0.1", port, None, False, wait_for_workers=False, timeout=WAIT))


def _meet(store: PrefixStore, name: str, size: int) -> None:
    if store.add(name, 1) == size:
        store.set(f"all {name}", "")
    store.wait([f"all {name}"], WAIT)


def _turns(ranks: list[_Rank], seconds: float) -> None:
    """Lets each rank take its turn, one a beat, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        for rank in ranks:
            rank.turn()
        time.sleep(max(0.0, BEAT_SECONDS - (time.monotonic() - began)))


def _numbers(caller: Heartbeat | None) -> dict[int, int]:
    """Of the last beat of each rank, as the rank that calls the roll has read it; nothing in other processes."""
    watch = caller.watch if caller is not None else None
    return {rank: beat.number for rank, beat in watch.beats.items() if beat} if isinstance(watch, Watch) else {}


def _allow_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()

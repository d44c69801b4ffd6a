"""Times a sum while one rank begins 50 ms late: by the group's clock, and from a barrier on, as it was done before."""

import json
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.connection import Clock, connect, typical

LATE, REPEAT = 0.05, 9
dist.init_process_group("gloo")
connection = connect()
doubling = parse_algorithm("doubling", connection.group.size)
is_late = connection.group.rank == 2
start = Clock.start


def late_start(clock: Clock) -> float:
    start(clock)
    time.sleep(LATE)
    return clock.now()


def run() -> Any:
    return connection.engine.run(torch.zeros(1024, dtype=torch.int32), doubling).wait()


def from_barrier() -> float:
    connection.group.barrier()
    time.sleep(LATE if is_late else 0)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measured() -> tuple[float, float]:
    taken = typical(connection.clock.elapsed([connection.clock.span(run) for _ in range(REPEAT)]))
    return taken.seconds, taken.skew


run()
on_time = measured()
with patch.object(Clock, "start", late_start if is_late else start):
    late = measured()
old = median(connection.slowest([from_barrier() for _ in range(REPEAT)]))
print("found:", json.dumps({"on_time": on_time, "late": late, "from_barrier": old}))
connection.close()

"""Plays a script on one rank: real messages through `torusgd.comm`, timed waits in place of compute."""

import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.algorithms import GRIDS, Algorithm, parse_algorithm, usual_chunks
from ..comm.allreduce import AlgorithmAllReduce, AnyAllReduce, ShardCollectives, create
from ..comm.base import Work
from ..comm.connection import connect
from ..comm.groups import Group, group_of
from ..plan.step_script import Action, Compute, Send, Wait

_Grid = tuple[int, int]  # Y x X


def dump(
    actions: list[Action], steps: int, stretch: float, shrink: float, allreduce: str, grid: _Grid | None, dtype: str
) -> str:
    """The script of a rank for `main`, as JSON."""
    kinds = [[type(action).__name__, *action] for action in actions]
    part = {"steps": steps, "stretch": stretch, "shrink": shrink, "allreduce": allreduce, "grid": grid, "dtype": dtype}
    return json.dumps({**part, "actions": kinds})


def elements(send: Send, shrink: float, dtype: torch.dtype) -> int:
    """Number of elements of the tensor that stands for a message; at least one."""
    return max(1, round(send.bytes / shrink / dtype.itemsize))


_Reducers = Callable[[int | None, int], AnyAllReduce]  # by the members of a group and their distance; None: all ranks


class Player:
    """The messages of a step's script, their bytes divided by `shrink`, ready to leave as often as it is played."""

    def __init__(self, actions: list[Action], shrink: float, dtype: torch.dtype, reducers: _Reducers) -> None:
        self._actions = actions
        self._begin: dict[str, Callable[[], Work]] = {}
        self._on_the_way: dict[str, Work] = {}
        dtypes = {"gradients": dtype, "weights": torch.float32, "statistics": torch.int64}
        shards = cache(ShardCollectives)
        for send in actions:
            if isinstance(send, Send):
                over = reducers(send.members, send.apart)
                used, halves = dtypes.get(send.content, torch.float32), shards(over)
                starts = {"sum": over.start, "scatter": halves.start_reduce_scatter, "gather": halves.start_all_gather}
                tensor = torch.zeros(elements(send, shrink, used), dtype=used)
                self._begin[send.name] = partial(starts[send.kind], tensor)

    def play(self, stretch: float) -> float:
        """One step; the time at which it ended (time.monotonic). The next one waits for messages that it leaves."""
        # Ends of compute add up from the step's beginning: after a sleep that was too long the next one is short.
        due = time.monotonic()
        for action in self._actions:
            match action:
                case Compute(seconds):
                    due += stretch * seconds
                    time.sleep(max(0.0, due - time.monotonic()))
                case Send(name):
                    self._on_the_way[name] = self._begin[name]()
                case Wait(name) if name in self._on_the_way:
                    self._on_the_way.pop(name).wait()
                    due = max(due, time.monotonic())
        return due

    def end(self) -> None:
        """Waits for the messages that are still on their way."""
        for work in self._on_the_way.values():
            work.wait()


def _open(name: str, shrink: float, group: Group, grid: _Grid | None = None) -> AnyAllReduce:
    if name in ("auto", "native"):
        return create(name, group=group)

    def choose(length: int) -> Algorithm:
        # As many chunks as the message has in full size.
        return parse_algorithm(name, group.size, grid, usual_chunks(round(length * shrink)))

    why = f"allreduce {parse_algorithm(name, group.size, grid)}: as requested"
    return AlgorithmAllReduce(name, connect(group), choose, why)


def main(part: Path) -> None:
    """Plays this rank's script and prints the end of each step."""
    spec = json.loads(part.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = group_of()
    name, shrink, grid = spec["allreduce"], spec["shrink"], spec["grid"]
    allreduce = _open(name, shrink, ranks, grid and tuple(grid))
    flat = "ring" if name == "auto" or name.partition(":")[0] in GRIDS else name
    opened = [allreduce]

    @cache
    def reducers(members: int | None, apart: int) -> AnyAllReduce:
        if members is None:
            return allreduce
        # Every rank calls it, for its own group of ranks that are `apart` from one to the next.
        firsts = [first for first in range(ranks.size) if first // apart % members == 0]
        group = ranks.partition([range(first, first + apart * members, apart) for first in firsts])
        opened.append(_open(flat, shrink, group))
        return opened[-1]

    classes: dict[str, Callable[..., Action]] = {"Compute": Compute, "Send": Send, "Wait": Wait}
    actions = [classes[kind](*fields) for kind, *fields in spec["actions"]]
    player = Player(actions, shrink, getattr(torch, spec["dtype"]), reducers)
    ranks.barrier()
    ends = [player.play(spec["stretch"]) for _ in range(spec["steps"])]
    player.end()
    if ranks.rank == 0:
        print(allreduce.explanation)
    print("result:", json.dumps(ends), flush=True)
    ranks.barrier()
    for each in opened:
        each.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

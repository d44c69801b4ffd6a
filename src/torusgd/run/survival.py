"""A run on one rank through all changes of its ranks: what it retains, and from what it goes on.

A rank's function is called with the group of each generation (`ranks/generations.py`). What does not depend on the
other ranks outlives the change in this process: open data, the network, the fingerprint, the newest state. Groups and
all that is built on them are made anew.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from ..comm import store_keys as keys
from ..comm.algorithms import parse_algorithm
from ..comm.base import Liveness
from ..comm.groups import Group, alone
from ..errors import UserError
from ..precision import arithmetic_of
from ..ranks.generations import RanksChange
from ..ranks.liveness import Heartbeat
from ..recipe.runtime_options import RuntimeOptions
from ..signals import StopFlag
from .components import draw_network
from .fingerprint import Fingerprint, fingerprint_on_rank
from .job import Job
from .newest_state import Retained, nothing_yet
from .run import Run
from .state_feed import StateFollower

_LOOK_SECONDS = 0.2


class TrainRank:
    """A run on one rank, called again in the same process with the ranks that are left; it began with `workers`."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job, self._began = job, range(workers)
        self._run: Run | None = None
        self._retained: Retained | None = None
        self._follower: StateFollower | None = None

    def prepare(self, heartbeat: Heartbeat) -> None:
        """Opens the images of a rank that joins, and finds out whether it belongs to the run at work."""
        while not heartbeat.store.check([keys.FINGERPRINT]):  # a `get` would wait too, and hold up the beats
            time.sleep(_LOOK_SECONDS)
        run = Fingerprint.from_dict(json.loads(heartbeat.store.get(keys.FINGERPRINT)))
        with arithmetic_of(self._job.recipe):
            device, job = torch.device(self._job.device), self._job
            retained = nothing_yet(job, alone(device), heartbeat, self._began)
            network = draw_network(job, retained.data, device)
            # Other ranks give it their weights, and so it needs no file of initial ones.
            mine = replace(fingerprint_on_rank(job, retained.data, network.model, device), init_sha256=run.init_sha256)
            mine.check_joins(run, job.options.mixed)
            self._retained = replace(retained, fingerprint=mine, network=network)
            self._follower = StateFollower(job, self._retained, heartbeat)

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        assert self._follower is not None, "it was prepared"
        with arithmetic_of(self._job.recipe):
            self._follower.follow(source, caught_up)

    def close(self) -> None:
        if self._run is not None:
            self._run.close_files()

    def __call__(self, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> dict[str, Any] | RanksChange:
        assert isinstance(liveness, Heartbeat), "of a rank that is ours"
        with arithmetic_of(self._job.recipe):
            # SIGKILL 9: in the process that lives on, what the last run stood on is closed, and its state is retained.
            if (ended := self._run or self._follower) is not None:  # a rank that follows has not run yet
                self._retained, self._run, self._follower = ended.keep(), None, None
            job, retained = self._job, self._retained or nothing_yet(self._job, world, liveness, self._began)
            if retained.began != world.ranks:
                options, news = fitting(job.options, len(world.ranks))
                job, retained = replace(job, options=options), replace(retained, news=news)
            self._run = Run(job, world, stop, restarts, liveness, retained, liveness.generations)
            if world.rank == 0 and retained.state is None:
                # Ranks that join compare it with their own before they take part, and need no group for that.
                liveness.store.set(keys.FINGERPRINT, json.dumps(self._run.trainer.fingerprint.as_dict()))
            result = self._run.run()
            return RanksChange() if result.ranks_change else asdict(result)


def fitting(options: RuntimeOptions, ranks: int) -> tuple[RuntimeOptions, str]:
    """The options for another number of ranks, and a line that says what gives way."""
    name, native = options.allreduce, {"allreduce": "native", "grid": None, "streams": 1}
    if ranks == 1 or name == "native":  # nothing is summed, and no grid but 1 x 1 would be taken
        return options.model_copy(update={"grid": None}), ""
    if name == "auto":
        line = f"allreduce auto gives way to native: it was measured with other ranks than these {ranks}"
        return options.model_copy(update=native), line
    without = f"grid {options.grid} does not fit {ranks} ranks: allreduce {name} goes on without it"
    for changed, line in ((options, ""), (options.model_copy(update={"grid": None}), without)):
        with suppress(UserError):
            parse_algorithm(name, ranks, changed.grid_size)
            return changed, line
    return options.model_copy(update=native), f"allreduce {name} gives way to native: it does not fit {ranks} ranks"

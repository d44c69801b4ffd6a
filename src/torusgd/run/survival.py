"""When ranks are lost or join, the run goes on: what a rank keeps of it, and how the ranks agree on a state.

With replicated updates every rank holds the whole state after each step, and nothing outside the reducer changes until
a step is accepted. So the state of any rank that is left is enough, for ranks that join too. Two of them may differ by
a step, or by an evaluation: one has received its last message, another has not. They take the newest state that two
of them can compare, if any two hold the same step, and redo at most one step: of a state that a single rank holds,
nobody could tell whether its memory has failed.

Sums of integers have the same bits whoever computes which virtual worker. So the weights are those of a run that
nothing has happened to, and that holds for exact reductions only.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..comm.algorithms import parse_algorithm
from ..comm.base import ConnectionLost, Liveness
from ..comm.groups import Group, alone
from ..errors import UserError, warn
from ..observe.trackers import Trackers
from ..recipe.compatibility import fixed_ranks
from ..recipe.runtime_options import RuntimeOptions
from ..text import named
from ..weights import Tensors
from .draw_network import Network, draw_network, fingerprint_of
from .fingerprint import Fingerprint
from .host_share import HostShare, MappedArrays
from .job import Job, images_at, setup_of
from .open_data import Data, open_data
from .progress import RunState, share_tensors
from .saving import LastSaved

_LOOK_SECONDS = 0.2
"""from one question to the next while ranks wait for others"""
_LARGE = ("model/", "optimizer/")
"""names of tensors that are equal on all ranks after the same step; the others may have been measured again"""


@dataclass(frozen=True)
class Kept:
    """What a rank keeps of its part in a run when the ranks change; all of it in memory."""

    data: Data
    """open"""
    began: tuple[int, ...]
    """the ranks with which the run was started"""
    fingerprint: Fingerprint | None
    """of the run; None: not found yet"""
    generation: int
    """of the groups that were used last"""
    state: RunState | None
    """None: this rank has not taken part in a step yet"""
    counted: float
    """until when `state.seconds` counts (time.perf_counter)"""
    tensors: Tensors
    """as `StepState.state_dict` gives them"""
    last_event: Callable[[], dict[str, Any]] | None
    """the line of events.jsonl for what this rank did last, which a lost rank 0 may not have written"""
    network: Network | None = None
    """with these tensors, or of a rank that joins with any; None: not drawn yet"""
    saved: LastSaved | None = None
    trackers: Trackers = field(default_factory=Trackers)
    """open, where this rank has been the first"""

    def close(self) -> None:
        """At the end of this rank's part in the run."""
        self.trackers.close()
        self.data.close()


@dataclass(frozen=True)
class Agreed:
    """The state from which all ranks go on."""

    state: RunState
    holders: frozenset[int]
    """places of the ranks that hold this state, and go on from their own"""
    tensors: Iterator[tuple[str, Tensor]]
    """what is sent, to be taken one after the other, on all ranks; if all hold the state, what may differ even so"""
    last_event: Mapping[str, Any] | None
    saved: LastSaved | None
    """the newest checkpoint; None: the rank that wrote them is lost, and maybe had not written the last"""

    def others(self, world: Group) -> str:
        """A line that says who does not hold the state; empty where all do."""
        ranks = [str(rank) for place, rank in enumerate(world.ranks) if place not in self.holders]
        sent_to = named("rank", ranks)
        return "" if not ranks else f"all waited while the state of step {self.state.step} was sent to {sent_to}"


def nothing_yet(job: Job, world: Group, liveness: Liveness, began: Sequence[int]) -> Kept:
    """What a rank has before its first step: the images, which it opens. `began`: see `Kept`."""
    if job.lists is None:
        wanted = f"{job.data and job.data.resolve()} {job.recipe.data.model_dump_json()}"
        keeps = job.options.loader_processes > 0
        once: HostShare | MappedArrays = HostShare(world, liveness, "the list of images", images_at(job), wanted, keeps)
    else:  # a rank that joins others at work must not wait for them here
        once = MappedArrays(job.lists)
    data, trackers = open_data(job, world.device, liveness, once), Trackers(job.options.track, warn)
    return Kept(data, tuple(began), None, -1, None, 0.0, {}, None, trackers=trackers)


def prepared(job: Job, liveness: Liveness, began: Sequence[int], run: Fingerprint) -> Kept:
    """What a rank has that joins a run at work, once it knows that it belongs there.

    Args:
        job: Of the run, with the lists of images that this machine has made.
        liveness: Learns of progress.
        began: See `Kept`.
        run: The run's fingerprint.

    Raises:
        UserError: This rank has another recipe, other data, or other conditions.
    """
    device = torch.device(job.device)
    kept = nothing_yet(job, alone(device), liveness, began)
    network = draw_network(job, kept.data, device)
    # Other ranks give it their weights, and so it needs no file of initial ones.
    mine = replace(fingerprint_of(job, kept.data, network.model, device), init_sha256=run.init_sha256)
    mine.check_joins(run, job.options.mixed)
    return replace(kept, fingerprint=mine, network=network)


def wait_for_ranks(world: Group, liveness: Liveness, step: int, is_asked_to_stop: Callable[[], bool]) -> bool:
    """Waits, on all ranks of a run that has fewer than it wants, for others; False when one was asked to stop.

    Raises:
        ConnectionLost: Others are there, or some more are lost; the ranks meet anew.
    """
    for number in count():
        liveness.progress("wait for ranks", step, number)
        told = torch.tensor([int(is_asked_to_stop()), int(liveness.ranks_change())], device=world.small_device)
        world.all_reduce(told)
        stops, changes = told.tolist()
        if stops:
            return False
        if changes:
            raise ConnectionLost("ranks join")
        time.sleep(_LOOK_SECONDS)
    raise AssertionError


def fewest_ranks(job: Job, ranks: int) -> int:
    """With how many of its ranks a run goes on when others are lost; fewer start again, all of them."""
    if fixed_ranks(setup_of(job)):
        return ranks
    return 2 if job.options.audit else 1  # one rank has no other to check it


def agree(kept: Kept, world: Group) -> Agreed | None:
    """Finds the newest state that two ranks keep, or else one; every rank calls it. None where no rank has begun."""
    state = kept.state
    progress = -1 if state is None else 2 * state.step + (state.evaluated == state.step)
    all_progress = [int(each) for each in world.all_gather(torch.tensor([progress], device=world.small_device))]
    if max(all_progress) < 0:
        return None
    holders = holders_of([each // 2 for each in all_progress])
    source = max(holders, key=lambda place: (all_progress[place], -place))
    last_event = kept.last_event() if kept.last_event is not None else None
    saved = kept.saved if kept.saved is not None and kept.saved.rank == world.ranks[0] else None
    mine = json.dumps({"state": state.as_dict(), "last_event": last_event, "saved": saved} if state is not None else {})
    told = json.loads(world.broadcast_text(mine, source))
    is_alike = len(holders) == world.size
    sent = {name: each for name, each in kept.tensors.items() if not (is_alike and name.startswith(_LARGE))}
    tensors = share_tensors(sent, world, source)
    saved = LastSaved(*told["saved"]) if told["saved"] else None
    return Agreed(RunState.from_dict(told["state"]), holders, tensors, told["last_event"], saved)


def holders_of(steps: Sequence[int]) -> frozenset[int]:
    """The places whose state all ranks go on from, by the steps that each has done (below 0: it has not begun).

    >>> holders_of([4, 5, 5]), holders_of([4, 5, 4]), holders_of([4, 5]), holders_of([7, -1])
    (frozenset({1, 2}), frozenset({0, 2}), frozenset({1}), frozenset({0}))
    """
    by_step: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        if step >= 0:
            by_step.setdefault(step, []).append(place)
    return frozenset(max(by_step.items(), key=lambda each: (len(each[1]) > 1, each[0]))[1])


def fitting(options: RuntimeOptions, ranks: int) -> tuple[RuntimeOptions, str]:
    """The options for another number of ranks than they were given for, and a line that says what gives way.

    >>> options, line = fitting(RuntimeOptions(allreduce="torus", grid="2x2"), 3)
    >>> line
    'grid 2x2 does not fit 3 ranks: allreduce torus goes on without it'
    """
    name = options.allreduce
    if name == "native" or ranks == 1:
        return options, ""
    if name == "auto":
        line = f"allreduce auto gives way to native: it was measured with other ranks than these {ranks}"
        return options.model_copy(update={"allreduce": "native"}), line
    for grid in dict.fromkeys((options.grid_size, None)):
        try:
            parse_algorithm(name, ranks, grid)
        except UserError:
            continue
        if grid == options.grid_size:
            return options, ""
        line = f"grid {options.grid} does not fit {ranks} ranks: allreduce {name} goes on without it"
        return options.model_copy(update={"grid": None}), line
    line = f"allreduce {name} gives way to native: it does not fit {ranks} ranks"
    return options.model_copy(update={"allreduce": "native", "grid": None}), line

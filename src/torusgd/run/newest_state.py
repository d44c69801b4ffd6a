"""The newest state, from which all ranks go on: of the ranks themselves, of nodes' memory, of the disk, or a new one.

Ranks agree on it whenever they meet: when a run begins, and when ranks were lost or have joined (`agree`). With exact
reductions the weights are those of a run that nothing has happened to, whatever they go on from.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.base import Liveness
from ..comm.groups import Group
from ..errors import RunError, UserError, warn
from ..models import head_of
from ..observe.events import Telemetry, plan_table
from ..observe.trackers import Trackers
from ..recipe.compatibility import fixed_ranks
from ..recipe.schedule import Schedule
from ..rundir.checkpoint import Checkpoint, newest_checkpoint, split, step_on_disk
from ..rundir.run_dir import RunDir
from ..rundir.run_view import RunRequests
from ..runtime import ranks_are_given
from ..step.forward_backward import portable_price
from ..step.records import Line, parse_line, recorded_tensors
from ..text import named
from ..weights import Tensors, match_weights, weights_sha256
from .build import Trainer
from .components import Network
from .fingerprint import Fingerprint, changes
from .job import Job, images_at, setup_of
from .node_memory import NodeMemory
from .open_data import Data, HostShare, MappedArrays, open_data
from .saving import LastSaved, RunState, resumed, share_tensors
from .trained_weights import fit, read_initial

# Names of tensors that are equal on all ranks after the same step; the others may have been measured again.
_LARGE = ("model/", "optimizer/")

Found = tuple[RunState, Tensors]


@dataclass(frozen=True)
class Retained:
    """What a rank retains of its part in a run when the ranks change; all of it in memory."""

    data: Data
    schedule: Schedule
    run_dir: RunDir
    requests: RunRequests
    about: Mapping[str, Any]  # what `torusgd status` shows of the job, plain JSON
    began: tuple[int, ...]
    trackers: Trackers  # open, if this rank has been the first
    fingerprint: Fingerprint | None = None
    generation: int = -1  # the last one whose groups were used
    state: RunState | None = None  # None: this rank has not taken part in a step yet
    counted: float = 0.0  # until when `state.seconds` counts (time.perf_counter)
    tensors: Tensors = field(default_factory=dict)  # as `StepState.state_dict` gives them
    # Line of events.jsonl for what this rank did last, which a lost rank 0 may not have written.
    last_event: Callable[[], dict[str, Any]] | None = None
    last_records: Sequence[Line] = ()  # which it may not have written either
    network: Network | None = None  # with these tensors, or of a rank that joins with any; None: not drawn yet
    saved: LastSaved | None = None
    news: str = ""  # line for people: what the change of ranks has changed

    def close(self, code: int) -> None:
        self.trackers.close(code)
        self.data.close()


def nothing_yet(job: Job, world: Group, liveness: Liveness, began: Sequence[int]) -> Retained:
    """What a rank has before its first step; it opens the images. `began`: see `Retained`."""
    if job.lists is None:
        wanted = f"{job.data and job.data.resolve()} {job.recipe.data.model_dump_json()}"
        keeps = job.options.loader_processes > 0
        once: HostShare | MappedArrays = HostShare(world, liveness, images_at(job), wanted, keeps)
    else:  # a rank that joins others at work must not wait for them here
        once = MappedArrays(job.lists)
    data, trackers = open_data(job, world.device, liveness, once), Trackers(job.options.track, warn)
    fixed = "another launcher has started them" if ranks_are_given() else fixed_ranks(setup_of(job))
    about = {"recipe": job.recipe.name, "virtual_workers": job.recipe.virtual_workers, "fixed_ranks": fixed}
    schedule, about = Schedule(job.recipe, len(data.training.source)), {**about, **job.command()}
    return Retained(data, schedule, RunDir(job.out), RunRequests(job.out), about, tuple(began), trackers)


class Offer(NamedTuple):
    """What a rank could give to the others."""

    progress: int = -1  # twice the steps that it has done, and 1 for an evaluation after them; below 0: not begun
    copy: int = -1  # step of the copy in its node's memory; below 0: none
    digest: int = 0
    disk: int = 0  # step of the newest checkpoint, as the first rank has found it


class Choice(NamedTuple):
    """From what all ranks go on; ranks are group indices."""

    source: int  # rank that sends it
    holders: frozenset[int] = frozenset()  # ranks that hold the state themselves; none: no rank has begun
    is_copy: bool = False  # a copy in the memory of the source's node


@dataclass(frozen=True)
class Agreed:
    """The state from which all ranks go on."""

    state: RunState
    holders: frozenset[int]  # see `Choice`; they go on from their own
    # What is sent, to be taken one after the other, on all ranks; if all hold the state, what may differ even so.
    tensors: Iterator[tuple[str, Tensor]]
    origin: str = ""  # where a run that begins has found it, for people
    last_event: Mapping[str, Any] | None = None
    last_records: Sequence[Line] = ()
    # Newest checkpoint; None: the rank that wrote them is lost, and maybe had not written the last.
    saved: LastSaved | None = None
    others: str = ""  # line for people with the ranks that do not hold the state; empty: all do


def choose(offers: Sequence[Offer]) -> Choice | None:
    """What all ranks go on from, by what each has to offer; the same on every rank.

    None: the copies of the nodes are of one step and not alike, so that nobody can tell which is wrong.

    >>> choose([Offer(progress=8), Offer(progress=10), Offer(progress=11)])  # steps 4, 5, and 5 with its evaluation
    Choice(source=2, holders=frozenset({1, 2}), is_copy=False)
    """
    # With replicated updates every rank holds the whole state after each step, and nothing outside the reducer changes
    # until a step is accepted. So the state of any rank that is left is enough, for ranks that join too. Two of them
    # may differ by a step, or by an evaluation: one has received its last message, another has not.
    if max(offer.progress for offer in offers) >= 0:
        holders = holders_of([offer.progress // 2 for offer in offers])
        return Choice(max(holders, key=lambda index: (offers[index].progress, -index)), holders)
    # No rank has begun: a copy in the memory of a node, or what the first rank finds on its disk, or a new state. Of
    # equal age memory wins: it is read in a fraction of the time, and has been compared with the other nodes'.
    newest = max(offer.copy for offer in offers)
    if newest < max(0, offers[0].disk):
        return Choice(source=0)
    # All nodes save a copy after the same steps, rank 0's clock says which. So copies of one step must be equal.
    copies = [index for index, offer in enumerate(offers) if offer.copy == newest]
    return Choice(copies[0], is_copy=True) if len({offers[index].digest for index in copies}) == 1 else None


def holders_of(steps: Sequence[int]) -> frozenset[int]:
    """The indices of those whose state all go on from, by the steps that each has done (below 0: it has not begun).

    >>> holders_of([4, 5, 5]), holders_of([4, 5, 4]), holders_of([4, 5]), holders_of([7, -1])
    (frozenset({1, 2}), frozenset({0, 2}), frozenset({1}), frozenset({0}))
    """
    # A step that two hold comes before a newer one that nobody else can confirm: of a state that a single rank holds,
    # nobody could tell whether its memory has failed. At most one step is redone for that.
    newest = max(steps, key=lambda step: (step >= 0, steps.count(step) > 1, step))
    return frozenset(index for index, step in enumerate(steps) if step == newest)


class Beginning:
    """What a run begins with, if no rank has begun: a copy in its node's memory, the disk, --init, or the seed."""

    def __init__(self, job: Job, trainer: Trainer, liveness: Liveness, memory: NodeMemory | None) -> None:
        self._job, self._trainer, self._liveness, self._memory = job, trainer, liveness, memory
        self._checkpoints = RunDir(job.out).checkpoints
        self._copy: Checkpoint | None = None

    def offer(self, is_first: bool) -> Offer:
        """What this rank could give from outside the ranks."""
        if self._memory is None:  # then the disk has no rival, and the others need not know its step
            return Offer()
        self.wait()
        offer = Offer(disk=step_on_disk(self._checkpoints) if is_first else 0)
        if (copy := self._memory.read()) is None:
            return offer
        try:
            self._fitting(copy)
        except UserError as error:
            warn(f"in this node's memory: {error}")
            return offer
        self._copy = copy
        return offer._replace(copy=copy.step, digest=int(weights_sha256(copy.tensors)[:15], 16))

    def wait(self) -> None:
        self._liveness.outside("the checkpoint", str(self._checkpoints))

    def read(self, is_copy: bool) -> Found:
        """The state, on the rank that gives it; errors as of `agree`."""
        checkpoint = self._copy if is_copy else newest_checkpoint(self._checkpoints, warn)
        state, tensors = self._fitting(checkpoint) if checkpoint is not None else self._initial()
        known = state.mixed_conditions
        known += [each for each in self._trainer.mixed_conditions if each not in known]
        return state, tensors

    def _fitting(self, checkpoint: Checkpoint) -> Found:
        """What a checkpoint holds; UserError if it is not of this run."""
        state, step = resumed(checkpoint.progress, self._trainer.fingerprint), self._trainer.step
        where, (model, rest) = f"checkpoint of step {checkpoint.step}", split(checkpoint.tensors)
        match_weights(model, step.state.model.state_dict(), where)
        expected = step.state.expected_state(state.totals.skipped < state.step)
        if self._job.expected is not None:  # it is computed anew from a light checkpoint
            expected = recorded_tensors(expected)
        match_weights(rest, expected, where)
        return state, checkpoint.tensors

    def _initial(self) -> Found:
        state, job = RunState(self._trainer.fingerprint), self._job
        if job.init is None:
            return state, {}
        initial, classes = read_initial(job.init, job.recipe), len(self._trainer.data.training.source.classes)
        state.initial = fit(initial, self._trainer.step.state.model.state_dict(), lambda: head_of(job.recipe, classes))
        return state, {f"model/{name}": initial.tensors[name] for name in state.initial.taken}


def agree(retained: Retained, world: Group, beginning: Beginning | None = None) -> Agreed:
    """Finds the newest state, and has one rank send it to all; every rank calls it.

    `beginning` says where to look if no rank holds a state; None: one does. On every rank UserError if what was found
    does not fit the job, RunError if it can't be read or no good checkpoint is left.
    """
    # One small message of each rank, from which each finds the same choice: nobody has to announce it.
    offer = beginning.offer(world.rank == 0) if beginning is not None else Offer()
    if retained.state is not None:
        offer = offer._replace(progress=2 * retained.state.step + (retained.state.evaluated == retained.state.step))
    offers = [Offer(*row.tolist()) for row in world.all_gather(torch.tensor(offer, device=world.small_device))]
    # SIGKILL 11: the newest state that two ranks confirm; every rank finds the same one in the same offers.
    choice = choose(offers)
    if choice is None and world.rank == 0:
        warn(f"the nodes' copies of step {max(each.copy for each in offers)} are not alike; ignored")
    choice = choice or Choice(source=0)
    if not choice.holders and beginning is not None:
        beginning.wait()
    message: dict[str, Any] = {}
    tensors: Mapping[str, Tensor] = {}
    if world.rank == choice.source:
        try:
            state, tensors, origin = _found(choice, retained, world, beginning)
            saved = retained.saved if retained.saved is not None and retained.saved.rank == world.ranks[0] else None
            last_event = retained.last_event() if choice.holders and retained.last_event is not None else None
            lines = [line.model_dump_json() for line in retained.last_records] if choice.holders else []
            message = {"state": state.as_dict(), "origin": origin, "saved": saved}
            message |= {"last_event": last_event, "last_records": lines}
        except (UserError, RunError) as error:
            message = {"problem": str(error), "is_mistake": isinstance(error, UserError)}
    # One message for both: the others must learn of a problem before this rank ends.
    message = world.broadcast_json(message, choice.source)
    if "problem" in message:
        raise (UserError if message["is_mistake"] else RunError)(message["problem"])
    state = RunState.from_dict(message["state"])
    others = [rank for index, rank in enumerate(world.ranks) if index not in choice.holders]
    line = f"all waited while the state of step {state.step} was sent to {named('rank', others)}" if others else ""
    sent, saved = share_tensors(tensors, world, choice.source), message["saved"] and LastSaved(*message["saved"])
    last = message["last_event"], [*map(parse_line, message["last_records"])]
    return Agreed(state, choice.holders, sent, message["origin"], *last, saved, line)


def _found(
    choice: Choice, retained: Retained, world: Group, beginning: Beginning | None
) -> tuple[RunState, Mapping[str, Tensor], str]:
    """What the chosen rank sends: a state, the tensors that others lack, and where it was found."""
    if not choice.holders:
        assert beginning is not None, "no rank holds a state"
        origin = f"the copy in the memory of {socket.gethostname()}" if choice.is_copy else "the checkpoint"
        return *beginning.read(choice.is_copy), origin
    assert retained.state is not None, "it holds it"
    # If all have the weights, scales of gradients may differ even so, of a rank that has measured again.
    left_out = _LARGE if len(choice.holders) == len(world.ranks) else ()
    return retained.state, {name: each for name, each in retained.tensors.items() if not name.startswith(left_out)}, ""


def greet(telemetry: Telemetry, job: Job, trainer: Trainer, state: RunState, origin: str) -> None:
    """Says what the run is and what it begins with."""
    telemetry.console.print(plan_table(job.recipe, trainer.step.schedule, trainer.step.world.size))
    if trainer.explanation:
        telemetry.say(trainer.explanation)
    if job.recipe.precision == "portable":
        telemetry.say(portable_price(job.recipe, len(trainer.data.training.source.classes), trainer.step.world.device))
    if state.initial is not None and not state.step:
        telemetry.initial(asdict(state.initial), str(state.initial))
    if state.step:
        telemetry.say(f"resumed from {origin} of step {state.step}")
    now = state.fingerprint.conditions
    if state.other_conditions and state.other_conditions[-1] != now:
        how = f"conditions changed since the checkpoint ({changes(state.other_conditions[-1], now)})"
        warn(f"{how}: the weights may differ in their bits from an undisturbed run")
    if state.mixed_conditions:
        warn(f"ranks compute under mixed conditions ({changes(now, state.mixed_conditions[0])}): bits don't repeat")

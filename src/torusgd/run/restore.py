"""What a run begins with: the newest copy or good checkpoint of its state, --init's weights, or those of the seed."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from ..comm.base import Liveness
from ..errors import RunError, UserError, warn
from ..models import head_of
from ..observe.events import Telemetry, plan_table
from ..rundir.checkpoint import Checkpoint, newest_checkpoint, step_on_disk
from ..weights import match_weights
from .build import Trainer
from .fingerprint import changes
from .initial_weights import fit, read_initial
from .job import Job
from .node_memory import NodeMemory, newest
from .progress import RunState, resumed, share_tensors, tensors_of

Found = tuple[RunState, Mapping[str, Tensor]]


def restore(
    job: Job, trainer: Trainer, checkpoints: Path, liveness: Liveness, memory: NodeMemory | None = None
) -> tuple[RunState, str]:
    """Puts what is found into the trainer's parts; every rank calls it, one reads, all ranks get.

    Returns:
        How far the run has come (step 0: nothing was found), and from what it goes on, for people.

    Raises:
        UserError: On every rank: what was found does not fit the job.
        RunError: On every rank: it can't be read, or no good checkpoint is left.
    """
    step, world = trainer.step, trainer.step.world
    liveness.outside("the checkpoint", str(checkpoints))
    state, problem = RunState(trainer.fingerprint), ""
    tensors: Mapping[str, Tensor] = {}
    copy = _own_copy(trainer, memory)
    chosen = newest(copy, step_on_disk(checkpoints) if world.rank == 0 else 0, world) if memory is not None else None
    source = chosen.source if chosen is not None else 0
    if world.rank == source:
        try:
            if chosen is not None and copy is not None:
                state, tensors = _fitting(trainer, copy)
            else:
                state, tensors = _from_checkpoint(trainer, checkpoints) or _from_init(job, trainer)
        except (UserError, RunError) as error:
            problem = f"{'user' if isinstance(error, UserError) else 'disk'}:{error}"
    # The others must learn of it before this rank ends.
    kind, _, problem = world.broadcast_text(problem, source).partition(":")
    if kind:
        raise (UserError if kind == "user" else RunError)(problem)
    state = RunState.from_dict(json.loads(world.broadcast_text(json.dumps(state.as_dict()), source)))
    known = state.mixed_conditions
    known += [each for each in trainer.mixed_conditions if each not in known]
    step.state.load_state_dict(share_tensors(tensors, world, source))
    return state, "the checkpoint" if chosen is None else f"the copy in the memory of {chosen.host}"


def greet(telemetry: Telemetry, job: Job, trainer: Trainer, state: RunState, source: str) -> None:
    """Says what the run is and what it begins with. `source`: see `restore`."""
    telemetry.console.print(plan_table(job.recipe, trainer.step.schedule, trainer.step.world.size))
    if trainer.explanation:
        telemetry.say(trainer.explanation)
    if state.initial is not None and not state.step:
        telemetry.initial(asdict(state.initial), str(state.initial))
    if state.step:
        telemetry.say(f"resumed from {source} of step {state.step}")
    now = state.fingerprint.conditions
    if state.other_conditions and state.other_conditions[-1] != now:
        warn(
            f"conditions changed since the checkpoint ({changes(state.other_conditions[-1], now)}): the weights "
            "may differ in their bits from an undisturbed run"
        )
    if state.mixed_conditions:
        warn(f"ranks compute under mixed conditions ({changes(now, state.mixed_conditions[0])}): bits don't repeat")


def _own_copy(trainer: Trainer, memory: NodeMemory | None) -> Checkpoint | None:
    """The copy in this node's memory, if it is of this run."""
    copy = memory.read() if memory is not None else None
    try:
        if copy is not None:
            _fitting(trainer, copy)
    except UserError as error:
        warn(f"in this node's memory: {error}")
        return None
    return copy


def _from_checkpoint(trainer: Trainer, checkpoints: Path) -> Found | None:
    checkpoint = newest_checkpoint(checkpoints, warn)
    return None if checkpoint is None else _fitting(trainer, checkpoint)


def _fitting(trainer: Trainer, checkpoint: Checkpoint) -> Found:
    """What a checkpoint holds; UserError where it is not of this run."""
    state, step = resumed(checkpoint.progress, trainer.fingerprint), trainer.step
    where = f"checkpoint of step {checkpoint.step}"
    match_weights(checkpoint.model, step.state.model.state_dict(), where)
    match_weights(checkpoint.state, step.state.expected_state(state.totals.skipped < state.step), where)
    return state, tensors_of(checkpoint)


def _from_init(job: Job, trainer: Trainer) -> Found:
    state = RunState(trainer.fingerprint)
    if job.init is None:
        return state, {}
    initial, classes = read_initial(job.init, job.recipe), len(trainer.data.training.source.classes)
    state.initial = fit(initial, trainer.step.state.model.state_dict(), lambda: head_of(job.recipe, classes))
    return state, {f"model/{name}": initial.tensors[name] for name in state.initial.taken}

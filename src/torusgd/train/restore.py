"""What a run begins with: the newest good checkpoint, the weights of --init, or those that the seed has drawn."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..comm.liveness import Liveness
from ..errors import RunError, UserError
from ..models import head_of
from ..weights import match_weights
from .build import Trainer
from .checkpoint import newest_checkpoint
from .events import warn
from .initial_weights import fit, read_initial
from .job import Job
from .state import RunState, resumed, share_tensors, tensors_of

Found = tuple[RunState, Mapping[str, Tensor]]


def restore(job: Job, trainer: Trainer, checkpoints: Path, liveness: Liveness) -> RunState:
    """Puts what is found into the trainer's parts; every rank calls it, rank 0 reads, all ranks get.

    Returns:
        How far the run has come; step 0 without a checkpoint.

    Raises:
        UserError: On every rank: what was found does not fit the job.
        RunError: On every rank: it can't be read, or no good checkpoint is left.
    """
    step, world = trainer.step, trainer.step.world
    liveness.outside("the checkpoint", str(checkpoints))
    state, problem = RunState(trainer.fingerprint), ""
    tensors: Mapping[str, Tensor] = {}
    if world.rank == 0:
        try:
            state, tensors = _from_checkpoint(trainer, checkpoints) or _from_init(job, trainer)
        except (UserError, RunError) as error:
            problem = f"{'user' if isinstance(error, UserError) else 'disk'}:{error}"
    # The others must learn of it before rank 0 ends.
    kind, _, problem = world.broadcast_text(problem).partition(":")
    if kind:
        raise (UserError if kind == "user" else RunError)(problem)
    state = RunState.from_dict(json.loads(world.broadcast_text(json.dumps(state.as_dict()))))
    known = state.mixed_conditions
    known += [each for each in trainer.mixed_conditions if each not in known]
    step.state.load_state_dict(share_tensors(tensors, world))
    return state


def _from_checkpoint(trainer: Trainer, checkpoints: Path) -> Found | None:
    checkpoint = newest_checkpoint(checkpoints, warn)
    if checkpoint is None:
        return None
    state, step = resumed(checkpoint.progress, trainer.fingerprint), trainer.step
    where = f"checkpoint of step {checkpoint.step}"
    match_weights(checkpoint.model, step.model.state_dict(), where)
    match_weights(checkpoint.state, step.state.expected_state(state.totals.skipped < state.step), where)
    return state, tensors_of(checkpoint)


def _from_init(job: Job, trainer: Trainer) -> Found:
    state = RunState(trainer.fingerprint)
    if job.init is None:
        return state, {}
    initial, classes = read_initial(job.init, job.recipe), len(trainer.data.training.source.classes)
    state.initial = fit(initial, trainer.step.model.state_dict(), lambda: head_of(job.recipe, classes))
    return state, {f"model/{name}": initial.tensors[name] for name in state.initial.taken}

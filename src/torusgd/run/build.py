"""Puts a run together on one rank, once for each generation of ranks.

images     `open_data`             what a virtual worker computes with
network    `draw_network`          the weights that the seed gives
sums       `summing.sums_of`       all-reduce and reducer: from a gradient to the sum over ranks
passes     `choose_passes`        forward and backward
watchers   `watchers`              what looks at a step
step       `build`                 joins them
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from ..comm.base import Liveness
from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..gradients.reducer import BucketRebuild, hook_parameters
from ..gradients.update import Update
from ..observe.trace import StepTrace, check_trace
from ..precision import Precision
from ..recipe.compatibility import check
from ..recipe.schedule import Schedule
from ..step.control_vector import ControlMessage
from ..step.drift import DriftWatch
from ..step.images import ImageReader
from ..step.membership import Membership, even_shares
from ..step.model_state import StepState
from ..step.requests import Requests
from ..step.stats import StepClock
from ..step.step import TrainStep
from ..step.watch import StepWatch
from ..step.weight_average import MovingAverage
from ..step.work_stealing import work_stealing
from ..synchrony.delays import delay_model
from .choose_passes import passes_of, thread_of
from .draw_network import Network, draw_network, fingerprint_of, optimizer_of
from .fingerprint import Conditions, Fingerprint, check_ranks_agree
from .job import Job, images_at, setup_of
from .open_data import Data
from .summing import Sums, explanations, sums_of
from .watchers import drift_of, watches_of

if TYPE_CHECKING:
    from ..cuda.form import GpuForm
    from ..cuda.run_ahead import RunAhead


@dataclass(frozen=True)
class Trainer:
    """All that a run consists of on one rank."""

    membership: Membership
    data: Data
    network: Network
    step: TrainStep
    drift: DriftWatch
    bucket_rebuild: BucketRebuild
    fingerprint: Fingerprint
    mixed_conditions: list[Conditions]
    """of ranks that have others than rank 0; empty unless the options allow them"""
    trace: StepTrace | None
    explanation: str
    """lines that say how gradients travel; empty if there is nothing to choose"""
    ahead: "RunAhead | None"
    """takes the steps in the place of `step`, with the runtime option `cuda_graphs`"""
    close: Callable[[], None]
    """ends threads and groups; every rank calls it, with nothing under way"""


def build(
    job: Job,
    data: Data,
    world: Group,
    liveness: Liveness,
    requests: Requests | None = None,
    watchers: Sequence[StepWatch] = (),
    generation: int = 0,
    fingerprint: Fingerprint | None = None,
    network: Network | None = None,
) -> Trainer:
    """A run's parts on this rank; every rank calls it, since groups are made.

    Args:
        job: What to run.
        data: Of the job.
        world: All ranks.
        liveness: Learns of this rank's progress, and names late ranks to those who wait for messages.
        requests: Of this rank: to stop, to save; None: there are none.
        watchers: Look at each step, besides those of the options.
        generation: Of `world`: times that ranks have met anew.
        fingerprint: Of the job, as this rank has found it in an earlier generation, since it costs hashes of the data
            and of the weights; None: it is found here.
        network: Of the job, likewise, whose weights are then any; None: it is drawn here.

    Raises:
        UserError: The job can't be run as given.
    """
    recipe, options = job.recipe, job.options
    schedule = Schedule(recipe, len(data.training.source))
    _check(job, world, len(schedule))
    network = network or draw_network(job, data, world.device)
    fingerprint = fingerprint or fingerprint_of(job, data, network.model, world.device)
    runtime = {**options.model_dump(mode="json"), "max_steps": job.max_steps}
    mixed_conditions = check_ranks_agree(fingerprint, runtime, world, options.mixed)
    form, monitor = _gpu_form(job, world), Monitor(liveness)
    sums = sums_of(network.model, recipe, options, world, monitor, form.make_sum if form is not None else None)
    requests = requests or Requests(lambda: False, liveness)
    state, clock = _state(job, data, network, world, sums, form), StepClock(data.loader, monitor)
    drift = drift_of(options, recipe, world, state)
    watched = [drift, *watches_of(options, recipe, world, sums, state, clock, schedule), *watchers]
    state = replace(state, watchers=tuple(watched))
    step = _step(job, data, schedule, network, world, liveness, sums, state, clock, requests, form)
    hooks: list[RemovableHandle] = []

    def close() -> None:
        for hook in hooks:
            hook.remove()
        step.close()
        sums.close()

    profile = sums.allreduce.profile if options.buckets == "auto" and form is None else None
    trainer = Trainer(
        membership=even_shares(world.ranks, world.rank, recipe.virtual_workers, generation),
        data=data,
        network=network,
        step=step,
        drift=drift,
        bucket_rebuild=BucketRebuild(sums.reducer, profile, world),
        fingerprint=fingerprint,
        mixed_conditions=mixed_conditions,
        trace=None if job.trace is None else StepTrace(job.trace, world, job.out),
        explanation="\n".join(explanations(recipe, options, sums.allreduce, sums.tail, world)),
        ahead=form.run_ahead(step, monitor) if form is not None else None,
        close=close,
    )
    if form is None:  # last, since nobody takes the hooks off the network if ranks are lost before
        hooks += hook_parameters(sums.reducer)
    return trainer


def _state(job: Job, data: Data, network: Network, world: Group, sums: Sums, form: "GpuForm | None") -> StepState:
    """What the steps change: the network, its statistics and average, the optimizer, scales."""
    recipe, train = job.recipe, data.training.source
    optimizer = optimizer_of(
        recipe, network.model, sums.tail.held if sums.tail is not None else None, len(train.classes)
    )
    update = Update(
        network.model,
        optimizer,
        sums.reducer,
        sum_over_ranks=lambda table: sums.watched.start(table).wait(),
        columns=sums.tail,
        take_step=form.flat_update(optimizer, sums.reducer).step if form is not None else None,
        follows_schedule=recipe.synchrony.local_steps is None,
    )
    average = None
    if recipe.average is not None:
        average = MovingAverage(recipe.average, len(train), network.model, network.batch_norm.running)
    precision = Precision(recipe, world.device)
    return StepState(network.model, sums.reducer, update, network.batch_norm, precision, average)


def _step(
    job: Job,
    data: Data,
    schedule: Schedule,
    network: Network,
    world: Group,
    liveness: Liveness,
    sums: Sums,
    state: StepState,
    clock: StepClock,
    requests: Requests,
    form: "GpuForm | None",
) -> TrainStep:
    """Joins the parts of a step."""
    recipe, watched = job.recipe, [requests, *state.watchers]
    control = ControlMessage(state.batch_norm.running.numel(), world.device, clock.monitor.to_host)
    if form is not None:
        control = form.control(state, clock.monitor, room=sum(watch.words for watch in watched))
    own_copy = copy.deepcopy(network.own_copy)
    return TrainStep(
        recipe=recipe,
        schedule=schedule,
        images=ImageReader(data.loader, schedule, liveness, images_at(job), watched),
        forward_backward=form.passes(state, control)
        if form is not None
        else passes_of(job, state, own_copy, sums.tail, world),
        reducer=state.reducer,
        update=state.update,
        state=state,
        allreduce=sums.watched,
        control=control,
        requests=requests,
        watchers=watched,
        clock=clock,
        world=world,
        liveness=liveness,
        stealing=work_stealing(job.options, world),
        pass_thread=thread_of(job, own_copy, state, world),
    )


def _check(job: Job, world: Group, steps: int) -> None:
    check_trace(job.trace, steps)
    check(setup_of(job, world.size, device=world.device.type))
    for text in {job.delays, job.recipe.synchrony.delays or ""} - {""}:
        delay_model(text, job.recipe.seed)


def _gpu_form(job: Job, world: Group) -> "GpuForm | None":
    """The parts by which a GPU takes steps as CUDA graphs; None: the plain step's parts."""
    if not job.options.cuda_graphs:
        return None
    from ..cuda.form import GpuForm  # the only way to cuda/, which has never run on a GPU

    return GpuForm(job.recipe, job.options, world)

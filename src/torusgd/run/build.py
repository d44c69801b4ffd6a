"""Puts a run together on one rank, once for each generation of ranks.

images     `data.open_data`        what a virtual worker computes with
network    `network.draw_network`  the weights that the seed gives
sums       `sums.sums_of`          all-reduce and reducer: from a gradient to the sum over ranks
passes     `passes.passes_of`      forward and backward
watchers   `watchers`              what looks at a step
step       `build`                 joins them
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from ..comm.groups import Group
from ..comm.liveness import Liveness
from ..comm.monitor import Monitor
from ..cuda.cuda_streams import check_cuda_streams
from ..cuda.form import GpuForm
from ..cuda.run_ahead import RunAhead, runs_ahead
from ..gradients.bucket_rebuild import BucketRebuild
from ..gradients.reducer import hook_parameters
from ..gradients.update import Update
from ..observe.trace import StepTrace, check_trace
from ..precision import Precision
from ..recipe.schedule import Schedule
from ..runtime import check_world_size
from ..step.audit import check_audit
from ..step.control_vector import ControlMessage
from ..step.drift import DriftWatch
from ..step.images import ImageReader
from ..step.membership import Membership, even_shares
from ..step.model_state import StepState
from ..step.relaxed import check_synchrony
from ..step.requests import Requests
from ..step.stats import StepClock
from ..step.step import TrainStep
from ..step.watch import StepWatch
from ..step.weight_average import MovingAverage
from ..step.work_stealing import work_stealing
from .conditions import Conditions
from .data import Data
from .fingerprint import Fingerprint, check_ranks_agree
from .job import Job, images_at, is_live
from .network import Network, draw_network, fingerprint_of, optimizer_of
from .passes import passes_of, thread_of
from .sums import explanations, sums_of
from .watchers import drift_of, speed_watches


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
    ahead: RunAhead | None
    """takes the steps in the place of `step` on a GPU that can be given them in advance"""
    close: Callable[[], None]
    """ends threads and groups; every rank calls it, with nothing under way"""


def build(
    job: Job,
    data: Data,
    world: Group,
    liveness: Liveness,
    requests: Requests,
    watchers: Sequence[StepWatch] = (),
    generation: int = 0,
    fingerprint: Fingerprint | None = None,
    network: Network | None = None,
    ahead: bool | None = None,
) -> Trainer:
    """A run's parts on this rank; every rank calls it, since groups are made.

    Args:
        job: What to run.
        data: Of the job.
        world: All ranks.
        liveness: Learns of this rank's progress, and names late ranks to those who wait for messages.
        requests: Of this rank: to stop, to save.
        watchers: Look at each step, besides those of the options.
        generation: Of `world`: times that ranks have met anew.
        fingerprint: Of the job, as this rank has found it in an earlier generation, since it costs hashes of the data
            and of the weights; None: it is found here.
        network: Of the job, likewise, whose weights are then any; None: it is drawn here.
        ahead: Whether the steps are taken in the form of a GPU, on any device; None: on a GPU, where they can be.

    Raises:
        UserError: The job can't be run as given.
    """
    recipe, options, device = job.recipe, job.options, world.device
    _check(job, world)
    train = data.training.source
    schedule = Schedule(recipe, len(train))
    check_trace(job.trace, len(schedule))
    network = network or draw_network(job, data, device)
    model, batch_norm, own_copy = network.model, network.batch_norm, copy.deepcopy(network.own_copy)
    fingerprint = fingerprint or fingerprint_of(job, data, model, device)
    runtime = {**options.model_dump(mode="json"), "max_steps": job.max_steps}
    mixed_conditions = check_ranks_agree(fingerprint, runtime, world, options.mixed)
    average = MovingAverage(recipe.average, len(train), model, batch_norm.running) if recipe.average else None
    precision, form = Precision(recipe, device), _gpu_form(job, device, ahead)

    monitor = Monitor(liveness)
    sums = sums_of(model, recipe, options, world, monitor, form.make_sum if form is not None else None)
    optimizer = optimizer_of(recipe, model, sums.tail.held if sums.tail is not None else None, len(train.classes))
    update = Update(
        model,
        optimizer,
        sums.reducer,
        sum_over_ranks=lambda table: sums.watched.start(table).wait(),
        columns=sums.tail,
        flat=form.flat(optimizer, sums.reducer) if form is not None else None,
        follows_schedule=recipe.synchrony.local_steps is None,
    )
    state = StepState(model, sums.reducer, update, batch_norm, precision, average)
    clock, drift = StepClock(data.loader, monitor), drift_of(options, recipe, world, state)
    audit, speeds = speed_watches(options, recipe, world, sums, clock)
    watched: list[StepWatch] = [requests, drift, audit, *speeds, *watchers]
    room = sum(watch.words for watch in watched) if form is not None else None
    control = ControlMessage(batch_norm.running.numel(), device, monitor.to_host, room)
    step = TrainStep(
        recipe=recipe,
        schedule=schedule,
        images=ImageReader(data.loader, schedule, liveness, images_at(job), audit.reads_too),
        forward_backward=form.passes(model, precision, batch_norm, sums.reducer, control, world)
        if form is not None
        else passes_of(job, model, own_copy, batch_norm, precision, sums.reducer, update, sums.tail, world),
        reducer=sums.reducer,
        update=update,
        state=state,
        allreduce=sums.watched,
        control=control,
        requests=requests,
        watchers=watched,
        clock=clock,
        world=world,
        liveness=liveness,
        stealing=work_stealing(options, recipe, world),
        pass_thread=thread_of(job, own_copy, model, sums.reducer, precision, world),
    )
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
        ahead=form.ahead(step, monitor) if form is not None else None,
        close=close,
    )
    if form is None:  # last, since nobody takes the hooks off the network if ranks are lost before
        hooks += hook_parameters(sums.reducer)
    return trainer


def _check(job: Job, world: Group) -> None:
    recipe, options = job.recipe, job.options
    check_world_size(world.size, recipe)
    check_audit(options, recipe, world.size)
    check_synchrony(recipe, options, world.device, job.delays, is_live(job))


def _gpu_form(job: Job, device: torch.device, ahead: bool | None) -> GpuForm | None:
    """The parts of a run in the form of a GPU; None: the plain ones."""
    is_ahead = (device.type == "cuda" if ahead is None else ahead) and runs_ahead(job.recipe, job.options)
    check_cuda_streams(job.options, device, is_ahead)
    return GpuForm(job.recipe, job.options, device) if is_ahead else None

"""Puts a run together on one rank, once for each generation of ranks.

images      `open_data`       what a virtual worker computes with
components  `components`      all-reduce and reducer; the network, its update, forward and backward passes
step        `build`           joins them, with the watchers of the step
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..comm.base import Liveness
from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..errors import UserError, warn
from ..gradients.reducer import BucketRebuild, MakeSum, hook_parameters
from ..observe.trace import StepTrace
from ..recipe.compatibility import BY_SPEED, CUDA_GRAPHS, PORTABLE_GRAPHS, Setup, obstacle
from ..recipe.schedule import Schedule
from ..step.control_vector import ControlMessage
from ..step.corruption import Audit, DriftWatch, steps_between
from ..step.images import ImageReader
from ..step.measures import LostPairsWatch, NoiseWatch
from ..step.membership import Membership, even_shares
from ..step.model_state import StepState
from ..step.rank_times import LinkProbe, SpeedWatch, Stragglers
from ..step.stats import StepClock
from ..step.step import TrainStep
from ..step.watch import Requests, StepWatch
from ..step.work_stealing import work_stealing
from .components import (
    Hook,
    Network,
    Sums,
    compiler_hooks,
    draw_network,
    explanations,
    passes_of,
    state_of,
    sums_of,
    thread_of,
)
from .fingerprint import Conditions, Fingerprint, check_ranks_agree, fingerprint_on_rank
from .job import Job, check_job, images_at, setup_of
from .open_data import Data

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
    mixed_conditions: list[Conditions]  # of ranks that have others than rank 0; empty unless the options allow them
    trace: StepTrace | None
    explanation: str
    ahead: "RunAhead | None"  # takes the steps in the place of `step`, as CUDA graphs
    sums: Sums
    hooks: Sequence[Hook]

    def close(self) -> None:
        """Every rank calls it, with nothing under way."""
        for hook in self.hooks:
            hook.remove()
        if self.trace is not None:
            self.trace.close()
        self.step.close()
        self.sums.close()


def build(
    job: Job, data: Data, world: Group, liveness: Liveness, requests: Requests | None = None,
    watchers: Sequence[StepWatch] = (), generation: int = 0,
    fingerprint: Fingerprint | None = None, network: Network | None = None,
) -> Trainer:  # fmt: skip
    """A run's parts on this rank; every rank calls it, since groups are made. UserError if the job can't be run.

    `watchers` look at each step besides those of the options; `generation` counts the times that the ranks of `world`
    have met anew. A rank that has a `fingerprint` and a `network` (with any weights) gives them again.
    """
    recipe, options = job.recipe, job.options
    schedule = Schedule(recipe, len(data.training.source))
    check_job(job, world.size, world.device.type, len(schedule))
    network = network or draw_network(job, data, world.device)
    fingerprint = fingerprint or fingerprint_on_rank(job, data, network.model, world.device)
    runtime = {**options.model_dump(mode="json"), "max_steps": job.max_steps}
    # Before any group but the first is made: ranks with other options would make others, and wait for each other.
    mixed_conditions = check_ranks_agree(fingerprint, runtime, world, options.mixed)
    (form, make_sum), monitor = _on_gpu(job, world), Monitor(liveness)
    # Also outside the steps a rank that waits for another says so; that time is none of the steps' messages.
    world.watch = Monitor(liveness).watch
    sums = sums_of(network.model, recipe, options, world, monitor, make_sum)
    requests = requests or Requests(lambda: False, liveness)
    state, clock = state_of(job, data, network, sums, world, form), StepClock(data.loader, monitor)
    drift = _drift_of(job, world, state)
    watched = [drift, *_watches_of(job, world, sums, state, clock, schedule), *watchers]
    state, watched = replace(state, watchers=tuple(watched)), [requests, *watched]
    control = ControlMessage(state.batch_norm.passed.numel(), world.device, monitor.to_host)
    if form is not None:
        control = form.control(state, monitor, room=sum(watch.words for watch in watched))
    passes = form.passes(state, control) if form else passes_of(job, network, state, sums, world)
    if PORTABLE_GRAPHS.is_in(setup_of(job)):
        from ..cuda.form import capture_portable

        passes = capture_portable(state, passes, world.device)
    step = TrainStep(
        images=ImageReader(data.loader, schedule, liveness, images_at(job), watched),
        forward_backward=passes,
        recipe=recipe, schedule=schedule, reducer=state.reducer, update=state.update, state=state,
        allreduce=sums.watched, control=control, requests=requests, watchers=watched, clock=clock,
        world=world, liveness=liveness, stealing=work_stealing(options, world),
        pass_thread=thread_of(job, network, state, world),
    )  # fmt: skip
    profile = sums.allreduce.profile if options.buckets == "auto" and form is None else None
    return Trainer(
        membership=even_shares(world.ranks, world.rank, recipe.virtual_workers, generation),
        data=data, network=network, step=step, drift=drift, sums=sums,
        bucket_rebuild=BucketRebuild(sums.reducer, profile, world),
        fingerprint=fingerprint, mixed_conditions=mixed_conditions,
        trace=None if job.trace is None else StepTrace(job.trace, world, job.out),
        explanation="\n".join(explanations(recipe, options, sums.allreduce, sums.tail, world)),
        ahead=form.run_ahead(step, monitor) if form is not None else None,
        # The last, since nobody takes the hooks off the network if ranks are lost before.
        hooks=[
            *(hook_parameters(sums.reducer) if form is None else ()),
            *compiler_hooks(recipe, liveness),
        ],
    )  # fmt: skip


def _drift_of(job: Job, world: Group, state: StepState) -> DriftWatch:
    every, fewest = job.options.drift_every, min(stage.images_per_worker for stage in job.recipe.stages)
    if every is None:
        every = steps_between(job.recipe.virtual_workers * fewest // world.size)
    others = [state.batch_norm.running, *([state.average.values] if state.average else [])]
    return DriftWatch(state.reducer.layout.slots, others, world, every, state.update.wait_weights)


def _watches_of(
    job: Job, world: Group, sums: Sums, state: StepState, clock: StepClock, schedule: Schedule
) -> Iterator[StepWatch]:
    """The audit, counts, and what compares the ranks' speed; every rank calls it, since groups are made."""
    recipe, workers = job.recipe, job.recipe.virtual_workers
    yield Audit(job.options.audit, recipe.seed, world, sums.watched)
    probe = LinkProbe(world) if world.size > 2 else None  # of two ranks nobody can say whose link is slow
    yield Stragglers(world.rank, world.size, sums.reducer, clock.data_seconds, probe)
    if job.options.shares == "speed" and not obstacle(BY_SPEED, Setup(recipe)):
        yield SpeedWatch(world.rank, world.size, lambda: clock.speed)
    if recipe.precision == "portable":
        yield LostPairsWatch()
    # A column block's gradient is that of several virtual workers, and local steps hand over changes of weights.
    if workers > 1 and recipe.column_blocks == 1 and recipe.synchrony.form == "synchronous":
        norm, precision, to_host = state.update.gradient_norm, state.precision, clock.monitor.to_host
        yield NoiseWatch(schedule, workers, world.device, sums.watched, norm, lambda: precision.loss_scale, to_host)


def _on_gpu(job: Job, world: Group) -> "tuple[GpuForm | None, MakeSum | None]":
    # The parts of steps as CUDA graphs, and what makes the sums; None: the plain step's.
    takes_graphs = CUDA_GRAPHS.is_in(setup_of(job))
    if not takes_graphs and world.device.type == "cpu":
        return None, None
    from ..cuda.form import GpuForm, plain_sum  # cuda/form is the only way to cuda/

    make_sum = plain_sum(job.recipe, world)
    if not takes_graphs:
        return None, make_sum
    if make_sum is None:  # ranks of two forms would send their messages in two orders
        why = f"Triton's kernels don't run on {world.device}"
        if world.size > 1:
            raise UserError(f"cuda_graphs = true: {why}; mend that, or leave it out")
        warn(f"no CUDA graphs: {why}")
        return None, None
    form = GpuForm(job.recipe, job.options, world)
    return form, form.make_sum

"""Puts a run together on one rank, once for each generation of ranks.

Data, model, all-reduce, reducer, update, and the step that joins them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..comm.groups import Group
from ..comm.liveness import Liveness
from ..comm.monitor import Monitor
from ..cuda.cuda_streams import MainStream, check_cuda_streams
from ..cuda.device_sum import device_sum
from ..cuda.graphs import GraphedNetwork, device_network
from ..cuda.run_ahead import RunAhead, runs_ahead
from ..cuda.update_graph import GraphedUpdate
from ..data.identity import data_sha256
from ..data.loader import Loader
from ..data.loader_processes import LoaderProcesses, Opener
from ..data.nvjpeg import decode_on_gpu
from ..data.order import StreamOrder
from ..data.pipeline import Pipeline, allocate_by_torch
from ..data.sources import open_sources
from ..data.upload import BytePipeline, allocate_pinned, can_normalise_later
from ..gradients.bucket_rebuild import BucketRebuild
from ..gradients.layout import Slot
from ..gradients.reducer import Reducer, hook_parameters, parameter_slots
from ..gradients.update import Update
from ..hub import commit_of
from ..models import head_of, model_of
from ..models.compiled import compile_blocks
from ..models.repeatable import check_repeatable
from ..observe.trace import trace_steps
from ..optim import BLOCK, Lars, Sgd, build_optimizer
from ..optim.flat import FlatUpdate
from ..precision import Precision
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..runtime import check_world_size, loader_threads, prepare_process
from ..step.audit import Audit, check_audit
from ..step.balance import follows_speed
from ..step.batchnorm import BatchNormStatistics
from ..step.control_vector import ControlMessage
from ..step.drift import DriftWatch, steps_between
from ..step.forward_backward import ForwardBackward, SharedTail, WholeNetwork
from ..step.membership import Membership, even_shares
from ..step.model_state import StepState
from ..step.relaxed import check_synchrony, keep_rates, local_steps, outer_optimizer, pass_thread, scheduled_rates
from ..step.stats import StepClock
from ..step.step import TrainStep
from ..step.stragglers import FIELDS, LinkProbe, Stragglers
from ..step.weight_average import MovingAverage
from ..step.weights_first import order_of_gradients
from ..step.work_stealing import work_stealing
from ..tensor_parallel.parallel_tail import ParallelTail
from ..weights import weights_sha256
from .channels import all_reduce_of, channels_of, explanations, shared_tail
from .conditions import Conditions, conditions
from .fingerprint import Fingerprint, check_ranks_agree
from .host_share import HostShare, KeptArrays, MappedArrays
from .job import Job, images_at, init_sha256, is_live, replayed_sha256


@dataclass(frozen=True)
class Data:
    """The images of a run; they know of no ranks, and so stay open when the ranks change."""

    training: Pipeline
    held_out: Pipeline
    loader: Loader
    processes: LoaderProcesses | None
    """that make the loader's batches; None: its threads do"""

    def close(self) -> None:
        """Ends threads and processes."""
        self.loader.close()
        if self.processes is not None:
            self.processes.close()


@dataclass(frozen=True)
class Network:
    """The network of a rank; it knows of no ranks either, and is drawn only once."""

    model: nn.Module
    batch_norm: BatchNormStatistics
    own_copy: nn.Module | None
    """as drawn and never used itself; of recipes whose ranks compute with weights of their own"""


@dataclass(frozen=True)
class Trainer:
    """All that a run consists of on one rank."""

    membership: Membership
    data: Data
    network: Network
    step: TrainStep
    bucket_rebuild: BucketRebuild
    fingerprint: Fingerprint
    mixed_conditions: list[Conditions]
    """of ranks that have others than rank 0; empty unless the options allow them"""
    between_steps: Callable[[int], object]
    """to be called with the number of steps done, by every rank alike"""
    explanation: str
    """lines that say how gradients travel; empty where there is nothing to choose"""
    ahead: RunAhead | None
    """takes the steps in the place of `step`, where a GPU can be handed them in advance"""
    _close: Callable[[], None]

    def close(self) -> None:
        """Ends threads and groups; every rank calls it, with nothing under way."""
        self._close()


def find_images(job: Job) -> KeptArrays:
    """What there is of a job's images, found by a process that starts ranks; UserError where they can't be used."""
    kept = KeptArrays()
    open_sources(job.recipe.data, job.data, job.recipe.seed, kept)
    return kept


def open_data(job: Job, device: torch.device, liveness: Liveness, once: MappedArrays | HostShare | None = None) -> Data:
    """Opens the images of a job, which may take a while; UserError where they can't be used.

    Args:
        job: Whose images.
        device: Of this rank.
        liveness: Learns for what this rank waits.
        once: Gives the lists of images; None: this process makes them.
    """
    recipe, once = job.recipe, once or MappedArrays()
    liveness.outside("the list of images", images_at(job))
    train, held_out = open_sources(recipe.data, job.data, recipe.seed, once)
    if recipe.data.decoder == "nvjpeg":
        decode_on_gpu((train, held_out), device, job.options.loader_processes)
    is_gpu = device.type == "cuda"
    make = BytePipeline if is_gpu and can_normalise_later(recipe.data.augment) else Pipeline
    allocate = allocate_pinned if is_gpu else allocate_by_torch
    training = make(train, recipe.data, recipe.seed, allocate)
    processes, threads = None, loader_threads(device)
    if job.options.loader_processes:
        threads = job.options.loader_processes  # each of which waits for a process
        opener = Opener(make, recipe.data, job.data, recipe.seed, MappedArrays(once.paths))
        processes = LoaderProcesses(training, opener, threads)
    order = StreamOrder(len(train), recipe.seed, recipe.data.augment.repeats)
    loader = Loader(processes or training, order, threads=threads, ahead=threads + 3)
    evaluated = (BytePipeline if is_gpu else Pipeline)(held_out, recipe.held_out_data, recipe.seed, allocate)
    return Data(training, evaluated, loader, processes)


def draw_network(job: Job, data: Data, device: torch.device) -> Network:
    """The network of a job with the weights that its seed gives, on a device."""
    recipe = job.recipe
    prepare_process(recipe, device)
    model = model_of(recipe, len(data.training.source.classes)).to(device)
    own_copy = copy.deepcopy(model) if recipe.synchrony.form != "synchronous" else None
    batch_norm = BatchNormStatistics(model)
    if recipe.compile:
        compile_blocks(model, device)
    return Network(model, batch_norm, own_copy)


def build(
    job: Job,
    data: Data,
    world: Group,
    liveness: Liveness,
    stop_requested: Callable[[], bool],
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
        liveness: Learns of this rank's progress; waits for messages ask it for late ranks.
        stop_requested: Asked before each virtual worker.
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
    order = order_of_gradients(options, recipe, device)
    train = data.training.source
    schedule = Schedule(recipe, len(train))

    network = network or draw_network(job, data, device)
    model, batch_norm, own_copy = network.model, network.batch_norm, copy.deepcopy(network.own_copy)
    fingerprint = fingerprint or fingerprint_of(job, data, model, device)
    runtime = {**options.model_dump(mode="json"), "max_steps": job.max_steps}
    mixed_conditions = check_ranks_agree(fingerprint, runtime, world, options.mixed)
    if device.type == "cuda" and recipe.reduction == "exact":
        check_repeatable(model, recipe)
    average = MovingAverage(recipe.average, len(train), model, batch_norm.running) if recipe.average else None
    precision = Precision(recipe, device)

    allreduce = all_reduce_of(options, world, options.grid_size)
    monitor = Monitor(liveness)
    watched = monitor.over(allreduce)
    tail = shared_tail(model, recipe, options, world, monitor.watch)
    channels, groups_closed = channels_of(options, allreduce, watched, monitor, tail)
    slots = _slots(recipe, model, tail)

    def maximum_over_ranks(maxima: Tensor) -> None:
        if world.size > 1:
            monitor.watch(world.start_all_reduce(maxima, maximum=True)).wait()

    is_ahead = _is_ahead(job, device, ahead)
    reducer = Reducer(
        slots,
        reduction=recipe.reduction,
        addends=recipe.virtual_workers,
        channels=channels,
        maximum_over_ranks=maximum_over_ranks,
        rule=options.buckets,
        block=BLOCK,
        to_host=monitor.to_host,
        make_sum=partial(device_sum, recipe.virtual_workers, device) if is_ahead else None,
    )
    optimizer = _optimizer(recipe, model, tail, len(train.classes))
    update = Update(
        model,
        optimizer,
        reducer,
        sum_over_ranks=lambda table: watched.start(table).wait(),
        columns=tail,
        flat=FlatUpdate(optimizer, reducer.owned) if is_ahead and isinstance(optimizer, Sgd | Lars) else None,
    )
    control = ControlMessage(
        batch_norm.running.numel(),
        device,
        monitor.to_host,
        # Of each rank its times and one fingerprint.
        room=world.size * (FIELDS + 1) if is_ahead else None,
    )
    forward_backward: ForwardBackward
    if is_ahead:
        forward_backward = device_network(
            model, recipe, precision, batch_norm, reducer, control, device, options.cuda_streams,
            # A rank that may take over others' work does not know beforehand which of its passes is the last.
            overlaps=world.size > 1 and not options.work_stealing,
        )  # fmt: skip
    elif recipe.synchrony.local_steps is not None and own_copy is not None:
        forward_backward = local_steps(recipe, own_copy, model, reducer, update, precision, batch_norm)
    elif tail is None:
        forward_backward = WholeNetwork(model, recipe, precision, batch_norm, device, order=order)
    else:
        forward_backward = SharedTail(
            model, tail, reducer, update.wait_weights, recipe, precision, batch_norm, world, order
        )
    step = TrainStep(
        recipe=recipe,
        schedule=schedule,
        model=model,
        loader=data.loader,
        forward_backward=forward_backward,
        reducer=reducer,
        update=update,
        batch_norm=batch_norm,
        state=StepState(model, reducer, update, batch_norm, precision, average),
        average=average,
        precision=precision,
        allreduce=watched,
        set_rates=keep_rates if recipe.synchrony.local_steps is not None else partial(scheduled_rates, update),
        control=control,
        audit=Audit(options.audit, recipe.seed, world, watched),
        stragglers=Stragglers(world.rank, world.size, LinkProbe(world) if world.size > 2 else None),
        follows_speed=follows_speed(options, recipe),
        stealing=work_stealing(options, recipe, world),
        drift=DriftWatch(
            slots,
            [batch_norm.running, *([average.values] if average else [])],
            world,
            _drift_every(options, recipe, world),
        ),
        clock=StepClock(data.loader, monitor),
        world=world,
        images_at=images_at(job),
        liveness=liveness,
        stop_requested=stop_requested,
        pass_thread=pass_thread(recipe, own_copy, model, reducer.names, precision, world, job.delays)
        if own_copy is not None and is_live(job)
        else None,
    )

    run_ahead = _run_ahead(step, monitor) if is_ahead else None
    hooks: list[RemovableHandle] = []

    def close() -> None:
        for hook in hooks:
            hook.remove()
        step.close()
        groups_closed()
        allreduce.close()

    trainer = Trainer(
        membership=even_shares(world.ranks, world.rank, recipe.virtual_workers, generation),
        data=data,
        network=network,
        step=step,
        bucket_rebuild=BucketRebuild(
            reducer, allreduce.profile if options.buckets == "auto" and not is_ahead else None, world
        ),
        fingerprint=fingerprint,
        mixed_conditions=mixed_conditions,
        between_steps=trace_steps(job.trace, step, monitor, world, job.out),
        explanation="\n".join(explanations(recipe, options, allreduce, tail, world)),
        ahead=run_ahead,
        _close=close,
    )
    if not is_ahead:  # last, since nobody takes them off the network if ranks are lost before
        hooks += hook_parameters(reducer)
    return trainer


def fingerprint_of(job: Job, data: Data, model: nn.Module, device: torch.device) -> Fingerprint:
    """Of a job on this rank, with the network's weights as they were drawn."""
    recipe, train = job.recipe, data.training.source
    return Fingerprint(
        recipe_sha256=recipe.sha256(),
        train_images=len(train),
        data_sha256=data_sha256(train, data.held_out.source),
        init_sha256=init_sha256(job),
        drawn_sha256=weights_sha256(model.state_dict()),
        conditions=conditions(recipe, device),
        replayed_sha256=replayed_sha256(job),
        data_revision=commit_of(job.data),
    )


def _check(job: Job, world: Group) -> None:
    recipe, options = job.recipe, job.options
    check_world_size(world.size, recipe)
    check_audit(options, recipe, world.size)
    check_synchrony(recipe, options, world.device, job.delays, is_live(job))


def _run_ahead(step: TrainStep, monitor: Monitor) -> RunAhead:
    passes, device = step.forward_backward, step.world.device
    assert isinstance(passes, WholeNetwork | GraphedNetwork)
    capture = MainStream(device).capture if device.type == "cuda" else None
    return RunAhead(step, GraphedUpdate(step, passes.shadow, capture), monitor)


def _slots(recipe: Recipe, model: nn.Module, tail: ParallelTail | None) -> list[Slot]:
    own = parameter_slots(model, wide_norms=recipe.has_wide_norms)
    return [*(tail.slots if tail is not None else ()), *own]


def _is_ahead(job: Job, device: torch.device, ahead: bool | None) -> bool:
    """Whether the host hands over steps before it knows how the last one went; `ahead` decides where it can."""
    is_ahead = (device.type == "cuda" if ahead is None else ahead) and runs_ahead(job.recipe, job.options)
    check_cuda_streams(job.options, device, is_ahead)
    return is_ahead


def _optimizer(recipe: Recipe, model: nn.Module, tail: ParallelTail | None, classes: int) -> Optimizer:
    if recipe.synchrony.local_steps is not None:
        return outer_optimizer(recipe, model)
    head = head_of(recipe, classes) if recipe.optimizer.needs_head else ()
    return build_optimizer(recipe.optimizer, model, recipe.rate.lr, tail.held if tail is not None else None, head=head)


def _drift_every(options: RuntimeOptions, recipe: Recipe, world: Group) -> int:
    if options.drift_every is not None:
        return options.drift_every
    fewest = min(stage.images_per_worker for stage in recipe.stages)
    return steps_between(recipe.virtual_workers * fewest // world.size)

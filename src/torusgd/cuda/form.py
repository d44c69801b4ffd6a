"""What a run puts in place of the plain step's parts to take its steps as CUDA graphs; sums of plain steps on a GPU.

Which runs can is in `recipe.compatibility`. On a CPU the same parts work without graphs and kernels, with the bits of
the plain step.
"""

from functools import cache, partial

import torch
from torch.optim import Optimizer

from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..errors import first_line, warn
from ..gradients.integer_sum import BucketedSum
from ..gradients.layout import ParameterLayout, plan_buckets
from ..gradients.reducer import MakeSum, Reducer, exact_sum, hook_parameters
from ..optim import Lars, Sgd
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..runtime import runs_kernels
from ..step.control_vector import ControlMessage
from ..step.forward_backward import ForwardBackward, WholeNetwork
from ..step.model_state import StepState
from ..step.step import TrainStep
from .flat_weights import FlatUpdate
from .graphs import CapturedPasses, GraphedNetwork, PassParts, pass_streams, ready_events
from .run_ahead import RunAhead
from .sums import DeviceControl, DeviceGradientSum, KernelSum


class GpuForm:
    """The parts of one rank's step, where `plain_sum` has found that the kernels run."""

    def __init__(self, recipe: Recipe, options: RuntimeOptions, world: Group) -> None:
        self._recipe, self._options, self._world, self._device = recipe, options, world, world.device
        self._flat: FlatUpdate | None = None

    def make_sum(self, layout: ParameterLayout) -> DeviceGradientSum:
        """The reducer's sum of a layout's gradients, all of whose slots every rank holds."""
        assert layout.is_whole, "column blocks are summed one by one"
        return DeviceGradientSum(layout.buckets, self._recipe.virtual_workers, self._device)

    def control(self, state: StepState, monitor: Monitor, room: int) -> DeviceControl:
        return DeviceControl(state.batch_norm.running.numel(), self._device, monitor.to_host, room)

    def passes(self, state: StepState, control: ControlMessage) -> ForwardBackward:
        """A whole network, on a GPU with captured passes; it hooks the parameters."""
        assert isinstance(control, DeviceControl), "made above"
        reducer, batch_norm = state.reducer, state.batch_norm
        hook_parameters(reducer)
        network = WholeNetwork(state.model, self._recipe, state.precision, batch_norm, self._device)
        streams = pass_streams(self._device, self._options.cuda_streams)
        if not streams:
            return network
        parts = PassParts(network, reducer, batch_norm, self._device)
        ready = ready_events(self._device, len(reducer.layout.buckets)) if self._overlaps else None
        return GraphedNetwork(parts, control, streams, self._overlaps, ready)

    @property
    def _overlaps(self) -> bool:
        return self._world.size > 1  # one rank alone sends nothing

    def flat_update(self, optimizer: Optimizer, reducer: Reducer) -> FlatUpdate:
        """Takes the optimizer's steps."""
        assert isinstance(optimizer, Sgd | Lars), "checked above"
        self._flat = FlatUpdate(optimizer, reducer.owned)
        return self._flat

    def run_ahead(self, step: TrainStep, monitor: Monitor) -> RunAhead:
        """Takes the steps in the place of `step`, which has the parts above."""
        assert self._flat is not None
        return RunAhead(step, self._flat, monitor)


def capture_portable(state: StepState, passes: ForwardBackward, device: torch.device) -> ForwardBackward:
    """The passes of a plain step in portable arithmetic, on a GPU as CUDA graphs where they are of a whole network."""
    streams = pass_streams(device, 1)
    if not (streams and isinstance(passes, WholeNetwork)):
        return passes
    parts = PassParts(passes, state.reducer, state.batch_norm, device)
    return CapturedPasses(parts, streams[0], state.update.wait_weights)


def plain_sum(recipe: Recipe, world: Group) -> MakeSum | None:
    """What makes exact sums by Triton's kernels, of a step without CUDA graphs; None where they don't run.

    Then a run takes torch's operators, with the same bits.
    """
    # Portable arithmetic has rules for torch's operators alone; AMD's GPUs nobody has tried.
    if recipe.reduction != "exact" or recipe.precision == "portable" or torch.version.hip is not None:
        return None
    if (why := _trial(world.device)) and world.rank == 0:
        warn(f"exact sums by torch's operators, since Triton's kernels don't run here: {why}")
    return None if why else partial(exact_sum, KernelSum, recipe.virtual_workers, world.device)


@cache
def _trial(device: torch.device) -> str:
    # Why the kernels don't run: Triton, a compiler or a folder may be missing. Found here, and not within a step.
    if device.type == "cuda" and not runs_kernels(device):
        return "they need a GPU of compute capability 8.0"
    try:
        sums = [make(plan_buckets([5, 300], limit=100), 2, device) for make in (BucketedSum, KernelSum)]
        means = [[torch.linspace(-1.0, 0.3, numel, device=device) for numel in (5, 300)] for _ in sums]
        for total, out in zip(sums, means, strict=True):
            total.set_maxima(torch.ones(2, device=device))
            for number, each in enumerate(out):
                total.add(number, number, each)
                total.end_worker(number)
            total.finish()
            total.mean(out, 2)
    except Exception as error:  # whatever a compiler has to say
        return first_line(error)
    return "" if all(map(torch.equal, *means)) else "their sums are not those of torch's operators"

"""The form of a run for a GPU: the parts that stand in the place of the plain step's, made here and nowhere else."""

from functools import partial

import torch
from torch.optim import Optimizer

from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..gradients.reducer import MakeSum, Reducer
from ..optim import Lars, Sgd
from ..optim.flat import FlatUpdate
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..step.control_vector import ControlMessage
from ..step.forward_backward import WholeNetwork
from ..step.model_state import StepState
from ..step.step import TrainStep
from .cuda_streams import MainStream
from .device_sum import device_sum
from .graphs import GraphedNetwork, device_network
from .run_ahead import RunAhead
from .update_graph import GraphedUpdate


class GpuForm:
    """Makes the parts of a run on a GPU, or of the same form on a CPU.

    Args:
        recipe: Of the run; `runs_ahead` holds for it.
        options: Of the run.
        device: Of the rank.
    """

    def __init__(self, recipe: Recipe, options: RuntimeOptions, device: torch.device) -> None:
        self._recipe, self._options, self._device = recipe, options, device

    @property
    def make_sum(self) -> MakeSum:
        """Makes the gradient sum, on the device."""
        return partial(device_sum, self._recipe.virtual_workers, self._device)

    def flat(self, optimizer: Optimizer, reducer: Reducer) -> FlatUpdate:
        """The update of all tensors at once."""
        assert isinstance(optimizer, Sgd | Lars)
        return FlatUpdate(optimizer, reducer.owned)

    def passes(self, state: StepState, control: ControlMessage, world: Group) -> WholeNetwork | GraphedNetwork:
        """The passes of a virtual worker, captured if they can be."""
        # A rank that may take over others' work does not know beforehand which of its passes is the last.
        overlaps = world.size > 1 and not self._options.work_stealing
        return device_network(
            state.model, self._recipe, state.precision, state.batch_norm, state.reducer, control, self._device,
            self._options.cuda_streams, overlaps,
        )  # fmt: skip

    def ahead(self, step: TrainStep, monitor: Monitor) -> RunAhead:
        """What hands the steps over in advance."""
        passes = step.forward_backward
        assert isinstance(passes, WholeNetwork | GraphedNetwork)
        capture = MainStream(self._device).capture if self._device.type == "cuda" else None
        return RunAhead(step, GraphedUpdate(step, passes.shadow, capture), monitor)

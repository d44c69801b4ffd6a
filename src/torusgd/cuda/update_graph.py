"""The end of a step that is handed over: verdict, mean, update and 16-bit copies, as one CUDA graph.

Once a step's messages have arrived the device decides on it and updates the weights, all in memory that stays where it
is. So from the second step on that is one replay, beside which the host copies what changes from step to step: rates
and weight decays before it (`FlatUpdate.write_rates`), the report after it. The copies of the weights with which the
next step's passes compute are made at the end of it.

What enters a graph as a number is part of its key: a step with another loss scale, or a stage's other momentum, is
first taken plainly, which compiles what is new, and from the second one on has a graph of its own.
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import fields

import torch
from torch import Tensor

from ..errors import first_line
from ..recipe.schedule import Step
from ..step.control_vector import VERSION, Counts
from ..step.requests import Requests
from ..step.step import TrainStep
from .cuda_streams import Graph
from .device_sum import DeviceGradientSum
from .operators import REPORT
from .shadow import ShadowWeights

Capture = Callable[[Callable[[], None]], Graph]
"""makes a graph of work, as `PassStream.capture`"""


class GraphedUpdate:
    """Gives the device the end of a step, and captures it where it can.

    Args:
        run: Takes the same steps one by one; its update is flat, its sum a `DeviceGradientSum`.
        shadow: The weights with which the passes compute; None: they are the model's own.
        capture: Makes a graph on the stream of all else; None: nothing is captured.
    """

    def __init__(self, run: TrainStep, shadow: ShadowWeights | None, capture: Capture | None) -> None:
        workers, size, device = run.recipe.virtual_workers, run.world.size, run.world.device
        usual = Counts(version=VERSION * size, ranks=size, contributions=workers)
        counts = [getattr(usual, field.name) for field in fields(Counts)]
        # Behind the counts stands the section of requests, all zeros unless a rank has one.
        self._ordinary = torch.tensor([*counts, *[0] * Requests.words], device=device)
        self._run, self._shadow = run, shadow
        self._capture = capture if run.update.flat.can_be_captured else None
        self._report = torch.zeros(REPORT, dtype=torch.float64, device=device)
        self._graphs: dict[Hashable, Graph | None] = {}
        """by the numbers in it; None: a step with these was taken, and the next one is captured"""

    def end(self, step: Step) -> Tensor:
        """Gives the device all of a step that follows its messages.

        Returns:
            The verdict's report, to be copied to the host before the next call.
        """
        run = self._run
        run.reducer.show_means()
        run.update.set_rates(step)
        graph = self._graph()
        if graph is None:
            report = torch.empty_like(self._report)
            self._decide_and_update(report, written=False)
            return report
        run.update.flat.write_rates()
        graph.replay()
        if self._shadow is not None:
            self._shadow.are_of(step.index + 1)
        # The host reads a CPU's report where it lies, when the next one may have been written.
        return self._report if self._report.is_cuda else self._report.clone()

    def _graph(self) -> Graph | None:
        run = self._run
        key = (run.reducer.sum, run.state.precision.loss_scale, *run.update.flat.constants())
        if self._capture is None or key not in self._graphs:
            self._graphs[key] = None
        elif self._graphs[key] is None:
            try:
                self._graphs[key] = self._capture(self._captured)
            except RuntimeError as error:
                self._capture = None
                why = first_line(error)
                warnings.warn(f"updates run without a CUDA graph, with some more launches: {why}", stacklevel=3)
        return self._graphs[key]

    def _captured(self) -> None:
        self._decide_and_update(self._report, written=True)
        if self._shadow is not None:
            self._shadow.copy()

    def _decide_and_update(self, report: Tensor, written: bool) -> None:
        run = self._run
        total, statistics = run.reducer.sum, run.state.batch_norm
        assert isinstance(total, DeviceGradientSum)
        total.decide(run.control.on_device, self._ordinary, statistics.running, statistics.momenta, report)
        total.write_mean(run.reducer.means, run.state.precision.loss_scale)
        run.update.flat.step(total.going, written)

"""Batch norm over virtual workers: one moving-average update a step, from the mean over all of them or from one.

Each virtual worker normalises with its own batch statistics, as the records did on each GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError
from ..models.registry import is_frozen

_RUNNING = ("running_mean", "running_var")


def learning_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers, by name, whose running statistics follow those of their batches."""
    named = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm))
    return {name: layer for name, layer in named if not is_frozen(layer) and isinstance(layer.running_mean, Tensor)}


class BatchNormStatistics:
    """The running statistics of a model's batch-norm layers, which are changed in place, stored apart from its passes.

    `running` is float32 [n], mean and variance of each layer, `momenta` the fraction of a step's statistics in each,
    and `batch` the flat scratch of the last training pass: the batch's mean and unbiased variance of each layer. After
    `write_to_model` the model's buffers hold the running ones, until `begin_pass`. UserError for a momentum of null.

    With `each_of` so many virtual workers have moving averages of their own, as Fujitsu's processes evaluated a part of
    the held-out images each. A file holds one, and training reads none: only the first worker's is computed; the
    expected accuracy is the same. With `has_extra` steps may have extra passes.
    """

    def __init__(self, model: nn.Module, each_of: int | None = None, has_extra: bool = False) -> None:
        self._model, self._each_of = model, each_of
        self._frozen = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and is_frozen(layer)]
        self._is_prepared = False
        self.layers = learning_layers(model)
        if not self.layers and (each_of is not None or has_extra):
            raise UserError("model: has no batch norm; leave out model.batch_norm_workers and stages.N.extra_pass")
        device = next(model.parameters()).device
        running, momenta = [torch.zeros(0, device=device)], [torch.zeros(0, device=device)]
        for name, layer in self.layers.items():
            if layer.momentum is None:
                raise UserError(f"model: batch norm {name!r} has momentum null; give it a number such as 0.1")
            for key in _RUNNING:
                running.append(layer.get_buffer(key).float())
                momenta.append(torch.full_like(layer.get_buffer(key), layer.momentum))
        for layer in self.layers.values():  # once all are known to be usable
            layer.momentum = 1.0
        self.running, self.momenta = torch.cat(running), torch.cat(momenta)
        # The layers' buffers are views of one flat scratch tensor: with momentum 1 a pass leaves its statistics there.
        self.batch = self.running.clone()
        self._extra = torch.zeros_like(self.running) if has_extra else self.running.new_zeros(0)
        self._use(self.batch)

    @contextmanager
    def aside(self, scratch: Tensor) -> Iterator[None]:
        """Passes that begin inside leave their statistics here, shaped like `batch`, and count nothing."""
        usual, counters = self._scratch, {layer: layer.num_batches_tracked for layer in self.layers.values()}
        self._use(scratch)
        for layer in counters:
            layer.num_batches_tracked = None
        try:
            yield
        finally:
            self._use(usual)
            for layer, counter in counters.items():
                layer.num_batches_tracked = counter

    def _use(self, scratch: Tensor) -> None:
        self._scratch, offset = scratch, 0
        for layer in self.layers.values():
            for key in _RUNNING:
                # `data`, for a version counter of its own: what is compiled keeps a buffer, and must not take a change
                # of another layer's for one of its own.
                layer._buffers[key] = scratch[offset : offset + layer.num_features].data
                offset += layer.num_features

    def begin_pass(self) -> None:
        """Puts the model into training mode, and clears what a pass before may have left, a nan included."""
        # Once after each evaluation, since for a ResNet-50 it takes a millisecond, which a GPU would wait.
        if not (self._is_prepared and self._model.training):
            self._is_prepared = True
            self._model.train()
            for layer in self._frozen:
                layer.eval()
        self.batch = self._scratch
        self.batch.zero_()

    @torch.no_grad()
    def extra_pass(self, model: Callable[[Tensor], Tensor], images: Tensor | None) -> None:
        """A forward pass for its statistics alone, before a virtual worker's training pass; None: there is none."""
        if images is None:
            self._extra.zero_()
            return
        # With the weights that the training pass has, not the updated ones: so the statistics travel in the same
        # message, and a step that is cut off has changed nothing. Dropout is off, and draws nothing.
        self.begin_pass()
        self._model.eval()
        for layer in self.layers.values():
            layer.train()
        model(images)
        self._extra.copy_(self.batch)

    @property
    def passed(self) -> Tensor:
        """The statistics of a virtual worker's passes, float32 [n], or [2n] with those of the extra pass behind."""
        return torch.cat([self.batch, self._extra]) if len(self._extra) else self.batch

    def added_by(self, worker: int) -> Tensor:
        """What a virtual worker adds to the step's sum of `passed`."""
        # By a factor, since what is not finite must remain so.
        return self.passed * 0 if self._each_of is not None and worker > 0 else self.passed

    def update(self, mean: Tensor, has_extra: bool = False) -> None:
        """A moving-average update from the step's mean of `added_by`, float64; with `has_extra` one more behind it."""
        # A float32 value survives the division and the product in float64.
        taken = (mean * (self._each_of or 1)).float().split(len(self.running) or 1)
        for statistics in taken[: 1 + has_extra]:
            self.running.mul_(1 - self.momenta).add_(self.momenta * statistics)

    def write_to_model(self, steps: int) -> None:
        self._scratch.copy_(self.running)
        for layer in self.layers.values():
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(steps)

    def read_from_model(self) -> None:
        self.running.copy_(self._scratch)

    def name_of(self, index: int) -> str:
        """The layer of an element of the flat tensors."""
        names = [name for name, layer in self.layers.items() for _ in range(2 * layer.num_features)]
        return names[index % len(names)]

"""Gradients and accuracy of a network as functions of its weights, held as one flat vector.

The workers of a simulation have different weights at the same moment. Each pass therefore takes the weights that it
is of, and the network itself is only the place where they are put.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..data import Pipeline, StreamOrder
from ..models import model_of
from ..recipe.schema import Recipe
from ..rng import DROPOUT, seed_torch

_CHUNK = 500
_STATISTICS = 4
"""batches of _CHUNK training images from which batch norm takes its statistics in evaluations"""


class Passes:
    """A recipe's network and images.

    Args:
        recipe: Its model, data, seed, label smoothing, and the first stage's images of a virtual worker, or of one of
            its local steps.
        train: Training images.
        held_out: Images for the accuracy.
    """

    def __init__(self, recipe: Recipe, train: Pipeline, held_out: Pipeline) -> None:
        self._recipe, self._train = recipe, train
        self._order = StreamOrder(len(train.source), recipe.seed)
        self.images = recipe.stages[0].images_per_worker // (recipe.synchrony.local_steps or 1)
        """images of a gradient"""
        self._model = model_of(recipe, len(train.source.classes))
        self._norms = [layer for layer in self._model.modules() if isinstance(layer, _BatchNorm)]
        self.initial = parameters_to_vector(self._model.parameters()).detach().clone()
        """weights to begin with, float32 [weights]"""
        known = min(_CHUNK * _STATISTICS, len(train.source))
        self._known = train.training_batch(np.arange(known), np.zeros(known, dtype=np.int64), augment=False)
        self._held_out = held_out.validation_batch(np.arange(len(held_out.source)))

    def gradient(self, weights: Tensor, number: int) -> Tensor:
        """The mean gradient over the stream's batch of that number, float32 [weights]."""
        indices, epochs = self._order.at(number * self.images, self.images)
        batch = self._train.training_batch(indices, epochs, augment=self._recipe.stages[0].augment)
        self._put(weights)
        self._model.train()
        seed_torch(self.initial.device, DROPOUT, self._recipe.seed, number)
        logits = self._model(batch.images)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self._recipe.label_smoothing)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self._model.parameters()))])

    @torch.no_grad()
    def error(self, weights: Tensor) -> float:
        """The share of held-out images that are classified wrongly.

        Workers see different images with different weights, so there are no running statistics that were theirs all:
        batch norm takes those of fixed training images with the weights that are judged.
        """
        self._put(weights)
        self._model.train()
        momenta = [layer.momentum for layer in self._norms]
        for layer in self._norms:
            layer.reset_running_stats()
            layer.momentum = None  # a plain average over the passes that follow
        for images in self._known.images.split(_CHUNK):
            self._model(images)
        for layer, momentum in zip(self._norms, momenta, strict=True):
            layer.momentum = momentum
        self._model.eval()
        found = torch.cat([self._model(images).argmax(dim=1) for images in self._held_out.images.split(_CHUNK)])
        return float((found != self._held_out.targets).double().mean())

    def tensors(self, weights: Tensor) -> dict[str, Tensor]:
        """The weights by name."""
        self._put(weights)
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def _put(self, weights: Tensor) -> None:
        # Views of the vector, not copies; nothing writes through them.
        vector_to_parameters(weights, self._model.parameters())

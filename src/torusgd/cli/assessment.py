"""Trained weights, opened for `torusgd eval` and `torusgd polish`."""

from ..comm.allreduce import native
from ..data.pipeline import Pipeline
from ..launch.torchrun import join
from ..precision import Precision
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..runtime import prepare_process, resolve_auto, resolve_device
from ..train.evaluate import Evaluation, evaluate
from ..train.load_trained import open_trained
from ..train.polish import polish_by_recipe
from .options import TrainedWeights

TIMEOUT = 1800.0
"""seconds that ranks of an evaluation wait for one another"""


class Assessment:
    """Trained weights on this rank's device, ready to be evaluated and polished.

    Raises:
        UserError: There are no weights, or they do not fit their network or the data.
    """

    def __init__(self, weights: TrainedWeights) -> None:
        device = resolve_device(RuntimeOptions.model_validate({"device": weights.device}))
        self.trained = open_trained(
            weights.checkpoint, weights.data, weights.model, weights.classes, weights.overrides or []
        )
        self.world = join(device, TIMEOUT)
        self.recipe: Recipe = resolve_auto(self.trained.recipe, device)
        prepare_process(self.recipe, self.world.device)
        self.model = self.trained.model.to(self.world.device)
        self.precision = Precision(self.recipe, self.world.device)

    def evaluate(self) -> Evaluation:
        """Classifies every held-out image."""
        pipeline = Pipeline(self.trained.held_out, self.recipe.held_out_data, self.recipe.seed)
        settings = self.recipe.evaluate
        result = evaluate(self.model, pipeline, settings, self.world, native(self.world), self.precision)
        assert result is not None, "nobody asks an assessment to stop"
        return result

    def polish(self) -> int:
        """Sets the batch-norm statistics over training images; their number."""
        pipeline = Pipeline(self.trained.train, self.recipe.data, self.recipe.seed)
        return polish_by_recipe(self.model, pipeline, self.recipe, self.world, native(self.world), self.precision)

"""Trained weights, opened for `torusgd eval` and `torusgd polish`."""

from ..comm.allreduce import NativeAllReduce
from ..data.pipeline import Pipeline
from ..launch.torchrun import join
from ..precision import Precision, arithmetic_of
from ..recipe.runtime_options import RuntimeOptions
from ..run.trained_weights import open_trained
from ..rundir.run_view import called, read_here
from ..runtime import prepare_process, resolve_auto, resolve_device
from ..step.evaluate import Confusion, Evaluation, Observe, evaluate
from ..step.polish import polish_by_recipe
from .options import TrainedWeights

_TIMEOUT = 1800.0  # seconds that ranks of an evaluation wait for one another
_MOST_CLASSES = 4096  # for a confusion matrix: 128 MiB


class Assessment:
    """Trained weights on this rank's device; UserError if there are none, or they don't fit network or data."""

    def __init__(self, weights: TrainedWeights, options: RuntimeOptions) -> None:
        device = resolve_device(options)
        with read_here(run := weights.checkpoint) as here:
            self.trained = open_trained(here, weights.data, weights.model, weights.classes, weights.overrides or [])
        self.name = called(run, here, str(self.trained.path))  # of the weights, for people
        self.world = join(device, _TIMEOUT)
        self.recipe = resolve_auto(self.trained.recipe, device)
        prepare_process(self.recipe, self.world.device)
        self.model = self.trained.model.to(self.world.device)
        self.precision = Precision(self.recipe, self.world.device)

    def evaluate(self, observe: Observe = lambda logits, batch, chunk: None) -> Evaluation:
        pipeline = Pipeline(self.trained.held_out, self.recipe.held_out_data, self.recipe.seed)
        settings, allreduce = self.recipe.evaluate, NativeAllReduce(self.world)
        with arithmetic_of(self.recipe):
            result = evaluate(self.model, pipeline, settings, self.world, allreduce, self.precision, observe=observe)
        assert result is not None, "no assessment is stopped"
        return result

    def evaluate_classes(self) -> tuple[Evaluation, Confusion | None]:
        """Classifies every held-out image, and counts which class was taken for which, unless there are too many."""
        classes = len(self.trained.classes)
        if classes > _MOST_CLASSES:
            return self.evaluate(), None
        confusion = Confusion(classes, self.world.device)
        result = self.evaluate(lambda logits, batch, _: confusion.add(logits, batch.targets.to(self.world.device)))
        confusion.sum_over_ranks(NativeAllReduce(self.world))
        return result, confusion

    def polish(self) -> int:
        """Sets the batch-norm statistics over training images; their number."""
        pipeline = Pipeline(self.trained.train, self.recipe.data, self.recipe.seed)
        allreduce = NativeAllReduce(self.world)
        with arithmetic_of(self.recipe):
            return polish_by_recipe(self.model, pipeline, self.recipe, self.world, allreduce, self.precision)

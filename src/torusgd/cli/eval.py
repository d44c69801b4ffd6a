"""`torusgd eval` and `torusgd polish`: what trained weights are worth, and exact batch-norm statistics for them."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.allreduce import native
from ..data.pipeline import Pipeline
from ..errors import UserError
from ..launch.torchrun import join
from ..precision import Precision
from ..recipe.schema import Recipe
from ..runtime import RuntimeOptions, prepare_process, ranks_of, resolve_auto, resolve_device
from ..train.evaluate import Evaluation, evaluate
from ..train.load_trained import Trained, open_trained
from ..train.polish import polish_by_recipe
from ..weights import save_weights, weights_sha256

TIMEOUT = 1800.0
"""seconds that ranks of an evaluation wait for one another"""


class Assessment:
    """Trained weights on this rank's device, ready to be evaluated and polished.

    Args:
        trained: As from `open_trained`.
        device: `cpu`, `cuda` or null: cuda where there is a GPU.
    """

    def __init__(self, trained: Trained, device: str | None) -> None:
        chosen = resolve_device(RuntimeOptions.model_validate({"device": device}))
        self.ranks = ranks_of(join(chosen, TIMEOUT))
        self.trained = trained
        self.recipe: Recipe = resolve_auto(trained.recipe, chosen)
        prepare_process(self.recipe, self.ranks.device)
        self.model = trained.model.to(self.ranks.device)
        self.precision = Precision(self.recipe, self.ranks.device)

    def evaluate(self) -> Evaluation:
        """Classifies every held-out image."""
        pipeline = Pipeline(self.trained.held_out, self.recipe.data, self.recipe.seed)
        chunk = self.recipe.evaluate.images_per_chunk
        result = evaluate(self.model, pipeline, chunk, self.ranks, native(), self.precision)
        assert result is not None, "nobody asks an assessment to stop"
        return result

    def polish(self) -> int:
        """Sets the batch-norm statistics over training images; their number."""
        pipeline = Pipeline(self.trained.train, self.recipe.data, self.recipe.seed)
        return polish_by_recipe(self.model, pipeline, self.recipe, self.ranks, native(), self.precision)


def eval_command(
    path: Path, data: Path | None, model: str | None, classes: str | None, device: str | None, overrides: Sequence[str]
) -> None:
    """Prints the accuracy of trained weights on the held-out images of a data set."""
    assessment = Assessment(open_trained(path, data, model, classes, overrides), device)
    result = assessment.evaluate()
    if assessment.ranks.is_first:
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{assessment.trained.path}: {describe(result)}", markup=False)


def polish_command(
    path: Path,
    data: Path | None,
    model: str | None,
    classes: str | None,
    device: str | None,
    overrides: Sequence[str],
    out: Path | None,
) -> None:
    """Gives trained weights exact batch-norm statistics, and prints their accuracy before and after.

    Raises:
        UserError: The weights can't be opened, or `out` can't be written.
    """
    trained = open_trained(path, data, model, classes, overrides)
    target = out or trained.path.with_name(f"{trained.path.stem}-polished.safetensors")
    if not target.parent.is_dir():
        raise UserError(f"--out {target}: there is no folder {target.parent}")
    assessment = Assessment(trained, device)
    if not any(isinstance(module, _BatchNorm) for module in assessment.model.modules()):
        raise UserError(f"{trained.path}: {assessment.recipe.model.name} has no batch norm to polish")
    before = assessment.evaluate()
    images = assessment.polish()
    after = assessment.evaluate()
    if not assessment.ranks.is_first:
        return
    tensors = assessment.model.state_dict()
    metadata = {
        "classes": json.dumps(trained.train.classes),
        "recipe": json.dumps(assessment.recipe.as_dict()),
        "recipe_sha256": assessment.recipe.sha256(),
        "polished": f"{images} images",
    }
    try:
        save_weights(target, tensors, metadata)
    except OSError as error:
        raise UserError(f"--out {target}: can't be written: {error.strerror}") from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"before  {describe(before)}")
    console.print(f"after   {describe(after)}  (statistics of {images} un-augmented training images)")
    console.print(f"in {target}  weights_sha256 {weights_sha256(tensors)}", markup=False)


def describe(result: Evaluation) -> str:
    """An evaluation in one line."""
    excluded = f", {result.excluded} undecodable left out" if result.excluded else ""
    return (
        f"top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}  on {result.images} held-out images"
        f"{excluded}"
    )

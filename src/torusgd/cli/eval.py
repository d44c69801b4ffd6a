"""`torusgd eval` and `torusgd polish`: what trained weights are worth, and exact batch-norm statistics for them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..errors import UserError
from .options import OUTPUT, TrainedWeights, takes_groups
from .output import check_writable, console

if TYPE_CHECKING:
    from ..train.evaluate import Evaluation


@takes_groups
def evaluate(weights: TrainedWeights) -> None:
    """Print the accuracy of trained weights on held-out images."""
    from .assessment import Assessment

    assessment = Assessment(weights)
    result = assessment.evaluate()
    if assessment.world.rank == 0:
        console().print(f"{assessment.trained.path}: {describe(result)}", markup=False)


@takes_groups
def polish(
    weights: TrainedWeights,
    out: Annotated[
        Path | None,
        Option("--out", help="Weight file to write. Default: NAME-polished.safetensors.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Give trained weights exact batch-norm statistics, from un-augmented training images (Final Polishing)."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from ..weights import save_weights, weights_sha256
    from .assessment import Assessment

    assessment = Assessment(weights)
    trained, recipe = assessment.trained, assessment.recipe
    target = out or trained.path.with_name(f"{trained.path.stem}-polished.safetensors")
    check_writable("--out", target)
    if not any(isinstance(module, _BatchNorm) for module in assessment.model.modules()):
        raise UserError(f"{trained.path}: {recipe.model.name} has no batch norm to polish")
    before = assessment.evaluate()
    images = assessment.polish()
    after = assessment.evaluate()
    if assessment.world.rank != 0:
        return
    tensors = assessment.model.state_dict()
    metadata = {
        "classes": json.dumps(trained.train.classes),
        "recipe": json.dumps(recipe.as_dict()),
        "recipe_sha256": recipe.sha256(),
        "polished": f"{images} images",
    }
    try:
        save_weights(target, tensors, metadata)
    except OSError as error:
        raise UserError(f"--out {target}: can't be written: {error.strerror}") from None
    terminal = console()
    terminal.print(f"before  {describe(before)}")
    terminal.print(f"after   {describe(after)}  (statistics of {images} un-augmented training images)")
    terminal.print(f"in {target}  weights_sha256 {weights_sha256(tensors)}", markup=False)


def describe(result: "Evaluation") -> str:
    """An evaluation in one line."""
    excluded = f", {result.excluded} undecodable left out" if result.excluded else ""
    return (
        f"top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}  on {result.images} held-out images"
        f"{excluded}"
    )

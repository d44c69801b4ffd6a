"""`torusgd polish`: exact batch-norm statistics for trained weights (Final Polishing)."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import UserError
from .options import OUTPUT, TrainedWeights, takes_groups
from .output import check_writable, console


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
    from .assessment import Assessment, describe

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

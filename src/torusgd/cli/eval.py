"""`torusgd eval` and `torusgd polish`: what trained weights are worth, and exact batch-norm statistics for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..errors import UserError, as_user_error, printable
from .options import OUTPUT, JsonFile, RuntimeFlags, TrainedWeights, flag
from .output import check_out, check_writable, console, write_json

if TYPE_CHECKING:
    from ..step.evaluate import Evaluation

FEW_CLASSES = 20  # that a terminal shows side by side; --json has the table of any number


def evaluate(weights: TrainedWeights, runtime: RuntimeFlags, json_file: JsonFile = None) -> None:
    """Print the accuracy of trained weights on held-out images, and of each class if there are few."""
    from .assessment import Assessment

    assessment = Assessment(weights, runtime.over())
    result, confusion = assessment.evaluate_classes()
    if assessment.world.rank != 0:
        return
    terminal = console()
    terminal.print(f"{assessment.name}: {describe(result)}")
    summary: dict[str, Any] = {**result.as_summary()}
    if confusion is not None:
        names, accuracies, counts = assessment.trained.train.classes, confusion.accuracies(), confusion.counts.tolist()
        if len(names) <= FEW_CLASSES:
            terminal.print(confusion_table(names, accuracies, counts))
        classes = [{"name": name, "top1": top1} for name, top1 in zip(names, accuracies, strict=True)]
        summary |= {"classes": classes, "confusion": counts}
    write_json(json_file, summary)


def polish(
    weights: TrainedWeights,
    runtime: RuntimeFlags,
    out: Path | None = flag("Write the weights to this file. Default: NAME-polished.safetensors.", OUTPUT),
) -> None:
    """Give trained weights exact batch-norm statistics, from un-augmented training images (Final Polishing)."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from ..weights import save_weights, weights_sha256
    from .assessment import Assessment

    check_out(out, weights.checkpoint)
    assessment = Assessment(weights, runtime.over())
    trained, recipe = assessment.trained, assessment.recipe
    target = out or trained.path.with_name(f"{trained.path.stem}-polished.safetensors")
    check_writable("--out", target)
    if not any(isinstance(module, _BatchNorm) for module in assessment.model.modules()):
        raise UserError(f"{assessment.name}: {recipe.model.name} has no batch norm to polish")
    before = assessment.evaluate()  # the statistics of training, which polish overwrites
    images = assessment.polish()
    after = assessment.evaluate()
    if assessment.world.rank != 0:
        return
    tensors = assessment.model.state_dict()
    classes, tree = json.dumps(trained.train.classes), json.dumps(recipe.as_dict())
    about = {"classes": classes, "recipe": tree, "recipe_sha256": recipe.sha256(), "polished": f"{images} images"}
    with as_user_error(f"--out {target}: can't be written"):
        save_weights(target, tensors, about)
    terminal = console()
    terminal.print(f"before  {describe(before)}")
    terminal.print(f"after   {describe(after)}  (statistics of {images} un-augmented training images)")
    terminal.print(f"in {target}  weights_sha256 {weights_sha256(tensors)}")


def confusion_table(names: Sequence[str], accuracies: Sequence[float | None], counts: list[list[int]]) -> Table:
    """A row for each class: its accuracy, and how often the network took its images for which class."""
    table = Table("class", "top-1", *map(str, range(len(names))), box=None, title="rows: class; columns: taken for")
    for column in table.columns[1:]:
        column.justify = "right"
    for number, (name, top1, row) in enumerate(zip(names, accuracies, counts, strict=True)):
        accuracy = "-" if top1 is None else f"{top1:.1%}"
        said = Text(printable(name if name == str(number) else f"{number} {name}"))
        table.add_row(said, accuracy, *("" if count == 0 else str(count) for count in row))
    return table


def describe(result: "Evaluation") -> str:
    excluded = f", {result.excluded} undecodable left out" if result.excluded else ""
    return f"{result}  on {result.images} held-out images{excluded}"

"""What `torusgd train` does with its flags: from names and paths to a job, and from its end to an exit code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UserError
from ..launch.local import launch
from ..launch.torchrun import join_and_train
from ..recipe.load import load_recipe, validate
from ..runtime import RuntimeOptions, ranks_are_given, resolve_auto, resolve_device
from ..train.compare_plan import PlanComparison
from ..train.run import Job


def train(
    name: str,
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    data: Path | None,
    out: Path | None,
    max_steps: int | None,
    init: Path | None,
    fresh: bool,
    plan: Path | None = None,
) -> int:
    """Trains, prints the result, and returns the exit code.

    Raises:
        UserError: The input is wrong.
        RunError: The run can't go on.
    """
    recipe, runtime = load_recipe(name, overrides)
    given = {key: value for key, value in flags.items() if value is not None}
    parts = given.get("model_parallel", "")
    if parts.isdigit():  # a flag that takes a word or a number is read as text
        given["model_parallel"] = int(parts)
    options = validate(RuntimeOptions, {**runtime.model_dump(mode="json"), **given}, "flags")
    device = resolve_device(options)
    if init is not None and not init.is_file():
        raise UserError(f"--init {init}: no such file")
    recipe = resolve_auto(recipe, device)
    folder = out or Path("runs") / recipe.name
    run = join_and_train if ranks_are_given() else launch
    planned = PlanComparison.load(plan) if plan else None
    result = run(Job(recipe, options, device, folder, data, init, max_steps, planned), fresh)
    if result.summary:
        show_result(result.summary, folder)
    return result.code


def show_result(summary: Mapping[str, Any], folder: Path) -> None:
    """The result and where it lies."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"done: top-1 {summary['top1']:.2%} on {summary['eval_images']} held-out images, {summary['steps']} steps, "
        f"{summary['seconds']:.1f} s, {summary['images_per_second']:,.0f} images/s on {summary['world_size']} ranks"
    )
    if summary.get("predicted"):
        beside = summary["predicted"]
        console.print(
            f"a step took {1e3 * beside['measured_step_seconds']:.1f} ms, the plan said "
            f"{1e3 * beside['step_seconds']:.1f} ms ({beside['step_seconds_error']:+.1%})"
        )
    console.print(f"weights_sha256 {summary['weights_sha256']}")
    console.print(
        f"in {folder}: model.safetensors, summary.json, events.jsonl, recipe.yaml, checkpoints/", markup=False
    )

"""The steps of a finished run with one worker, from which a plan of the same recipe is made; and whether they fit."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..errors import UserError, as_user_error
from ..recipe.load import read_run_recipe
from ..recipe.schema import Recipe
from ..text import is_number
from ..untrusted import check_regular, parse_json, read_text

_LONGEST = 1e6  # seconds of a step
_OF_A_STEP = (
    "model.name", "model.options", "model.freeze", "virtual_workers", "precision", "compile", "memory_format",
    "reduction", "threads", "optimizer.name", "data.channels", "synchrony.local_steps",
)  # fmt: skip


def measured_steps(recipe: Recipe, batch: int, run: Path) -> list[dict[str, Any]]:
    """The events of the first stage's steps, of so many images each; UserError unless the run suits such a plan."""
    needed = f"measured run {run}: needs the summary.json and events.jsonl of a finished run"
    with as_user_error(needed, of=(OSError, ValueError)):
        summary: dict[str, Any] = parse_json(read_text(run / "summary.json"))
        with check_regular(run / "events.jsonl").open() as lines:
            events = [parse_json(line) for line in lines]
    if not all(isinstance(table, dict) for table in (summary, *events)):
        raise UserError(f"measured run {run}: its summary.json or events.jsonl is damaged")
    if summary.get("world_size") != 1:
        raise UserError(
            f"measured run {run}: ran on {summary.get('world_size')} workers; plan from a run of --workers 1"
        )
    _check_recipe(recipe, run)
    of_first = {"stage": 0, "batch": batch}  # a later stage of this batch may have other images
    steps = [event for event in events if of_first.items() <= event.items() and "update_seconds" in event]
    if len(steps) < 2:
        raise UserError(f"measured run {run}: has no 2 steps of batch {batch}; it was another recipe or too short")
    check_times(f"measured run {run}", steps)
    # The summary knows the last ranks alone. One rank waits for no messages.
    if any("hidden_share" in step or step.get("sync_seconds") for step in steps):
        raise UserError(f"measured run {run}: had several workers in some steps; plan from a run of --workers 1")
    return steps


def check_times(what: str, steps: Iterable[Mapping[str, Any]], *parts: str) -> None:
    """UserError if steps of the run that `what` names have times, or further `parts` of them, that no step takes."""
    for step in steps:
        whole, update, *rest = (step.get(key) for key in ("step_seconds", "update_seconds", *parts))
        # Where steps are launched in advance (CUDA graphs), of updates nothing is known, and some steps take no time.
        is_sensible = is_number(whole) and is_number(update) and 0 <= update <= whole <= _LONGEST
        if not is_sensible or not all(is_number(each) and each >= 0 for each in rest) or (update and not whole):
            raise no_times(what)


def no_times(what: str) -> UserError:
    return UserError(f"{what}: events.jsonl has steps without sensible times; it is damaged")


def _check_recipe(recipe: Recipe, run: Path) -> None:
    own, theirs = _of_a_step(recipe), _of_a_step(read_run_recipe(run / "recipe.yaml"))
    for key, value in own.items():
        # `auto` is whatever the run's device took, which is never portable.
        if value != (ran := theirs[key]) and (value != "auto" or ran == "portable"):
            raise UserError(
                f"measured run {run}: has {key} = {ran}, and this recipe {value}; train this one for some steps with "
                "--workers 1 and measure that"
            )


def _of_a_step(recipe: Recipe) -> dict[str, Any]:
    """What decides the time of a step of the first stage, besides its batch."""
    first, changes = recipe.stages[0], recipe.data.augment
    found = {key: attrgetter(key)(recipe) for key in _OF_A_STEP}
    sides = "x".join(map(str, recipe.training_sizes(first).sides))
    found |= {"image_size": sides, "extra_pass": first.extra_pass, "augment": first.augment}
    # Parts of an update whose values take no time; only whether there are any does.
    found["average.every"] = "null" if recipe.average is None else recipe.average.every
    found["clip_grad_norm"] = "null" if recipe.clip_grad_norm is None else "a number"
    return found | {f"data.augment.{key}": value for key, value in changes} if first.augment else found

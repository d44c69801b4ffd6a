"""Small runs for tests: in this process, or on several ranks through the command line."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from tests.commands import command, ran
from torusgd.comm.groups import group_of
from torusgd.observe.events import plan_table
from torusgd.precision import arithmetic_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.job import Job
from torusgd.run.run import Run
from torusgd.rundir.run_dir import RunDir
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag
from torusgd.step.membership import Membership

DIGITS_NET = "model={name: digits-net, options: {dropout: 0.1, zero_gamma: true}}"
SMALL = "model={name: 'tests.run.sources:small_net', options: {dropout: 0.1, zero_gamma: true}}"
# The digits recipe, made tiny: two stages, four virtual workers, keyed images, dropout, batch norm, LARS.
TINY = (
    "data={source: synthetic, train_images: 96, eval_images: 24, image_size: 8, channels: 1, classes: 4, "
    "mean: [0.5], std: [0.25], augment: {crop: shift, shift: 1, flip: 0.5}}",
    SMALL, "virtual_workers=4", "evaluate={every: 2st, images_per_chunk: 10}",
    "stages=[{until: 2st, images_per_worker: 3}, {until: 4st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    "rate={lr: 1.0, warmup: {length: 1st, start: 0.5}}", "polish={images: 24, images_per_batch: 8}",
)  # fmt: skip


def run_here(
    out: Path, *overrides: str, recipe: str = "digits", tiny: bool = True, fresh: bool = False,
    options: RuntimeOptions | None = None, **job: Any,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Trains in this process on one rank; the summary and the printed plan. `job`: more of its fields."""
    loaded = resolve_auto(load_recipe(recipe, [*(TINY if tiny else ()), *overrides]).recipe, "cpu")
    folder = RunDir(out)
    out.mkdir(parents=True, exist_ok=True)
    folder.claim(loaded, fresh)
    threads = torch.get_num_threads()
    try:
        with arithmetic_of(loaded):
            run = Run(Job(loaded, options or RuntimeOptions(), "cpu", out, **job), group_of(), StopFlag(), restarts=0)
            console = Console(width=200, record=True, file=io.StringIO(), markup=False)
            console.print(plan_table(loaded, run.schedule, 1))
            with patch("torusgd.run.newest_state.portable_price", return_value=""):  # which times some passes
                return run.run().summary, console.export_text()
    finally:
        torch.set_num_threads(threads)


def before_steps(run: Run, call: Callable[[int], object]) -> None:
    """From now on this is called before each step of a run, with the step's index."""
    take = (run.trainer.ahead or run.trainer.step).run

    def called(membership: Membership, entry: Any) -> Any:
        call(entry.step)
        return take(membership, entry)

    steps: Any = SimpleNamespace(run=called)
    run.trainer = replace(run.trainer, ahead=steps)


def train(out: Path, *arguments: object, recipe: str = "digits", timeout: float = 240) -> dict[str, Any]:
    """Runs `torusgd train` to its end; the summary."""
    ran(command("train", recipe, "--out", out, *arguments), timeout=timeout)
    return json.loads((out / "summary.json").read_text())


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

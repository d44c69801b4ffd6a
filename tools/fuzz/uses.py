"""What torusgd does with an input, in this process: UserError or a result, and never anything else."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from torusgd import cli
from torusgd.comm.tuning.profile import Profile, expect
from torusgd.data.decode import decode, decode_region
from torusgd.data.registry import open_sources
from torusgd.data.tar_index import make_index, write_index
from torusgd.data.types import CorruptImage, Region
from torusgd.errors import UserError
from torusgd.observe.events import PlanComparison
from torusgd.plan.published import predict_row, read_rows
from torusgd.recipe.data_schema import Data
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schedule import Schedule
from torusgd.report.page import run_page
from torusgd.report.read_run import read_run
from torusgd.run.fingerprint import Fingerprint
from torusgd.run.saving import resumed
from torusgd.rundir.checkpoint import read_checkpoint


def scheduled(name: str, overrides: list[str]) -> None:
    """A recipe as `train` reads it, laid out in steps."""
    recipe = load_recipe(name, overrides).recipe
    schedule = Schedule(recipe, 1437)
    schedule.boundaries(recipe.evaluate.every, recipe.evaluate.first)
    for index in (0, len(schedule) // 2, len(schedule) - 1):
        schedule[index]


def run_command(words: list[str]) -> None:
    """The command line in this process: UserError where it ends with exit code 2 and one line."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    argv, sys.argv = sys.argv, ["torusgd", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    if code == 2:
        raise UserError(err.getvalue().rstrip("\n") or "(no line)")
    assert code == 0, f"exit code {code}: {err.getvalue()}"


def decoded(data: bytes) -> None:
    """A picture as training and as evaluation read it."""
    decode_region(data, 3, lambda height, width: Region(0, 0, max(1, height // 2), width, 8, 8))
    decode(data, 1)


def arrays_of(count: int) -> dict[str, Any]:
    """A small data set by the names of its arrays."""
    images, labels = np.zeros((count, 4, 4), np.uint8), np.arange(count) % 4
    return {"train_images": images, "train_labels": labels, "eval_images": images, "eval_labels": labels}


def read_first(data: Data, path: Path) -> None:
    """A data set opened, and an image of each half read."""
    for source in open_sources(data, path, 0):
        source.read(0)


def read_shards(path: Path, torn: str) -> None:
    """Tar shards or lists as training reads them; an image that can't be decoded would be replaced."""
    if torn == "before":
        write_index(path / "index.safetensors", make_index(path))
    data = Data(source="csv" if torn == "list" else "tar", image_size=4)
    for source in open_sources(data, path, 0):
        for index in range(min(8, len(source))):
            with contextlib.suppress(CorruptImage, FileNotFoundError):
                source.read(index)


def gone_on(path: Path, fingerprint: Fingerprint) -> None:
    """A checkpoint from which a run goes on."""
    resumed(read_checkpoint(path).progress, fingerprint)


def predicted(path: Path) -> None:
    """A table of published results beside its predictions."""
    for row in read_rows(path):
        predict_row(row)


def compared(path: Path) -> None:
    """A plan that `train --plan` compares with a run."""
    PlanComparison.load(path).check("digits", [96], 8)


def shown(folder: Path) -> None:
    """The page of a run."""
    run_page([read_run(folder)], [None])


def chosen(path: Path) -> None:
    """What `auto` makes of a profile."""
    profile = Profile.load(path)
    for size in (1, 1 << 16, 1 << 26) if profile.timings else ():
        expect(profile, size)

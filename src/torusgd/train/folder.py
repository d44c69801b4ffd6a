"""The run's folder: what it holds, who may write to it, and whether the run in it is done."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ..errors import UserError
from ..recipe import Recipe
from ..recipes import validate
from ..weights import write_text

LOCK_SECONDS = 10.0
OWN = ("recipe.yaml", "events.jsonl", "summary.json", "model.safetensors", "checkpoints", "tensorboard")


class RunFolder:
    """Paths of a run.

    Args:
        path: The folder; made by `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other runs out; UserError naming the holder after 10 s, or where the folder can't be written."""
        holder = self.path / ".holder"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=LOCK_SECONDS)
            lock.acquire()
        except Timeout:
            name = holder.read_text().strip() if holder.exists() else "another run"
            raise UserError(f"--out {self.path}: in use by {name}; wait for it or choose another folder") from None
        except OSError as error:
            raise UserError(f"--out {self.path}: can't be written: {error.strerror}; choose another folder") from None
        try:
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
            yield
            holder.unlink(missing_ok=True)
        finally:
            lock.release()

    def claim(self, recipe: Recipe, fresh: bool) -> None:
        """Makes the folder this recipe's; with `fresh` an earlier run in it is deleted.

        Raises:
            UserError: It belongs to another recipe, or holds files that no run of ours wrote.
        """
        strangers = sorted(p.name for p in self.path.iterdir() if p.name not in OWN and not p.name.startswith("."))
        if not self.recipe.exists() and strangers:
            raise UserError(f"--out {self.path}: holds {strangers[0]!r} but no run; choose an empty folder")
        if self.recipe.exists() and not fresh:
            other = read_run_recipe(self.recipe)
            if other.sha256() != recipe.sha256():
                key = _first_difference(other.as_dict(), recipe.as_dict())
                raise UserError(
                    f"--out {self.path}: holds a run of another recipe ({other.name}; {key} differs); choose "
                    "another folder, or give --fresh to delete that run"
                )
        if fresh:
            for name in OWN:
                target = self.path / name
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                else:
                    target.unlink(missing_ok=True)
        if not self.recipe.exists():
            write_text(self.recipe, dump_recipe(recipe))

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary, if the run in this folder has done `steps` steps."""
        try:
            summary = json.loads(self.summary.read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and summary.get("steps", 0) >= steps else None


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML, defaults included."""
    head = f"# The complete recipe of this run, defaults included. recipe_sha256: {recipe.sha256()}\n"
    return head + yaml.safe_dump(recipe.as_dict(), sort_keys=False, default_flow_style=None, width=110)


def read_run_recipe(path: Path) -> Recipe:
    """The recipe that a run wrote down; UserError when it is damaged."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read as a recipe: {error}") from None
    return validate(Recipe, tree, str(path))


def _first_difference(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one:
            if one[key] != other.get(key):
                return _first_difference(one[key], other.get(key), f"{path}.{key}" if path else key)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return _first_difference(a, b, f"{path}.{index}")
    return path

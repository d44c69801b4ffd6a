"""The trainings of the proof: one line each in `RUNS`, and one in `LEDGER` for each look at the held-out images.

A training is known by its recipe without name, description and seed, by its seed, and by processor, torch and
precision, by which bits differ. Choices are made by the validation images; the held-out ones are looked at once for
each training that a claim needs, when nothing about its arm is left to choose.
"""

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Recipe
from torusgd.run.fingerprint import machine
from torusgd.runtime import resolve_auto

from ..record import RESULTS, commit

RUNS, LEDGER = RESULTS / "proof-runs.jsonl", RESULTS / "proof-held-out.jsonl"
KEY = ("recipe", "seed", "processor", "torch", "precision")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl: orphans of this process's children become its own children
Key = tuple[Any, ...]
Line = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A recipe with changes, and options of `torusgd train` that belong to it."""

    recipe: str
    changes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ("data.validation_images=null",)
    """changes by which the held-out images are classified in place of those for validation"""

    def but(self, *changes: str) -> "Arm":
        """The same with further changes."""
        return replace(self, changes=(*self.changes, *changes))

    def words(self, seed: int) -> list[str]:
        """Of the command that trains it, after `torusgd`."""
        sets = [word for change in (*self.changes, f"seed={seed}") for word in ("--set", change)]
        return ["train", self.recipe, *sets, *self.options]

    @property
    def sha256(self) -> str:
        """16 digits of the hash of what is computed, without name, description and seed."""
        return _sha256(self)

    @property
    def precision(self) -> str:
        """Of its passes, on this machine."""
        return resolve_auto(_recipe(self), "cpu").precision

    def key(self, seed: int) -> Key:
        """What a training of it has on this machine."""
        return self.sha256, seed, processor(), torch.__version__, self.precision


@cache
def _recipe(arm: Arm) -> Recipe:
    return load_recipe(arm.recipe, arm.changes).recipe


@cache
def _sha256(arm: Arm) -> str:
    tree = {key: value for key, value in _recipe(arm).as_dict().items() if key not in ("name", "description", "seed")}
    text = json.dumps([tree, arm.options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def processor() -> str:
    """Model, design and instruction set: what the bits of a training follow."""
    found = machine(torch.device("cpu"))
    return " ".join(str(found[name]) for name in ("cpu", "cpu_design", "isa"))


def key_of(line: Line) -> Key:
    """The key of a line of either file."""
    return tuple(line[name] for name in KEY)


def read(path: Path) -> list[Line]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def go_on(arm: Arm, seed: int, data: Path | None, out: Path, minutes: float, has_line: bool = False) -> bool:
    """Trains for at most so many minutes, from where an earlier call ended; whether the training is over.

    One that has its line already is trained again for its weights, which must be the same.
    """
    run = out / f"{arm.sha256}-{seed}"
    words = [*arm.words(seed), *_from(arm, data), "--out", str(run)]
    words += [] if "--workers" in words else ["--workers", "1"]
    code, errors, seconds = ended(_torusgd(words), minutes)
    has_diverged = code == 1 and "diverged" in errors
    is_stopped = code in (143, -signal.SIGTERM)  # before or after a checkpoint
    if code and not is_stopped and not has_diverged:
        raise SystemExit(errors)
    out.mkdir(parents=True, exist_ok=True)
    spent = run.with_suffix(".core-seconds")
    seconds += float(spent.read_text()) if spent.exists() else 0.0
    spent.write_text(str(seconds))
    if is_stopped:
        return False
    summary = json.loads((run / "summary.json").read_text()) if not has_diverged else {"top1": 0.0}
    found = {
        **dict(zip(KEY, arm.key(seed), strict=True)), "validation": summary["top1"],
        "images": summary.get("eval_images"), "steps": summary.get("steps"), "core_seconds": round(seconds, 1),
        "weights": summary.get("weights_sha256"), "noise_scale": _noise_scale(run),
        "command": " ".join(["torusgd", *arm.words(seed)]), **_when(),
    }  # fmt: skip
    if not has_line:
        _add(RUNS, found)
    elif found["weights"] != (known := next(line for line in read(RUNS) if key_of(line) == arm.key(seed)))["weights"]:
        raise SystemExit(f"{found['command']}: weights {found['weights']}, in {RUNS} {known['weights']}")
    return True


def ended(words: Sequence[str], minutes: float) -> tuple[int, str, float]:
    """Exit code, errors and processor time of a command with all its processes.

    It gets SIGTERM after `minutes`, and whenever this process gets it.
    """
    # Ranks are of a fork server, which outlives the command that started it: it comes to this process then, and its
    # time counts here once it has ended.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), list[subprocess.Popen[str]]()

    def end(*_: Any) -> None:
        for each in started:
            each.terminate()  # writes a checkpoint first; the same command goes on from there

    outer = signal.signal(signal.SIGTERM, end)
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        started.append(process)
        try:
            _, errors = process.communicate(timeout=60 * minutes)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            end()
            _, errors = process.communicate()
        except BaseException:
            end()
            raise
        finally:
            signal.signal(signal.SIGTERM, outer)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-process.pid, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process.returncode, errors, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _noise_scale(run: Path) -> float | None:
    """The median of the gradient noise scale over the steps that measured it, in images."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event["noise_scale"] for event in events if "noise_scale" in event]
    return median(found) if found else None


def look(arm: Arm, seed: int, data: Path | None, out: Path) -> None:
    """Classifies the held-out images by the weights of a training that lie in `out`, and enters that in the ledger."""
    line = next(line for line in read(RUNS) if key_of(line) == arm.key(seed))
    run, found = out / f"{arm.sha256}-{seed}", {"top1": 0.0, "eval_images": None}
    if line["weights"] is not None:
        result = run / "held-out.json"
        sets = [word for change in arm.held_out for word in ("--set", change)]
        words = ["eval", str(run), *_from(arm, data), *sets, "--json", str(result)]
        subprocess.run(_torusgd(words), check=True, stdout=subprocess.DEVNULL)
        found = json.loads(result.read_text())
    told = {name: line[name] for name in (*KEY, "weights")}
    _add(LEDGER, {**told, "top1": found["top1"], "images": found["eval_images"], **_when()})


def has_weights(arm: Arm, seed: int, out: Path) -> bool:
    """Whether a training's result lies in `out`."""
    return (out / f"{arm.sha256}-{seed}" / "model.safetensors").exists()


def _from(arm: Arm, data: Path | None) -> list[str]:
    return [] if data is None or _recipe(arm).data.source == "digits" else ["--data", str(data)]


def _torusgd(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "torusgd", *words]


def _when() -> Line:
    return {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _add(path: Path, line: Line) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        os.fsync(file.fileno())

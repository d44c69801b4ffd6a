"""Ranks that are lost and that join, many times in one run: time to go on, steps redone, and the weights in the end.

    python -m benchmarks elastic changes --recipe digits --changes 50
    python -m benchmarks elastic changes --recipe fashion --data data/fashion-mnist --changes 50 --max-steps 600

A run with one rank on this machine listens on loopback. A seeded draw says what happens next: a rank is lost (SIGKILL),
ranks join (`torusgd resize`, or an agent of `torusgd join`), both at once, one is lost while others join, the newest is
lost, or an agent joins, is killed and another one comes at once. Images take their time until all changes are done, and
the weights must be those of the same recipe without any of it.

Needs: nothing, or Fashion-MNIST.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])

from tests.polling import until
from tests.run.processes import Process, last_step

from torusgd.data.registry import open_sources
from torusgd.launch.local import TOKEN
from torusgd.recipe.load import load_recipe

from ..record import sample

MOST = 4
"""ranks at a time"""
GO_ON = " on\n"
_BEFORE = 6
"""lines of the launcher that are shown before a restart of all ranks, which say why none was left"""
LONGEST = 300.0
"""seconds to wait for anything: on a busy machine a command alone takes a minute to start"""


class Paced:
    """The images of a built-in recipe, each of which takes `pause` seconds as long as there is the file `gate`."""

    def __init__(self, path: Path | None, split: str, *, recipe: str, gate: str, pause: float) -> None:
        train, held_out = open_sources(load_recipe(recipe).recipe.data, path, 0)
        self._source, self._gate = (train if split == "train" else held_out), Path(gate)
        self._pause = pause if split == "train" else 0.0
        self.classes, self.labels = self._source.classes, self._source.labels

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> np.ndarray:
        """One image."""
        if self._gate.exists():
            time.sleep(self._pause)
        return self._source.read(index)


class Campaign:
    """One run, and what is done to it.

    Args:
        folder: For all files.
        words: Of `torusgd train`, after the recipe.
        recipe: The name of a built-in one.
        pause: Seconds an image.
        seed: Of the draw.
    """

    def __init__(self, folder: Path, recipe: str, words: list[str], data: list[str], pause: float, seed: int) -> None:
        self._folder, self._data, self._draw = folder, data, random.Random(seed)
        self.out, self.gate = folder / "out", folder / "gate"
        self.gate.touch()
        source = f"{{recipe: {recipe}, gate: '{self.gate}', pause: {pause}}}"
        paced = ["--set", "data.source=benchmarks.elastic.changes:Paced", "--set", f"data.options={source}"]
        listen = ["--workers", f"1:{MOST}", "--listen", "127.0.0.1:0"]
        self.root = self._start("train", recipe, "--out", str(self.out), *data, *words, *paced, *listen)
        until(lambda: "join by torusgd join" in self.root.err, "it listens", self.root, LONGEST)
        self._where = "127.0.0.1:" + self.root.err.split("torusgd join 127.0.0.1:")[1].split()[0]
        self._agents: list[Process] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.redone: dict[str, list[int]] = defaultdict(list)
        until(lambda: last_step(self.out) >= 2, "it has begun", self.root, LONGEST)

    def change(self) -> None:
        """Does the next thing that the draw says, if it can be done now, and waits until the run goes on."""
        kinds: dict[str, Callable[[], None]] = {
            "loss": self._lose,
            "join": self._join,
            "loss and join": self._both,
            "loss while joining": self._while_joining,
            "loss of the newest": self._lose_newest,
            "flapping": self._flap,
        }
        size = len(self._ranks())
        able = [kind for kind in kinds if ("loss" not in kind or size > 1) and (kind != "join" or size < MOST)]
        able = [kind for kind in able if kind != "flapping" or size < MOST]
        kind = self._draw.choice(able)
        done, least, begin = last_step(self.out), last_step(self.out) + 1, time.monotonic()
        told = self._times_it_went_on()
        kinds[kind]()
        until(lambda: self._times_it_went_on() > told, f"it goes on after {kind}", self.root, LONGEST)
        changed = last_step(self.out)
        while (now := last_step(self.out)) <= max(done, changed if "join" in kind else done):
            least = min(least, now or least)  # a new rank 0 replaces the file
            assert self.root.popen.poll() is None, self.root.output
            time.sleep(0.002)
        self.seconds[kind].append(time.monotonic() - begin)
        self.redone[kind].append((1 if "loss" in kind or kind == "flapping" else 0) + max(0, done - least))
        self._agents = [agent for agent in self._agents if agent.popen.poll() is None]
        time.sleep(self._draw.uniform(0, 0.5))

    def end(self) -> dict[str, Any]:
        """Lets the run end; its summary."""
        self.gate.unlink()
        assert self.root.end(300) == 0, self.root.output
        return json.loads((self.out / "summary.json").read_text())

    def _start(self, *words: str) -> Process:
        return Process(self._folder / "told", sys.executable, "-m", "torusgd", *words)

    def _times_it_went_on(self) -> int:
        """Lines of the launcher that say so; all start again where no rank is left."""
        return self.root.err.count(GO_ON) + self.root.err.count("(restart ")

    def _ranks(self) -> list[int]:
        """Process ids, those of this machine first."""
        return self.root.ranks() + [rank for agent in self._agents for rank in agent.ranks()]

    def _lose(self) -> None:
        _kill(self._draw.choice(self._ranks()))

    def _lose_newest(self) -> None:
        _kill(self._ranks()[-1])

    def _join(self) -> None:
        size = min(len(self._ranks()), MOST - 1)
        if self._draw.random() < 0.6:
            words = ["resize", str(self.out), "--workers", str(self._draw.randint(size + 1, MOST))]
            subprocess.run([sys.executable, "-m", "torusgd", *words], check=True, stdout=subprocess.DEVNULL)
        else:
            self._bring(self._draw.randint(1, MOST - size))

    def _bring(self, workers: int) -> None:
        token = ["--token-file", str(self.out / TOKEN), "--workers", str(workers)]
        self._agents.append(self._start("join", self._where, *self._data, *token))

    def _both(self) -> None:
        self._lose()
        self._join()

    def _while_joining(self) -> None:
        self._join()
        time.sleep(self._draw.uniform(0, 3))
        _kill(self._draw.choice(self._ranks()))

    def _flap(self) -> None:
        told = self.root.err.count(" join")
        self._bring(1)
        until(lambda: self.root.err.count(" join") > told, "it joins", self.root, LONGEST)
        time.sleep(self._draw.uniform(0, 1))
        _kill(self._agents[-1].pid)
        self._bring(1)


def main(
    recipe: str = "digits",
    data: str | None = None,
    changes: int = 50,
    max_steps: int | None = None,
    pause: Annotated[float, Option(help="seconds an image")] = 0.015,
    seed: int = 0,
    undisturbed: Annotated[
        str | None, Option(help="the hash of the weights without changes; else they are trained")
    ] = None,
) -> None:
    """Runs the campaign and the undisturbed run, and prints the table."""
    words = ["--max-steps", str(max_steps)] if max_steps else []
    source = ["--data", data] if data else []
    folder = Path(tempfile.mkdtemp())
    campaign = Campaign(folder, recipe, words, source, pause, seed)
    try:
        for _ in range(changes):
            campaign.change()
            print(".", end="", file=sys.stderr, flush=True)
        done = last_step(campaign.out)
        summary = campaign.end()
        expected = undisturbed or train_alone(recipe, [*source, *words], folder / "alone")
    except BaseException:
        print(campaign.root.output, file=sys.stderr)
        raise
    finally:
        with suppress(ProcessLookupError):
            campaign.root.kill()
    for kind, seconds in campaign.seconds.items():
        redone = campaign.redone[kind]
        sample(f"{recipe}, {kind}, s", seconds)
        print(
            f"{kind}: n {len(seconds)}, {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
            f"steps redone {min(redone)} to {max(redone)}"
        )
    told = campaign.root.err.splitlines()
    for number, line in enumerate(told):
        if "(restart " in line:
            print("\n".join(told[max(0, number - _BEFORE) : number + 1]))
    is_same = summary["weights_sha256"].startswith(expected)
    print(
        f"{recipe}: {changes} changes in {done} of {summary['steps']} steps, "
        f"{len(summary['lost_ranks'])} ranks lost, {summary['restarts']} restarts, weights "
        f"{'those of the undisturbed run' if is_same else 'DIFFER from the undisturbed run'} ({expected[:8]})"
    )
    shutil.rmtree(folder)
    sys.exit(0 if is_same else 1)


def train_alone(recipe: str, words: list[str], out: Path) -> str:
    """The weights' hash of the same recipe on two ranks to which nothing happens."""
    alone = [sys.executable, "-m", "torusgd", "train", recipe, "--workers", "2", *words, "--out", str(out)]
    subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    typer.run(main)

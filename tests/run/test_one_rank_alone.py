"""What one rank alone learns, all ranks know by the step's first message: a stop, or images that can't be read."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.comm.gloo_world import run_ranks
from tests.run.processes import RECIPE, assert_told_once, results, run_alone
from tests.run.slow import Slow
from torusgd.comm.groups import group_of
from torusgd.data import pipeline
from torusgd.errors import RunError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.run.job import Job
from torusgd.run.run import Run
from torusgd.rundir.checkpoint import list_checkpoints
from torusgd.rundir.run_dir import RunDir
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag

STEPS = 12
SHORT = RECIPE.replace("until: 12st", "until: 6st").replace("until: 30st", f"until: {STEPS}st")


class StopAfter(StopFlag):
    """A rank that is asked to stop once it has begun so many virtual workers; those of step 0 are begun twice."""

    def __init__(self, begun: int) -> None:
        super().__init__()
        self.left = begun

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


class Unreadable:
    """Lets the n-th read of a training image fail, and those after it."""

    def __init__(self, good: int) -> None:
        self.good, self._read = good, Slow.read

    def read(self, source: Slow, index: int) -> Any:
        self.good -= len(source) == 96
        if self.good < 0:
            raise OSError(5, "Input/output error", f"/data/{index}.png")
        return self._read(source, index)


def job(folder: Path, name: str, **options: Any) -> Job:
    (folder / name).mkdir(exist_ok=True)
    recipe = resolve_auto(load_recipe(str(folder / "recipe.yaml"), []).recipe, "cpu")
    every = RuntimeOptions(checkpoint_every=Duration(4, "st"), **options)
    return Job(recipe, every, "cpu", folder / name)


def _on_two_ranks(folder: Path) -> list[Any]:
    """Several runs one after another, in each of which something happens to rank 1 alone."""
    world, told = group_of(), list[Any]()

    def run(name: str, stop: StopFlag, **options: Any) -> Run:
        return Run(job(folder, name, **options), world, stop if world.rank == 1 else StopFlag(), restarts=0)

    for update in ("replicated", "sharded"):
        told.append(run(update, StopAfter(7), update=update).run().signal)
    for name, good in (("measured", 0), ("later", 24)):
        broken = Unreadable(good).read if world.rank == 1 else Slow.read
        reading = patch.object(Slow, "read", lambda source, index, read=broken: read(source, index))
        with reading, patch.object(pipeline, "_PAUSES", ()), pytest.raises(RunError) as caught:
            run(name, StopFlag()).run()
        told.append((type(caught.value).__name__, str(caught.value)))
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    (folder / "recipe.yaml").write_text(SHORT)
    for name in ("replicated", "sharded", "measured", "later"):
        its = job(folder, name)
        RunDir(its.out).claim(its.recipe, fresh=False)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[list[Any]]:
    """By rank."""
    return run_ranks(2, _on_two_ranks, folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return results(run_alone(folder / "undisturbed", folder / "recipe.yaml"))


@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_a_stop_between_two_virtual_workers_abandons_the_step_on_all_ranks(
    folder: Path, told: list[list[Any]], undisturbed: dict[str, Any], name: str
) -> None:
    assert [rank[:2] for rank in told] == [[15, 15], [15, 15]]
    assert [path.name for path in list_checkpoints(folder / name / "checkpoints")] == ["step-00000002"]
    again = run_alone(folder / name, folder / "recipe.yaml")
    assert (results(again), again["resumed_from"]) == (undisturbed, 2)
    assert_told_once(folder / name, STEPS)


def test_images_that_one_rank_cannot_read_end_all_ranks_with_the_same_error(
    folder: Path, told: list[list[Any]], undisturbed: dict[str, Any]
) -> None:
    for case, name in ((2, "measured"), (3, "later")):
        (kind, line), (other_kind, other) = told[0][case], told[1][case]
        assert line == other.partition(" (rank 1: ")[0]
        assert line.endswith(": 1 of 2 ranks can't read training images")
        assert "Input/output error: '/data/" in other
        assert (kind, other_kind) == ("RunError", "DiskError")  # the rank that knows says that a restart may help
        assert line.startswith("step 0: ") == (name == "measured")
        assert bool(list_checkpoints(folder / name / "checkpoints")) == (name == "later")
    assert results(run_alone(folder / "later", folder / "recipe.yaml")) == undisturbed


def test_a_stop_of_a_rank_alone_is_heard_between_two_virtual_workers(folder: Path, undisturbed: dict[str, Any]) -> None:
    its = job(folder, "alone")
    RunDir(its.out).claim(its.recipe, fresh=False)
    threads = torch.get_num_threads()
    assert Run(its, group_of(), StopAfter(11), restarts=0).run().signal == 15
    torch.set_num_threads(threads)
    (checkpoint,) = list_checkpoints(its.out / "checkpoints")
    assert checkpoint.name == "step-00000001"
    assert results(run_alone(its.out, folder / "recipe.yaml")) == undisturbed

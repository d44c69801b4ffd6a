"""What one rank alone learns, all ranks know by the step's first message: a stop, or images that can't be read."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from tests.comm.gloo_world import run_ranks
from tests.run.processes import RECIPE, assert_told_once, results, run_alone
from tests.run.slow import Slow
from tests.step.trainers import job_of, run_of
from torusgd.comm.groups import group_of
from torusgd.data import pipeline
from torusgd.errors import RunError
from torusgd.gradients.reducer import BucketRebuild
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.run.run import Run
from torusgd.rundir.checkpoint import list_checkpoints
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag

STEPS = 12
SHORT = RECIPE.replace("until: 12st", "until: 6st").replace("until: 30st", f"until: {STEPS}st")


def test_buckets_are_rebuilt_after_the_mean_was_copied_for_ranks_that_join(tmp_path: Path) -> None:
    run, seen = run_of(job_of(out=tmp_path)), list[str]()
    run._feeds = Mock(after_step=lambda *_: seen.append("copied"))
    with patch.object(BucketRebuild, "after_step", lambda _: seen.append("rebuilt")):
        run.run()
    assert seen[:4] == ["copied", "rebuilt"] * 2


class StopAfter(StopFlag):
    """A rank that is asked to stop once it has begun so many virtual workers; those of step 0 are begun twice."""

    def __init__(self, begun: int) -> None:
        super().__init__()
        self.left = begun

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def unreadable(good: int) -> Callable[[Slow, int], Any]:
    """In place of `Slow.read`: all reads of training images fail after so many."""
    read, reads = Slow.read, count()

    def broken(source: Slow, index: int) -> Any:
        if len(source) == 96 and next(reads) >= good:
            raise OSError(5, "Input/output error", f"/data/{index}.png")
        return read(source, index)

    return broken


def run(folder: Path, name: str, stop: StopFlag, **options: Any) -> Run:
    recipe = resolve_auto(load_recipe(str(folder / "recipe.yaml"), []).recipe, "cpu")
    every = RuntimeOptions(checkpoint_every=Duration(4, "st"), **options)
    return run_of(job_of(recipe=recipe, options=every, out=folder / name), stop=stop)


def _on_two_ranks(folder: Path) -> list[Any]:
    """Several runs one after another, in each of which something happens to rank 1 alone."""
    is_struck, told = group_of().rank == 1, list[Any]()
    for update in ("replicated", "sharded"):
        told.append(run(folder, update, StopAfter(7) if is_struck else StopFlag(), update=update).run().signal)
    for name, good in (("measured", 0), ("later", 24)):
        reading = patch.object(Slow, "read", unreadable(good) if is_struck else Slow.read)
        with reading, patch.object(pipeline, "_PAUSES", ()), pytest.raises(RunError) as caught:
            run(folder, name, StopFlag()).run()
        told.append((type(caught.value).__name__, str(caught.value)))
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    (folder / "recipe.yaml").write_text(SHORT)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[list[Any]]:
    return run_ranks(2, _on_two_ranks, folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return results(run_alone(folder / "undisturbed", folder / "recipe.yaml"))


@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_a_stop_between_two_virtual_workers_abandons_the_step_on_all_ranks(folder, told, undisturbed, name) -> None:
    assert [rank[:2] for rank in told] == [[15, 15], [15, 15]]
    assert [path.name for path in list_checkpoints(folder / name / "checkpoints")] == ["step-00000002"]
    again = run_alone(folder / name, folder / "recipe.yaml")
    assert (results(again), again["resumed_from"]) == (undisturbed, 2)
    assert_told_once(folder / name, STEPS)


def test_images_that_one_cannot_read_end_all(folder: Path, told: list[list[Any]], undisturbed: dict[str, Any]) -> None:
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
    assert run(folder, "alone", StopAfter(11)).run().signal == 15
    assert [path.name for path in list_checkpoints(folder / "alone" / "checkpoints")] == ["step-00000001"]
    assert results(run_alone(folder / "alone", folder / "recipe.yaml")) == undisturbed

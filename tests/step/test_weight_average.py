"""The moving average of the weights: its arithmetic, and that training never sees it; test_resume.py resumes one."""

from pathlib import Path

import pytest
import torch
from tests.run.runs import events, run_here
from tests.step.trainers import recipe_of
from torch import nn

from torusgd.recipe.schedule import Schedule
from torusgd.recipe.schema import WeightAverage
from torusgd.recipe.section import Duration
from torusgd.step.model_state import MovingAverage
from torusgd.weights import load_weights

SCHEDULE = Schedule(recipe_of(), 96)


def average_of(half_life: str, every: int, model: nn.Module, running: torch.Tensor) -> MovingAverage:
    return MovingAverage(WeightAverage(half_life=Duration.parse(half_life), every=every), 96, model, running)


@pytest.mark.parametrize(("half_life", "every", "fraction"), [
    ("100st", 20, 2**-0.2), ("1st", 1, 0.5), ("24sa", 2, 0.5), ("0.5ep", 4, 0.5), ("12sa", 1, 0.5),
])  # fmt: skip
def test_a_half_life_halves(half_life: str, every: int, fraction: float) -> None:
    found = average_of(half_life, every, nn.Linear(2, 2), torch.zeros(0))
    assert SCHEDULE[0].batch == 12
    assert found.remains(SCHEDULE[0]) == pytest.approx(fraction)


def test_it_averages_weights_and_statistics_and_gives_the_model_its_own_back() -> None:
    model, running = nn.Linear(3, 2), torch.zeros(4)
    first = model.weight.detach().clone()
    average = average_of("1st", 2, model, running)
    assert [average.is_due(SCHEDULE[index]) for index in range(4)] == [False, True, False, True]
    with torch.no_grad():
        model.weight += 4.0
        running += 8.0
    own = model.weight.detach().clone()
    average.update(SCHEDULE[1])  # two steps are two half-lives: a quarter remains
    with average.in_model():
        assert torch.allclose(model.weight, first + 3.0)
        assert torch.equal(running, torch.full((4,), 6.0))
    assert torch.equal(model.weight, own)
    assert torch.equal(running, torch.full((4,), 8.0))
    average.begin()
    with average.in_model():
        assert torch.equal(model.weight, own)


def test_training_never_sees_it_both_results_are_reported_and_it_is_saved_beside_the_weights(tmp_path: Path) -> None:
    plain, _ = run_here(tmp_path / "plain")
    averaged, _ = run_here(tmp_path / "averaged", "average={half_life: 2st}")
    losses = [[event["loss"] for event in events(tmp_path / name) if "lr" in event] for name in ("plain", "averaged")]
    assert losses[0] == losses[1]
    assert averaged["top1_without_average"] == plain["top1_before_polish"]
    assert averaged["weights_sha256"] != plain["weights_sha256"]
    assert "top1_without_average" not in plain
    result, _ = load_weights(tmp_path / "averaged" / "model.safetensors")
    newest = sorted((tmp_path / "averaged" / "checkpoints").glob("step-*"))[-1]
    files = [load_weights(path)[0] for path in newest.glob("*.safetensors")]
    model, state = sorted(files, key=lambda tensors: "average" in tensors)
    weights = [name for name in result if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    # A file has its tensors by name, the average in the model's order.
    flat, without = (torch.cat([each[name].reshape(-1) for name in weights]).sort()[0] for each in (result, model))
    assert torch.equal(state["average"][: flat.numel()].sort()[0], flat)
    assert not torch.equal(without, flat)

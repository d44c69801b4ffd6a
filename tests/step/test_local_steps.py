"""Local steps with an outer optimiser: the limit that is plain SGD, and one result on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.test_leaving_out import run_world
from tests.step.trainers import job_of, take_all, trainer_of
from torch import nn

from torusgd.recipe.runtime_options import RuntimeOptions

SGD = ("optimizer={name: sgd, momentum: 0.0, weight_decay: 1.0e-3}", "stages=[{until: 4st, images_per_worker: 6}]")
PLAIN_SUM = "{form: local, local_steps: 1, outer: {lr: 1.0, momentum: 0.0, nesterov: false}}"
DILOCO = "{form: local, local_steps: 3}"
FLAT = "rate={lr: 0.2, decay: {shape: constant}}"


def trained(*overrides: str) -> nn.Module:
    trainer = trainer_of(job_of(*SGD, "rate.lr=0.2", *overrides))
    trainer.step.state.write_to_model(len(take_all(trainer)))
    return trainer.step.state.model


def test_one_local_step_is_plain_sgd_by_the_whole_mean_change_and_sgd_with_momentum_by_outer_momentum() -> None:
    outer = "{form: local, local_steps: 1, outer: {lr: 1.0, momentum: 0.9, nesterov: true}}"
    common = (FLAT, "optimizer.weight_decay=0.0")
    one = trained(*common, f"synchrony={outer}")
    other = trained(*common, "optimizer.momentum=0.9", "optimizer.nesterov=true")
    mixed = ((), ("data.augment.mixup=0.8",))
    pairs = [(trained(f"synchrony={PLAIN_SUM}", *more), trained(*more), 4e-6) for more in mixed]
    # 4e-6: four updates of 1e-6 each.
    for ours, theirs, tolerance in ((one, other, 1e-5), *pairs):
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=tolerance)


def test_frozen_layers_are_those_that_the_run_begins_with() -> None:
    found = []
    for form in ((), (f"synchrony={PLAIN_SUM}",)):
        trainer = trainer_of(job_of(*SGD, "rate.lr=0.2", "model.freeze=[conv1]", *form))
        with torch.no_grad():
            trainer.step.state.model.get_parameter("conv1.weight").mul_(-2.0)  # as initial weights would
        trainer.step.state.write_to_model(len(take_all(trainer)))
        found.append(dict(trainer.step.state.model.named_parameters()))
    torch.testing.assert_close(*found, rtol=0, atol=4e-6)


def test_local_steps_are_those_of_a_plain_loop() -> None:
    """One virtual worker, the whole change taken: three small steps in a row."""
    common = (FLAT, "virtual_workers=1", "model.options={dropout: 0.0}")
    form = PLAIN_SUM.replace("local_steps: 1", "local_steps: 3")
    one = trained(*common, f"synchrony={form}", "stages=[{until: 1st, images_per_worker: 9}]")
    other = trained(*common, "stages=[{until: 3st, images_per_worker: 3}]")
    torch.testing.assert_close(*(dict(each.named_parameters()) for each in (one, other)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_the_same_bits_on_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    jobs: dict[str, dict[str, Any]] = {"local": {"synchrony": DILOCO}}
    if size == 3:
        jobs["sharded"] = {"synchrony": DILOCO, "options": RuntimeOptions(update="sharded", drift_every=1)}
    many = run_world(size, tmp_path / "many", jobs)
    replayed = run_world(1, tmp_path / "one", {"local": {"synchrony": DILOCO, "replay": tmp_path / "many" / "local"}})
    assert many == dict.fromkeys(jobs, replayed["local"])
    lines = (tmp_path / "many" / "local" / "journal.txt").read_text().splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [[str(step), "-"] for step in range(len(lines))]
    assert len(lines) > 1

"""One step: against a plain loop, and what happens on overflow, divergence, and an unread image."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.messages import refused
from tests.run.runs import events, run_here
from tests.run.sources import Half
from tests.step.trainers import job_of, take, trainer_of
from torch import nn
from torch.nn import functional as F

from torusgd.data.order import StreamOrder
from torusgd.data.pipeline import Batch
from torusgd.errors import DivergedError, RunError
from torusgd.models import build_model
from torusgd.rng import DROPOUT, seed_torch

PLAIN = ("model.options={dropout: 0.0}", "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3}")


def test_a_step_is_that_of_a_plain_loop() -> None:
    """Ours with exact sums, against torch's SGD on the mean gradient of the virtual workers."""
    trainer = trainer_of(job_of(*PLAIN))
    ours, recipe = trainer.step, trainer.step.recipe
    model = build_model(recipe.model, classes=4, channels=1, image_size=8, seed=0).train()
    decayed, rest = ([p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.momentum = 1.0  # so that a pass leaves the statistics of its own batch
    running = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    order = StreamOrder(96, 0)
    for index in range(len(ours.schedule)):
        step = ours.schedule[index]
        take(trainer, index)
        sgd.zero_grad()
        means = {name: torch.zeros_like(buffer) for name, buffer in running.items()}
        for worker in range(recipe.virtual_workers):
            images = order.at(step.share(worker), step.images_per_worker)
            batch = trainer.data.training.training_batch(*images, step.augment)
            loss = F.cross_entropy(model(batch.images), batch.targets, label_smoothing=recipe.label_smoothing)
            (loss / recipe.virtual_workers).backward()
            for name, mean in means.items():
                mean.add_(model.get_buffer(name) / recipe.virtual_workers)
        for name, mean in means.items():
            running[name].lerp_(mean, 0.1)
        for group in sgd.param_groups:
            group["lr"], group["momentum"] = step.lr, step.momentum
        sgd.step()
        ours.state.batch_norm.write_to_model(index + 1)
        for (name, p), q in zip(ours.state.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=partial("{}: {}".format, name))
        for name, buffer in ours.state.model.named_buffers():
            if name in running:
                torch.testing.assert_close(buffer, running[name], rtol=1e-4, atol=1e-6)
            else:
                assert buffer == index + 1, "num_batches_tracked"


@pytest.mark.parametrize("each", [False, True])
def test_running_averages_take_extra_passes_and_all_workers_or_the_first(each: bool) -> None:
    """Against passes of a plain network over the same images, with dropout off where they are un-augmented."""
    trainer = trainer_of(job_of("stages.1.extra_pass=true", f"model.batch_norm_workers={'each' if each else 'all'}"))
    recipe, batch_norm, order = trainer.step.recipe, trainer.step.state.batch_norm, StreamOrder(96, 0)
    plain = build_model(recipe.model, classes=4, channels=1, image_size=8, seed=0)
    layers = [m for m in plain.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    plain.load_state_dict(trainer.step.state.model.state_dict())

    def statistics(batch: Batch, extra: bool, seed: tuple[int, ...]) -> torch.Tensor:
        plain.train(not extra)
        for layer in layers:
            layer.train()
            layer.momentum = 1.0
        seed_torch(torch.device("cpu"), *seed)
        plain(batch.images)
        return torch.cat([b for m in layers for b in (m.get_buffer("running_mean"), m.get_buffer("running_var"))])

    for index in range(len(trainer.step.schedule)):
        step, expected = trainer.step.schedule[index], batch_norm.running.clone()
        with torch.no_grad():
            for mine, theirs in zip(plain.parameters(), trainer.step.state.model.parameters(), strict=True):
                mine.copy_(theirs)
            for extra in [False, True][: 1 + step.extra_pass]:
                found = []
                for worker in range(1 if each else recipe.virtual_workers):
                    images = order.at(step.share(worker), step.images_per_worker)
                    batch = trainer.data.training.training_batch(*images, augment=not extra)
                    found.append(statistics(batch, extra, (DROPOUT, 0, index, worker)))
                expected = 0.9 * expected + 0.1 * torch.stack(found).mean(dim=0)
        take(trainer, index)
        torch.testing.assert_close(batch_norm.running, expected, rtol=1e-5, atol=1e-7)
    assert trainer.step.schedule[3].extra_pass


def test_an_overflow_is_reported_redone_without_a_trace_and_stands_in_the_events(tmp_path: Path) -> None:
    one, other = trainer_of(job_of()), trainer_of(job_of())
    undisturbed, disturbed = one.step, other.step
    for index in range(len(undisturbed.schedule)):
        take(one, index)
        if index == 2:
            bounds = disturbed.reducer.sum.state()
            bounds[3] /= 1e5  # as if this gradient had grown a hundred thousand times since the last step
            disturbed.reducer.sum.load_state(bounds)
        result = take(other, index)
        assert result.redone == (index == 2)
        assert result.overflowed == ([disturbed.reducer.names[3]] if index == 2 else [])
    for each in (disturbed, undisturbed):
        each.state.batch_norm.write_to_model(4)
    # The scale of a redone step is measured, not the bound of the step before: equal but for the last bits.
    states = [dict(each.state.model.state_dict()) for each in (disturbed, undisturbed)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
    # A natural one: the rate makes the gradients grow by far more than the headroom in a step.
    rate = ("rate={lr: 300.0, decay: {shape: constant}}", "rate.warmup=null")
    run_here(tmp_path, *rate, "stages.1={until: 9st, images_per_worker: 3}")
    redone = [event for event in events(tmp_path) if event.get("redone")]
    assert redone
    assert all(event["overflowed"] for event in redone)


def test_divergence_ends_the_run_naming_step_and_layer(tmp_path: Path) -> None:
    rate = ("rate={lr: 1.0e+30, decay: {shape: constant}}", "stages.1.momentum=0.9", "stages.1.lr=1.0e+30")
    with pytest.raises(RunError) as caught:
        run_here(tmp_path, *PLAIN, *rate)
    state = trainer_of(job_of(*PLAIN)).step.state
    assert str(caught.value).startswith("step ")
    assert any(name in str(caught.value) for name in (*state.reducer.names, *state.batch_norm.layers))


class Overflowing(nn.Module):
    """A network whose output is finite in training alone."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) * (1.0 if self.training else math.inf)


def test_a_result_whose_loss_is_no_number_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="the loss of the held-out images is nan"):
        run_here(tmp_path, "model={name: 'tests.step.test_step:Overflowing'}")
    assert not (tmp_path / "summary.json").exists()


def test_parameters_without_a_gradient_are_zero_and_keys_of_batch_norm_want_it(tmp_path: Path) -> None:
    summary, _ = run_here(tmp_path, "model={name: 'tests.step.test_step:Forgetful'}")
    assert summary["steps"] == 4
    for change in ("model.batch_norm_workers=each", "stages.0.extra_pass=true"):
        with refused("keys of batch norm without one", "model: "):
            trainer_of(job_of("model={name: 'tests.step.test_step:Forgetful'}", change))


class Forgetful(nn.Module):
    """A network that doesn't use all it has."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.unused_first = nn.Linear(7, 7)
        self.head = nn.Linear(channels * 64, classes)
        self.unused_last = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def test_vanished_images_end_the_run_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run_here(tmp_path, "data.source=tests.step.test_step:Vanishing")
    assert caught.type is RunError, "a missing file is no reason to begin again"
    assert ".png" in str(caught.value)


class Vanishing(Half):
    """A source whose files vanish."""

    reads = 0

    def read(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 30:
            raise FileNotFoundError(2, "No such file or directory", f"image-{index}.png")
        return super().read(index)

"""Evaluation counts every image once, also by classes; polish gives the float64 statistics of the same batches."""

import copy
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.gloo_world import on_ranks
from tests.run.runs import DIGITS_NET, run_here
from tests.step.trainers import recipe_of
from torch import nn

from torusgd import polish
from torusgd.cli.eval import confusion_table
from torusgd.comm.allreduce import NativeAllReduce
from torusgd.comm.groups import group_of
from torusgd.data.pipeline import Batch, Pipeline
from torusgd.data.registry import open_sources
from torusgd.errors import UserError
from torusgd.integrations.parts import precise_batch_norm
from torusgd.models import build_model
from torusgd.precision import Precision
from torusgd.recipe.data_schema import Evaluate
from torusgd.step.evaluate import Confusion, Evaluation, count_correct, evaluate
from torusgd.step.polish import polish_by_recipe, refresh


def test_counts_are_those_of_torch_and_equal_logits_count_for_the_lower_class_and_nan_for_none() -> None:
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(200) % 30
    top = logits.topk(5).indices == targets[:, None]
    assert count_correct(logits, targets).tolist() == [int(top[:, 0].sum()), int(top.any(dim=1).sum())]
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [float("nan"), 2.0, 0.0], [0.0, float("inf"), 0.0]])
    assert count_correct(logits, torch.tensor([0, 1, 1, 1])).tolist() == [2, 3]


def evaluated(settings: Evaluate, stop: bool = False) -> tuple[Evaluation | None, nn.Module, Batch]:
    """What is found with a network, which images it has, and the network."""
    recipe, device = recipe_of(), torch.device("cpu")
    pipeline = Pipeline(open_sources(recipe.data, None, 0)[1], recipe.data, 0)
    model = build_model(recipe.model, classes=4, channels=1, image_size=8, seed=0)
    found = evaluate(model, pipeline, settings, group_of(), NativeAllReduce(), Precision(recipe, device), lambda: stop)
    return found, model, pipeline.validation_batch(torch.arange(24).numpy())


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
def test_every_image_is_counted_once_by_the_mean_of_it_and_its_mirror_unless_stopped(chunk: int, flip: bool) -> None:
    assert evaluated(Evaluate(images_per_chunk=chunk, flip=flip), stop=True)[0] is None
    result, model, batch = evaluated(Evaluate(images_per_chunk=chunk, flip=flip))
    assert result is not None
    assert (result.images, result.excluded) == (24, 0)
    logits = model(batch.images)
    if flip:
        logits = (logits + model(batch.images.flip(-1))) / 2
    assert result.top1 == float((logits.argmax(1) == batch.targets).float().mean())
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, batch.targets).item(), rel=1e-5)


def some(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (50, 5), generator=generator).float()  # many equal ones
    logits[3] = float("nan")
    return logits, torch.randint(0, 5, (50,), generator=generator)


@on_ranks(3)
def test_the_diagonal_of_a_confusion_matrix_is_top1_and_ranks_count_together() -> None:
    confusion = Confusion(5, torch.device("cpu"))
    logits, targets = some(0)
    confusion.add(logits, targets)
    assert int(confusion.counts.diagonal().sum()) == int(count_correct(logits, targets)[0])
    assert confusion.counts.sum(dim=1).tolist() == torch.bincount(targets, minlength=5).tolist()
    world = group_of()
    whole, own = Confusion(5, world.device), Confusion(5, world.device)
    for seed in range(4):
        whole.add(*some(seed))
        if seed % world.size == world.rank:
            own.add(*some(seed))
    own.sum_over_ranks(NativeAllReduce(world))
    assert torch.equal(own.counts, whole.counts)


def test_eval_prints_few_classes_as_they_are_named_and_writes_all(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    summary, _ = run_here(tmp_path / "run", DIGITS_NET)
    code, out, _ = run_cli("eval", tmp_path / "run", "--json", tmp_path / "e.json")
    told = json.loads((tmp_path / "e.json").read_text())
    assert (code, told["top1"]) == (0, summary["top1"])
    assert [len(row) for row in told["confusion"]] == [4] * 4
    assert sum(row[number] for number, row in enumerate(told["confusion"])) == round(told["top1"] * 24)
    assert [each["name"] for each in told["classes"]] == ["0", "1", "2", "3"]
    rows = [line.split() for line in out.splitlines()]
    assert sum(row[:1] == [str(n)] and row[1][-1] in "%-" for row in rows for n in range(4)) == 4, "no 0 0"
    assert "top-1" in out
    assert "top-5" not in out, "of four classes it is always 100 %"
    assert str(next(iter(confusion_table(["[red]x"], [None], [[0]]).columns[0].cells))) == "0 [red]x"


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4)
    )


def float64_statistics(model: nn.Sequential, batches: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The oracle: population mean and variance (E[var] + Var[mean]) of each layer's inputs, in float64."""
    model = copy.deepcopy(model).double().eval()
    seen: dict[nn.Module, list[torch.Tensor]] = {m: [] for m in model if isinstance(m, nn.BatchNorm2d)}
    for layer in seen:
        layer.train()
        layer.register_forward_pre_hook(lambda module, inputs: seen[module].append(inputs[0]))
    for batch in batches:
        model(batch.double())
    flat = (torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], dim=1) for inputs in seen.values())
    return [(each.mean(dim=1), each.var(dim=1, correction=0)) for each in flat]


@given(st.lists(st.integers(2, 6), min_size=1, max_size=5), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_polish_is_the_float64_oracle_on_uneven_batches(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(n, 2, 7, 7, generator=generator) * 3 + 1 for n in sizes]
    model = small_net()
    expected = float64_statistics(model, batches)
    modes = {m: m.training for m in model.modules()}
    weights = [p.clone() for p in model.parameters()]
    assert polish(model, batches) == sum(sizes)
    for layer, (mean, variance) in zip([model[1], model[5]], expected, strict=True):
        torch.testing.assert_close(layer.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-5, atol=1e-6)
        assert layer.momentum == 0.1
        assert layer.num_batches_tracked == 0
    assert modes == {m: m.training for m in model.modules()}
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(input=images)


def test_a_layer_and_a_model_may_be_called_by_their_inputs_names() -> None:
    model, images = Named(), torch.randn(8, 2, 3, 3)
    for batches in ([images], [{"images": images[:0]}, {}, {"images": images}]):
        model.norm.reset_running_stats()
        assert polish(model, batches) == 8
        torch.testing.assert_close(model.norm.running_mean, images.mean((0, 2, 3)))


@on_ranks(2)
def test_a_rank_may_have_no_batch_of_a_model_in_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(small_net())
    for how in (polish, precise_batch_norm):
        model(torch.ones(2, 2, 7, 7)).sum().backward()  # the next forward pass sends buffers
        assert how(model, [torch.ones(3, 2, 7, 7)] * group_of().rank) == 3


def test_polish_does_not_depend_on_the_order_of_batches_and_leaves_the_model_whole_when_one_fails() -> None:
    batches = [torch.randn(n, 2, 7, 7) for n in (4, 4, 3)]
    one, other = small_net(), small_net()
    polish(one, batches)
    polish(other, [*batches[::-1], torch.empty(0, 2, 7, 7)])  # of images that can't be decoded none is left
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    model = small_net()
    with pytest.raises(RuntimeError):
        polish(model, [torch.randn(4, 2, 7, 7), torch.randn(4, 9, 7, 7)])
    assert [model[1].momentum, model.training, len(model[1]._forward_pre_hooks)] == [0.1, True, 0]


@pytest.mark.parametrize("batch", [None, (torch.ones(2, 2, 7, 7), torch.ones(2))])
def test_batches_of_a_form_that_no_model_takes_are_refused(batch: Any) -> None:
    with pytest.raises(UserError, match=r"mappings of inputs by name, not (NoneType|tuple)"):
        precise_batch_norm(small_net(), [batch])
    with pytest.raises(ValueError, match=r"polish: a batch of type (NoneType|tuple); give the images alone"):
        polish(small_net(), [batch])


def test_statistics_of_a_float64_model_are_of_float64() -> None:
    images = torch.randn(8, 2, 3, 3, dtype=torch.float64) + 1e5
    polish(model := nn.BatchNorm2d(2).double(), [images[:5], images[5:]])
    torch.testing.assert_close(model.running_mean, images.mean((0, 2, 3)), rtol=1e-13, atol=0)


def test_polish_without_images_is_refused_and_a_layer_that_sees_none_stays() -> None:
    class Aside(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self[0](images)

    model, images = Aside(nn.BatchNorm2d(1), nn.BatchNorm2d(1)), torch.full((2, 1, 3, 3), 3.0)
    ended = iter([images])
    next(ended)
    for nothing in (iter(list[torch.Tensor]()), ended):
        with pytest.raises(ValueError, match="polish: no images on any rank"):
            polish(model, nothing)
    assert model[0].running_mean == torch.zeros(1)
    assert polish(model, [images]) == 2
    assert [float(layer.get_buffer("running_mean")) for layer in model] == [3.0, 0.0]
    assert precise_batch_norm(nn.BatchNorm2d(1, affine=False), [images]) == 2  # a model without parameters
    with pytest.raises(ValueError, match="polish: 0 keeps statistics of single images"):
        polish(nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True)), [images])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch would rather have torch.export
        traced = torch.jit.trace(nn.Sequential(nn.BatchNorm2d(1)).eval(), images)
    with pytest.raises(ValueError, match=r"polish: 0 is of torch\.jit"):
        polish(traced, [images])


def test_images_of_extra_forward_passes_are_named_as_they_are_taken() -> None:
    """Not all of them before the first pass: ten thousand steps would be some 20 MB, and more of them no memory has."""
    recipe = recipe_of("polish={steps: 10000, images_per_batch: 8}")
    pipeline = Pipeline(open_sources(recipe.data, None, recipe.seed)[0], recipe.data, 0)
    tracemalloc.start()
    try:
        with pytest.raises(InterruptedError):
            polish_by_recipe(
                small_net(), pipeline, recipe, group_of(), NativeAllReduce(),
                Precision(recipe, torch.device("cpu")),
                progress=Mock(side_effect=InterruptedError),
            )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_extra_forward_passes_are_the_running_average_of_training() -> None:
    batches = [torch.randn(6, 2, 9, 9, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    model, plain = small_net(), small_net()
    nothing = batches[0][:0]  # of images that can't be decoded none is left
    steps = [[nothing, *batches[:2]], [nothing], batches[2:]]
    assert refresh(model, steps, momentum=0.3, allreduce=NativeAllReduce()) == 24
    running = {name: buffer.clone() for name, buffer in plain.named_buffers() if buffer.is_floating_point()}
    plain[3].eval()  # dropout
    for layer, own in zip(model, plain, strict=True):
        if isinstance(own, nn.BatchNorm2d):
            own.momentum = 1.0  # so that a pass leaves the statistics of its own batch
            assert layer.momentum == 0.1
    for step in (batches[:2], batches[2:]):
        passes = []
        for batch in step:
            plain(batch)
            passes.append({name: plain.get_buffer(name).clone() for name in running})
        for name, average in running.items():
            average.lerp_(torch.stack([each[name] for each in passes]).mean(dim=0), 0.3)
    torch.testing.assert_close({name: model.get_buffer(name) for name in running}, running)

"""Images that the device normalises: the bits of the CPU's own product and sum, whatever is done to an image before."""

from typing import Literal

import numpy as np
import pytest
import torch

from torusgd.data.pipeline import Pipeline
from torusgd.data.registry import open_sources
from torusgd.data.to_device import BytePipeline, allocate_pinned, can_normalise_later, parts, pinned, place
from torusgd.recipe.data_schema import Augment, Data

CPU = torch.device("cpu")


def data_of(channels: Literal[1, 3], **augment: object) -> Data:
    return Data(
        source="synthetic", train_images=20, eval_images=8, image_size=9, channels=channels, classes=4,
        mean=(0.485, 0.456, 0.406)[:channels], std=(0.229, 0.224, 0.225)[:channels],
        augment=Augment.model_validate(augment),
    )  # fmt: skip


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("channels", "augment"),
    [(1, {}), (3, {"crop": "shift", "shift": 1, "flip": 0.5}), (3, {"rotation": 0.2, "policy": "trivialaugment"})],
)
def test_a_device_makes_the_images_of_the_cpu(channels: Literal[1, 3], augment, memory_format) -> None:
    data = data_of(channels, **augment)
    (source, _), indices = open_sources(data, None, 0), np.arange(20)
    ready, bytes_ = (kind(source, data, 0) for kind in (Pipeline, BytePipeline))
    for read, arguments in (("training_batch", (indices, np.full(20, 3), True)), ("validation_batch", (indices[:7],))):
        ours, theirs = (getattr(pipeline, read)(*arguments) for pipeline in (bytes_, ready))
        assert ours.images.dtype == torch.uint8
        images = place(ours, CPU, memory_format)
        assert torch.equal(images, theirs.images)
        assert images.is_contiguous(memory_format=memory_format)
        assert torch.equal(place(theirs, CPU, memory_format), theirs.images)
        assert torch.equal(ours.targets, theirs.targets)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_images_and_targets_come_in_one_message(count: int) -> None:
    """Of an odd number of bytes too; targets of a plain pass are not part of it."""
    source, _ = open_sources(data_of(3), None, 0)
    first = np.zeros(count, np.int64)
    batch = BytePipeline(source, data_of(3), 0).training_batch(np.arange(count), first, augment=True)
    assert batch.message is not None
    images, targets = parts(batch.message.clone(), batch.images.shape)
    assert torch.equal(images, batch.images)
    assert torch.equal(targets, batch.targets)
    assert batch.images.data_ptr() == batch.message.data_ptr(), "where torch looks for pinned memory"
    assert batch.targets.untyped_storage().data_ptr() != batch.message.data_ptr()
    assert Pipeline(source, data_of(3), 0).training_batch(np.arange(count), first, augment=True).message is None


def test_what_is_no_function_of_a_byte_is_normalised_on_the_cpu_and_what_a_gpu_is_given_is_pinned(monkeypatch) -> None:
    assert can_normalise_later(Augment())
    values = {"brightness": 0.1, "noise": 0.1, "erase": 0.5, "mixup": 0.2, "cutmix": 1.0, "contrast": 1.5}
    for name, value in values.items():
        assert not can_normalise_later(Augment.model_validate({name: value})), name
    there, gpu, on_device = torch.ones(2), torch.device("cuda", 0), torch.zeros(2, device="meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: there)
    targets = torch.zeros(2)
    assert pinned(targets, gpu) is there
    assert pinned(targets, CPU) is targets
    assert pinned(on_device, gpu) is on_device


@pytest.mark.gpu
def test_images_reach_a_busy_gpu_before_their_memory_is_used_again() -> None:
    data, indices = data_of(3, flip=0.5), np.arange(20)
    source, _ = open_sources(data, None, 0)
    ready, given = Pipeline(source, data, 0), BytePipeline(source, data, 0, allocate_pinned)
    torch.cuda._sleep(200_000_000)
    batches = (given.training_batch(indices, np.full(20, epoch), augment=True) for epoch in range(30))
    placed = [place(batch, torch.device("cuda", 0), torch.channels_last) for batch in batches]
    for epoch, images in enumerate(placed):
        assert torch.equal(images.cpu(), ready.training_batch(indices, np.full(20, epoch), augment=True).images)

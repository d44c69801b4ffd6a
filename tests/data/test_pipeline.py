import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.own import Stripes
from tests.data.pictures import folder_data, psnr, write_folder
from tests.messages import refuses
from torusgd.data import ArraySource, Pipeline, Source, open_sources
from torusgd.data import pipeline as module
from torusgd.data.geometry import render, scaled
from torusgd.errors import RunError
from torusgd.recipe.data_schema import Augment, Data

EPOCH_0 = np.zeros(30, dtype=np.int64)


def own_data(**changes: Any) -> Data:
    augment = Augment(crop="resized", flip=0.5)
    return Data(**{"source": "tests.data.own:stripes", "image_size": 16, "resize": 18, "augment": augment, **changes})


def stripes(*arguments: Any, data: Data | None = None, seed: int = 0) -> tuple[Stripes, Pipeline]:
    source = Stripes(30, *arguments)
    return source, Pipeline(source, data or own_data(), seed)


def pictures(root: Path) -> Pipeline:
    return Pipeline(open_sources(folder_data(), write_folder(root), 0)[0], folder_data(), 0)


class OneByOne:
    """A source without its fast ways of reading."""

    def __init__(self, source: Source) -> None:
        self.classes, self.labels, self.read = source.classes, source.labels, source.read

    def __len__(self) -> int:
        return len(self.labels)


TILES: dict[str, Any] = {"source": "synthetic", "train_images": 20, "eval_images": 20, "classes": 4}
WARPS = Augment(rotation=0.5, distortion=0.2, brightness=0.1, contrast=1.5, noise=0.05, by_channel=True)
PIPELINES = {
    "digits": Data(source="digits", image_size=8, channels=1, mean=(0.3,), std=(0.2,)),
    "shifted": Data(**TILES, image_size=12, augment=Augment(crop="shift", shift=2, flip=0.5)),
    "odd width": Data(**TILES, image_size=13, augment=Augment(flip=0.5), mean=(0.1, 0.5, 0.9), std=(0.5, 1.0, 2.0)),
    "resized without a change": Data(**TILES, image_size=12, resize=12, augment=Augment(crop="shift", shift=2)),
    "not square": Data(**TILES, image_size=(11, 39), augment=Augment(crop="shift", shift=2)),
    "resized": Data(**TILES, image_size=12, resize=15, augment=Augment(crop="resized")),
    "warped": Data(**TILES, image_size=12, augment=WARPS),
    "erased": Data(**TILES, image_size=12, augment=Augment(erase=0.9)),
    "by a policy": Data(**TILES, image_size=12, augment=Augment(policy="randaugment", magnitude=20)),
    "folder": folder_data(), "folder, not square": folder_data(image_size=(16, 24)),
    "folder, one channel": folder_data(channels=1, mean=(0.5,), std=(0.5,)),
    "folder, shifted": folder_data(augment=Augment(crop="shift", shift=3, flip=0.5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pipeline]:
    root = write_folder(tmp_path_factory.mktemp("pictures"), train=10)
    (root / "train" / "cat" / "004.jpg").write_text("torn")
    return {
        name: Pipeline(open_sources(data, {"folder": root}.get(data.source), 0)[0], data, seed=7)
        for name, data in PIPELINES.items()
    }


@pytest.mark.parametrize("name", PIPELINES)
@given(st.data())
@settings(deadline=None, max_examples=10)
def test_an_image_is_the_same_in_any_batch(pipelines: dict[str, Pipeline], name: str, data: st.DataObject) -> None:
    pipeline = pipelines[name]
    indices = np.array(data.draw(st.lists(st.integers(0, min(len(pipeline.source), 20) - 1), min_size=1, max_size=12)))
    epochs = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(indices), max_size=len(indices))))
    cut = data.draw(st.integers(0, len(indices)))
    for augment in (True, False):
        whole = pipeline.training_batch(indices, epochs, augment)
        for cuts in ([cut], range(1, len(indices))):
            pieces = zip(np.split(indices, cuts), np.split(epochs, cuts), strict=True)
            batches = [pipeline.training_batch(*piece, augment) for piece in pieces]
            assert torch.equal(whole.images, torch.cat([batch.images for batch in batches]))
            assert torch.equal(whole.targets, torch.cat([batch.targets for batch in batches]))
            assert whole.replaced == sum(batch.replaced for batch in batches)
        assert whole.images.shape == (len(indices), PIPELINES[name].channels, *PIPELINES[name].sizes.sides)
        assert whole.images.is_contiguous()
        assert (whole.images.dtype, whole.targets.dtype) == (torch.float32, torch.int64)
        assert whole.positions.tolist() == list(range(len(indices)))
    whole = pipeline.validation_batch(indices)
    alone = [pipeline.validation_batch(indices[at : at + 1]) for at in range(len(indices))]
    assert torch.equal(whole.images, torch.cat([batch.images for batch in alone]))
    assert torch.equal(whole.targets, torch.cat([batch.targets for batch in alone]))


@pytest.mark.parametrize("name", PIPELINES)
def test_seeds_and_epochs_change_what_is_seen_and_without_augmentation_it_is_as_in_evaluation(pipelines, name: str):
    source, data, indices = pipelines[name].source, PIPELINES[name], np.arange(4)

    def seen(seed: int, epoch: int, augment: bool = True, source: Source = source) -> torch.Tensor:
        return Pipeline(source, data, seed).training_batch(indices, np.full(4, epoch), augment).images

    evaluated = pipelines[name].validation_batch(indices)
    assert torch.equal(seen(0, 3, augment=False), evaluated.images)
    if data.augment != Augment():
        for other in (seen(0, 1), seen(1, 0), seen(0, 0, augment=False)):
            assert not torch.equal(seen(0, 0), other)
    if isinstance(source, ArraySource):  # the way without a loop gives the same bits, normalised by channel
        for augment in (True, False):
            assert torch.equal(seen(0, 0, augment), seen(0, 0, augment, OneByOne(source)))
        assert torch.equal(Pipeline(OneByOne(source), data, 7).validation_batch(indices).images, evaluated.images)
        if data.sizes.sides == source.shape[:2]:
            expected = (source.read_many(indices) / 255 - np.array(data.mean)) / np.array(data.std)
            assert np.allclose(evaluated.images.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-6)
        assert evaluated.targets.tolist() == source.labels[:4].tolist()


@pytest.mark.parametrize("crop", ["none", "random", "resized"])
def test_another_size_is_that_of_a_pipeline_made_for_it(crop: str, tmp_path: Path) -> None:
    augment = Augment.model_validate({"crop": crop, "flip": 0.5})
    large, small = (folder_data(image_size=size, resize=size + 8, augment=augment) for size in (40, 24))
    source, _ = open_sources(large, write_folder(tmp_path), 0)
    indices, epochs = np.arange(len(source)), np.full(len(source), 2)
    for is_augmented in (True, False):
        resized = Pipeline(source, large, 0).training_batch(indices, epochs, is_augmented, small.sizes)
        made = Pipeline(source, small, 0).training_batch(indices, epochs, is_augmented)
        assert torch.equal(resized.images, made.images)


def test_a_random_crop_is_a_window_of_the_scaled_image_at_each_place_in_some_epoch() -> None:
    source, pipeline = stripes(data=own_data(augment=Augment(crop="random"), mean=(0.0,) * 3, std=(1.0,) * 3))
    whole = torch.from_numpy(render(source.read(0), scaled(20, 20, 18))).float() / 255
    windows = {(y, x): whole[:, y : y + 16, x : x + 16] for y in range(3) for x in range(3)}
    seen = set()
    for epoch in range(60):
        image = pipeline.training_batch(np.array([0]), np.array([epoch]), augment=True).images[0]
        found = [corner for corner, window in windows.items() if torch.allclose(image, window, atol=1e-6)]
        assert len(found) == 1
        seen.update(found)
    assert seen == set(windows)


def test_evaluation_is_torchvisions_resize_and_centre_crop(tmp_path: Path) -> None:
    data = folder_data(image_size=30, resize=37, mean=(0.0,) * 3, std=(1.0,) * 3)
    source, _ = open_sources(data, write_folder(tmp_path), 0)
    images = Pipeline(source, data, 0).validation_batch(np.arange(8)).images
    for index in range(8):
        picture = Image.fromarray(source.read(index))
        (width, height), short = picture.size, min(picture.size)
        picture = picture.resize((37 * width // short, 37 * height // short), Image.Resampling.BILINEAR)
        left, top = round((picture.width - 30) / 2), round((picture.height - 30) / 2)
        expected = np.asarray(picture.crop((left, top, left + 30, top + 30))).transpose(2, 0, 1)
        assert psnr(images[index] * 255, expected) > 50


def test_an_undecodable_image_is_replaced_by_a_keyed_one_with_its_own_label(caplog: pytest.LogCaptureFixture) -> None:
    bad, (_, clean) = (3, 11), stripes()
    _, pipeline = stripes(bad)
    indices, epochs = np.arange(12), EPOCH_0[:12]
    with caplog.at_level(logging.WARNING):
        batch = pipeline.training_batch(indices, epochs, augment=True)
    assert (batch.replaced, caplog.messages) == (2, [f"replaced: image {index}: torn" for index in bad])
    whole = clean.training_batch(indices, epochs, augment=True)
    for at in range(12):
        assert torch.equal(batch.images[at], whole.images[at]) == (at not in bad)
    again = pipeline.training_batch(np.array([11, 3]), EPOCH_0[:2], augment=True)
    assert torch.equal(again.images, batch.images[[11, 3]])
    assert torch.equal(again.targets, batch.targets[[11, 3]])
    later = pipeline.training_batch(np.array([3]), np.array([1]), augment=False)
    assert not torch.equal(later.images, pipeline.training_batch(np.array([3]), EPOCH_0[:1], augment=False).images)
    source, pipeline = stripes(tuple(range(29)))  # only image 29 is whole
    plain, found = pipeline.validation_batch(np.array([29])), 0
    for index in range(29):
        with suppress(RunError):
            batch = pipeline.training_batch(np.array([index]), EPOCH_0[:1], augment=False)
            found += 1
            assert batch.targets.tolist() == [source.labels[29]]
            assert torch.equal(batch.images, plain.images)
    assert found > 0
    source, pipeline = stripes(tuple(range(30)))
    refuses("sixteen substitutes", pipeline.training_batch, np.array([0]), EPOCH_0[:1], augment=True, kind=RunError)
    assert len(source.reads) == 17


def test_evaluation_leaves_undecodable_images_out_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    (_, pipeline), (_, clean), whole = stripes((3, 5)), stripes(), [0, 1, 2, 4, 6, 7]
    with caplog.at_level(logging.WARNING):
        batch = pipeline.validation_batch(np.arange(8))
    assert torch.equal(batch.images, clean.validation_batch(np.array(whole)).images)
    assert (batch.positions.tolist(), batch.targets.tolist(), batch.replaced) == (whole, [0, 1, 2, 1, 0, 1], 0)
    none = pipeline.validation_batch(np.array([3, 5]))
    assert (none.images.shape, none.targets.shape, none.positions.shape) == ((0, 3, 16, 16), (0,), (0,))
    assert caplog.messages == [f"left out: image {index}: torn" for index in (3, 5)]


def test_trouble_in_reading_is_tried_again_and_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.0))
    source, pipeline = stripes((), {4: 2})
    assert (pipeline.training_batch(np.array([4]), EPOCH_0[:1], augment=True).replaced, source.reads) == (0, [4, 4, 4])
    source, pipeline = stripes((), {4: 3})
    refuses("a stripe out of reach", pipeline.training_batch, np.array([3, 4]), EPOCH_0[:2], augment=True, kind=OSError)
    source.unreadable[4] = 3
    refuses("a stripe out of reach", pipeline.validation_batch, np.array([3, 4]), kind=OSError)
    pipeline = pictures(tmp_path)
    (tmp_path / "train" / "cat" / "002.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        pipeline.training_batch(np.arange(4), EPOCH_0[:4], augment=True)


def test_images_of_another_size_or_kind_are_refused() -> None:
    wrong: dict[str, Any] = {"another size": {"resize": None, "augment": Augment()}}
    wrong["other channels"] = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    for what, changes in wrong.items():
        _, pipeline = stripes(data=own_data(**changes))
        for read, arguments in ((pipeline.validation_batch, ()), (pipeline.training_batch, (EPOCH_0[:1], True))):
            refuses(f"an image of {what}", read, np.array([0]), *arguments, about="data.")

"""JPEGs decoded by a GPU: many in one call, with bits that depend on the picture alone; the GPU is a stand-in."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.pictures import encoded, folder_data, photo, psnr, write_folder
from tests.messages import refused, refuses
from torusgd.data.decode import EncodedImages, NvJpeg, decode, is_common_jpeg
from torusgd.data.pipeline import Pipeline
from torusgd.data.registry import decode_on_gpu, open_sources
from torusgd.recipe.data_schema import Augment, Data
from torusgd.recipe.load import load_recipe
from torusgd.run import fingerprint as conditions_module
from torusgd.run.fingerprint import conditions

GPU = torch.device("cuda", 0)


class FakeGpu:
    """Decodes as libjpeg does; notes how many pictures each call has, and refuses those that it is told to."""

    def __init__(self, damaged: bytes = b"none", says: str = "nvjpegDecode failed: 4") -> None:
        self._damaged, self._says = damaged, says
        self.calls: list[int] = []

    def __call__(self, pictures: Sequence[bytes], channels: int) -> Sequence[Tensor]:
        self.calls.append(len(pictures))
        if self._damaged in pictures:
            raise RuntimeError(f"Error while decoding JPEG images: {self._says}")
        return [torch.from_numpy(decode(picture, channels)).permute(2, 0, 1) for picture in pictures]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), train=4, val=1)


def opened(path: Path, decode_many: Any = None, **changes: Any) -> Pipeline:
    """The training images of a folder, decoded by a stand-in, or as ever."""
    data = folder_data(decoder="nvjpeg", **changes)
    train, _ = open_sources(data, path, 0)
    if decode_many is not None:
        assert isinstance(train, EncodedImages)
        train = train.decoded_by(NvJpeg(decode_many))
    return Pipeline(train, data, 0)


def batch(pipeline: Pipeline, indices: Sequence[int]) -> Any:
    return pipeline.training_batch(np.array(indices), np.full(len(indices), 2), augment=True)


def test_a_batch_is_one_call_with_the_same_images_as_in_any_and_one_that_spoils_a_call_is_replaced(folder: Path):
    gpu = FakeGpu()
    pipeline = opened(folder, gpu)
    images = batch(pipeline, range(8)).images
    assert gpu.calls == [8]
    for index in (0, 5):
        assert torch.equal(batch(pipeline, [index]).images[0], images[index])
    for ours, usual in zip(images, batch(opened(folder), range(8)).images, strict=True):
        assert (ours - usual).abs().mean() < 0.1, "in units of about 1/4 of the whole range"
    assert torch.equal(batch(opened(folder, gpu, train_images=3), [2]).images[0], images[2])
    assert gpu.calls == [8, 1, 1, 1]
    damaged = sorted((folder / "train" / "cat").iterdir())[2].read_bytes()
    found, whole = (batch(opened(folder, gpu), range(8)) for gpu in (FakeGpu(damaged), FakeGpu()))
    same = [torch.equal(a, b) for a, b in zip(found.images, whole.images, strict=True)]
    assert (found.replaced, same) == (1, [index != 2 for index in range(8)])
    with refused("a GPU without memory for pictures", kind=RuntimeError):
        batch(opened(folder, FakeGpu(damaged, "CUDA out of memory")), range(8))


def test_what_the_gpu_does_not_know_the_usual_decoder_decodes(folder: Path, tmp_path: Path) -> None:
    path, gpu = write_folder(tmp_path, train=3, val=1), FakeGpu()
    first, second, third = sorted((path / "train" / "cat").iterdir())
    first.write_bytes(encoded(photo(50, 60), "PNG"))
    second.write_bytes(encoded(photo(50, 60).convert("CMYK"), "JPEG"))
    third.write_bytes(third.read_bytes()[:-300])
    ours, usual = (batch(pipeline, [0, 1, 2]) for pipeline in (opened(path, gpu), opened(path)))
    assert torch.equal(ours.images[:2], usual.images[:2])
    assert ours.replaced == usual.replaced == 1, "the one that is cut short"
    assert set(gpu.calls) <= {1}, "substitutes alone may be for the GPU"
    usual = photo(40, 50)
    common = encoded(usual), encoded(usual, progressive=True), encoded(usual.convert("L"))
    others = encoded(usual, keep_rgb=True), encoded(usual.convert("CMYK")), encoded(usual, "PNG")
    assert all(map(is_common_jpeg, common))
    assert not any(map(is_common_jpeg, (*others, common[0][:-9], common[0][:30], b"")))


def test_it_is_refused_where_it_can_not_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = open_sources(folder_data(), folder, 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    refuses("nvjpeg without torchvision", decode_on_gpu, sources, GPU, about="data.decoder: ")
    given: list[Any] = []

    def decode_jpeg(pictures: Any, mode: str, device: torch.device) -> Any:
        given.append((mode, device, [picture.dtype for picture in pictures]))
        return [torch.zeros(3, 60, 60, dtype=torch.uint8) for _ in pictures]

    names = SimpleNamespace(ImageReadMode=SimpleNamespace(GRAY="grey", RGB="colours"), decode_jpeg=decode_jpeg)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(io=names))
    monkeypatch.setitem(sys.modules, "torchvision.io", names)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    batch(Pipeline(decode_on_gpu(sources, GPU)[0], folder_data(), 0), [0, 1])
    assert given == [("colours", GPU, [torch.uint8] * 2)]
    digits = Data(source="digits", image_size=8, channels=1, mean=(0.5,), std=(0.5,), augment=Augment())
    refuses("nvjpeg for digits", decode_on_gpu, open_sources(digits, None, 0), GPU, about="data.decoder: ")


def test_the_decoder_is_in_the_recipe_and_in_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions_module, "version_of", lambda package="torusgd": "1.2")
    recipes = [load_recipe("resnet50", ["data.source=tar", *more]).recipe for more in ([], ["data.decoder=nvjpeg"])]
    usual, ours = (str(conditions(recipe, torch.device("cpu"))["decoders"]) for recipe in recipes)
    assert ours == f"{usual} torchvision-1.2 nvidia-nvjpeg-1.2 nvidia-nvjpeg-cu12-1.2"
    assert recipes[0].sha256() != recipes[1].sha256()


@pytest.mark.gpu
def test_on_a_gpu_pixels_are_near_those_of_libjpeg_and_repeat(folder: Path) -> None:
    pytest.importorskip("torchvision")
    data = folder_data(augment=Augment())

    def images(sources: Any) -> Tensor:
        return Pipeline(sources[0], data, 0).validation_batch(np.arange(8)).images

    found = [images(decode_on_gpu(open_sources(data, folder, 0), GPU)) for _ in range(2)]
    assert torch.equal(*found)
    assert psnr(found[0] * 57, images(open_sources(data, folder, 0)) * 57) > 30

"""JPEG files of ImageNet's usual size to training tensors on one core: Pillow as torchvision uses it against ours.

    python -m benchmarks input decode [--rounds 40] [--height 375 --width 500 --quality 90]

Pictures: windows cut from the two photographs that scikit-learn ships (china.jpg, flower.jpg), mirrored and not,
encoded with 4:2:0 chroma. All sides start from the same files, cut the same boxes and mirror the same images; they
take turns within each round. The clock is the process's CPU time, so that other programs on the machine count less.
PSNR compares their results, in 8-bit levels after undoing the normalisation.

Needs: the extra images, and scikit-learn for its photographs.
"""

import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import typer
from PIL import Image
from sklearn.datasets import load_sample_image

from torusgd.data import Pipeline, open_sources
from torusgd.data.augment import draw_changes, random_region
from torusgd.data.decode import fit
from torusgd.data.pictures import PictureFiles
from torusgd.recipe.data_schema import Augment, Data

from ..record import sample

SIZE = 224
PICTURES = 16


def write_pictures(root: Path, height: int, width: int, quality: int) -> None:
    """PICTURES files of two classes in train; the same in val, since a folder source has both."""
    photos = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    grow = max(1.0, 1.1 * height / photos[0].height, 1.1 * width / photos[0].width)
    photos = [
        photo.resize((int(photo.width * grow), int(photo.height * grow)), Image.Resampling.LANCZOS) for photo in photos
    ]
    for split in ("train", "val"):
        for number in range(PICTURES):
            photo, place = photos[number % 2], root / split / ("china", "flower")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            left = (photo.width - width) * (number // 2 % 4) // 3
            top = (photo.height - height) * (number // 2 % 4) // 3
            picture = photo.crop((left, top, left + width, top + height))
            if number >= PICTURES // 2:
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            picture.save(place / f"{number:02}.jpg", quality=quality, subsampling="4:2:0")


def with_pillow(folder: PictureFiles, data: Data, epoch: int) -> torch.Tensor:
    """What torchvision's Pillow transforms do: open, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize."""
    mean, std = torch.tensor(data.mean)[:, None, None], torch.tensor(data.std)[:, None, None]
    indices = np.arange(len(folder))
    epochs = np.full(len(folder), epoch)
    changes = draw_changes(data.augment, data.channels, 0, epochs, indices)
    assert changes.boxes is not None
    images = []
    for index in indices:
        with Image.open(folder.where(int(index))) as file:
            picture = file.convert("RGB")
        box = random_region(picture.height, picture.width, (SIZE, SIZE), data.augment, changes.boxes[index])
        _, box = fit(box, picture.height, picture.width)  # the box that ours takes, to the pixel
        picture = picture.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)  # Pillow always antialiases
        if changes.mirrored[index]:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        images.append(tensor.sub_(mean).div_(std))
    return torch.stack(images)


def psnr(ours: torch.Tensor, theirs: torch.Tensor, data: Data) -> float:
    levels = (ours - theirs) * torch.tensor(data.std)[:, None, None] * 255
    error = float((levels.double() ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def timed(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main(
    rounds: int = 40,
    height: int = 375,
    width: int = 500,
    quality: int = 90,
) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)

    data = Data(source="folder", image_size=SIZE, augment=Augment(crop="resized", flip=0.5))
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), height, width, quality)
        source, _ = open_sources(data, Path(folder), seed=0)
        assert isinstance(source, PictureFiles)
        size = statistics.mean(Path(source.where(index)).stat().st_size for index in range(PICTURES))
        pipeline = Pipeline(source, data, seed=0)
        indices = np.arange(PICTURES)

        def ours(epoch: int) -> torch.Tensor:
            return pipeline.training_batch(indices, np.full(PICTURES, epoch), augment=True).images

        ways = {"Pillow": lambda epoch: with_pillow(source, data, epoch), "torusgd": ours}
        # The last few batches stay alive, as in a loop with a loader that works ahead.
        kept: deque[torch.Tensor] = deque(maxlen=6)

        def taken(way: Callable[[int], torch.Tensor], epoch: int) -> None:
            kept.append(way(epoch))

        levels = [psnr(ours(epoch), with_pillow(source, data, epoch), data) for epoch in range(5)]
        found = [[timed(partial(taken, way, epoch)) for way in ways.values()] for epoch in range(rounds)]
    print(f"{PICTURES} JPEGs of {width} x {height}, {size / 1000:.0f} kB each, {rounds} rounds, one core")
    pillow = [times[0] for times in found]
    for name, times in zip(ways, zip(*found, strict=True), strict=True):
        sample(f"{name}, images a CPU second", [PICTURES / seconds for seconds in times])
        speed = statistics.quantiles([PICTURES / seconds for seconds in times], n=4)
        ratio = statistics.quantiles([theirs / mine for theirs, mine in zip(pillow, times, strict=True)], n=4)
        print(
            f"{name:8} {speed[1]:5.0f} images/CPU-s (quartiles {speed[0]:.0f} to {speed[2]:.0f}),"
            f" {ratio[1]:.2f} times Pillow's ({ratio[0]:.2f} to {ratio[2]:.2f})"
        )
    print(f"PSNR of torusgd against Pillow: {min(levels):.1f} dB at worst over 5 epochs' boxes")


if __name__ == "__main__":
    typer.run(main)

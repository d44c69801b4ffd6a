"""Real picture files for the tests."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torusgd.recipe.data_schema import Augment, Data


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture with coarse shapes, fine texture and colours, as a photograph has."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    coarse = coarse.resize((width, height), Image.Resampling.BICUBIC)
    fine = random.integers(-25, 26, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def picture(number: int) -> bytes:
    """One of many sizes, as a JPEG file."""
    return encoded(photo(40 + 7 * (number % 5), 36 + 9 * (number % 4), seed=number), quality=90)


def write_folder(root: Path, train: int = 6, val: int = 4, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """`train` and `val` JPEG files a class, of many sizes."""
    number = 0
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                number += 1
                (root / split / name / f"{index:03}.jpg").write_bytes(picture(number))
    return root


def folder_data(**changes: Any) -> Data:
    """A recipe's section for small pictures."""
    augment = Augment(crop="resized", flip=0.5)
    return Data(**{"source": "folder", "image_size": 24, "resize": 28, "augment": augment, **changes})


def psnr(a: Any, b: Any) -> float:
    """In decibels, for 8-bit levels; infinite for equal pictures."""
    error = np.mean((np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)) ** 2)
    return float(np.inf if error == 0 else 10 * np.log10(255**2 / error))

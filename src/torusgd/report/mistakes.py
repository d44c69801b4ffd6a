"""What trained weights get wrong: the worst classes, and the held-out images of which they were most sure."""

import base64
import heapq
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.pipeline import Batch
from ..recipe.schema import Recipe
from ..step.evaluate import Confusion, Indices, Observe

MOST_IMAGES = 24  # pictures on the sheet
MOST_CLASSES = 10  # classes in the table of the worst
_PIXELS = 96  # largest longer side of a picture on the sheet; larger ones are scaled down


class WorstClass(NamedTuple):
    name: str
    images: int
    top1: float
    taken_for: str  # class that its wrong images are taken for most often


@dataclass(frozen=True)
class WrongImage:
    index: int  # index in the held-out data
    name: str
    taken_for: str
    probability: float  # probability that the network gave the right class
    picture: str  # data: URL of a PNG of what the network saw; empty unless it has one or three channels


class Mistakes(NamedTuple):
    """What to look at first when weights are not good enough."""

    classes: tuple[WorstClass, ...]
    images: tuple[WrongImage, ...]
    wrong: int  # all images that are taken for another class
    seen: int


def find_mistakes(classify: Callable[[Observe], object], recipe: Recipe, names: Sequence[str]) -> Mistakes:
    """What is wrong of all that `classify` observes; `names` are those of the classes, in the order of the outputs."""
    confusion = Confusion(len(names), torch.device("cpu"))
    worst: list[tuple[float, int, int, int, Tensor]] = []  # a heap: the least wrong one of the worst goes first

    def observe(logits: Tensor, batch: Batch, chunk: Indices) -> None:
        logits = logits.cpu()
        confusion.add(logits, batch.targets)
        likely = logits.softmax(dim=1)
        chosen, own = likely.argmax(dim=1), likely.gather(1, batch.targets[:, None])[:, 0]
        for row in (chosen != batch.targets).nonzero()[:, 0].tolist():
            entry = (-float(own[row]), -int(chunk[batch.positions[row]]), int(batch.targets[row]), int(chosen[row]))
            # Clone: the pipeline reuses the batch's memory for the next images.
            heapq.heappush(worst, (*entry, batch.images[row].clone()))
            # The heap holds one more than the sheet: the least wrong image goes.
            if len(worst) > MOST_IMAGES:
                heapq.heappop(worst)

    classify(observe)
    images = [
        WrongImage(-index, names[own], names[taken], -likely, picture_of(image, recipe.data.mean, recipe.data.std))
        for likely, index, own, taken, image in sorted(worst, key=lambda entry: entry[:2], reverse=True)
    ]
    seen, right, found = int(confusion.counts.sum()), int(confusion.counts.diagonal().sum()), list[WorstClass]()
    for row, (name, top1) in enumerate(zip(names, confusion.accuracies(), strict=True)):
        if top1 is not None and top1 < 1.0:
            others = confusion.counts[row].clone()
            count, others[row] = int(others.sum()), 0
            found.append(WorstClass(name, count, top1, names[int(others.argmax())]))
    found.sort(key=lambda each: each.top1)
    return Mistakes(tuple(found[:MOST_CLASSES]), tuple(images), seen - right, seen)


def picture_of(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> str:
    """A normalised image [channels, height, width] as a data: URL; empty unless it has one or three channels."""
    channels = image.shape[0]
    if channels not in (1, 3):
        return ""
    shape = (channels, 1, 1) if len(mean) == channels else (1, 1, 1)
    pixels = image.float() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    scale = _PIXELS / max(pixels.shape[1:])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in pixels.shape[1:]]
        pixels = F.interpolate(pixels[None], size=size, mode="area")[0]
    data = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return "data:image/png;base64," + base64.b64encode(png(data)).decode()


def png(pixels: "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]") -> bytes:
    """Pixels [height, width, 1 or 3] as a PNG file (RFC 2083), each row unfiltered.

    >>> png(np.zeros((2, 3, 1), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")

"""From sample indices to a batch of tensors: read, decode, augment, normalise."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RunError, UserError, printable, retry
from ..recipe.data_schema import Data
from ..recipe.section import ImageSizes
from ..rng import SUBSTITUTE, keyed_integer
from .augment import Changes, apply_policy, draw_changes, erase, mirror, mix, random_region, shift
from .decode import EncodedImages
from .geometry import Warps, bend, cut, render, scaled, tone
from .types import ArraySource, Choose, CorruptImage, Float32, Int64, Pixels, Region, RegionSource, Source

T = TypeVar("T")
Read = Callable[[int, Choose], Pixels | None]  # from an image's position in its batch and `_region`; None: it stays out
Allocate = Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]  # from shape and dtype; not cleared

log = logging.getLogger(__name__)

_PAUSES = (0.1, 0.5)  # seconds before a failed read is tried again
_SUBSTITUTES = 16  # undecodable images in a row, after which the run stops


@dataclass(frozen=True, eq=False)
class Batch:
    images: torch.Tensor  # float32 [n, channels, height, width], contiguous, normalised; or uint8, with `table`
    targets: torch.Tensor  # int64 [n], labels
    positions: Int64  # [n], of these images in the request, of which evaluation leaves out undecodable ones
    replaced: int  # number of these images that stand in for undecodable ones
    partners: torch.Tensor | None = None  # int64 [n], labels that images were mixed with; None without mixing
    shares: torch.Tensor | None = None  # float32 [n], weight of each image's own label
    table: torch.Tensor | None = None  # float32 [channels, 256], normalised value of each byte (`to_device.place`)
    plain: "Batch | None" = None  # the same images un-augmented, for a stage's extra pass
    message: torch.Tensor | None = None  # uint8 [bytes], images and targets in one piece (`to_device.parts`)

    def labels(self) -> dict[str, torch.Tensor]:
        """What a loss reads beside the images, by field: the targets and, of mixed images, partners and shares."""
        found = {"targets": self.targets, "partners": self.partners, "shares": self.shares}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def allocate_by_torch(shape: tuple[int, ...], dtype: npt.DTypeLike, is_pinned: bool = False) -> npt.NDArray[Any]:
    """A new array in torch's memory, not cleared."""
    # numpy requests huge pages of the kernel, which take longer to clear than an image takes to make.
    return torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=is_pinned).numpy()


class Pipeline:
    """Makes batches from a source as a recipe's `data` says. Safe to use from several threads."""

    # The tensor of an image depends on (seed, epoch, index) alone, bit for bit: never on the other images of its batch,
    # on the thread, or on the method by which a source reads it. Only mixing joins images, those of one virtual worker.
    dtype: ClassVar[npt.DTypeLike] = np.float32  # of the images
    table: torch.Tensor | None = None  # as of `Batch`

    def __init__(self, source: Source, data: Data, seed: int, allocate: Allocate = allocate_by_torch) -> None:
        self.source, self.allocate = source, allocate
        self._arrays = source if isinstance(source, ArraySource) else None
        self._regions = source if isinstance(source, RegionSource) else None
        self._encoded = source if isinstance(source, EncodedImages) else None
        self._data, self._sizes, self._seed = data, data.sizes, seed
        self._named: set[tuple[str, int]] = set()
        # Whether `expect` makes reading faster.
        self.reads_ahead = self._encoded is not None and self._encoded.reads_ahead
        # Two roundings for each value, a product and a sum: equal bits in any batch and at any alignment.
        self._scale = (1 / (255 * np.array(data.std))).astype(np.float32)
        self._offset = (-np.array(data.mean) / np.array(data.std)).astype(np.float32)

    def expect(self, indices: Int64) -> None:
        """Starts to read the images at `indices` [n], which are needed soon."""
        if self._encoded is not None:
            self._encoded.expect(indices)

    def training_batch(self, indices: Int64, epochs: Int64, augment: bool, sizes: ImageSizes | None = None) -> Batch:
        """The images at `indices` [n] as epoch `epochs` [n] sees them; undecodable ones have keyed substitutes.

        Without `augment` they have the validation preprocessing (Final Polishing). No draw depends on `sizes`, by
        default the recipe's. OSError if an image can't be read, after further attempts; RunError if one substitute
        after the other is undecodable; UserError if an image's size or channels don't fit the recipe.
        """
        # Batch 4: images are read and decoded, each with the changes that its key draws (Batch 5, `draw_changes`).
        used, keys = indices.copy(), (self._seed, epochs, indices)
        drawn = draw_changes(self._data.augment, self._data.channels, *keys) if augment else Changes()

        def read(at: int, choose: Choose) -> Pixels:
            image, used[at] = self._image_or_substitute(int(indices[at]), int(epochs[at]), choose)
            return image

        out, message = self._images(indices, drawn, sizes or self._sizes, read)
        batch = self._batch(out, used, np.arange(len(indices)), int((used != indices).sum()))
        batch = self.joined(batch, message)
        if not augment:
            return batch
        erase(out, self._data.augment, *keys)
        if (shares := mix(out, self._data.augment, *keys)) is None:
            return batch
        # `mix` pairs image i with image n - 1 - i.
        return replace(batch, partners=batch.targets.flip(0), shares=torch.from_numpy(shares))

    def validation_batch(self, indices: Int64) -> Batch:
        """The images at `indices` [n], shorter side scaled to `data.resize`, middle `data.image_size` cut out.

        Undecodable images are left out and named in the log; `positions` has those of the others.
        """
        self.expect(indices)
        decodable = np.ones(len(indices), dtype=bool)

        def read(at: int, choose: Choose) -> Pixels | None:
            try:
                return self._image(int(indices[at]), choose)
            except CorruptImage as error:
                decodable[at] = False
                self._name("left out", int(indices[at]), error)
                return None

        out, _ = self._images(indices, Changes(), self._sizes, read)
        positions = np.flatnonzero(decodable)
        out = out if decodable.all() else out[decodable]
        return self._batch(out, indices[positions], positions, 0)

    def memory(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], Pixels | None]:
        """New memory for the images of a batch, and the message that this memory is a part of, if any."""
        return self.allocate(shape, self.dtype), None

    def joined(self, batch: Batch, message: Pixels | None) -> Batch:
        """The batch, joined with the message that `memory` returned: its targets are copied into it."""
        assert message is None
        return batch

    def _images(self, indices: Int64, drawn: Changes, sizes: ImageSizes, read: Read) -> tuple[Any, Pixels | None]:
        """What `memory` returns, with the finished images, read whole or each alone."""
        out, message = self.memory((len(indices), self._data.channels, *sizes.sides))
        if (images := self._whole_batch(indices, drawn, sizes)) is not None:
            self._finish(images, drawn, slice(None), out)
            return out, message
        with nullcontext() if self._encoded is None else self._encoded.together(indices):
            for at in range(len(indices)):
                if (image := read(at, partial(self._region, drawn, at, sizes))) is not None:
                    corner = None if drawn.corners is None else drawn.corners[at].tolist()
                    self._finish(cut(image[None], sizes.sides, corner), drawn, slice(at, at + 1), out)
        return out, message

    def _batch(self, out: Float32, indices: Int64, positions: Int64, replaced: int) -> Batch:
        targets = self.source.labels[indices].astype(np.int64)
        return Batch(torch.from_numpy(out), torch.from_numpy(targets), positions, replaced, table=self.table)

    def _whole_batch(self, indices: Int64, drawn: Changes, sizes: ImageSizes) -> Pixels | None:
        """The images at their final size without a loop, uint8 [n, channels, height, width]; None if they need one."""
        source = self._arrays
        if source is None or source.shape[:2] != sizes.sides:
            return None
        # Boxes of random size, and a resize, need each image alone.
        if sizes.resize not in (None, min(sizes.sides)) or drawn.boxes is not None:
            return None
        return np.ascontiguousarray(_retried(lambda: source.read_many(indices)).transpose(0, 3, 1, 2))

    def _finish(self, images: Pixels, drawn: Changes, at: slice, out: Float32) -> None:
        # Changes and normalises the images [m, channels, height, width] at these positions of the batch.
        # The order is part of the result: each change starts from the bytes that the one before has rounded to.
        if drawn.moves is not None:
            images = shift(images, self._data.augment.shift, drawn.moves[at])
        if (warps := drawn.warps) is not None and len(images):
            turns = zip(images, warps.angles[at], warps.distortions[at], strict=True)
            images = np.stack([bend(*turn) for turn in turns])
        images = mirror(images, drawn.mirrored[at])
        if drawn.policy is not None:
            images = apply_policy(images, self._data.augment, drawn.policy[at])
        self._write(images, warps, range(*at.indices(len(out))), out[at])

    def _write(self, images: Pixels, warps: Warps | None, places: range, out: Float32) -> None:
        """Changes the tones of finished images, at these positions of their batch, and normalises them."""
        # Plane by plane, so that the second and third pass over a large image find it in the cache.
        # A block of small images at a time, for the same reason.
        block = max(1, (1 << 18) // max(1, images[:1].size))
        for start in range(0, len(images), block):
            some = slice(start, start + block)
            for channel in range(images.shape[1]):
                plane = out[some, channel]
                plane[...] = images[some, channel]
                if warps is not None:
                    for values, place in zip(plane, places[some], strict=True):
                        tone(values, warps, place, channel)
                plane *= self._scale[channel]
                plane += self._offset[channel]

    def _region(self, drawn: Changes, at: int, sizes: ImageSizes, height: int, width: int) -> Region:
        """The region of an image of this size, at this position of its batch."""
        if drawn.boxes is not None:
            region = random_region(height, width, sizes.sides, self._data.augment, drawn.boxes[at])
        elif sizes.resize is not None:
            region = scaled(height, width, sizes.resize)
        elif (height, width) == sizes.sides:
            region = Region(0, 0, height, width, height, width)
        else:
            rows, columns = sizes.sides
            what = f"null wants images of {columns} x {rows} pixels, but there is one of {width} x {height}"
            remedy = "set data.resize (stages.N.resize for one stage) to the shorter side before the centre crop"
            raise UserError(f"data.resize: {what}; {remedy}")
        return replace(region, exact=self._data.pixels == "portable")

    def _image_or_substitute(self, index: int, epoch: int, choose: Choose) -> tuple[Pixels, int]:
        taken = index
        for attempt in range(_SUBSTITUTES + 1):
            try:
                return self._image(taken, choose), taken
            except CorruptImage as error:
                last = error
                self._name("replaced", taken, error)
                # Keyed: every rank that computes this sample finds the same substitute, without a message.
                taken = int(keyed_integer(len(self.source), SUBSTITUTE, self._seed, epoch, index, attempt))
        raise RunError(f"{_SUBSTITUTES} substitutes in a row can't be decoded either, the last: {last}") from last

    def _name(self, fate: str, index: int, error: CorruptImage) -> None:
        if (fate, index) not in self._named:  # once: it comes anew in each epoch
            self._named.add((fate, index))
            log.warning("%s: %s", fate, printable(str(error)))

    def _image(self, index: int, choose: Choose) -> Pixels:
        if (regions := self._regions) is not None:
            return _retried(lambda: regions.read_region(index, choose))
        pixels = _retried(lambda: self.source.read(index))
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != self._data.channels:
            channels = self._data.channels
            wanted = f"the recipe says {channels}, so images are to be uint8 [height, width, {channels}]"
            raise UserError(f"data.channels: {wanted}, but image {index} is {pixels.dtype} {list(pixels.shape)}")
        return render(pixels, choose(*pixels.shape[:2]))


def _retried(read: Callable[[], T]) -> T:
    def is_of_disk(error: Exception) -> bool:
        if found := isinstance(error, OSError):
            log.warning("reading again: %s", error)
        return found

    # A network disk may fail for a moment. A substitute would change the weights, so the read is repeated.
    return retry(read, _PAUSES, is_of_disk)

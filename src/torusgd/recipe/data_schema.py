"""The images of a recipe: where they come from, how they become tensors, and which passes read them after training."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .section import (
    MOST_PIXELS,
    Count,
    Duration,
    Fraction,
    ImageSizes,
    NotNegative,
    Options,
    Pixels,
    Positive,
    Section,
    Sides,
    sides,
)

Aspect = Annotated[float, Field(ge=1e-3, le=1e3)]  # width / height


class Augment(Section):
    """Random changes of a training image; each draw is keyed by (seed, epoch, sample)."""

    crop: Literal["none", "shift", "random", "resized"] = "none"
    """`shift`: pad with zeros and cut at a random offset; `random`: cut at a random offset out of the image with its
    shorter side at data.resize (Caffe, VGG, OverFeat); `resized`: random area and aspect, scaled to image_size"""
    shift: Annotated[int, Field(ge=0, le=MOST_PIXELS)] = 0
    """pixels, with crop: shift"""
    area: tuple[Positive, Positive] = (0.08, 1.0)
    """fraction of the image's area, with crop: resized"""
    aspect: tuple[Aspect, Aspect] = (0.75, 4 / 3)
    """width / height, with crop: resized"""
    flip: Fraction | Literal["alternating"] = 0.0
    """probability of a left-right mirror; alternating: every image in every other epoch, a keyed half of them in the
    first (Jordan, arXiv 2404.00498)"""
    rotation: Annotated[float, Field(ge=0, le=math.pi)] = 0.0
    """radians; each image by an angle from -rotation to rotation (this key and those below as in Sony's NNabla)"""
    distortion: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """bending of straight lines, from exp(-distortion) to exp(distortion) in scale between middle and border"""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """added to values in 0..1: from -brightness to brightness"""
    contrast: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """factor about a middle grey: from 1 / contrast to contrast"""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    """standard deviation of what is added to each pixel's values in 0..1; of each image from 0 to noise"""
    by_channel: bool = False
    """brightness and contrast of each colour by itself"""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """changes in form and colour: randaugment, `operations` of 14 at strength `magnitude` (Cubuk et al., arXiv
    1909.13719); trivialaugment, one at a strength that is drawn (Mueller and Hutter, arXiv 2103.10158); the 14, with
    their ranges, are torchvision's"""
    operations: Annotated[int, Field(ge=1, le=1000)] = 2
    """changes of each image, with policy: randaugment"""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """strength of each, with policy: randaugment; torchvision's 31 steps"""
    erase: Fraction = 0.0
    """probability that a box of the normalised image, of 2 to 33 % of its area, is set to zero (random erasing)"""
    mixup: NotNegative = 0.0
    """alpha of Beta(alpha, alpha), from 0.05 to 10, for the fraction of an image that is blended with another of its
    virtual worker, and of its target; 0: none is"""
    cutmix: NotNegative = 0.0
    """alpha, likewise, for the area of the box that an image takes from another; with mixup, each image draws which"""
    repeats: Count = 1
    """copies of an image in a row, changed otherwise each time (repeated augmentation); an epoch stays as long, so it
    sees 1 / repeats of the images"""

    @model_validator(mode="after")
    def _check(self) -> "Augment":
        if self.by_channel and self.brightness == 0 and self.contrast == 1:
            raise ValueError("by_channel: has a meaning with brightness or contrast")
        for key in ("area", "aspect"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"{key}: the first value must not be above the second")
        self.check_meaning("policy", dict.fromkeys(("operations", "magnitude"), ("randaugment",)))
        for key in ("mixup", "cutmix"):
            alpha = getattr(self, key)
            if alpha and not 0.05 <= alpha <= 10:
                raise ValueError(f"{key}: 0, or from 0.05 to 10")
        if self.area[1] > 1:
            raise ValueError("area: a fraction of the image, at most 1.0")
        if (self.crop == "shift") != (self.shift > 0):
            raise ValueError("crop: shift needs shift of at least 1 pixel, and shift needs crop: shift")
        return self


class Data(Section):
    """Where images come from and how they become tensors."""

    source: str
    """digits, synthetic, frames, csv, tar, parquet, folder, folders, numpy, mnist, or package.module:factory"""
    options: Options = {}  # noqa: RUF012, since pydantic copies a default
    """arguments of the source, such as noise for synthetic"""
    decoder: Literal["libjpeg", "nvjpeg"] = "libjpeg"
    """decoder of JPEGs in training and its evaluations; nvjpeg: the GPU's own, by torchvision, with other bits. PNGs,
    and JPEGs of rare kinds, are decoded by the CPU in any case"""
    train_images: Count | None = None
    """number of training images, the first ones; null: all that the source has"""
    eval_images: Count | None = None
    """held-out images; null: all"""
    validation_images: Count | None = None
    """so many training images, the same for every seed, are not trained on and are classified in place of the held-out
    ones, for choices to be made by them"""
    image_size: Sides
    """pixels a side after cropping, or [height, width]"""
    resize: Pixels | None = None
    """shorter side, in pixels, before the centre crop of evaluation; null: no resize"""
    pixels: Literal["fast", "portable"] = "fast"
    """portable: images are decoded by decoders that are tried on a built-in set first, and scaled by single operations,
    with the same bits on any machine, in place of torch's kernel, in six times its time"""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue"""
    classes: Annotated[int, Field(ge=2)] | None = None
    """number of classes; null: as many as the source has"""
    mean: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = (0.485, 0.456, 0.406)
    """mean of each channel, for values in 0..1"""
    std: tuple[Annotated[float, Field(ge=1e-6, le=1e6)], ...] = (0.229, 0.224, 0.225)
    """standard deviation of each channel, for values in 0..1"""
    augment: Augment = Augment()
    max_replaced: Fraction = 0.001
    """largest fraction of undecodable training images before the run stops"""

    @model_validator(mode="after")
    def _check(self) -> "Data":
        for key in ("mean", "std"):
            if len(getattr(self, key)) != self.channels:
                raise ValueError(f"{key}: needs one value a channel, {self.channels} here")
        if self.resize is not None and self.resize < max(sides(self.image_size)):
            raise ValueError(f"resize: must be at least image_size, {max(sides(self.image_size))}")
        if (self.validation_images or 0) >= (self.train_images or math.inf):
            raise ValueError("validation_images: must leave some of train_images to train on")
        if self.augment.crop == "random" and self.resize is None:
            raise ValueError("augment.crop: random needs resize, the shorter side of what it cuts from, such as 256")
        return self

    @property
    def sizes(self) -> ImageSizes:
        return ImageSizes(sides(self.image_size), self.resize)


class Evaluate(Section):
    """When and how the held-out images are classified."""

    every: Duration | None = Duration(1, "ep")
    """time from one evaluation to the next; null: at the end only"""
    first: Duration | None = None
    """time of the first evaluation; null: after `every`"""
    images_per_chunk: Count = 100
    """images of one forward pass; logits depend on it, so it is part of the recipe"""
    image_size: Sides | None = None
    """pixels a side that the network takes then, often more than in training (Touvron et al., arXiv 1906.06423); null:
    data.image_size"""
    resize: Pixels | None = None
    """shorter side before its centre crop; null: data.resize"""
    flip: bool = False
    """true: logits are the mean over an image and its mirror image, which takes twice the time"""


class Polish(Section):
    """After training: exact batch-norm statistics over training images, weights frozen."""

    steps: Count | None = None
    """null: exact statistics; else the running averages go on for so many steps of forward passes, each virtual worker
    with a batch of its own, as a switch of Fujitsu's MLPerf v0.6 code does between updates"""
    images: Count | None = None
    """number of images, the first ones; null: all"""
    images_per_batch: Count | None = None
    """images of a batch; null: those of a virtual worker in the last stage"""
    augment: bool = False
    """true: of images as the first epoch changed them, which mends the running averages' lag and not that they are of
    other images than the held-out ones"""

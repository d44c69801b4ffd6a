"""The recipe: everything that decides the trained weights, typed, validated, complete and hashable.

Nothing about processes or machines stands here; that is the runtime options' (`runtime_options.py`).
"""

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .duration import Duration

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Options = dict[str, bool | int | float | str]
Sides = Count | tuple[Count, Count]
SCHEMA = 1
"""of recipes; it grows where a default or the meaning of a key changes, since hashes leave out keys at their default"""


def sides(size: Sides) -> tuple[int, int]:
    """Height and width of a size that is given as one number, for a square, or as both.

    >>> sides(224), sides((11, 39))
    ((224, 224), (11, 39))
    """
    return (size, size) if isinstance(size, int) else size


class Section(BaseModel):
    """A part of a recipe: immutable, no unknown keys, no silent conversions such as "8" to 8."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Augment(Section):
    """Random changes of a training image; each draw is keyed by (seed, epoch, sample)."""

    crop: Literal["none", "shift", "resized"] = "none"
    """`shift`: pad with zeros and cut at a random offset; `resized`: random area and aspect, scaled to image_size"""
    shift: Annotated[int, Field(ge=0)] = 0
    """pixels, with crop: shift"""
    area: tuple[Positive, Positive] = (0.08, 1.0)
    """share of the image's area, with crop: resized"""
    aspect: tuple[Positive, Positive] = (0.75, 4 / 3)
    """width / height, with crop: resized"""
    flip: Fraction = 0.0
    """probability of a left-right mirror"""
    erase: Fraction = 0.0
    """probability that a box of the normalised image, of 2 to 33 % of its area, is set to zero (random erasing)"""
    mixup: NotNegative = 0.0
    """alpha of Beta(alpha, alpha), 1 or one over a whole number, for the share of an image that is blended with another
    of its virtual worker, and of its target; 0: none is"""
    cutmix: NotNegative = 0.0
    """alpha, likewise, for the area of the box that an image takes from another; with mixup, each image draws which"""
    repeats: Count = 1
    """times that an image follows itself, changed otherwise each time (repeated augmentation); an epoch stays as long,
    so it sees 1 / repeats of the images"""

    @model_validator(mode="after")
    def _check(self) -> "Augment":
        for key in ("area", "aspect"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"{key}: the first value must not be above the second")
        for key in ("mixup", "cutmix"):
            alpha = getattr(self, key)
            if alpha and (alpha > 1 or abs(round(1 / alpha) - 1 / alpha) > 1e-9):
                raise ValueError(f"{key}: 0, 1, or one over a whole number, such as 0.5, 0.25, 0.2 or 0.1")
        if self.area[1] > 1:
            raise ValueError("area: a share of the image, at most 1.0")
        if (self.crop == "shift") != (self.shift > 0):
            raise ValueError("crop: shift needs shift of at least 1 pixel, and shift needs crop: shift")
        return self


class Data(Section):
    """Where images come from and how they become tensors."""

    source: str
    """digits, synthetic, frames, idx, folder, arrays, or package.module:factory"""
    options: Options = {}
    """arguments of the source, such as noise for synthetic"""
    train_images: Count | None = None
    """use the first so many; null: all that the source has"""
    eval_images: Count | None = None
    """held-out images; null: all"""
    image_size: Sides
    """pixels a side after cropping, or [height, width]"""
    resize: Count | None = None
    """shorter side, in pixels, before the centre crop of evaluation; null: no resize"""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue"""
    classes: Annotated[int, Field(ge=2)] | None = None
    """null: as many as the source has"""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """a channel, for values in 0..1"""
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    """a channel, for values in 0..1"""
    augment: Augment = Augment()
    max_replaced: Fraction = 0.001
    """largest share of undecodable training images before the run stops"""

    @field_validator("image_size", mode="wrap")
    @classmethod
    def _check_size(cls, value: Any, check: Callable[[Any], Sides]) -> Sides:
        try:
            return check(tuple(value) if isinstance(value, list) else value)
        except ValidationError:
            raise ValueError("pixels a side, such as 224, or [height, width], such as [11, 39]") from None

    @model_validator(mode="after")
    def _check(self) -> "Data":
        for key in ("mean", "std"):
            if len(getattr(self, key)) != self.channels:
                raise ValueError(f"{key}: needs one value a channel, {self.channels} here")
        if self.resize is not None and self.resize < max(sides(self.image_size)):
            raise ValueError(f"resize: must be at least image_size, {max(sides(self.image_size))}")
        return self


class Model(Section):
    """The network."""

    name: str
    """a built-in name (torusgd.models.MODELS), torchvision:NAME, timm:NAME, or package.module:factory"""
    options: Options = {}
    """keyword arguments of the builder, such as dropout or zero_gamma"""
    freeze: tuple[str, ...] = ()
    """parameters that stay as they are: names, names of modules that hold them, or patterns with * of either; body:
    all but the head. A batch norm whose weights are frozen also keeps its statistics, and normalises by them"""


class Warmup(Section):
    """The rate climbs from `start` to the stage's rate."""

    length: Duration
    """from the start of the run"""
    shape: Literal["linear", "quadratic"] = "linear"
    """progress p or p ** 2, from `start` to the rate"""
    start: NotNegative = 0.0
    """the rate of step 0"""


class Decay(Section):
    """The factor on the rate after the warm-up, as a function of progress p from 0 at `start` to 1 at `end`."""

    shape: Literal["constant", "polynomial", "cosine", "step"] = "polynomial"
    """how the factor falls"""
    power: Positive = 2.0
    """polynomial: (1 - p) ** power"""
    floor: Fraction = 0.0
    """polynomial and cosine end at this fraction of the rate"""
    start: Duration | None = None
    """null: the end of the warm-up"""
    end: Duration | None = None
    """null: the end of the run"""
    milestones: tuple[Duration, ...] = ()
    """step: the rate is multiplied by `factor` at each"""
    factor: Positive = 0.1
    """with shape: step"""

    @model_validator(mode="after")
    def _check(self) -> "Decay":
        if (self.shape == "step") != bool(self.milestones):
            raise ValueError("milestones: needed with shape: step, and only there")
        return self


class Rate(Section):
    """The learning rate over the run."""

    lr: Positive
    """rate of the first stage, and of every stage that gives none"""
    warmup: Warmup | None = None
    decay: Decay = Decay()


class Stage(Section):
    """A span with one batch size and one rate rule (batch-size control)."""

    until: Duration
    """from the start of the run; the stage ends at the first step boundary at or after it"""
    images_per_worker: Count
    """images of each virtual worker a step"""
    lr: Positive | Literal["linear", "sqrt"] | None = None
    """a rate, or rate.lr scaled by this stage's batch against the first's; null: rate.lr"""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["noise-scale"] | None = None
    """noise-scale keeps lr / (batch * (1 - momentum)) as in the first stage; null: optimizer.momentum"""
    augment: bool = True
    """false: training images with the validation preprocessing (Final Polishing, first form)"""


_MEANT_FOR = {
    "beta2": ("adamw", "lamb"),
    "eps": ("lars", "adamw", "lamb"),
    "nesterov": ("sgd",),
    "no_trust": ("lars", "lamb"),
    "trust": ("lars",),
    "variant": ("lars",),
}
"""keys of the optimizer that some update rules don't read"""


class Optimizer(Section):
    """SGD, LARS, AdamW or LAMB with its exclusions."""

    name: Literal["sgd", "lars", "adamw", "lamb"] = "sgd"
    """the update rule"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """of the first stage, and of every stage that gives none; beta1 of adamw and lamb"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """adamw and lamb only: decay of the mean of squares"""
    nesterov: bool = False
    """sgd only"""
    weight_decay: NotNegative = 0.0
    """times the weight: added to the gradient; adamw takes it off the weight itself, times the rate, and lamb adds it
    to the direction"""
    no_decay: tuple[Literal["norm", "bias"], ...] = ("norm", "bias")
    """parameters without weight decay"""
    ramp_weight_decay: bool = False
    """weight decay follows the rate's warm-up and decay"""
    variant: Literal["paper", "caffe", "larc", "larc-clip", "tensorflow", "mxnet", "fujitsu"] = "paper"
    """lars only: whose formula"""
    trust: Positive = 0.001
    """lars only: trust coefficient"""
    eps: NotNegative = 0.0
    """lars: added to the denominator of the trust ratio; adamw and lamb: to that of the direction, where 0 stands for
    the usual 1e-8 and 1e-6"""
    no_trust: tuple[Literal["norm", "bias"], ...] = ("norm", "bias")
    """lars and lamb only: parameters updated with the plain rate"""
    head_lr: Positive = 1.0
    """factor on the rate of the head: of what depends on the number of classes"""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """factor on the rate from each layer to the one before it; the head has none"""

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        for key, names in _MEANT_FOR.items():
            if self.name not in names and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: has a meaning for name: {' or '.join(names)} only")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0")
        return self

    @property
    def needs_head(self) -> bool:
        """Whether rates depend on what the head is."""
        return self.head_lr != 1 or self.layer_decay != 1


class Evaluate(Section):
    """When and how the held-out images are classified."""

    every: Duration | None = Duration(1, "ep")
    """from one evaluation to the next; null: at the end only"""
    first: Duration | None = None
    """the first evaluation; null: after `every`"""
    images_per_chunk: Count = 100
    """images of one forward pass; logits depend on it, so it is part of the recipe"""


class Polish(Section):
    """After training: exact batch-norm statistics over un-augmented training images, weights frozen."""

    images: Count | None = None
    """the first so many; null: all"""
    images_per_batch: Count | None = None
    """null: those of a virtual worker in the last stage"""


class LossScale(Section):
    """Dynamic loss scaling, with precision: float16."""

    initial: Positive = 65536.0
    """factor on the loss at step 0"""
    growth_interval: Count = 2000
    """accepted steps after which the scale is doubled"""


class Recipe(Section):
    """What is computed. Two runs with equal recipes (and conditions) end with equal weights."""

    name: str
    """runs lie in runs/NAME unless --out is given"""
    description: str = ""
    """one line for the list of recipes"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """of the initial weights and of every random draw"""
    data: Data
    model: Model
    virtual_workers: Count
    """V: the batch of a step is V * images_per_worker; at most so many ranks can share it"""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    rate: Rate
    optimizer: Optimizer = Optimizer()
    clip_grad_norm: Positive | None = None
    """largest norm of the mean gradient over all parameters; a longer one is scaled down to it; null: none is"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the target spread evenly over all classes"""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """of the passes (autocast); auto: the fastest of the device, written to the recipe of the run"""
    loss_scale: LossScale = LossScale()
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """of the activations"""
    reduction: Literal["exact", "float32", "float16", "bfloat16"] = "exact"
    """how gradients are summed; only exact gives the same bits on any number of ranks"""
    threads: Count = 1
    """threads of each rank; bits differ between 1 and 2"""
    evaluate: Evaluate = Evaluate()
    column_blocks: Count = 1
    """runs of outputs in which each linear layer at the network's end is computed, each for itself; above 1, groups of
    ranks can share them (`--model-parallel`) and get the same bits"""
    target_top1: Fraction | None = None
    """the time to reach it is reported as seconds_to_target"""
    polish: Polish | None = None

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.stages[0].lr is not None:
            raise ValueError("stages.0.lr: the first stage's rate is rate.lr")
        if self.stages[0].momentum is not None:
            raise ValueError("stages.0.momentum: the first stage's momentum is optimizer.momentum")
        if self.loss_scale != LossScale() and self.precision != "float16":
            raise ValueError("loss_scale: has a meaning with precision: float16 only")
        if self.column_blocks > 1 and self.reduction != "exact":
            raise ValueError("column_blocks: above 1 it needs reduction: exact")
        if self.column_blocks > 1 and self.model.freeze:
            raise ValueError("model.freeze: needs column_blocks: 1")
        if self.column_blocks > 1 and (self.data.augment.mixup or self.data.augment.cutmix):
            raise ValueError("data.augment: mixup and cutmix need column_blocks: 1")
        return self

    def resolve(self, *, precision: str, memory_format: str) -> "Recipe":
        """The recipe with each `auto` replaced by what this device is best at."""
        changes = {"precision": precision, "memory_format": memory_format}
        auto = {key: value for key, value in changes.items() if getattr(self, key) == "auto"}
        return Recipe.model_validate_json(json.dumps({**self.as_dict(), **auto}))

    def as_dict(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as plain JSON types."""
        return self.model_dump(mode="json")

    def sha256(self) -> str:
        """Hash of the number SCHEMA and of every key that is not at its default, in canonical JSON.

        So a key that a later version adds does not move the hash of a recipe that leaves it at its default, whose
        checkpoints can still be resumed.
        """
        changed = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps({"schema": SCHEMA, **changed}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

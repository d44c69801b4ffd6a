"""How the weights of a recipe are updated: rate, stages, optimiser, loss scale."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from .duration import Duration
from .section import Count, Fraction, NotNegative, Positive, Section, Sides, read_sides


class Warmup(Section):
    """The rate climbs from `start` to the stage's rate."""

    length: Duration
    """time from the start of the run"""
    shape: Literal["linear", "quadratic"] = "linear"
    """progress p or p ** 2, from `start` to the rate"""
    start: NotNegative = 0.0
    """rate of step 0"""


class Decay(Section):
    """The factor on the rate after the warm-up, as a function of progress p from 0 at `start` to 1 at `end`."""

    shape: Literal["constant", "polynomial", "cosine", "step"] = "polynomial"
    """form of the factor's fall"""
    power: Positive = 2.0
    """polynomial: (1 - p) ** power"""
    floor: Fraction = 0.0
    """polynomial and cosine end at this fraction of the rate"""
    start: Duration | None = None
    """begin of the decay; null: the end of the warm-up"""
    end: Duration | None = None
    """end of the decay; null: the end of the run"""
    milestones: tuple[Duration, ...] = ()
    """step: the rate is multiplied by `factor` at each"""
    factor: Positive = 0.1
    """factor of a milestone, with shape: step"""

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
    """A span with one batch size, one image size and one rate rule (batch-size control, progressive resizing)."""

    until: Duration
    """end, counted from the start of the run; the stage ends at the first step boundary at or after it"""
    images_per_worker: Count
    """images of each virtual worker a step"""
    lr: Positive | Literal["linear", "sqrt"] | None = None
    """rate, or rate.lr scaled by this stage's batch against the first's; null: rate.lr"""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["noise-scale"] | None = None
    """noise-scale holds the noise scale of `noise_scale` constant; null: optimizer.momentum"""
    augment: bool = True
    """false: training images with the validation preprocessing (Final Polishing, first form)"""
    image_size: Sides | None = None
    """pixels a side in this stage, small ones first (progressive resizing); null: data.image_size"""
    resize: Count | None = None
    """shorter side before a cut to that size; null: data.resize"""

    _check_size = field_validator("image_size", mode="wrap")(read_sides)


class NoiseScale(Section):
    """The noise scale that `momentum: noise-scale` holds constant.

    g = lr * (N / B - 1) / (1 - momentum), with N images an epoch and B a step. Source: Smith and Le, arXiv 1710.06451.
    """

    exact: bool = False
    """g as it stands; false: without the - 1, as for a batch that is small against the epoch"""
    batch: Count | None = None
    """batch of the run whose g is held; null: the first stage's"""
    lr: Positive | None = None
    """rate of that run; null: rate.lr"""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """momentum of that run; null: optimizer.momentum"""


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
    """update rule"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum of the first stage, and of every stage that gives none; beta1 of adamw and lamb"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """adamw and lamb only: decay of the mean of squares"""
    nesterov: bool = False
    """Nesterov's momentum, sgd only"""
    weight_decay: NotNegative = 0.0
    """factor on the weight, which is added to the gradient; adamw takes it off the weight itself, times the rate, and
    lamb adds it to the direction"""
    no_decay: tuple[Literal["norm", "bias"], ...] = ("norm", "bias")
    """parameters without weight decay"""
    bias_rate: Positive = 1.0
    """factor on the rate of biases, batch norm's not among them; 2.0 in Caffe's networks (lr_mult)"""
    ramp_weight_decay: bool = False
    """weight decay follows the rate's warm-up and decay"""
    variant: Literal["paper", "caffe", "larc", "larc-clip", "tensorflow", "mxnet", "fujitsu", "nnabla"] = "paper"
    """lars only: whose formula"""
    trust: Positive = 0.001
    """lars only: trust coefficient"""
    eps: NotNegative = 0.0
    """lars: added to the denominator of the trust ratio, variant nnabla: where that is below it; adamw and lamb: added
    to that of the direction, where 0 stands for the usual 1e-8 and 1e-6"""
    no_trust: tuple[Literal["norm", "bias"], ...] = ("norm", "bias")
    """lars and lamb only: parameters updated with the plain rate"""
    head_lr: Positive = 1.0
    """factor on the rate of the head, which depends on the number of classes"""
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


class WeightAverage(Section):
    """A moving average of the weights and of batch norm's statistics, which is evaluated and saved as the result."""

    half_life: Duration
    """training after which the weights of a step count half"""
    every: Count = 1
    """steps from one update of the average to the next"""


class LossScale(Section):
    """Dynamic loss scaling, with precision: float16."""

    initial: Positive = 65536.0
    """factor on the loss at step 0"""
    growth_interval: Count = 2000
    """accepted steps after which the scale is doubled"""

"""The recipe: everything that decides the trained weights, typed, validated, complete and hashable.

Processes and machines are the matter of the runtime options (`runtime_options.py`).
Here: what a step waits for, how weights are updated, and the whole; `data_schema.py` has the images.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .compatibility import check_recipe
from .data_schema import Data, Evaluate, Polish
from .section import (
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


class Outer(Section):
    """SGD on the mean change of the virtual workers' copies, for form: local."""

    lr: Positive = 0.7
    """fraction of the mean change that the weights take; 1.0: all of it (local SGD)"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum of the changes, from one step to the next; 0.0: none (local SGD)"""
    nesterov: bool = True
    """Nesterov's momentum, as in DiLoCo"""

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0; give nesterov: false")
        return self


SIMULATED = ("sampled", "stale", "asynchronous", "gossip", "elastic")  # of weights of many ages, in virtual time
_MEANT_FOR_FORMS = {
    "backups": ("backup",), "count": ("cutoff",), "threshold": ("cutoff",), "warmup": ("backup", "cutoff"),
    "delays": ("backup", "cutoff", *SIMULATED), "local_steps": ("local",), "outer": ("local",),
    "sample": ("sampled",), "staleness": ("sampled", "stale"), "probability": ("gossip",), "pull_every": ("elastic",),
}  # fmt: skip
_MEANT_FOR_SHAPES = {
    "power": ("polynomial",), "floor": ("polynomial", "cosine"), "start": ("polynomial", "cosine"),
    "end": ("polynomial", "cosine"), "milestones": ("step",), "factor": ("step",),
}  # fmt: skip
_NEEDED = {  # key that a form needs, and its meaning
    "backup": ("backups", "the virtual workers that a step leaves out"),
    "local": ("local_steps", "the updates of each copy a step"),
    "sampled": ("sample", "the workers that each of them looks at"),
    "stale": ("staleness", "the steps by which a worker may be ahead"),
    "gossip": ("probability", "that of a mean with another worker after a step"),
    "elastic": ("pull_every", "the steps from one pull towards the centre to the next"),
}

# Steps of a warm-up from which a model of workers' times can be fitted: two of its windows.
LEAST_LEARNED = 32


class Synchrony(Section):
    """What a step waits for. With backup and cutoff the mean is over the gradients that came in time, exactly."""

    form: Literal[
        "synchronous", "backup", "cutoff", "local", "sampled", "stale", "asynchronous", "gossip", "elastic"
    ] = "synchronous"
    """backup: the first virtual workers to finish (Chen et al.); cutoff: those in time (Teng and Wood; DropCompute);
    local: each takes some steps of its own (local SGD, DiLoCo). The run's journal records what time decides. Only
    simulated (`torusgd simulate`) are sampled, stale and asynchronous: barriers that look at some workers (PSP), at all
    (SSP) or at none; gossip: means of pairs; elastic: a pull towards a centre (EASGD)"""
    backups: Count | None = None
    """backup: a step takes the first virtual_workers - backups of them"""
    count: Count | Literal["predicted", "learned"] | None = None
    """cutoff: a step takes so many, the first to finish; predicted: by the times of earlier steps, as many as make the
    most gradients a second; learned: the same by a model of hidden states, fitted on a warm-up of 32 steps or more"""
    threshold: Positive | Literal["measured"] | None = None
    """cutoff: seconds of each rank's own clock after which it leaves out the rest; measured: by the times of the
    warm-up, what makes the most gradients a second"""
    warmup: Annotated[int, Field(ge=2)] = 20
    """backup and cutoff: steps at the start of the run that wait for all, and so do as many after ranks start again;
    predicted and measured take their times from them"""
    delays: str | None = None
    """model of delays, such as lognormal, added to the 1 s of virtual time that each virtual worker takes, on a
    machine of its own. backup and cutoff: it decides in place of clocks; simulated forms: null is exponential"""
    local_steps: Count | None = None
    """local: updates of each virtual worker's own copy a step, each on an equal part of its images_per_worker"""
    outer: Outer = Outer()
    sample: Annotated[int, Field(ge=0)] | None = None
    """sampled: workers, drawn afresh each time, that a worker looks at before it goes on"""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """sampled and stale: steps by which it may be ahead of those that it looks at; null: 0"""
    probability: Fraction | None = None
    """gossip: of a mean with another worker's weights after a step"""
    pull_every: Count | None = None
    """elastic: steps of a worker from one pull towards the centre to the next"""

    @model_validator(mode="after")
    def _check(self) -> "Synchrony":
        self.check_meaning("form", _MEANT_FOR_FORMS)
        if self.form in _NEEDED and getattr(self, key := _NEEDED[self.form][0]) is None:
            raise ValueError(f"{key}: is missing; give {_NEEDED[self.form][1]}")
        if self.form == "cutoff" and (self.count is None) == (self.threshold is None):
            raise ValueError("count, threshold: form: cutoff needs one of them")
        if self.count == "learned" and self.warmup < LEAST_LEARNED:
            raise ValueError(f"warmup: {self.warmup} steps are too few to learn from; give {LEAST_LEARNED} or more")
        return self

    @property
    def is_simulated(self) -> bool:
        return self.form in SIMULATED

    def count_of(self, virtual_workers: int) -> int | Literal["predicted", "learned"] | None:
        """Number of virtual workers that a step waits for; None: all."""
        return self.count if self.backups is None else virtual_workers - self.backups

    @property
    def leaves_out(self) -> bool:
        return self.form in ("backup", "cutoff")

    @property
    def keeps_journal(self) -> bool:
        """True if a run writes down whose gradients, or changes, entered each update."""
        return self.leaves_out or self.form == "local"

    def check_counts(self, virtual_workers: int, images_per_worker: list[int]) -> None:
        """ValueError if there are too few virtual workers, or a stage's images of each can't be divided."""
        # A step takes one virtual worker at least.
        least = self.backups + 1 if self.backups is not None else self.count if isinstance(self.count, int) else 1
        if least > virtual_workers:
            key = "backups" if self.form == "backup" else "count"
            raise ValueError(
                f"synchrony.{key} = {getattr(self, key)}: there are {virtual_workers} virtual workers; use fewer"
            )
        for number, images in enumerate(images_per_worker):
            if images % (self.local_steps or 1):
                raise ValueError(
                    f"stages.{number}.images_per_worker = {images}: must be a multiple of synchrony.local_steps, "
                    f"{self.local_steps}"
                )


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
        self.check_meaning("shape", _MEANT_FOR_SHAPES)
        if self.shape == "step" and not self.milestones:
            raise ValueError("milestones: needed with shape: step")
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
    extra_pass: bool = False
    """true: beside each step every virtual worker passes its images forward once more, un-augmented, for batch norm's
    running statistics alone (Final Polishing, third form)"""
    image_size: Sides | None = None
    """pixels a side in this stage, small ones first (progressive resizing); null: data.image_size"""
    resize: Pixels | None = None
    """shorter side before a cut to that size; null: data.resize"""


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


_MEANT_FOR_RULES = {
    "beta2": ("adamw", "lamb"), "eps": ("lars", "adamw", "lamb"), "nesterov": ("sgd",), "no_trust": ("lars", "lamb"),
    "trust": ("lars",), "variant": ("lars",),
}  # fmt: skip


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
        self.check_meaning("name", _MEANT_FOR_RULES)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0")
        return self

    @property
    def needs_head(self) -> bool:
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


MOST_VIRTUAL_WORKERS = 2**20
SCHEMA = 1
"""version of recipes, which grows if a default or the meaning of a key changes, since hashes leave out defaults"""


class Model(Section):
    """The network."""

    name: str
    """built-in name (torusgd.models.MODELS), torchvision:NAME, timm:NAME, or package.module:factory"""
    options: Options = {}  # noqa: RUF012, since pydantic copies a default
    """keyword arguments of the builder, such as dropout, zero_gamma or fan_in (He's rule by inputs, as Fujitsu)"""
    batch_norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """fraction of a step's batch statistics in the running ones (torch's momentum); 1.0: no moving average (Sony, after
    Akiba et al., arXiv 1711.04325); null: the network's own, 0.1 in the built-in ones"""
    batch_norm_workers: Literal["all", "each"] = "all"
    """whose batch statistics enter a running average: the mean of all virtual workers'; each: every virtual worker has
    its own average, as each process of Fujitsu's had, and the first one's is evaluated and saved"""
    freeze: tuple[str, ...] = ()
    """parameters that stay as they are: names, names of modules that hold them, or patterns with * of either; body:
    all but the head. A batch norm whose weights are frozen also retains its statistics, and normalises by them"""


class Recipe(Section):
    """What is computed. Two runs with equal recipes (and conditions) end with equal weights."""

    name: str
    """runs lie in runs/NAME unless --out is given"""
    description: str = ""
    """one line for the list of recipes"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the initial weights and of every random draw"""
    data: Data
    model: Model
    virtual_workers: Count
    """V: the batch of a step is V * images_per_worker; at most so many ranks can share it. At most 1,048,576; from
    8,192 on exact sums of gradients travel as 64-bit integers, 8 bytes an element in place of 4"""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    rate: Rate
    noise_scale: NoiseScale = NoiseScale()
    optimizer: Optimizer = Optimizer()
    clip_grad_norm: Positive | None = None
    """largest norm of the mean gradient over all parameters; a longer one is scaled down to it; null: none is"""
    average: WeightAverage | None = None
    loss: Literal["cross-entropy", "binary-cross-entropy"] = "cross-entropy"
    """binary-cross-entropy: each class for itself against a sigmoid, summed over classes (Wightman et al., arXiv
    2110.00476)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """fraction of the target spread evenly over all classes"""
    precision: Literal["auto", "float32", "bfloat16", "float16", "portable"] = "float32"
    """precision of the passes (autocast); auto: the fastest of the device, written to the recipe of the run; portable:
    the same weights from any processor, instruction set, number of threads and build of a library, at 2 to 6 times
    float32's time (docs/methods/portable-arithmetic.md)"""
    arithmetic: Literal[1] = 1
    """version of the portable arithmetic, with precision: portable; another one gives other bits"""
    compile: bool = False
    """each block of the network compiled by torch (Inductor): fewer and larger kernels, other bits; it needs a C++
    compiler on a CPU, Triton on a GPU"""
    loss_scale: LossScale = LossScale()
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """memory format of the activations"""
    reduction: Literal["exact", "float32", "float16", "bfloat16"] = "exact"
    """arithmetic of gradients' sums; only exact gives the same bits on any number of ranks"""
    float32_norms: bool = False
    """true: beside a 16-bit reduction batch norm's gradients are summed as float32, and leave last (Fujitsu's records);
    exact and float32 sums need no such care, and stay as they are"""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """threads of each rank; bits differ between 1 and 2"""
    synchrony: Synchrony = Synchrony()
    evaluate: Evaluate = Evaluate()
    column_blocks: Count = 1
    """runs of outputs in which each linear layer at the network's end is computed, each for itself; above 1, groups of
    ranks can share them (`--model-parallel`) and get the same bits"""
    target_top1: Fraction | None = None
    """accuracy whose time is reported as seconds_to_target"""
    polish: Polish | None = None

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if not re.match(r"\w", self.name) or "/.." in self.name:
            raise ValueError(f"name = {self.name!r}: runs lie in runs/NAME; begin with a letter or a digit, without ..")
        if self.virtual_workers > MOST_VIRTUAL_WORKERS:
            raise ValueError(
                f"virtual_workers = {self.virtual_workers}: at most {MOST_VIRTUAL_WORKERS:,}, for which exact sums "
                "have room; give each more images (stages.N.images_per_worker)"
            )
        if self.stages[0].lr is not None:
            raise ValueError("stages.0.lr: the first stage's rate is rate.lr")
        if isinstance(self.stages[0].momentum, float):
            raise ValueError("stages.0.momentum: the first stage's momentum is optimizer.momentum")
        if self.stages[0].momentum is not None and self.noise_scale.batch is None:
            raise ValueError("stages.0.momentum: noise-scale needs noise_scale.batch, of the run whose noise it holds")
        if self.noise_scale != NoiseScale() and all(stage.momentum != "noise-scale" for stage in self.stages):
            raise ValueError("noise_scale: no stage has momentum: noise-scale to read it; noise_scale={} clears it")
        if self.average is not None and not self.average.half_life.value:
            raise ValueError("average.half_life: must be above 0")
        sizes = {f"stages.{number}": self.training_sizes(stage) for number, stage in enumerate(self.stages)}
        for key, (size, resize) in {**sizes, "evaluate": self.held_out_data.sizes}.items():
            if resize is not None and resize < max(size):
                raise ValueError(f"{key}.resize: must be at least its image_size, {max(size)}")
        check_recipe(self)
        self.synchrony.check_counts(self.virtual_workers, [stage.images_per_worker for stage in self.stages])
        return self

    def training_sizes(self, stage: Stage) -> ImageSizes:
        default = self.data.sizes
        size = default.sides if stage.image_size is None else sides(stage.image_size)
        return ImageSizes(size, default.resize if stage.resize is None else stage.resize)

    @property
    def has_extra_passes(self) -> bool:
        return any(stage.extra_pass for stage in self.stages)

    @property
    def held_out_data(self) -> Data:
        """`data` with the sizes at which held-out images are evaluated."""
        own = {key: getattr(self.evaluate, key) for key in ("image_size", "resize")}
        return self.data.model_copy(update={key: value for key, value in own.items() if value is not None})

    @property
    def has_wide_norms(self) -> bool:
        """True if batch norm's gradients are summed as float32, the others in 16 bits."""
        return self.float32_norms and self.reduction in ("float16", "bfloat16")

    def resolve(self, *, precision: str, memory_format: str) -> "Recipe":
        """The recipe with each `auto` replaced."""
        changes = {"precision": precision, "memory_format": memory_format}
        auto = {key: value for key, value in changes.items() if getattr(self, key) == "auto"}
        # Validated anew: loss_scale, for one, goes with float16 alone.
        return Recipe.model_validate_json(json.dumps({**self.as_dict(), **auto}))

    def as_dict(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as plain JSON types."""
        return self.model_dump(mode="json")

    def sha256(self) -> str:
        """Hash of the number SCHEMA and of every key that is not at its default, in canonical JSON."""
        # Without defaults, a key that a later version adds moves no hash, and checkpoints can still be resumed.
        # Sorted keys without spaces: one text for equal recipes, however their files were written.
        changed = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps({"schema": SCHEMA, **changed}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

"""The recipe: everything that decides the trained weights, typed, validated, complete and hashable.

Processes and machines are the matter of the runtime options (`runtime_options.py`).
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .compatibility import check_recipe
from .data_schema import Data, Evaluate, Polish
from .optimizer_schema import LossScale, NoiseScale, Optimizer, Rate, Stage, WeightAverage
from .section import Count, Fraction, ImageSizes, Options, Positive, Section, sides
from .synchrony_schema import Synchrony

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
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """precision of the passes (autocast); auto: the fastest of the device, written to the recipe of the run"""
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
    threads: Count = 1
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
        for number, stage in enumerate(self.stages):
            size, resize = self.training_sizes(stage)
            if resize is not None and resize < max(size):
                raise ValueError(f"stages.{number}.resize: must be at least its image_size, {max(size)}")
        held_out = self.held_out_data
        if held_out.resize is not None and held_out.resize < max(sides(held_out.image_size)):
            raise ValueError(f"evaluate.resize: must be at least its image_size, {max(sides(held_out.image_size))}")
        check_recipe(self)
        images = tuple(stage.images_per_worker for stage in self.stages)
        self.synchrony.check_counts(self.virtual_workers, images)
        return self

    def training_sizes(self, stage: Stage) -> ImageSizes:
        """Of the images of a stage."""
        default = self.data.sizes
        size = default.sides if stage.image_size is None else sides(stage.image_size)
        return ImageSizes(size, default.resize if stage.resize is None else stage.resize)

    @property
    def held_out_data(self) -> Data:
        """`data` with the sizes at which held-out images are evaluated."""
        own = {key: getattr(self.evaluate, key) for key in ("image_size", "resize")}
        return self.data.model_copy(update={key: value for key, value in own.items() if value is not None})

    @property
    def has_wide_norms(self) -> bool:
        """Batch norm's gradients are summed as float32, the others in 16 bits."""
        return self.float32_norms and self.reduction in ("float16", "bfloat16")

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
        # Sorted keys without spaces: one text for equal recipes, however their files were written.
        changed = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps({"schema": SCHEMA, **changed}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

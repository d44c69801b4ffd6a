"""What the proof claims, each written before its first run: arms, all else equal, and a criterion.

Differences are in points of top-1 on the held-out images, between two trainings of one seed on one machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from .runs import Arm

T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 0.975 for 1, 2, ... degrees of freedom"""
HELD, REFUTED, OPEN, TOLD = "held", "refuted", "not resolved", "reported"


def resolved(differences: Sequence[float]) -> float:
    """Half the 95 % interval of the mean: what n pairs tell from chance, t(0.975, n - 1) * s_d / sqrt(n)."""
    n = len(differences)
    if n < 2:
        return math.inf
    return T975[min(n - 1, len(T975)) - 1] * stdev(differences) / math.sqrt(n)


@dataclass(frozen=True)
class Criterion:
    """Bounds between which the mean difference must lie; without any it is reported, and its sign is the verdict."""

    least: float | None = None
    most: float | None = None

    def verdict(self, differences: Sequence[float]) -> str:
        """Held or refuted if the 95 % interval lies inside or outside of the bounds."""
        half = resolved(differences)
        if half == math.inf:
            return OPEN
        low, high = mean(differences) - half, mean(differences) + half
        if self.least is None and self.most is None:
            return TOLD if low > 0 or high < 0 else OPEN
        if low >= (-math.inf if self.least is None else self.least) and (self.most is None or high <= self.most):
            return HELD
        is_outside = (self.least is not None and high < self.least) or (self.most is not None and low > self.most)
        return REFUTED if is_outside else OPEN

    def __str__(self) -> str:
        if self.least is None:
            return "reported"
        return f"within {self.most:g}" if self.most is not None else f"at least {self.least:+g}"


def equal(points: float) -> Criterion:
    """The 95 % interval lies within so many points."""
    return Criterion(-points, points)


@dataclass(frozen=True)
class Side:
    """An arm, or several of which the first seed's best on the validation images is taken."""

    name: str
    arms: tuple[Arm, ...]

    def is_choice(self) -> bool:
        return len(self.arms) > 1


@dataclass(frozen=True)
class Claim:
    """On against off."""

    technique: str
    on: Side
    off: Side
    criterion: Criterion
    source: str
    seeds: int = 5
    fails: bool = False
    """a side that is 5 points below the other fails"""
    batch: int | None = None
    """of a row of the sweep over batches"""
    in_budget: bool = True
    """its trainings count as the proof's"""


def rates(arm: Arm, *values: float) -> tuple[Arm, ...]:
    """The arm at each of some rates."""
    return tuple(arm.but(f"rate.lr={value:g}") for value in values)


def stages(*spans: tuple[int, int, str]) -> str:
    """Of (last epoch, images of a virtual worker, further keys)."""
    told = (
        f"{{until: {end}ep, images_per_worker: {images}{', ' if more else ''}{more}}}" for end, images, more in spans
    )
    return f"stages=[{', '.join(told)}]"


COMMON = ("data.validation_images=5000", "evaluate.every=null")
LARGE = Arm("fashion-large", COMMON)
"""as the recipe stands: batch 1,024, 2,048, then 4,096, the rate with it; the last six epochs without augmentation"""
DIGITS = Arm("digits", ("data.validation_images=200", "evaluate.every=null"))
PLAIN = "augment: false"
SGD = "optimizer={name: sgd, momentum: 0.9, nesterov: true, weight_decay: 5.0e-4}"
AT_256, AT_1024, AT_4096 = (stages((14, each // 16, ""), (20, each // 16, PLAIN)) for each in (256, 1024, 4096))
LARS_256 = Side("LARS at 256, best of 4 rates", rates(LARGE.but(AT_256), 0.375, 0.75, 1.5, 3.0))
STANDS = Side("as it stands", (LARGE,))


def staged(more: str) -> str:
    """The recipe's stages with a rule of their own, without the rate's."""
    return stages((5, 64, ""), (10, 128, more), (14, 256, more), (20, 256, ", ".join(filter(None, (more, PLAIN)))))


def long_staged(more: str) -> str:
    """The same at a quarter of the batch, in four times as many steps."""
    return stages((5, 16, ""), (10, 32, more), (14, 64, more), (20, 64, ", ".join(filter(None, (more, PLAIN)))))


def one(name: str, *changes: str, of: Arm = LARGE) -> Side:
    """A side of one arm."""
    return Side(name, (of.but(*changes),))


CROPS = ("data.augment={crop: resized, area: [0.05, 0.9], aspect: [0.6667, 1.5], flip: 0.5}", "polish=null")


def ending(more: str) -> str:
    """The recipe's stages with keys of the last one."""
    last = ", ".join(filter(None, ("lr: linear", more)))
    return stages((5, 64, ""), (10, 128, "lr: linear"), (14, 256, "lr: linear"), (20, 256, last))


CUT = LARGE.but(*CROPS, ending(""))
"""Fujitsu's crops to the end, running averages"""
APART = CUT.but("model.batch_norm_workers=each")
"""each virtual worker has averages of its own, and the first one's are evaluated, as in Fujitsu's processes"""
NO_FORM = Side("Fujitsu's crops, running averages", (CUT,))
SMALL = Arm("fashion", COMMON)
LIKE_SMALL = Side("`fashion`", (SMALL,))
TIMES = (-1, 0, 1, 2)
"""powers of two by which rates are tried"""
WARM = [(scale, (f"rate.lr={1.5 * scale:g}",)) for scale in (1, 2, 4, 8)]

QUARTETS = "data.source=benchmarks.accuracy.quartets:quartets"
HARD = Arm(
    "fashion-large",
    (
        *COMMON[1:],
        QUARTETS,
        "data.options={images: 15000}",
        "data.image_size=56",
        "data.augment={crop: shift, shift: 4, flip: 0.5}",
        "model.name=resnet18",
    ),
    held_out=(QUARTETS, "data.options.of=held-out"),
)
"""four pictures in one image, 100 classes, and a network of 18 layers; 293 steps"""
HARD_STANDS = Side("as it stands, best of 4 rates", rates(HARD, 0.75, 1.5, 3.0, 6.0))

CLAIMS = (
    Claim(
        "LARS at 4,096", STANDS, Side("SGD, best of 4 rates", rates(LARGE.but(SGD), 0.2, 0.4, 0.8, 1.6)),
        Criterion(0.5), "arXiv 1708.03888",
    ),
    Claim(
        "LARS at 256", LARS_256,
        Side("SGD at 256, best of 4 rates", rates(LARGE.but(AT_256, SGD), 0.05, 0.1, 0.2, 0.4)), equal(0.4),
        "arXiv 1708.03888",
    ),
    *(
        Claim(
            f"warm-up, rate x {scale}", one(f"warm-up, rate x {scale}", *rate),
            one(f"none, rate x {scale}", *rate, "rate.warmup=null"), Criterion(), "arXiv 1706.02677, section 2.2",
            fails=True,
        )
        for scale, rate in WARM
    ),
    Claim(
        "batch-size control, against large from the start", STANDS,
        one("4,096 from the start", AT_4096, "rate.lr=6"), Criterion(0.5), "arXiv 1811.05233",
    ),
    Claim(
        "batch-size control, against small throughout", STANDS, one("1,024 throughout", AT_1024), Criterion(-0.3),
        "arXiv 1811.05233",
    ),
    Claim(
        "noise-scale momentum", one("noise scale", staged("momentum: noise-scale")), one("0.9", staged("")),
        Criterion(), "arXiv 1811.05233",
    ),
    Claim(
        "noise-scale momentum, four times the steps", one("noise scale", long_staged("momentum: noise-scale")),
        one("0.9", long_staged("")), Criterion(), "arXiv 1811.05233",
    ),
    Claim(
        "label smoothing at 4,096", one("0.1"), one("none", "label_smoothing=0.0"), Criterion(0.0),
        "arXiv 1512.00567",
    ),
    Claim(
        "label smoothing at 256", LARS_256,
        Side("none", tuple(arm.but("label_smoothing=0.0") for arm in LARS_256.arms)), Criterion(), "arXiv 1512.00567",
    ),
    Claim(
        "polish, form 1", one("last epochs without augmentation", ending(PLAIN), of=CUT), NO_FORM, Criterion(1.0),
        "Fujitsu, HPDC 2020",
    ),
    Claim(
        "polish, lag alone", one("exact on augmented", "polish={augment: true}", of=CUT), NO_FORM, Criterion(), "ours",
    ),
    Claim("polish, form 2", one("exact on plain images", "polish={}", of=CUT), NO_FORM, Criterion(), "ours"),
    Claim(
        "polish, form 3", one("passes beside steps", ending("extra_pass: true"), of=CUT), NO_FORM, Criterion(),
        "Fujitsu's code",
    ),
    Claim(
        "averages of all workers", NO_FORM, one("the first worker's", "model.batch_norm_workers=each", of=CUT),
        Criterion(), "arXiv 1903.12650",
    ),
    Claim(
        "polish, form 1, averages apart", one("last epochs without augmentation", ending(PLAIN), of=APART),
        Side("Fujitsu's crops, the first worker's averages", (APART,)), Criterion(), "Fujitsu, HPDC 2020",
    ),
    Claim(
        "batch norm without averages, polished", one("momentum 1.0", "model.batch_norm_momentum=1.0"), STANDS,
        Criterion(), "arXiv 1711.04325",
    ),
    Claim(
        "batch norm without averages", one("momentum 1.0", "model.batch_norm_momentum=1.0", "polish=null"),
        one("0.1", "polish=null"), Criterion(), "arXiv 1711.04325",
    ),
    Claim("16-bit sums", one("float16", "reduction=float16"), one("float32", "reduction=float32"), Criterion(-0.25),
          "arXiv 1811.05233"),
    Claim("exact sums", one("exact"), one("float32", "reduction=float32"), Criterion(-0.25), "ours"),
    Claim("averaged weights", one("half-life of an epoch", "average={half_life: 1ep}", of=SMALL), LIKE_SMALL,
          Criterion(-0.25), "arXiv 1703.01780"),
    Claim("alternating mirrors", one("alternating", "data.augment.flip=alternating", of=SMALL), LIKE_SMALL,
          Criterion(-0.25), "arXiv 2404.00498"),
    Claim("evaluation with mirrors", one("with mirrors", "evaluate={every: null, flip: true}", of=SMALL), LIKE_SMALL,
          Criterion(-0.25), "FFCV"),
    Claim(
        "small images first",
        one("20 px to epoch 8", "stages=[{until: 8ep, images_per_worker: 64, image_size: 20, resize: 20}, "
            "{until: 20ep, images_per_worker: 64}]", of=SMALL), LIKE_SMALL, Criterion(-0.25), "fast.ai and DIUx, 2018",
    ),
    Claim(
        "cutoff",
        Side("late work left out", (
            Arm("fashion-large", (*COMMON, "synchrony={form: cutoff, count: predicted, warmup: 20}"),
                ("--delays", "lognormal", "--workers", "4")),
        )),
        STANDS, Criterion(-0.25), "arXiv 1803.04209",
    ),
    Claim(
        "local steps",
        one("8 local steps", "stages=[{until: 20ep, images_per_worker: 512}]",
            "synchrony={form: local, local_steps: 8, outer: {lr: 0.7, momentum: 0.6, nesterov: true}}", of=SMALL),
        LIKE_SMALL, Criterion(-0.25), "arXiv 2311.08105",
    ),
    Claim(
        "harder set: LARS at 4,096", HARD_STANDS,
        Side("SGD, best of 4 rates", rates(HARD.but(SGD), 0.1, 0.2, 0.4, 0.8)), Criterion(0.5), "arXiv 1708.03888",
        seeds=3,
    ),
    Claim(
        "harder set: batch-size control, against large from the start", HARD_STANDS,
        Side("4,096 from the start, best of 4 rates", rates(HARD.but(AT_4096), 1.5, 3.0, 6.0, 12.0)), Criterion(0.5),
        "arXiv 1811.05233", seeds=3,
    ),
    Claim(
        "harder set: batch-size control, against small throughout", HARD_STANDS,
        Side("1,024 throughout, best of 4 rates", rates(HARD.but(AT_1024), 0.75, 1.5, 3.0, 6.0)), Criterion(-0.3),
        "arXiv 1811.05233", seeds=3,
    ),
    Claim(
        "harder set: polish, form 1", HARD_STANDS,
        Side("augmented to the end", tuple(arm.but(ending("")) for arm in HARD_STANDS.arms)), Criterion(),
        "Fujitsu, HPDC 2020", seeds=3,
    ),
    Claim(
        "harder set: polish, form 2", HARD_STANDS,
        Side("running averages", tuple(arm.but("polish=null") for arm in HARD_STANDS.arms)), Criterion(), "ours",
        seeds=3,
    ),
    *(
        Claim(
            f"batch {batch:,}",
            Side("LARS, best of 4 rates", rates(LARGE.but(at), *(1.5 * (batch / 1024) ** 0.5 * 2**k for k in TIMES))),
            Side("SGD, best of 4 rates", rates(LARGE.but(at, SGD), *(0.2 * batch / 1024 * 2**k for k in TIMES))),
            Criterion(), "arXiv 1709.05011", seeds=3, batch=batch,
        )
        for batch in (256, 1024, 4096, 16384)
        for at in [stages((14, batch // 16, ""), (20, batch // 16, PLAIN))]
    ),
    *(
        Claim(
            name, one("portable", "precision=portable", of=arm), one("float32", "precision=float32", of=arm),
            equal(points), "ours", seeds, in_budget=False,
        )
        for name, arm, points, seeds in (
            ("portable arithmetic, `digits`", DIGITS, 0.5, 10), ("portable arithmetic", LARGE, 0.3, 3),
        )
    ),
)  # fmt: skip

"""The recipe `digits-portable`, trained by `second_implementation` from the recipe's file and scikit-learn's table.

From docs/methods/portable-arithmetic.md alone, like it; it imports nothing of the package and nothing of torch.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from tests.arithmetic.second_implementation import Arithmetic, Array, f32, f64

Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class Numbers(Arithmetic):
    """The arithmetic, and what else the document fixes beside the recipe."""

    order: int = 1
    augment: int = 2
    dropout: int = 3
    split: int = 6
    initial: int = 7
    mix: int = 17
    held_out: int = 360
    headroom: float = 8.0
    most: int = 2**31 - 1
    block: int = 4096
    narrow: tuple[int, int] = (14, 3)
    full: tuple[int, int] = (85, 7)


def read_recipe(file: Path, *changes: str) -> dict[str, Any]:
    """The recipe of a file, with changes as `key=value` or `key.key=value`, the values in YAML."""
    recipe: dict[str, Any] = yaml.safe_load(file.read_text())
    for change in changes:
        key, _, text = change.partition("=")
        outer, _, inner = key.partition(".")
        value = yaml.safe_load(text)
        recipe[outer] = {**recipe[outer], inner: value} if inner else value
    return recipe


@cache
def table_of_digits() -> Array:
    return np.loadtxt(str(files("sklearn") / "datasets/data/digits.csv.gz"), delimiter=",", dtype=np.int64)


def digits(numbers: Numbers) -> tuple[Array, Array]:
    """The training images, uint8 [1437, 1, 8, 8], and their labels."""
    table = table_of_digits()
    order = np.argsort(numbers.keyed_hash(numbers.split, 0, np.arange(len(table))), kind="stable")
    chosen = np.sort(order[numbers.held_out :])
    return np.rint(table[chosen, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8), table[chosen, -1]


# The schedule


class Step(NamedTuple):
    start: int
    images: int
    lr: float
    momentum: float


def schedule(recipe: Recipe, epoch: int) -> list[Step]:
    """All steps of a recipe of stages, a linear warm-up and a polynomial decay."""
    rate, base = recipe["rate"], recipe["optimizer"]["momentum"]
    spans, start, first_batch = [], 0, recipe["virtual_workers"] * recipe["stages"][0]["images_per_worker"]
    for stage in recipe["stages"]:
        batch = recipe["virtual_workers"] * stage["images_per_worker"]
        lr = rate["lr"] * math.sqrt(batch / first_batch) if stage.get("lr") == "sqrt" else rate["lr"]
        momentum = base
        if stage.get("momentum") == "noise-scale":
            momentum = 1 - (lr / batch) * (first_batch * (1 - base) / rate["lr"])
        steps = math.ceil((_samples(stage["until"], epoch) - start) / batch)
        spans += [(start + n * batch, stage["images_per_worker"], lr, momentum) for n in range(steps)]
        start += steps * batch
    warmup, decay = rate["warmup"], rate["decay"]
    end = _samples(warmup["length"], epoch)
    found = []
    for begin, images, lr, momentum in spans:
        if begin < end:
            now = warmup["start"] + (lr - warmup["start"]) * (begin / end)
        else:
            rest = 1 - (begin - end) / (start - end)
            now = lr * float(Fraction(rest) ** int(decay["power"]))
        found.append(Step(begin, images, now, momentum))
    return found


def _samples(duration: str, epoch: int) -> float:
    number, unit = float(duration[:-2]), duration[-2:]
    assert unit in ("ep", "sa")
    return number * epoch if unit == "ep" else number


# The network

LAYERS = {  # of each convolution its batch norm, outputs, inputs, kernel, stride, padding
    "conv1": ("bn1", 16, 1, 3, 1, 1),
    "blocks.0.conv1": ("blocks.0.bn1", 16, 16, 3, 1, 1),
    "blocks.0.conv2": ("blocks.0.bn2", 16, 16, 3, 1, 1),
    "blocks.1.conv1": ("blocks.1.bn1", 32, 16, 3, 2, 1),
    "blocks.1.conv2": ("blocks.1.bn2", 32, 32, 3, 1, 1),
    "blocks.1.downsample.0": ("blocks.1.downsample.1", 32, 16, 1, 2, 0),
}
CLASSES = 10


def initial_weights(numbers: Numbers, recipe: Recipe) -> dict[str, Array]:
    twister = numbers.twister(int(numbers.keyed_hash(numbers.initial, recipe["seed"])))
    for _ in range(len(LAYERS) + 2):  # PyTorch's own initial weights, and the bias, which are drawn and not used
        numbers.draws(twister, (1,))
    w: dict[str, Array] = {}
    for name, (norm, outputs, inputs, kernel, _, _) in LAYERS.items():
        std = math.sqrt(2.0) / math.sqrt(outputs * kernel * kernel)
        w[f"{name}.weight"] = numbers.normal(twister, (outputs, inputs, kernel, kernel), std)
        is_zero = recipe["model"]["options"]["zero_gamma"] and norm.endswith("bn2")
        w[f"{norm}.weight"], w[f"{norm}.bias"] = np.full(outputs, 0 if is_zero else 1, f32), np.zeros(outputs, f32)
    w["fc.weight"], w["fc.bias"] = numbers.normal(twister, (CLASSES, 32), 0.01), np.zeros(CLASSES, f32)
    return w


class Pass:
    """A forward pass of a virtual worker or a batch of the polish, and its gradients."""

    def __init__(self, a: Arithmetic, w: dict[str, Array], images: Array) -> None:
        self.a, self.w = a, w
        self.inputs, self.gradients = dict[str, Array](), dict[str, Array]()
        self.saved, self.statistics = dict[str, tuple[Array, ...]](), dict[str, tuple[Array, ...]]()
        self.x0 = relu(self._layer("conv1", images))
        self.y0 = relu(self._layer("blocks.0.conv1", self.x0))
        self.x1 = relu(self._layer("blocks.0.conv2", self.y0) + self.x0)
        self.y1 = relu(self._layer("blocks.1.conv1", self.x1))
        shortcut = self._layer("blocks.1.downsample.0", self.x1)
        self.x2 = relu(self._layer("blocks.1.conv2", self.y1) + shortcut)

    def _layer(self, name: str, x: Array) -> Array:
        norm, _, _, _, stride, padding = LAYERS[name]
        self.inputs[name] = x
        out = self.a.convolution(x, self.w[f"{name}.weight"], stride, padding)
        weight, bias = self.w[f"{norm}.weight"], self.w[f"{norm}.bias"]
        out, self.saved[norm], self.statistics[norm] = self.a.batch_norm(out, weight, bias)
        return out

    def backward(self, labels: Array, factors: Array, smoothing: float, shares: Array | None) -> None:
        """Fills `gradients` from the loss of the classifier behind the mean over pixels and dropout.

        With mixup each image's own label has the weight of `shares`, and the label of its partner the rest.
        """
        a, w = self.a, self.w
        features = a.mean(self.x2, (2, 3)) * factors
        logits = a.matmul(features, w["fc.weight"].T) + w["fc.bias"]
        if shares is None:
            g = self._loss_gradient(logits, labels, smoothing, None)
        else:
            each = f32(1) / f32(len(labels))
            own = self._loss_gradient(logits, labels, smoothing, each * shares)
            g = own + self._loss_gradient(logits, labels[::-1], smoothing, each * (f32(1) - shares))
        self.gradients["fc.weight"] = a.matmul(g.T, features)
        self.gradients["fc.bias"] = a.gridsum(g, (0,)).astype(f32)
        g = (a.matmul(g, w["fc.weight"]) * factors)[:, :, None, None] / f32(self.x2[0, 0].size)
        g = behind_relu(np.broadcast_to(g, self.x2.shape), self.x2)
        shortcut = self._layer_gradient("blocks.1.downsample.0", g)
        g = behind_relu(self._layer_gradient("blocks.1.conv2", g), self.y1)
        g = behind_relu(shortcut + self._layer_gradient("blocks.1.conv1", g), self.x1)
        inner = behind_relu(self._layer_gradient("blocks.0.conv2", g), self.y0)
        g = behind_relu(g + self._layer_gradient("blocks.0.conv1", inner), self.x0)
        self._layer_gradient("conv1", g)

    def _loss_gradient(self, logits: Array, labels: Array, smoothing: float, weights: Array | None) -> Array:
        """Of the mean over images, or of their sum with weights."""
        a, n = self.a, f32(len(labels))
        d = logits - logits.max(1, keepdims=True)
        y = (d.astype(f64) - a.log64(a.gridsum(a.exp(d), (1,)))[:, None]).astype(f32)
        shares = [f32(smoothing / CLASSES), f32(1 - smoothing)]
        flat, peak = (share / n if weights is None else share * weights for share in shares)
        g = np.zeros_like(y) - np.reshape(flat, (-1, 1))
        g[np.arange(len(y)), labels] += -peak
        return g - a.exp(y) * a.gridsum(g, (1,)).astype(f32)[:, None]

    def _layer_gradient(self, name: str, g: Array) -> Array:
        norm, _, _, kernel, stride, padding = LAYERS[name]
        x = self.inputs[name]
        g, weight, bias = self.a.batch_norm_gradient(g, self.saved[norm])
        self.gradients |= {f"{norm}.weight": weight, f"{norm}.bias": bias}
        self.gradients[f"{name}.weight"] = self.a.weight_gradient(g, x, kernel, stride, padding)
        return self.a.input_gradient(g, self.w[f"{name}.weight"], x.shape[2], stride, padding)


def relu(x: Array) -> Array:
    return np.maximum(x, f32(0))


def behind_relu(g: Array, result: Array) -> Array:
    return np.where(result > 0, g, f32(0))


# Steps


class Training:
    """A run of the recipe; `step` takes the next step, `sha256` hashes what the run would leave now."""

    def __init__(self, recipe: Recipe, numbers: Numbers | None = None) -> None:
        self.recipe, self.a = recipe, numbers or Numbers()
        self.pixels, self.labels = (each[: recipe["data"].get("train_images")] for each in digits(self.a))
        self.schedule = schedule(recipe, len(self.labels))
        self.w = initial_weights(self.a, recipe)
        self.momentum = {name: np.zeros_like(each) for name, each in self.w.items()}
        norms = {norm: outputs for norm, outputs, *_ in LAYERS.values()}
        self.running = {norm: (np.zeros(n, f32), np.ones(n, f32)) for norm, n in norms.items()}
        self.bounds: dict[str, float] | None = None
        self.orders, self.steps = dict[int, Array](), 0

    def step(self) -> None:
        mean = None
        while mean is None:
            passes = self._passes()
            if self.bounds is None:
                maxima = {name: max(float(np.abs(p.gradients[name]).max()) for p in passes) for name in self.w}
                self.bounds = {name: most * len(passes) for name, most in maxima.items()}
            mean = self._mean_gradient(passes)
        self._update(mean)
        for norm, before in self.running.items():
            batch = [p.statistics[norm] for p in passes]
            both = [[m for m, _, _ in batch], [(total / max(n - 1, 1)).astype(f32) for _, total, n in batch]]
            new = [(self.a.exact_sum(each, *self.a.narrow) / len(passes)).astype(f32) for each in both]
            m, rest = f32(0.1), f32(1) - f32(0.1)
            self.running[norm] = (before[0] * rest + m * new[0], before[1] * rest + m * new[1])
        self.steps += 1

    def _passes(self) -> list[Pass]:
        step, recipe, passes = self.schedule[self.steps], self.recipe, []
        for worker in range(recipe["virtual_workers"]):
            indices, images, mixed = self._images(step.start + worker * step.images, step.images)
            seed = int(self.a.keyed_hash(self.a.dropout, recipe["seed"], self.steps, worker)) >> 1
            share = recipe["model"]["options"]["dropout"]
            factors = self.a.dropped(self.a.twister(seed), (step.images, 32), share)
            found = Pass(self.a, self.w, images)
            found.backward(self.labels[indices], factors, recipe["label_smoothing"], mixed)
            passes.append(found)
        return passes

    def _images(self, start: int, count: int) -> tuple[Array, Array, Array | None]:
        """Of positions of the stream indices, normalised images, and by mixup the weight of each one's own pixels."""
        seed, shift = self.recipe["seed"], self.recipe["data"]["augment"]["shift"]
        epochs, places = np.divmod(np.arange(start, start + count), len(self.labels))
        indices = np.array([self._permutation(int(e))[p] for e, p in zip(epochs, places, strict=True)])
        moves = np.stack([
            np.floor(self.a.uniform(self.a.augment, seed, epochs, indices, n) * (2 * shift + 1)) for n in (1, 2)
        ]).astype(np.int64)  # fmt: skip
        padded = np.pad(self.pixels[indices], ((0, 0), (0, 0), (shift, shift), (shift, shift)))
        rows = [image[:, down : down + 8, right : right + 8] for image, down, right in zip(padded, *moves, strict=True)]
        images, alpha = self._normalised(np.stack(rows)), self.recipe["data"]["augment"].get("mixup", 0.0)
        if not alpha:
            return indices, images, None
        shares = np.array([self._share(alpha, int(e), int(i)) for e, i in zip(epochs, indices, strict=True)], f32)
        own = shares.reshape(-1, 1, 1, 1)
        return indices, images * own + images[::-1] * (f32(1) - own), shares

    def _share(self, alpha: float, epoch: int, index: int) -> float:
        words, power = (self.a.mix, self.recipe["seed"], epoch, index), round(1 / alpha)
        if alpha > 1 or abs(power - 1 / alpha) > 1e-9:
            return self.a.beta(alpha, *words)
        draws = self.a.uniform(*words, np.arange(3, 67))
        if alpha == 1:
            return float(draws[0])
        for u, v in draws.reshape(-1, 2).tolist():
            x, y = math.prod([u] * power), math.prod([v] * power)
            if 0 < x + y <= 1:
                return x / (x + y)
        return 0.5

    def _permutation(self, epoch: int) -> Array:
        if epoch not in self.orders:
            words = (self.a.order, self.recipe["seed"], epoch, np.arange(len(self.labels)))
            self.orders[epoch] = np.argsort(self.a.keyed_hash(*words), kind="stable")
        return self.orders[epoch]

    def _normalised(self, pixels: Array) -> Array:
        (mean,), (std,) = self.recipe["data"]["mean"], self.recipe["data"]["std"]
        return pixels.astype(f32) * f32(1 / (255 * std)) + f32(-mean / std)

    def _mean_gradient(self, passes: list[Pass]) -> dict[str, Array] | None:
        """None if a sum may have left its range: then the bounds are measured, and the passes are repeated."""
        assert self.bounds is not None
        count, found, after, most = len(passes), {}, {}, self.a.most
        largest = max(self.bounds.values())
        unit = 2.0 ** (count.bit_length() + 1)
        for name, bound in self.bounds.items():
            filled = max(bound, 2.0**-150) if bound > 0 else largest if largest > 0 else 1.0
            exponent = math.frexp(most / (self.a.headroom * filled))[1] - 1
            scale = 2.0 ** min(max(exponent, -100), 100)
            gradients = [p.gradients[name] for p in passes]
            total = np.sum([self.a.rne(g * f32(scale)).astype(np.int64) for g in gradients], axis=0)
            units = int(sum(math.ceil(np.abs(g).max() * f32(scale / unit)) for g in gradients))
            if units * unit > most:
                self.bounds = None
                return None
            found[name] = total.astype(f32) * f32(1 / (scale * count))
            after[name] = units * unit / scale
        self.bounds = after
        return found

    def _update(self, mean: dict[str, Array]) -> None:
        step, settings = self.schedule[self.steps], self.recipe["optimizer"]
        decay = settings["weight_decay"]
        for name, w in self.w.items():
            g, rate = mean[name], step.lr
            if w.ndim > 1:
                of_weights, of_gradient = self._norm(w), self._norm(g)
                if of_weights != 0 and of_gradient != 0:
                    rate *= settings["trust"] * of_weights / (of_gradient + decay * of_weights + settings["eps"])
                g = g + w * f32(decay)
            self.momentum[name] = self.momentum[name] * f32(step.momentum) + g * f32(1 - (1 - rate))
            self.w[name] = w - self.momentum[name]

    def _norm(self, x: Array) -> float:
        """By blocks."""
        flat = x.ravel()
        blocks = [flat[n : n + self.a.block] for n in range(0, len(flat), self.a.block)]
        squares = [float(np.sqrt(self.a.gridsum(block * block, (0,))).astype(f32)) ** 2 for block in blocks]
        while len(squares) > 1:
            squares += [0.0] * (len(squares) % 2)
            squares = [a + b for a, b in zip(squares[::2], squares[1::2], strict=True)]
        return math.sqrt(squares[0])

    def _polished(self) -> dict[str, tuple[Array, Array]]:
        """Mean and variance of each batch norm over the training images."""
        size, found = self.recipe["polish"]["images_per_batch"], {}
        pixels = self._normalised(self.pixels[: self.recipe["polish"].get("images")])
        passes = [Pass(self.a, self.w, pixels[cut : cut + size]) for cut in range(0, len(pixels), size)]
        for norm in self.running:
            batch = [p.statistics[norm] for p in passes]
            parts = [(m.astype(f64), (total / n).astype(f32).astype(f64), n) for m, total, n in batch]
            terms = ([m * n for m, _, n in parts], [m * m * n for m, _, n in parts], [v * n for _, v, n in parts])
            count = sum(int(n) for *_, n in parts)
            mean, square, variance = (self.a.exact_sum(each, *self.a.full) / count for each in terms)
            found[norm] = (mean.astype(f32), (variance + np.maximum(square - mean * mean, 0)).astype(f32))
        return found

    def sha256(self) -> str:
        tensors: dict[str, Array] = dict(self.w)
        for norm, (mean, variance) in (self._polished() if self.recipe["polish"] else self.running).items():
            tensors[f"{norm}.running_mean"], tensors[f"{norm}.running_var"] = mean, variance
            tensors[f"{norm}.num_batches_tracked"] = np.array(self.steps)
        digest = hashlib.sha256()
        for name in sorted(tensors):
            tensor = tensors[name]
            digest.update(f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0".encode())
            digest.update(np.ascontiguousarray(tensor).astype(tensor.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

"""Portable arithmetic once more, in plain NumPy, from docs/methods/portable-arithmetic.md alone.

It imports nothing of the package and nothing of torch. `Arithmetic` has every number and rounding as a field, so that a
test can change one and see that the weights change. `train` trains a small residual network; all arrays are float32
unless a line says otherwise, and a name of a line of the document stands where its formula does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
f32, f64 = np.float32, np.float64


def horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value = (value + coefficient) * x
    return value + coefficients[0]


def half_up(x: Array) -> Array:
    """What `rne` is not: a mutation of the rounding."""
    return np.floor(x + x.dtype.type(0.5))


@dataclass(frozen=True)
class Arithmetic:
    largest: int = 16256
    most_scale: int = 127
    grid_bits: int = 22
    rne: Callable[[Array], Array] = np.rint
    log2_e: float = 1.4426950408889634
    ln_2: float = 0.6931471805599453
    exp2: tuple[float, ...] = (
        0.6931471805599453, 0.24022650922288763, 0.05550410883910522, 0.009618056678521874,
        0.0013333502384966778, 0.00015461444699635, 1.5297324125640444e-05,
    )  # fmt: skip
    atanh: tuple[float, ...] = (
        2.000000000008362, 0.6666666524700432, 0.40000384775485404, 0.2853504433643064, 0.2361649129560904,
    )  # fmt: skip
    centre: tuple[float, ...] = (
        1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
        3.43273939e-07, 2.81022636e-08,
    )  # fmt: skip
    tail: tuple[float, ...] = (
        2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
        0.000100950558, -0.000200214257,
    )  # fmt: skip
    draw_word: int = 23
    images_share_a_scale: bool = False
    """a mutation: one amax for all images"""
    shape: dict[str, int] = field(default_factory=lambda: {"width": 8, "classes": 10})

    # Scales and contractions

    def integers(self, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
        """q as int64, and 2**-s as float64, of length 1 along `axes`."""
        amax = np.abs(x).max(axis=axes, keepdims=True).astype(f64)
        # The largest s of those that fit, found by trying: 2**s is exact, and so is its product with amax.
        with np.errstate(divide="ignore"):
            guess = np.where(amax > 0, 14 - np.floor(np.log2(amax)).astype(np.int64), self.most_scale)
        s = np.minimum(guess, self.most_scale).astype(np.int64)
        while (over := self.rne(np.ldexp(amax, s)) > self.largest).any():
            s = np.where(over, s - 1, s)
        return self.rne(np.ldexp(x.astype(f64), s)).astype(np.int64), np.ldexp(1.0, -s)

    def matmul(self, a: Array, b: Array) -> Array:
        (left, rows), (right, columns) = self.integers(a, (1,)), self.integers(b, (0,))
        return ((left @ right).astype(f64) * rows * columns).astype(f32)

    def windows(self, x: Array, kernel: int, stride: int, padding: int) -> Array:
        """[N, H', W', C, kernel, kernel] of integers [N, C, H, W]."""
        padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        found = sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
        return found.transpose(0, 2, 3, 1, 4, 5)

    def images(self, x: Array) -> tuple[Array, Array]:
        return self.integers(x, (0, 1, 2, 3) if self.images_share_a_scale else (1, 2, 3))

    def convolution(self, x: Array, w: Array, stride: int, padding: int) -> Array:
        (pixels, of_image), (weights, of_channel) = self.images(x), self.integers(w, (1, 2, 3))
        windows = self.windows(pixels, w.shape[2], stride, padding)
        total = np.einsum("nhwckl,ockl->nohw", windows, weights)
        return (total.astype(f64) * of_channel.reshape(1, -1, 1, 1) * of_image).astype(f32)

    def input_gradient(self, g: Array, w: Array, size: int, stride: int, padding: int) -> Array:
        (gradients, of_image), (weights, of_channel) = self.images(g), self.integers(w, (0, 2, 3))
        n, _, rows, columns = g.shape
        total = np.zeros((n, w.shape[1], size + 2 * padding, size + 2 * padding), np.int64)
        for y in range(w.shape[2]):
            for x in range(w.shape[3]):
                part = np.einsum("nohw,oc->nchw", gradients, weights[:, :, y, x])
                total[:, :, y : y + stride * rows : stride, x : x + stride * columns : stride][
                    ..., :rows, :columns
                ] += part
        inside = total[:, :, padding : padding + size, padding : padding + size]
        return (inside.astype(f64) * of_channel * of_image).astype(f32)

    def weight_gradient(self, g: Array, x: Array, kernel: int, stride: int, padding: int) -> Array:
        (gradients, of_output), (pixels, of_input) = self.integers(g, (0, 2, 3)), self.integers(x, (0, 2, 3))
        total = np.einsum("nhwckl,nohw->ockl", self.windows(pixels, kernel, stride, padding), gradients)
        return (total.astype(f64) * of_output.reshape(-1, 1, 1, 1) * of_input).astype(f32)

    # Sums over a grid

    def gridsum(self, x: Array, axes: tuple[int, ...]) -> Array:
        amax = np.abs(x).max(axis=axes, keepdims=True)
        exponent = np.maximum(np.frexp(amax)[1], -126)
        c = np.ldexp(f32(1.5), exponent + 23 - self.grid_bits).astype(f32)
        assert ((x + c) - c).dtype == f32
        return ((x + c) - c).astype(f64).sum(axis=axes)

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        return (self.gridsum(x, axes) / np.prod([x.shape[axis] for axis in axes])).astype(f32)

    # Functions

    def exp(self, x: Array) -> Array:
        t = np.clip(x.astype(f64) * self.log2_e, -1000, 1000)
        n = np.rint(t)
        fraction = t - n
        return np.ldexp(horner(fraction, self.exp2) * fraction + 1.0, n.astype(np.int64)).astype(f32)

    def log64(self, x: Array) -> Array:
        bits = np.ascontiguousarray(x, f64).view(np.int64)
        k = (bits - 0x3FE6A09E667F3BCD) >> 52
        m = (bits - (k << 52)).view(f64)
        z = (m - 1.0) / (m + 1.0)
        return horner(z * z, self.atanh) * z + k.astype(f64) * self.ln_2

    # Norms

    def batch_norm(self, x: Array, weight: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
        def wide(v: Array) -> Array:
            return v.reshape(1, -1, 1, 1)

        axes = (0, 2, 3)
        d = x - wide(self.mean(x, axes))
        r = f32(1) / np.sqrt(self.mean(d * d, axes) + f32(1e-5))
        return d * wide(r * weight) + wide(bias), (wide(r), d * wide(r), wide(weight))

    def batch_norm_gradient(self, g: Array, saved: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        r, h, weight = saved
        axes, n = (0, 2, 3), g.size // g.shape[1]
        bias, stretch = self.gridsum(g, axes), self.gridsum(g * h, axes)
        shift, slope = ((total / n).astype(f32).reshape(1, -1, 1, 1) for total in (bias, stretch))
        return ((g - shift) - h * slope) * (r * weight), stretch.astype(f32), bias.astype(f32)

    # Draws

    def keyed_hash(self, *words: Any) -> Array:
        state = np.zeros((), np.uint64)
        with np.errstate(over="ignore"):
            for word in words:
                x = (state ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
                x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                state = x ^ (x >> np.uint64(31))
        return state

    def normal(self, twister: np.random.RandomState, shape: tuple[int, ...], std: float) -> Array:
        first, second = (int(word) for word in twister.randint(0, 2**32, 2, np.uint32))
        bits = (first * 2**32 + second) % 2**63
        draws = self.keyed_hash(self.draw_word, bits, np.arange(np.prod(shape))) >> np.uint64(11)
        v = (draws.astype(f64) * 2.0**-53 + 2.0**-54) * 2 - 1
        w = -self.log64((1 - v) * (v + 1))
        root = np.sqrt(w)
        inverse = np.where(w < 5, horner(w - 2.5, self.centre), horner(root - 3, self.tail)) * v
        return (inverse * 1.4142135623730951 * std + 0.0).astype(f32).reshape(shape)


def train(images: Array, labels: Array, steps: int, arithmetic: Arithmetic | None = None) -> dict[str, Array]:
    """The weights of the network after some steps, each on all images.

    conv1 3x3, norm1, ReLU; conv2 3x3 with stride 2, norm2, and beside it shortcut 1x1 with stride 2, added, ReLU;
    the mean over pixels; a linear layer; cross-entropy with label smoothing 0.1; SGD with momentum 0.9, weight decay
    1e-4 and a rate of 0.1. The weights are drawn in that order, N(0, 0.2) and the linear layer's N(0, 0.1).
    """
    a = arithmetic or Arithmetic()
    width, classes = a.shape["width"], a.shape["classes"]
    twister = np.random.RandomState(1)
    w = {
        "conv1": a.normal(twister, (width, 1, 3, 3), 0.2),
        "conv2": a.normal(twister, (width, width, 3, 3), 0.2),
        "shortcut": a.normal(twister, (width, width, 1, 1), 0.2),
        "linear": a.normal(twister, (classes, width), 0.1),
        "bias": np.zeros(classes, f32),
    }
    w |= {f"norm{n}.weight": np.ones(width, f32) for n in (1, 2)}
    w |= {f"norm{n}.bias": np.zeros(width, f32) for n in (1, 2)}
    momentum: dict[str, Array] = {}
    for _ in range(steps):
        for name, gradient in gradients(a, w, images, labels).items():
            decayed = gradient + w[name] * f32(1e-4)
            momentum[name] = momentum[name] * f32(0.9) + decayed if name in momentum else decayed
            w[name] = w[name] + momentum[name] * f32(-0.1)
    return w


def gradients(a: Arithmetic, w: dict[str, Array], images: Array, labels: Array) -> dict[str, Array]:
    n, size, classes = len(images), images.shape[2], len(w["bias"])
    zero = f32(0)
    first, saved1 = a.batch_norm(a.convolution(images, w["conv1"], 1, 1), w["norm1.weight"], w["norm1.bias"])
    x1 = np.maximum(first, zero)
    second, saved2 = a.batch_norm(a.convolution(x1, w["conv2"], 2, 1), w["norm2.weight"], w["norm2.bias"])
    x2 = np.maximum(second + a.convolution(x1, w["shortcut"], 2, 0), zero)
    pixels = x2.shape[2] * x2.shape[3]
    features = a.mean(x2, (2, 3))
    logits = a.matmul(features, w["linear"].T) + w["bias"]
    d = logits - logits.max(1, keepdims=True)
    total = a.gridsum(a.exp(d), (1,))[:, None]
    y = (d.astype(f64) - a.log64(total)).astype(f32)

    # The loss is 0.9 * (-mean of y[label]) + 0.01 * (-sum of y / n): of label smoothing 0.1 and 10 classes.
    g = np.zeros_like(y) - f32(0.1 / classes) / f32(n)
    at_label = np.zeros_like(y)
    at_label[np.arange(n), labels] = -f32(1 - 0.1) / f32(n)
    g = g + at_label
    g = g - a.exp(y) * a.gridsum(g, (1,)).astype(f32)[:, None]

    found = {"linear": a.matmul(g.T, features), "bias": a.gridsum(g, (0,)).astype(f32)}
    g = a.matmul(g, w["linear"])[:, :, None, None] / f32(pixels)
    g = np.where(x2 > 0, np.broadcast_to(g, x2.shape), zero)
    found["shortcut"] = a.weight_gradient(g, x1, 1, 2, 0)
    through_shortcut = a.input_gradient(g, w["shortcut"], size, 2, 0)
    g, found["norm2.weight"], found["norm2.bias"] = a.batch_norm_gradient(g, saved2)
    found["conv2"] = a.weight_gradient(g, x1, 3, 2, 1)
    g = through_shortcut + a.input_gradient(g, w["conv2"], size, 2, 1)
    g = np.where(x1 > 0, g, zero)
    g, found["norm1.weight"], found["norm1.bias"] = a.batch_norm_gradient(g, saved1)
    found["conv1"] = a.weight_gradient(g, images, 3, 1, 1)
    return found

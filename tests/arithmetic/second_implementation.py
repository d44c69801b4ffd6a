"""Portable arithmetic once more, in plain NumPy, from docs/methods/portable-arithmetic.md alone.

It imports nothing of the package and nothing of torch. `Arithmetic` has every number, rounding and choice of axes as a
field, so that a test can change one and see that the weights change. Arrays are float32 unless a line says otherwise,
and a name of a line of the document stands where its formula does. `second_training` trains by it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
f32, f64 = np.float32, np.float64
DOCUMENT = Path(__file__).parents[2] / "docs/methods/portable-arithmetic.md"


def coefficients(name: str) -> tuple[float, ...]:
    """Of a polynomial of the document."""
    row = re.search(rf"^\| {name} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert row is not None
    return tuple(map(float, row[1].split(", ")))


def horner(x: Array, terms: tuple[float, ...]) -> Array:
    value = x * terms[-1]
    for term in terms[-2:0:-1]:
        value = (value + term) * x
    return value + terms[0]


@dataclass(frozen=True)
class Arithmetic:
    """Every number of the document's arithmetic; `second_training.Numbers` has those of a run too."""

    largest: int = 16256
    rne: Callable[[Array], Array] = np.rint
    grid_bits: int = 22
    log2_e: float = 1.4426950408889634
    ln_2: float = 0.6931471805599453
    root_half_bits: int = 0x3FE6A09E667F3BCD
    exp2: tuple[float, ...] = coefficients("EXP2")
    atanh: tuple[float, ...] = coefficients("ATANH")
    centre: tuple[float, ...] = coefficients("CENTRE")
    tail: tuple[float, ...] = coefficients("TAIL")
    tail_from: float = 5.0
    root_2: float = 1.4142135623730951
    draw_word: int = 23
    gamma: tuple[float, float, float] = (1 / 3, 9.0, 0.5)
    golden: int = 0x9E3779B97F4A7C15
    mix1: int = 0xBF58476D1CE4E5B9
    mix2: int = 0x94D049BB133111EB
    # The axes over which an amax is taken, by operand and role.
    of_image: tuple[int, ...] = (1, 2, 3)
    of_output_channel: tuple[int, ...] = (1, 2, 3)
    of_input_channel: tuple[int, ...] = (0, 2, 3)
    of_gradient_channel: tuple[int, ...] = (0, 2, 3)
    of_pixel_channel: tuple[int, ...] = (0, 2, 3)
    of_row: tuple[int, ...] = (1,)
    of_column: tuple[int, ...] = (0,)

    # Scales and contractions. Integers are float64: the sums of their products stay below 2**53, so no one rounds.

    def integers(self, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
        """q and 2**-s, float64, the latter of length 1 along `axes`."""
        amax = np.abs(x).max(axis=axes, keepdims=True).astype(f64)
        s = np.minimum(14 - np.frexp(amax)[1], 127)
        while (over := self.rne(np.ldexp(amax, s)) > self.largest).any():
            s = np.where(over, s - 1, s)
        s = np.where(amax == 0, 127, s)
        return self.rne(np.ldexp(x.astype(f64), s)), np.ldexp(1.0, -s)

    def matmul(self, a: Array, b: Array) -> Array:
        (left, rows), (right, columns) = self.integers(a, self.of_row), self.integers(b, self.of_column)
        return (left @ right * rows * columns).astype(f32)

    def convolution(self, x: Array, w: Array, stride: int, padding: int) -> Array:
        pixels, of_image = self.integers(x, self.of_image)
        weights, of_channel = self.integers(w, self.of_output_channel)
        windows = windows_of(pixels, w.shape[2], stride, padding)
        total = windows.reshape(*windows.shape[:3], -1) @ weights.reshape(len(w), -1).T
        return (total.transpose(0, 3, 1, 2) * of_channel.reshape(1, -1, 1, 1) * of_image).astype(f32)

    def input_gradient(self, g: Array, w: Array, size: int, stride: int, padding: int) -> Array:
        gradients, of_image = self.integers(g, self.of_image)
        weights, of_channel = self.integers(w, self.of_input_channel)
        total = np.zeros((len(g), w.shape[1], size + 2 * padding, size + 2 * padding))
        rows, columns = (slice(stride * (n - 1) + 1) for n in g.shape[2:])
        for y in range(w.shape[2]):
            for x in range(w.shape[3]):
                part = np.tensordot(gradients, weights[:, :, y, x], (1, 0)).transpose(0, 3, 1, 2)
                total[:, :, y:, x:][:, :, rows, columns][:, :, ::stride, ::stride] += part
        return (total[:, :, padding : padding + size, padding : padding + size] * of_channel * of_image).astype(f32)

    def weight_gradient(self, g: Array, x: Array, kernel: int, stride: int, padding: int) -> Array:
        gradients, of_output = self.integers(g, self.of_gradient_channel)
        pixels, of_input = self.integers(x, self.of_pixel_channel)
        total = np.tensordot(gradients, windows_of(pixels, kernel, stride, padding), ((0, 2, 3), (0, 1, 2)))
        return (total * of_output.reshape(-1, 1, 1, 1) * of_input).astype(f32)

    # Sums over a grid

    def gridsum(self, x: Array, axes: tuple[int, ...]) -> Array:
        """float64; each term is at most 2**24 steps of the grid, so that the sum of up to 2**29 of them is exact."""
        exponent = np.maximum(np.frexp(np.abs(x).max(axis=axes, keepdims=True))[1], -126)
        c = np.ldexp(f32(1.5), exponent + 23 - self.grid_bits).astype(f32)
        return ((x + c) - c).astype(f64).sum(axis=axes)

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        return (self.gridsum(x, axes) / np.prod([x.shape[axis] for axis in axes])).astype(f32)

    # Functions

    def exp64(self, x: Array) -> Array:
        """float64, of float64."""
        t = np.clip(x * self.log2_e, -1000, 1000)
        n = np.rint(t)
        fraction = t - n
        return np.ldexp(horner(fraction, self.exp2) * fraction + 1.0, n.astype(np.int64))

    def exp(self, x: Array) -> Array:
        return self.exp64(x.astype(f64)).astype(f32)

    def log64(self, x: Array) -> Array:
        bits = np.ascontiguousarray(x, f64).view(np.int64)
        k = (bits - self.root_half_bits) >> 52
        m = (bits - (k << 52)).view(f64)
        z = (m - 1.0) / (m + 1.0)
        return horner(z * z, self.atanh) * z + k.astype(f64) * self.ln_2

    # Norms

    def batch_norm(self, x: Array, weight: Array, bias: Array) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
        """The output; what the gradient needs; the mean, the gridsum of squares (float64) and their count."""
        axes, n = (0, 2, 3), np.array(x.size // x.shape[1])
        middle = self.mean(x, axes)
        d = x - wide(middle)
        squares = self.gridsum(d * d, axes)
        r = f32(1) / np.sqrt((squares / n).astype(f32) + f32(1e-5))
        return d * wide(r * weight) + wide(bias), (r, d * wide(r), weight), (middle, squares, n)

    def batch_norm_gradient(self, g: Array, saved: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Of the input, the weight and the bias."""
        r, h, weight = saved
        axes, n = (0, 2, 3), g.size // g.shape[1]
        bias, stretch = self.gridsum(g, axes), self.gridsum(g * h, axes)
        shift, slope = (wide((total / n).astype(f32)) for total in (bias, stretch))
        return ((g - shift) - h * slope) * wide(r * weight), stretch.astype(f32), bias.astype(f32)

    # Draws

    def keyed_hash(self, *words: Any) -> Array:
        state = np.zeros((), np.uint64)
        with np.errstate(over="ignore"):
            for word in words:
                x = (state ^ np.asarray(word).astype(np.uint64)) + np.uint64(self.golden)
                x = (x ^ (x >> np.uint64(30))) * np.uint64(self.mix1)
                x = (x ^ (x >> np.uint64(27))) * np.uint64(self.mix2)
                state = x ^ (x >> np.uint64(31))
        return state

    def uniform(self, *words: Any) -> Array:
        """float64."""
        return (self.keyed_hash(*words) >> np.uint64(11)).astype(f64) * 2.0**-53

    def twister(self, seed: int) -> np.random.RandomState:
        return np.random.RandomState(seed % 2**32)

    def draws(self, twister: np.random.RandomState, shape: tuple[int, ...]) -> Array:
        """u of a call, float64."""
        first, second = (int(word) for word in twister.randint(0, 2**32, 2, np.uint32))
        bits = (first * 2**32 + second) % 2**63
        return self.uniform(self.draw_word, bits, np.arange(np.prod(shape))).reshape(shape)

    def normal(self, twister: np.random.RandomState, shape: tuple[int, ...], std: float) -> Array:
        v = (self.draws(twister, shape) + 2.0**-54) * 2 - 1
        return (self.erfinv(v) * self.root_2 * std).astype(f32)

    def dropped(self, twister: np.random.RandomState, shape: tuple[int, ...], share: float) -> Array:
        """The factors of dropout."""
        return (self.draws(twister, shape) < 1 - share).astype(f32) / f32(1 - share)

    def erfinv(self, v: Array) -> Array:
        """float64."""
        w = -self.log64((1 - v) * (v + 1))
        return np.where(w < self.tail_from, horner(w - 2.5, self.centre), horner(np.sqrt(w) - 3, self.tail)) * v

    def beta(self, alpha: float, *words: int) -> float:
        """A draw of Beta(alpha, alpha)."""
        first, second = (self._log_gamma(alpha, *words, number) for number in (0, 1))
        return float(1 / (1 + self.exp64(np.array(second - first))))

    def _log_gamma(self, alpha: float, *words: int) -> float:
        (third, nine, half), attempt = self.gamma, 0

        def draw(*more: int) -> float:
            return (float(self.keyed_hash(self.draw_word, *words, *more) >> np.uint64(11)) + 0.5) * 2.0**-53

        d = (alpha if alpha >= 1 else alpha + 1) - third
        c = 1 / math.sqrt(nine * d)
        while True:
            attempt += 1
            z = float(self.erfinv(np.array([2 * draw(attempt, 0) - 1]))[0]) * self.root_2
            root = 1 + c * z
            v = root * root * root
            if v > 0 and self._log(draw(attempt, 1)) < half * z * z + d - d * v + d * self._log(v):
                return self._log(d * v) + (0.0 if alpha >= 1 else self._log(draw(0, 2)) / alpha)

    def _log(self, x: float) -> float:
        return float(self.log64(np.array([x]))[0])

    # Exact sums

    def exact_sum(self, values: list[Array], top: int, limbs: int) -> Array:
        """float64, of arrays of one shape: in units of 2**lowest, towards zero, and read from limbs of 40 bits."""
        lowest = top - 40 * (limbs - 1)
        columns = zip(*(value.astype(f64).ravel().tolist() for value in values), strict=True)
        found = [self._read(sum(int(math.ldexp(x, -lowest)) for x in each), lowest, limbs) for each in columns]
        return np.array(found).reshape(values[0].shape)

    def _read(self, total: int, lowest: int, limbs: int) -> float:
        result = float(total >> 40 * (limbs - 1)) * 2.0 ** (lowest + 40 * (limbs - 1))
        for number in reversed(range(limbs - 1)):
            result += float(total >> 40 * number & 2**40 - 1) * 2.0 ** (lowest + 40 * number)
        return result


def wide(values: Array) -> Array:
    return values.reshape(1, -1, 1, 1)


def windows_of(x: Array, kernel: int, stride: int, padding: int) -> Array:
    """[N, H', W', C, kernel, kernel] of images [N, C, H, W]."""
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    return sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride].transpose(0, 2, 3, 1, 4, 5)

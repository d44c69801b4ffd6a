"""Random numbers that are pure functions of integers: initial weights, dropout, drop path, and mixup's coefficients.

torch's own transforms differ by vector width and device. Here a call takes 64 bits from torch's generator of the CPU (a
Mersenne Twister, integers alone, whatever the device), and element i, in row order, gets splitmix64 of these bits and i
(`rng.keyed_hash`). So `torch.manual_seed` and saved states of the generator keep their meaning.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..rng import keyed_hash, keyed_hash_on_device, keyed_uniform
from .functions import exp64, log64
from .passes import polynomial

_DRAW = 23  # first word of the draws of this file; those of `rng` and of `methods` end at 22
_BLOCK = 1 << 18
_MOST_CALLS = 1 << 12  # of a pass
_ROOT_2 = 1.4142135623730951
_CENTRE = (1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
           3.43273939e-07, 2.81022636e-08)  # fmt: skip
_TAIL = (2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
         0.000100950558, -0.000200214257)  # fmt: skip


def inverse_erf64(x: Tensor) -> Tensor:
    """The inverse error function of float64 values on a CPU, within 4e-7 of itself (Giles, GPU Computing Gems 2012).

    >>> round(inverse_erf64(torch.tensor([0.5], dtype=torch.float64)).item(), 5)
    0.47694
    """
    w = log64((1.0 - x).mul_(x + 1.0)).neg_()
    root = torch.from_numpy(np.sqrt(w.numpy()))  # numpy rounds it as IEEE says, torch doesn't
    value = torch.where(w < 5.0, polynomial(w - 2.5, _CENTRE), polynomial(root - 3.0, _TAIL)).mul_(x)
    return torch.where(x.abs() == 1.0, x * torch.inf, value)


def uniform_(x: Tensor, low: float = 0, high: float = 1, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills a tensor with u * (high - low) + low, u of 53 bits in [0, 1)."""
    return _fill(x, generator, lambda u: u.mul_(high - low).add_(low))


def normal_(x: Tensor, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills a tensor with erfinv(2 u - 1) * sqrt(2) * std + mean, u of 53 bits within (0, 1)."""
    return _fill(
        x, generator, lambda u: inverse_erf64(u.add_(2.0**-54).mul_(2.0).sub_(1.0)).mul_(_ROOT_2).mul_(std).add_(mean)
    )


def bernoulli_(x: Tensor, probability: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills a tensor with 1 where u < probability, else 0."""
    given = _given.get() if generator is None else None
    if x.is_cpu and given is None:
        return _fill(x, generator, lambda u: (u < probability).double())
    # Dropout's masks are as large as activations, so elsewhere they are drawn where they are needed.
    bits = _bits(generator) if given is None else given.next()
    hashed = keyed_hash_on_device(_DRAW, bits, torch.arange(x.numel(), dtype=torch.int64, device=x.device))
    u = hashed.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)
    return x.copy_((u < probability).view(x.shape))


class Bits:
    """The 64 bits that each call takes, int64 on a device, for passes that a CUDA graph replays."""

    # A graph repeats what the host did once. So its calls read their bits from memory of the device, which is filled
    # before each replay as the calls would have taken them, one after the other.
    def __init__(self, device: torch.device) -> None:
        self._there, self.count = torch.zeros(_MOST_CALLS, dtype=torch.int64, device=device), 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside of it the calls without a generator read here, and are counted anew."""
        self.count, token = 0, _given.set(self)
        try:
            yield
        finally:
            _given.reset(token)

    def next(self) -> Tensor:
        if self.count == _MOST_CALLS:
            raise RuntimeError(f"a pass draws more than {_MOST_CALLS} times")
        self.count += 1
        return self._there[self.count - 1]

    def draw(self, count: int) -> None:
        """So many calls' bits, from torch's generator of the CPU."""
        if not count:
            return
        drawn = torch.tensor([_bits(None) for _ in range(count)], dtype=torch.int64, device="cpu")
        # From other memory the host would wait for all that the GPU was given before.
        self._there[:count].copy_(drawn.pin_memory() if self._there.is_cuda else drawn, non_blocking=True)


_given: ContextVar[Bits | None] = ContextVar("_given", default=None)


def _bits(generator: torch.Generator | None) -> int:
    if generator is not None and generator.device.type != "cpu":
        raise UserError("portable arithmetic: a generator of a GPU; its draws are its own: give one of the CPU")
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _fill(x: Tensor, generator: torch.Generator | None, transform: Callable[[Tensor], Tensor]) -> Tensor:
    bits = _bits(generator)
    values = torch.empty(x.numel(), dtype=x.dtype)
    for begin in range(0, x.numel(), _BLOCK):
        draws = torch.from_numpy(keyed_uniform(_DRAW, bits, np.arange(begin, min(begin + _BLOCK, x.numel()))))
        values[begin : begin + _BLOCK] = transform(draws)
    return x.copy_(values.view(x.shape))


def beta(alpha: float, *words: int) -> float:
    """One draw of Beta(alpha, alpha), a function of the words, for an alpha from 0.05 to 10.

    X / (X + Y) of two Gamma(alpha) draws (Marsaglia and Tsang, ACM TOMS 2000; below 1 by their power of a uniform
    draw), from logarithms, so that an alpha of 0.05 doesn't underflow.

    >>> 0 <= beta(0.2, 1, 2) <= 1, beta(0.2, 1, 2) == beta(0.2, 1, 2)
    (True, True)
    """
    if not 0.05 <= alpha <= 10:
        raise UserError(f"alpha = {alpha}: a Beta draw needs one from 0.05 to 10")
    first, second = (_log_gamma_draw(alpha, number, words) for number in (0, 1))
    return 1 / (1 + _scalar(exp64, second - first))


def _log_gamma_draw(alpha: float, number: int, words: tuple[int, ...]) -> float:
    def draw(*more: int) -> float:
        return (int(keyed_hash(_DRAW, *words, number, *more) >> np.uint64(11)) + 0.5) * 2.0**-53

    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    c = 1 / float(np.sqrt(9 * d))
    attempt = 0
    while True:
        attempt += 1
        z = _scalar(inverse_erf64, 2 * draw(attempt, 0) - 1) * _ROOT_2
        root = 1 + c * z
        v = root * root * root
        if v > 0 and _scalar(log64, draw(attempt, 1)) < 0.5 * z * z + d - d * v + d * _scalar(log64, v):
            return _scalar(log64, d * v) + (0.0 if alpha >= 1 else _scalar(log64, draw(0, 2)) / alpha)


def _scalar(function: Callable[[Tensor], Tensor], x: float) -> float:
    return function(torch.full((1,), x, dtype=torch.float64)).item()

"""Keyed randomness: every draw is a pure function of integer keys, never of a rank, a process or a clock.

The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014), chained over the keys. Library generators and
permutations may change between versions; this does not.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

U64 = npt.NDArray[np.uint64]

# The first word of every key chain, so that two uses of the same numbers never share their draws.
ORDER, AUGMENT, DROPOUT, SUBSTITUTE, SYNTHETIC, SPLIT, INIT, FRAMES, DATA_SAMPLE, AUDIT, DRIFT = range(1, 12)
DELAY, BARRIER, CUTOFF, PEER, ERASE, MIX, POLICY, ALTERNATE, NOISE, VALIDATION = range(12, 22)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def keyed_hash(*words: int | npt.NDArray[Any]) -> U64:
    """64 random bits for each combination of the words: uint64 of the broadcast shape (0-d for plain integers).

    Words are integers or integer arrays that broadcast together; negative values wrap modulo 2**64.

    >>> hex(int(keyed_hash(1, 2, 3)))
    '0xd0734750fde362b3'
    """
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            bits = np.asarray(word % 2**64 if isinstance(word, int) else word).astype(np.uint64)
            x = (state ^ bits) + _GOLDEN
            x = (x ^ (x >> np.uint64(30))) * _MIX1
            x = (x ^ (x >> np.uint64(27))) * _MIX2
            state = np.asarray(x ^ (x >> np.uint64(31)))
    return state


def keyed_hash_on_device(*words: "int | torch.Tensor") -> "torch.Tensor":
    """`keyed_hash` by torch: the same bits as int64, where the last of the words, a tensor, lies."""
    import torch

    last = words[-1]
    assert isinstance(last, torch.Tensor)
    golden, mix1, mix2 = (int(each.astype(np.int64)) for each in (_GOLDEN, _MIX1, _MIX2))

    def shifted(x: torch.Tensor, by: int) -> torch.Tensor:  # torch shifts the sign in
        return (x >> by) & ((1 << (64 - by)) - 1)

    state = torch.zeros((), dtype=torch.int64, device=last.device)
    for word in words:
        x = (state ^ word) + golden
        x = (x ^ shifted(x, 30)) * mix1
        x = (x ^ shifted(x, 27)) * mix2
        state = x ^ shifted(x, 31)
    return state


def keyed_uniform(*words: int | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Uniform float64 draws in [0, 1), one for each combination of the words."""
    return np.asarray((keyed_hash(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def keyed_integer(bound: int | npt.NDArray[Any], *words: int | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Uniform integers in [0, bound), one for each combination of the words (bias below bound / 2**53)."""
    return np.asarray(np.floor(keyed_uniform(*words) * bound).astype(np.int64))


def keyed_permutation(length: int, *words: int) -> npt.NDArray[np.int64]:
    """A permutation of 0..length-1 as int64: the indices sorted by their hash."""
    return np.argsort(keyed_hash(*words, np.arange(length)), kind="stable")


def seed_torch(device: "torch.device", *words: int) -> None:
    """Sets torch's own generators, of the CPU and of a device, by keys: they decide a network's draws in a pass."""
    import torch  # here, since commands that compute nothing import this module too, and torch takes seconds

    seed = int(keyed_hash(*words)) >> 1
    # The same draws as after torch.manual_seed, which also records a stack trace for each kind of device that has not
    # begun yet: 0.2 ms and more for each virtual worker, while this takes 0.002 ms.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)

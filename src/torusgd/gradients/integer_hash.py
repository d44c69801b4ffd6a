"""A 64-bit hash of the integers that a virtual worker's gradients become, whatever order they arrive in.

The hash is a sum, modulo 2**64, of every integer times an odd key of its place. So gradients may be added as autograd
has them, and a change of any one integer always changes the hash; other changes go unseen with a chance of about
2**-64. This is multilinear hashing (Carter and Wegman, JCSS 1979) with keys that are cheap to make, against faults of
machines and not against people.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..rng import AUDIT, keyed_hash

_CHUNK = 1 << 16
"""elements at a time, so that keys and products stay in the cache"""


class IntegerHash:
    """Hashes one virtual worker.

    >>> one, other = IntegerHash(torch.device("cpu")), IntegerHash(torch.device("cpu"))
    >>> one.add(0, torch.tensor([0.25, 0.5]), scale=torch.tensor(4.0))
    >>> other.add(0, torch.tensor([0.24, 0.51]), scale=torch.tensor(4.0))
    >>> one.value() == other.value()
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._keys = _odd_keys(device)

    def add(self, slot: int, gradient: Tensor, scale: Tensor) -> None:
        """Adds a slot's gradient (float32, finite) as the integers round(gradient * scale)."""
        flat = gradient.reshape(-1)
        for begin, factor in _chunks(slot, flat.numel()):
            run = flat[begin : begin + _CHUNK]
            self._add(torch.mul(run, scale).round_().to(torch.int64), factor)

    def add_bits(self, slot: int, values: Tensor) -> None:
        """Adds the bits of values (float32), for what travels beside the gradients; `slot`: a number of its own."""
        flat = values.detach().reshape(-1).contiguous().view(torch.int32)
        for begin, factor in _chunks(slot, flat.numel()):
            self._add(flat[begin : begin + _CHUNK].to(torch.int64), factor)

    def value(self) -> int:
        """The hash, between -2**63 and 2**63 - 1; waits for the device."""
        return int(self._total)

    def _add(self, integers: Tensor, factor: int) -> None:
        self._total += integers.mul_(self._keys[: len(integers)]).sum() * factor


@cache
def _odd_keys(device: torch.device) -> Tensor:
    """The keys of the places in a chunk: int64 [_CHUNK], odd, so that a product is zero only if the integer is."""
    words = keyed_hash(AUDIT, 0, np.arange(_CHUNK)) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64)).to(device)


def _chunks(slot: int, numel: int) -> list[tuple[int, int]]:
    """Where the chunks of a slot begin, and an odd factor for each."""
    begins = np.arange(0, numel, _CHUNK)
    factors = (keyed_hash(AUDIT, 1, slot, begins) | np.uint64(1)).view(np.int64)
    return list(zip(begins.tolist(), factors.tolist(), strict=True))

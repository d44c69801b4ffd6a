"""A 64-bit hash of the integers that a virtual worker's gradients become, whatever order they arrive in.

The hash is a sum, modulo 2**64, of every 64-bit word of the integers times an odd key of its position. So gradients may
be added in autograd's order, and a change of any one integer always changes the hash; other changes go unseen with a
chance of about 2**-64. This is multilinear hashing (Carter and Wegman, JCSS 1979) with keys that are cheap to make,
against faults of machines and not against people.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..rng import AUDIT, keyed_hash

# number of words at a time, so that keys and integers stay in the cache
_WORDS = 1 << 15


class IntegerHash:
    """Hashes one virtual worker."""

    def __init__(self, device: torch.device) -> None:
        self.sum = torch.zeros((), dtype=torch.int64, device=device)  # the hash of what has been added, on the device
        self._keys = _word_keys(device)

    def add(self, slot: int, begin: int, integers: Tensor) -> None:
        """Adds a run of a slot's integers that begins at the offset `begin` of the slot.

        `integers` are int32 or int64 [n], contiguous, or float32, of which the bits count. Values that travel beside
        the gradients have a slot number of their own.
        """
        most = _WORDS * 8 // integers.element_size()
        # Each run has the same keys, times a factor of its own: a table of keys for all words would not fit the cache.
        for run, factor in zip(integers.split(most), _factors(slot, begin, integers.numel(), most), strict=True):
            self.sum += keyed_sum(run, self._keys) * factor

    def value(self) -> int:
        """The hash, between -2**63 and 2**63 - 1; waits for the device."""
        return int(self.sum)


def tensor_hash(tensor: Tensor) -> Tensor:
    """The hash of the bits of any tensor, of a sparse one those of its indices and values: int64 [], on its device."""
    found, parts = IntegerHash(tensor.device), [tensor.detach()]
    if tensor.layout != torch.strided:
        sparse = parts[0].to_sparse_coo().coalesce()
        parts = [sparse.indices(), sparse.values()]
    for slot, part in enumerate(parts):
        values = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
        values = values.as_strided(values.shape, (1,))  # of one element torch keeps the stride that it had in a matrix
        if values.element_size() not in (4, 8):
            octets = values.view(torch.uint8)
            values = torch.nn.functional.pad(octets, (0, -len(octets) % 8)).view(torch.int64)
        found.add(slot, 0, values)
    return found.sum


def keyed_sum(values: Tensor, keys: Tensor) -> Tensor:
    """The sum modulo 2**64 of the 64-bit words of `values`, each times its key (int64): int64 [].

    Values are 1-D, contiguous, of 4 or 8 bytes an element; of an odd number of 4 bytes the last is a word of its own.
    """
    rest = values.numel() % 2 if values.element_size() == 4 else 0
    words = values[: values.numel() - rest]
    if words.element_size() == 4 and words.storage_offset() % 2:
        words = words.clone()  # torch views as wider words only what begins at one
    words = words.view(torch.int64)
    own = keys[: len(words)]
    # One pass without a product in memory; on GPUs torch has none for integers.
    total = torch.dot(words, own) if words.device.type == "cpu" else (words * own).sum()
    return total + values[-1].view(torch.int32) * keys[len(words)] if rest else total


def odd_keys(stream: int, use: int, count: int) -> Tensor:
    """int64 [count]: odd factors drawn by key, the same on every rank; a product is zero only if the word is."""
    return torch.from_numpy((keyed_hash(stream, use, np.arange(count)) | np.uint64(1)).view(np.int64))


@cache
def _word_keys(device: torch.device) -> Tensor:
    return odd_keys(AUDIT, 0, _WORDS).to(device)


@cache
def _factors(slot: int, begin: int, numel: int, most: int) -> list[int]:
    # An odd factor for each run of a slot that has `most` elements or is the last.
    offsets = np.arange(begin, begin + max(numel, 1), most)
    return (keyed_hash(AUDIT, 1, slot, offsets) | np.uint64(1)).view(np.int64).tolist()

"""Keyed randomness where torch's own generators are given their keys."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torusgd.rng import DROPOUT, keyed_hash, keyed_hash_on_device, seed_torch

WORD = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(WORD, max_size=3), st.lists(WORD, min_size=1, max_size=5))
def test_a_device_hashes_as_the_host(words: list[int], last: list[int]) -> None:
    found = keyed_hash_on_device(*words, torch.tensor(last))
    assert np.array_equal(found.numpy().astype(np.uint64), keyed_hash(*words, np.array(last)))


def test_a_network_draws_as_after_manual_seed() -> None:
    torch.manual_seed(int(keyed_hash(DROPOUT, 3, 7)) >> 1)
    usual = torch.nn.functional.dropout(torch.ones(100))
    torch.rand(5)
    seed_torch(torch.device("cpu"), DROPOUT, 3, 7)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100)), usual)
    seed_torch(torch.device("cpu"), DROPOUT, 3, 8)
    assert not torch.equal(torch.nn.functional.dropout(torch.ones(100)), usual)

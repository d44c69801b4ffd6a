"""Keyed randomness where torch's own generators are given their keys."""

import torch

from torusgd.rng import DROPOUT, keyed_hash, seed_torch


def test_a_network_draws_as_after_manual_seed() -> None:
    torch.manual_seed(int(keyed_hash(DROPOUT, 3, 7)) >> 1)
    usual = torch.nn.functional.dropout(torch.ones(100))
    torch.rand(5)
    seed_torch(torch.device("cpu"), DROPOUT, 3, 7)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100)), usual)
    seed_torch(torch.device("cpu"), DROPOUT, 3, 8)
    assert not torch.equal(torch.nn.functional.dropout(torch.ones(100)), usual)

"""LARS over column blocks on several ranks (threads of one process here): the bits of one rank that holds them all."""

import threading

import pytest
import torch
from torch import Tensor

from torusgd.optim import Lars, layer_norms
from torusgd.tensor_parallel.column_norms import ColumnNorms

ROWS, INPUTS = 8, 3000  # a row is no multiple of 4,096


class Sum:
    """Adds up what the threads bring, in place."""

    def __init__(self, size: int) -> None:
        self._barrier, self._brought = threading.Barrier(size, timeout=30), [torch.zeros(0)] * size

    def of(self, rank: int):
        def complete(tensor: Tensor) -> None:
            self._brought[rank] = tensor.clone()
            self._barrier.wait()
            tensor.copy_(sum(self._brought))
            self._barrier.wait()

        return complete


def after_two_steps(size: int, blocks: int) -> dict[str, Tensor]:
    """The weights after two steps on `size` ranks; each updates its rows of every matrix, and a whole vector."""
    wholes = [
        [torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(n)) for n in (1, 2)] for _ in range(size)
    ]
    vectors = [torch.ones(5000) for _ in range(size)]
    total = Sum(size)

    def run(rank: int) -> None:
        cut = {str(n): list(whole.split(ROWS // blocks)) for n, whole in enumerate(wholes[rank])}
        each = blocks // size
        held = [block for tensors in cut.values() for block in tensors[rank * each : (rank + 1) * each]]
        params = [*held, vectors[rank]]
        optimizer = Lars(params, lr=0.5, weight_decay=1e-3, norms=ColumnNorms(cut, held, total.of(rank)))
        for step in range(2):
            for name, tensors in cut.items():
                draw = torch.Generator().manual_seed(10 + 2 * step + int(name))
                gradients = torch.randn(ROWS, INPUTS, generator=draw).split(ROWS // blocks)
                for tensor, gradient in zip(tensors, gradients, strict=True):
                    tensor.grad = gradient.contiguous()
            vectors[rank].grad = torch.full((5000,), 0.1)
            optimizer.step()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows = ROWS // size
    found = {str(n): torch.cat([wholes[r][n][r * rows : (r + 1) * rows] for r in range(size)]) for n in range(2)}
    assert all(torch.equal(vectors[0], vector) for vector in vectors)
    return {**found, "vector": vectors[0]}


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_on_several_ranks_have_the_bits_of_one(size: int) -> None:
    want = after_two_steps(1, blocks=4)
    found = after_two_steps(size, blocks=4)
    assert want.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), name


def test_the_norm_is_that_of_the_whole_parameter() -> None:
    whole, other = torch.randn(8, 2048), torch.randn(777)
    aligned = list(whole.split(2))  # 4,096 elements each
    norms = ColumnNorms({"w": aligned}, aligned, lambda table: None)
    gradients = [torch.randn_like(tensor) for tensor in (*aligned, other)]
    found = norms([*aligned, other, *gradients])
    assert torch.equal(found[:4], layer_norms([whole]).expand(4))
    assert torch.equal(found[4:5], layer_norms([other]))
    assert torch.equal(found[5:9], layer_norms([torch.cat(gradients[:4])]).expand(4))
    assert torch.equal(found[9:], layer_norms([gradients[4]]))

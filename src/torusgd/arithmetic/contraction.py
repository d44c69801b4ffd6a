"""Matrix products of float32 tensors over integers: the same bits by any exact method, in any order, on any device.

Each row of the left operand and each column of the right one, so each index that the product keeps, has a scale of its
own, 2**s (`scales`). q = round-half-even(x * 2**s), the sums of products of integers are exact, and the sum times
2**-s of the row times 2**-s of the column is rounded once to float32. Where a row or column has a value that is not
finite, all results of it are NaN.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .methods import Method, exactly, multiply, order_of_preference
from .scales import amax_over, scales


def quantised(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Integers of a float32 tensor, with a scale for each index of the dimensions that are not summed.

    Args:
        x: float32.
        dims: The dimensions over which an amax is taken.

    Returns:
        round-half-even(x * 2**s), float32, and 2**-s, float64, of length 1 in `dims`.
    """
    scale, inverse = scales(amax_over(x, dims))
    return (x * scale).round_(), inverse


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of float32 matrices [M, K] and [K, N], or of batches of them [B, M, K] and [B, K, N].

    >>> import torch
    >>> matmul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5], [0.25]]))
    tensor([[1.0000],
            [2.5000]])
    """
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(*a.shape[:-1], b.shape[-1])
    left, rows = quantised(a, (-1,))
    right, columns = quantised(b, (-2,))

    def product(method: Method) -> Tensor:
        return multiply(method, method.prepare(left), method.prepare(right))

    return exactly(product, a.device).mul_(rows).mul_(columns).float()


def price(device: torch.device) -> str:
    """A line that says what a product costs on a device: the fastest method, and its time over float32's, measured."""
    with _disable_current_modes():
        a, b = (torch.full(shape, 0.3, device=device) for shape in ((256, 1152), (1152, 128)))
        ours, theirs = (min(_seconds(product, a, b) for _ in range(5)) for product in (matmul, torch.mm))
        method = order_of_preference(device, torch.get_num_threads())[0]
    return (
        f"portable arithmetic: products by {method}; one of 256 x 1152 x 128 takes {ours / theirs:.1f} times float32's"
    )


def _seconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    product(a, b).flatten()[0].item()
    return time.perf_counter() - start

"""The ordered gradient of max pooling is torch's own."""

import pytest
import torch
from torch.nn import functional as F

from torusgd.models.networks import OrderedMaxPool


@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (8, 8), (13, 6)])
def test_values_and_gradients_are_torchs(
    window: int, stride: int, padding: int, ceil_mode: bool, size: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few distinct values, so that ties are common.
    x = torch.randint(0, 4, (2, 3, *size), generator=generator).double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours = OrderedMaxPool.apply(x, window, stride, padding, ceil_mode)
    theirs = F.max_pool2d(y, window, stride, padding, ceil_mode=ceil_mode)
    assert torch.equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)

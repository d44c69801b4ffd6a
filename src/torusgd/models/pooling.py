"""Pooling: max pooling whose gradient has the same bits on every run, on GPUs too, and a blur before a stride."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` of one window size, stride and padding; deterministic if torch is set to be."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.are_deterministic_algorithms_enabled():
            pooled: Tensor = OrderedMaxPool.apply(x, self.kernel_size, self.stride, self.padding, self.ceil_mode)
            return pooled
        return super().forward(x)


class OrderedMaxPool(torch.autograd.Function):
    """Max pooling with a gradient that is added in one fixed order."""

    # CUDA's own gradient of max pooling adds with atomics, in no fixed order, and refuses to run under deterministic
    # algorithms. This one adds the k * k positions of the window one after the other.
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int, stride: int, padding: int, ceil_mode: bool) -> Tensor:
        # Torch's own, which is deterministic; backward needs the positions of the maxima.
        pooled, positions = F.max_pool2d(x, window, stride, padding, ceil_mode=ceil_mode, return_indices=True)
        ctx.save_for_backward(positions)
        ctx.shape, ctx.window, ctx.stride, ctx.padding = x.shape, window, stride, padding
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,), (positions,) = grads, ctx.saved_tensors
        n, c, h, w = ctx.shape
        rows = torch.arange(grad.shape[2], device=grad.device)[:, None] * ctx.stride - ctx.padding
        columns = torch.arange(grad.shape[3], device=grad.device) * ctx.stride - ctx.padding
        within = (positions // w - rows) * ctx.window + (positions % w - columns)  # index of the maximum in its window
        # With ceil_mode the last windows reach beyond the padding.
        reach = [(size - 1) * ctx.stride + ctx.window for size in grad.shape[2:]]
        padded = grad.new_zeros(n, c, max(h + 2 * ctx.padding, reach[0]), max(w + 2 * ctx.padding, reach[1]))
        for i in range(ctx.window):
            for j in range(ctx.window):
                # No two windows meet at one position of the window: a strided addition writes each element once.
                part = grad.masked_fill(within != i * ctx.window + j, 0.0)
                down, right = i + ctx.stride * grad.shape[2], j + ctx.stride * grad.shape[3]
                padded[:, :, i : down : ctx.stride, j : right : ctx.stride] += part
        return padded[:, :, ctx.padding : ctx.padding + h, ctx.padding : ctx.padding + w], None, None, None, None


class Blur2d(nn.Module):
    """A small low-pass filter for each channel, so that a stride after it skips less (Zhang, arXiv 1904.11486).

    The kernel is [1 2 1] x [1 2 1] / 16 with a border of one zero, as in MosaicML's Composer and in FFCV's ResNets:
    (n, c, h, w) -> (n, c, h / stride, w / stride).
    """

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        row = torch.tensor([1.0, 2.0, 1.0])
        kernel = (torch.outer(row, row) / 16).expand(channels, 1, 3, 3).contiguous()
        # No part of the state: files of weights stay those of a network without a blur.
        self.register_buffer("kernel", kernel, persistent=False)
        self.kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, stride=self.stride, padding=1, groups=x.shape[1])

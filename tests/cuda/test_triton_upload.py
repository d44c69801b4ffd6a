"""Normalising images by Triton's kernel, on a GPU or under its interpreter: the values of torch's own look-up."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the extra triton")

from tests.triton_device import ON_TRITON_DEVICE, seeded

from torusgd.cuda import triton_upload
from torusgd.data import to_device

pytestmark = ON_TRITON_DEVICE


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(5, 3, 11, 13), (2, 1, 40, 16), (1, 4, 1, 1), (3, 3, 1, 7)])
def test_every_value_stands_where_torchs_look_up_puts_it(
    shape: tuple[int, int, int, int], memory_format: torch.memory_format
) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(1))
    table = torch.randn(shape[1], 256, generator=seeded(2))
    made = []
    for form in (triton_upload, to_device):
        out = torch.empty(shape, memory_format=memory_format).fill_(torch.nan)
        form.look_up(pixels, table, out)  # type: ignore[attr-defined]
        made.append(out)
    assert torch.equal(*made)
    assert made[0].is_contiguous(memory_format=memory_format)

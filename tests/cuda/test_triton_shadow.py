"""16-bit copies of weights by Triton's kernel, on a GPU or under its interpreter: the bits of torch's own operators."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the extra triton")

from tests.triton_device import ON_TRITON_DEVICE, seeded

from torusgd.cuda import shadow, triton_shadow

pytestmark = ON_TRITON_DEVICE

SHAPES = [(6, 5, 3, 3), (300, 7), (64, 32, 1, 1), (11,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_have_the_bits_of_torch_in_every_layout(dtype: torch.dtype) -> None:
    weights = [torch.randn(shape, generator=seeded(1)) for shape in SHAPES]
    # Halfway between two values, above the largest of float16, below its least, and what is not finite.
    weights[1][0] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 70000.0, 1e-9, -float("inf"), 3.4e38])
    made = []
    for form in (triton_shadow, shadow):
        copies = [torch.zeros_like(weight, dtype=dtype) for weight in weights]
        copies[0] = copies[0].contiguous(memory_format=torch.channels_last)
        form.copy_weights(weights, copies)  # type: ignore[attr-defined]
        made.append(copies)
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))

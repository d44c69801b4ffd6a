"""Where Triton's kernels are tested: on the GPU that is here, or else on the CPU by Triton's interpreter."""

import pytest
import torch

ON_TRITON_DEVICE = [
    pytest.mark.usefixtures("triton_device"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]
"""marks of a file of such tests"""


def seeded(seed: int) -> torch.Generator:
    """Draws for new tensors."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)

"""Cross-entropy in column blocks against torch's own over all columns."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from torusgd.tensor_parallel.column_pass import block_gradient, block_numbers, join
from torusgd.tensor_parallel.tail import cut_columns


@settings(deadline=None, max_examples=40)
@given(
    images=st.integers(1, 5),
    classes=st.integers(2, 40),
    blocks=st.integers(1, 8),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    size=st.sampled_from([0.1, 10.0, 1e4]),
    seed=st.integers(0, 9),
)
def test_loss_and_gradient_are_those_of_the_whole(
    images: int, classes: int, blocks: int, smoothing: float, size: float, seed: int
) -> None:
    blocks = min(blocks, classes)
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=draw) * size
    targets = torch.randint(classes, (images,), generator=draw)
    spans = cut_columns(classes, blocks)
    cut = [logits[:, low:high].contiguous() for low, high in spans]
    numbers = torch.stack([block_numbers(part, low, targets) for part, (low, _) in zip(cut, spans, strict=True)])
    joined = join(numbers, classes, smoothing)
    gradient = torch.cat(
        [
            block_gradient(part, low, targets, joined, classes, smoothing, scale=4.0)
            for part, (low, _) in zip(cut, spans, strict=True)
        ],
        dim=1,
    )
    whole = logits.double().requires_grad_()
    want = F.cross_entropy(whole, targets, label_smoothing=smoothing)
    want.backward()
    assert joined.loss.dtype == torch.float32
    torch.testing.assert_close(joined.loss.double(), want.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), 4.0 * whole.grad, rtol=1e-5, atol=1e-6)


def test_a_logit_that_is_not_finite_shows_in_the_loss() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    targets = torch.tensor([0, 1])
    joined = join(block_numbers(logits, 0, targets)[None], 2, 0.0)
    assert joined.loss.isnan()

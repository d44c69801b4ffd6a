"""The loss scale of float16: it grows to a bound, and a start above the bound stays as the recipe says."""

import pytest
import torch

from torusgd.precision import MOST_SCALE, Precision
from torusgd.recipe.load import load_recipe
from torusgd.runtime import resolve_auto


@pytest.mark.parametrize(("initial", "end"), [(2.0**20, MOST_SCALE), (2.0**30, 2.0**30), (1e20, 1e20)])
def test_the_loss_scale_is_bounded(initial: float, end: float) -> None:
    changes = ["precision=float16", f"loss_scale={{initial: {initial}, growth_interval: 1}}"]
    precision = Precision(resolve_auto(load_recipe("digits", changes).recipe, "cpu"), torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.zeros(1))
    for _ in range(200):  # gradients of zero never overflow
        parameter.grad = torch.zeros(1)
        precision.accept([parameter])
    assert precision.loss_scale == end
    for name, value in precision.state_dict().items():
        precision.load_state(name, value)

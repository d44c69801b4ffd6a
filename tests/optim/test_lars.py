import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refuses
from torch import Tensor, nn

from torusgd.arithmetic import portable
from torusgd.optim import BLOCK, VARIANTS, AdamW, Lars, Sgd, lars, layer_rates

PATHS = {"fused": None, "foreach": True, "plain": False}


def reference_rate(variant: str, w: Tensor, g: Tensor, lr, wd, trust, eps, peak) -> float:
    """The published formulas one by one, in float64, written apart from the table that the code uses."""
    nw, ng = w.norm().item(), g.norm().item()
    if variant in ("fujitsu", "nnabla"):
        below, least = ng + wd * peak * nw + eps, 0.0
        if variant == "nnabla":
            below, least = ng + wd * nw, eps
            below += eps if below < eps else 0.0
        return lr if nw == 0 or nw < least or below == 0 else lr * trust * nw / below
    if variant == "tensorflow":
        ng = (g + wd * w).norm().item()
    if nw == 0 or ng == 0:
        return min(lr, 1.0) if variant == "larc-clip" else lr
    if variant == "larc":
        return lr * trust * nw / ng
    if variant == "larc-clip":
        return min(lr, trust * nw / ng)
    if variant == "caffe":
        return lr * trust * nw / (ng + wd * nw)
    return lr * trust * nw / (ng + wd * nw + eps)


def reference_step(variant: str, w: Tensor, g: Tensor, v: Tensor, momentum: float, wd: float, rate: float) -> Any:
    if variant == "tensorflow":
        v = momentum * v + g + wd * w
        return w - rate * v, v
    v = momentum * v + rate * (g + wd * w)
    return w - v, v


def close(actual: Tensor, expected: Tensor, scale: float) -> None:
    assert actual.dtype == torch.float32
    assert ((actual.flatten().double() - expected).abs() <= 3e-6 * (expected.abs() + scale)).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([(), (1,), (3,), (17,), (4, 3, 3, 3), (BLOCK + 3,)]),
    seed=st.integers(0, 2**31),
    zero=st.sampled_from(["", "weights", "gradient"]),
    lr=st.sampled_from([0.0, 1e-3, 0.1, 30.0]),
    hyper=st.fixed_dictionaries({
        "momentum": st.sampled_from([0.0, 0.9, 0.96]), "weight_decay": st.sampled_from([0.0, 5e-5, 0.1]),
        "trust": st.sampled_from([None, 1e-3, 0.5]), "eps": st.sampled_from([0.0, 1e-9, 0.1]),
    }),
)  # fmt: skip
def test_three_steps_follow_the_published_formula(variant: str, path: str, shape, seed: int, zero: str, lr, hyper):
    hyper["eps"] *= VARIANTS[variant].eps
    momentum, weight_decay, trust, eps = (hyper[name] for name in ("momentum", "weight_decay", "trust", "eps"))
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(shape) if zero == "weights" else torch.randn(shape, generator=generator)
    param = nn.Parameter(start.clone())
    how: dict[str, Any] = {"variant": variant, "foreach": PATHS[path], "trust_one_dimensional": True}
    optimizer = Lars([param], lr=13.0, **hyper, **how)
    w, v, scale = start.flatten().double(), torch.zeros(start.numel(), dtype=torch.float64), 1e-3
    for step in range(3):
        optimizer.param_groups[0]["lr"] = rate = lr / (step + 1)
        param.grad = torch.zeros(shape) if zero == "gradient" else torch.randn(shape, generator=generator)
        g = param.grad.flatten().double()
        if trust is not None:
            rate = reference_rate(variant, w, g, rate, weight_decay, trust, eps, peak=13.0)
        w, v = reference_step(variant, w, g, v, momentum, weight_decay, rate)
        optimizer.step()
        scale = max(scale, w.abs().max().item(), v.abs().max().item())
        buffer = optimizer.state[param]["momentum_buffer"]
        close(param.data, w, scale)
        close(buffer, v, scale)
        # The next step starts from the rounded values, so that errors don't add up in the comparison.
        w, v = (each.flatten().double() for each in (param.data, buffer))


def model_and_groups(seed: int = 0) -> tuple[nn.Module, list[dict[str, object]]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "trust": None, "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_nnablas_epsilon_is_a_threshold_on_both_norms() -> None:
    """The figures of sony/nnabla's lars.cpp for weights and gradients on either side of its epsilon."""
    norms = torch.tensor([[0.5, 2.0], [0.05, 2.0], [0.5, 0.03], [0.5, 0.0]], dtype=torch.float64)
    rates = layer_rates(norms[:, 0], norms[:, 1], lr=3.0, trust=0.02, eps=0.1, variant="nnabla")
    expected = [3 * 0.02 * 0.5 / 2.0, 3.0, 3 * 0.02 * 0.5 / 0.13, 3 * 0.02 * 0.5 / 0.1]
    torch.testing.assert_close(rates, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_portable_steps_have_one_factor_on_all_devices(momentum: float) -> None:
    """CPUs take the fused rule by 1 - rate, which rounds a small rate, and GPUs the foreach one."""
    param = nn.Parameter(torch.ones(5, 3))
    optimizers = [Lars([param], lr=1e-6, momentum=momentum, foreach=foreach) for foreach in (None, True, False)]
    param.grad = torch.arange(1.0, 16.0).view(5, 3)
    with portable():
        for optimizer in optimizers:
            param.data.fill_(1.0)
            optimizer.step()
    first, *others = (optimizer.state[param]["momentum_buffer"] for optimizer in optimizers)
    assert all(torch.equal(first, other) for other in others)


SHAPES = st.lists(st.sampled_from([(), (5,), (BLOCK + 3,), (3, 4), (2, 3, 1, 1)]), min_size=1, max_size=4)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=15)
@given(shapes=SHAPES, named=st.booleans(), everything=st.booleans(), seed=st.integers(0, 2**31))
def test_what_has_one_dimension_is_left_out_unless_its_group_names_a_trust(variant, shapes, named, everything, seed):
    """Bit for bit what two groups give that are made by hand, one with a trust and one without."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    hyper: dict[str, Any] = {"lr": 3.0, "weight_decay": 1e-3, "variant": variant}
    group: dict[str, Any] = {"params": ours, "trust": 0.02} if named else {"params": ours}
    first = Lars([group], trust=0.02, trust_one_dimensional=everything, **hyper)
    scaled, plain = ([p for p in theirs if (named or everything or p.dim() > 1) == flag] for flag in (True, False))
    by_hand: list[dict[str, Any]] = [{"params": scaled, "trust": 0.02}, {"params": plain, "trust": None}]
    second = Lars(by_hand, **hyper)
    for _ in range(2):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        first.step()
        second.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("resumed_at", [1, 3])
def test_a_run_resumed_from_its_state_ends_with_the_same_bits(resumed_at: int) -> None:
    model, groups = model_and_groups()
    optimizer = Lars(groups, lr=1.0, weight_decay=1e-4)
    train(model, optimizer, range(resumed_at))
    again, groups = model_and_groups(seed=9)
    again.load_state_dict(model.state_dict())
    second = Lars(groups, lr=5.0)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    runs = [(again, second), copy.deepcopy((model, optimizer)), (model, optimizer)]
    for run in runs:
        train(*run, range(resumed_at, 6))
    assert all(torch.equal(weights(each), weights(model)) for each, _ in runs)


def test_without_trust_it_is_sgd_and_each_takes_the_others_state() -> None:
    model, _groups = model_and_groups()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd, range(3))
    again, _ = model_and_groups()
    again.load_state_dict(model.state_dict())
    optimizer = Lars(again.parameters(), lr=1.0, momentum=0.5, trust=None, variant="tensorflow")
    optimizer.load_state_dict(copy.deepcopy(sgd.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["trust"], group["variant"]) == (0.1, 0.9, None, "tensorflow")
    train(model, sgd, range(3, 6))
    train(again, optimizer, range(3, 6))
    torch.testing.assert_close(weights(again), weights(model))
    sgd.load_state_dict({**sgd.state_dict(), "state": copy.deepcopy(optimizer.state_dict()["state"])})
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(sgd.state[theirs]["momentum_buffer"], optimizer.state[mine]["momentum_buffer"])


def test_parameters_without_a_gradient_or_elements_stay_and_nan_reaches_the_whole_layer() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lars([used, unused], lr=1.0, weight_decay=0.1, trust=0.1, trust_one_dimensional=True)
    used.grad = torch.ones(3)
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0, 1.0]
    assert used[0].item() == pytest.approx(1 - 0.1 / 1.1 * 1.1)
    param = nn.Parameter(torch.zeros(0))
    param.grad = torch.zeros(0)
    Lars([param], lr=1.0).step()
    lars([], [], [], lr=1.0)
    param = nn.Parameter(torch.ones(20))
    param.grad = torch.ones(20)
    param.grad[3] = math.nan
    Lars([param], lr=1.0, trust_one_dimensional=True).step()
    assert param.isnan().all()
    assert layer_rates(torch.ones(1).double(), torch.tensor([math.inf]).double(), lr=1.0) == 0


def test_closure_and_schedulers_of_torch_work() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Lars([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert optimizer.step(lambda: param.square().sum().backward() or 3.0) == 3.0
    scheduler.step()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["peak_lr"]) == (0.5, 1.0)


@pytest.mark.parametrize("wrong", [
    {"variant": "lamb"}, {"trust": 0.0}, {"momentum": 1.0}, {"lr": -1.0}, {"weight_decay": math.nan},
    {"variant": "caffe", "eps": 1e-9},
])  # fmt: skip
def test_a_users_mistake_is_named(wrong: dict[str, Any]) -> None:
    key, param = [*wrong][-1], nn.Parameter(torch.ones(1))
    refuses(f"LARS with {key} = {wrong[key]}", Lars, [param], about=f"{key} = ", **{"lr": 1.0} | wrong)


@pytest.mark.parametrize("optimizer", [Lars, Sgd, AdamW], ids=["lars", "sgd", "adamw"])
def test_sparse_gradients_are_refused(optimizer: Any) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    before = embedding.weight.detach().clone()
    refuses("a sparse gradient", optimizer(embedding.parameters(), lr=0.1).step)
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("optimizer", [Lars, Sgd], ids=["lars", "sgd"])
def test_a_momentum_of_another_shape_is_refused(optimizer: Any) -> None:
    """torch's fused kernel writes beyond its end: the process was aborted, or went on with a damaged heap."""
    saved, own = (optimizer([nn.Parameter(torch.ones(size))], lr=0.1, momentum=0.9) for size in (2, 2000))
    for each in (saved, own):
        each.param_groups[0]["params"][0].grad = torch.ones_like(each.param_groups[0]["params"][0])
    saved.step()
    own.load_state_dict(saved.state_dict())
    refuses("a momentum of another shape", own.step)

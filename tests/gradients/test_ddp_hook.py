"""One line in a DDP script: the gradients are plain DDP's, whatever DDP is told to do."""

import contextlib
import copy
import json
import math
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks, run_ranks, write_profile
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from torusgd.arithmetic import portable
from torusgd.errors import UserError
from torusgd.gradients.ddp_hook import ddp_hook
from torusgd.weights import weights_sha256


class Net(nn.Module):
    """Two branches, so that one can stay unused, a convolution in channels_last, and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.used, self.unused = nn.Linear(6, 40), nn.Linear(6, 40)
        self.head, self.empty = nn.Linear(40, 5), nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.conv(x).relu().mean((2, 3))
        return self.head(self.used(x) + (self.unused(x) if both else 0)) + self.empty.sum(0)


def gradients(hooked: dict | None, ddp: dict, both: bool = True, accumulate: bool = False, steps: int = 2) -> list:
    """The gradients of each step of a small DDP run; `hooked` holds the hook's arguments, None leaves DDP plain."""
    torch.manual_seed(0)
    net = Net()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch does not declare memory_format here
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, **ddp)
    if hooked is not None:
        ddp_hook(model, **hooked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        for is_last in (False, True) if accumulate else (True,):
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(torch.randn(4, 3, 6, 6), both).square().mean().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters() if p.numel()])
        optimizer.step()
    return found


def hooked(network: nn.Module, wire: Any = "exact", **options: Any) -> Any:
    model = DistributedDataParallel(network, **options)
    ddp_hook(model, "ring", wire)
    return model


CASES = [
    ({}, True, False), ({"gradient_as_bucket_view": True}, True, False), ({"static_graph": True}, True, False),
    ({"find_unused_parameters": True}, False, False),
    ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, False, True), ({}, True, True),
]  # fmt: skip
HOOKS = [
    ({}, 1e-6), ({"algorithm": "torus:halving/ring"}, 1e-6), ({"algorithm": "native"}, 1e-6), ({"wire": "exact"}, 1e-6),
    ({"algorithm": "ring", "wire": "float16"}, 3e-3), ({"algorithm": "doubling", "wire": "bfloat16"}, 3e-2),
]  # fmt: skip
"""The hook's arguments, and how far from plain DDP's the gradients may be, relative to the largest."""


def largest_difference(plain: list, ours: list) -> float:
    found = []
    for p_step, o_step in zip(plain, ours, strict=True):
        assert [p is None for p in p_step] == [o is None for o in o_step]
        pairs = [(p, o) for p, o in zip(p_step, o_step, strict=True) if p is not None]
        found.append(max(float((p - o).abs().max()) for p, o in pairs) / max(float(p.abs().max()) for p, _ in pairs))
    return max(found)


def compare_with_plain_ddp(profile: Path) -> None:
    found = []
    chosen = [hooked if "algorithm" in hooked else {"profile": profile, **hooked} for hooked, _ in HOOKS]
    for ddp, both, accumulate in CASES:
        plain = gradients(None, copy.copy(ddp), both, accumulate)
        found.append([largest_difference(plain, gradients(how, copy.copy(ddp), both, accumulate)) for how in chosen])
    for (hooked, bound), differences in zip(HOOKS, zip(*found, strict=True), strict=True):
        assert max(differences) <= bound
        assert "wire" not in hooked or max(differences) > 0  # it did go over the narrow wire


def test_gradients_are_those_of_plain_ddp(tmp_path):
    run_ranks(4, compare_with_plain_ddp, write_profile(tmp_path, 4))


MICRO_BATCHES = 12
ALGORITHMS = {2: "doubling", 3: "ring", 4: "torus", 5: "halving-doubling"}  # by the number of ranks; else the backend's
SPREAD: dict[str, dict[str, Any]] = {
    "plain": {}, "views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True},
    "unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True}, "autocast": {}, "bfloat16": {},
    "loss-scale": {}, "given-up": {}, "zeroed": {}, "zeroed-views": {"gradient_as_bucket_view": True}, "divided": {},
}  # fmt: skip
"""What DistributedDataParallel takes in each case; `spread` has what else it means."""


def spread(case: str) -> str:
    """The hash of the weights after 3 steps of 12 keyed micro-batches, spread over these ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16 if case == "bfloat16" else torch.float32)
    net.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, **copy.copy(SPREAD[case]))
    micro_batches = None if case == "divided" else MICRO_BATCHES
    hook = ddp_hook(model, ALGORITHMS.get(size, "native"), "exact", micro_batches=micro_batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=case == "loss-scale")
    mine = range(MICRO_BATCHES * rank // size, MICRO_BATCHES * (rank + 1) // size)
    for step in range(3):
        passes = [mine[0], *mine] if case == "given-up" and step in (0, 2) else [*mine]
        for number, key in enumerate(passes):
            if number == 1 and len(passes) > len(mine):
                optimizer.zero_grad()  # begins the step anew
            torch.manual_seed(100 * step + key)
            images = torch.randn(4, 3, 6, 6, dtype=net.conv.weight.dtype)
            # The second branch has a part in a few micro-batches, and in the third step in none.
            both = "unused" not in case or (key % 5 == 0 and step != 2)
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), (
                contextlib.nullcontext() if number == len(passes) - 1 else model.no_sync()
            ):  # fmt: skip
                loss = torch.nn.functional.dropout(model(images, both), 0.3).square().mean()
                if case == "loss-scale" and step == 1 and key == 7:
                    loss = loss * torch.inf
                scaler.scale(loss / (len(mine) if case == "divided" else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none="zeroed" not in case)
        hook.load_state_dict(json.loads(json.dumps(hook.state_dict())))
    return weights_sha256({name: tensor.float() for name, tensor in net.state_dict().items()})


def spreads(cases: list[str]) -> dict[str, str]:
    return {case: spread(case) for case in cases}


@pytest.mark.parametrize("sizes", [(2, 1, 3), pytest.param((2, 4, 5, 12), marks=pytest.mark.slow)])
def test_exact_has_the_same_bits_however_micro_batches_are_spread_and_by_any_algorithm(sizes):
    by_case = run_ranks(sizes[0], spreads, list(SPREAD))[0]
    assert len({by_case[case] for case in ("given-up", "zeroed", "zeroed-views", "plain", "views")}) == 1
    assert by_case["unused"] == by_case["unused-views"] != by_case["plain"]
    assert len(set(by_case.values())) == len(SPREAD) - 5
    for size in sizes[1:]:
        # A mean over ranks of losses that are divided by a rank's passes is exact for powers of two only.
        cases = [case for case in SPREAD if case != "divided" or size in (1, 2, 4)]
        assert run_ranks(size, spreads, cases) == [{case: by_case[case] for case in cases}] * size


@pytest.mark.parametrize("wire", ["exact", "float16", "bfloat16"])
@on_ranks(3)
def test_overflow_is_summed_anew_and_what_is_not_finite_is_nan_everywhere(wire):
    """Gradients grow 2,000 times from one step to the next, then are not finite on one rank.

    The sum of the last ones is beyond float16 (65,504); the mean is not.
    """
    model, seen = hooked(nn.Linear(3, 2, bias=False), wire), []
    for size in (1.0, 1.0, 2000.0, float("inf"), 1.0, 60000.0, 60000.0):
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * (size if dist.get_rank() == 1 or size < 1e30 else 1.0)).backward()
        seen.append(model.module.weight.grad.flatten().tolist())
    for step, value in enumerate((1.0, 1.0, 2000.0, math.nan, 1.0, 60000.0, 60000.0)):
        assert seen[step] == pytest.approx([value] * 6, rel=1e-2, nan_ok=True)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"wire": "exact", "micro_batches": 2}, {"wire": "exact", "micro_batches": 4}), ({"wire": "float16"}, {}),
        ({"algorithm": "ring"}, {"algorithm": "native"}), ({"algorithm": "ring"}, {"algorithm": "no such"}),
        ({"algorithm": "torus", "grid": (1, 3)}, {"algorithm": "torus", "grid": (3, 1)}),
    ],
    ids=str,
)  # fmt: skip
@on_ranks(3)
def test_ranks_with_other_arguments_say_so(first, other):
    """Else their gradients would be means over different numbers, or messages that don't meet."""
    model, rank = DistributedDataParallel(nn.Linear(3, 2)), dist.get_rank()
    with pytest.raises(UserError, match="on rank 0; give all" if rank == 1 else "another rank has other arguments"):
        ddp_hook(model, **(other if rank == 1 else first))


@pytest.mark.parametrize("wire", ["exact", "float16", "bfloat16"])
@on_ranks(2)
def test_a_step_of_zeros_says_nothing_of_the_next(wire):
    """Neither in the first steps nor later: what follows is tiny, and arrives."""
    model = hooked(nn.Linear(3, 2, bias=False), wire)
    for size in (0.0, 0.0, 3e-12, 3e-12, 0.0, 3e-12, float("inf"), 3e-12):
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * size).backward()
        gradient = model.module.weight.grad.flatten().tolist()
        assert gradient == pytest.approx([size] * 6, rel=1e-2, abs=0) or not math.isfinite(size)


@pytest.mark.parametrize("wire", ["exact", "float16"])
@on_ranks(2, timeout=60)
def test_a_static_graph_of_two_dtypes_is_summed_in_the_first_step_too(wire):
    """There DistributedDataParallel numbers no bucket and calls none the last."""

    class Two(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x).sum() + 3 * self[1](x.bfloat16()).float().sum()

    model = hooked(Two([nn.Linear(3, 2), nn.Linear(3, 2).bfloat16()]), wire, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 3)).backward()
        assert [p.grad.unique().tolist() for p in model.parameters()] == [[1.0], [1.0], [3.0], [3.0]]


def _falls() -> list[list[float]]:
    """The gradients of steps of 4 micro-batches that fall 2**60-fold and grow again, of which some ranks have zeros."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(3, 1), gradient_as_bucket_view=dist.get_rank() > 0)
    ddp_hook(model, "ring", "exact", micro_batches=4)
    mine, seen = range(4 * rank // size, 4 * (rank + 1) // size), []
    for height in (1.0, 2.0**-60, 2.0**-60, 2.0**-41, 2.0**-125, 2.0**-120, 0.0, 2.0**-9, 1.0):
        model.zero_grad()
        for key in mine:
            factor = height * (key != 3) * (2.0**-40 if key == 1 else 1.0)
            with contextlib.nullcontext() if key + 1 == mine.stop else model.no_sync():
                (model(torch.tensor([[1.1, 1.3 + key, -0.7]])).sum() * factor).backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist())
        exact = [height * sum((k != 3) * (2.0**-40 if k == 1 else 1.0) * x for k in range(4)) / 4 for x in (1.1, 1.0)]
        assert [seen[-1][0], seen[-1][3]] == pytest.approx(exact, rel=1e-6, abs=0)
    return seen


def test_a_gradient_may_fall_by_any_factor():
    """DistributedDataParallel can't redo a step, whose scale is that of the step before."""
    found = [each for size in (1, 3) for each in run_ranks(size, _falls)]
    assert found == [found[0]] * 4


@on_ranks(2, timeout=60)
def test_a_sum_that_ends_before_its_pass_does_is_measured_once():
    """Zeros have the next step measured anew; the pass whose bucket has come back already must not join in that."""
    model = hooked(nn.Linear(3, 2, bias=False))
    for size in (0.0, 0.0, 1.0):
        model.zero_grad()
        images = torch.ones(1, 3, requires_grad=True)
        if dist.get_rank() == 1:  # here autograd has more to do once the bucket has left
            images.register_hook(lambda _: time.sleep(0.5))
        (model(images * 1.0).sum() * size).backward()
        assert model.module.weight.grad.flatten().tolist() == [size] * 6


@pytest.mark.parametrize("first", [0.0, float("inf"), 1.0])
@on_ranks(2, timeout=60)
def test_a_step_without_a_scale_is_measured_where_a_rank_has_no_more_input(first):
    """Under join() that rank takes part in the passes that send, and in no other."""
    model = hooked(nn.Linear(3, 2, bias=False))
    with model.join():
        for size in (first, 1.0)[: 2 - dist.get_rank()]:
            model.zero_grad()
            with model.no_sync():
                (model(torch.ones(1, 3)).sum() * size).backward()
            (model(torch.ones(1, 3)).sum() * size).backward()
    if dist.get_rank() == 0:
        assert model.module.weight.grad.flatten().tolist() == [1.0] * 6  # two passes over two ranks


@on_ranks(2, timeout=60)
def test_a_step_given_up_under_join_leaves_no_scale_to_the_next():
    model = hooked(nn.Linear(3, 2))
    with model.join():
        for size in (1e15, 1e-9):
            model.zero_grad()
            with model.no_sync():
                (model(torch.ones(1, 3)).sum() * size).backward()
        (model(torch.ones(1, 3)).sum() * 1e-9).backward()
    assert model.module.bias.grad.tolist() == pytest.approx([2e-9] * 2, rel=1e-5)


@pytest.mark.parametrize("before", [0, 1])
@on_ranks(2)
def test_nothing_is_left_of_a_pass_that_failed(before):
    model = hooked(Net())
    images, fails = torch.ones(2, 3, 5, 5), [False]
    model.module.conv.weight.register_hook(lambda _: next(iter(())) if fails[0] else None)
    gradients = []
    for fails[0] in (False,) * before + (True, False):
        model.zero_grad()
        with model.no_sync() if fails[0] else contextlib.nullcontext(), contextlib.suppress(StopIteration):
            model(images * (100 if fails[0] else 1), True).sum().backward()
            gradients = [copy.copy(parameter.grad) for parameter in model.parameters()]
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    alone(images, True).sum().backward()
    torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "width"), [("cpu", 16), pytest.param("cuda", 2048, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wire", ["exact", "float16"])
@on_ranks(1)
def test_a_sum_waits_for_gradients_of_which_the_host_is_far_ahead(wire, device, width):
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(20))).to(device)
    images = torch.randn(4 * width, width, device=device)
    plain(images).square().mean().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    model = DistributedDataParallel(copy.deepcopy(plain))
    ddp_hook(model, "native", wire)
    for _ in range(3):
        model.zero_grad()
        model(images).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert gradient is not None
            atol = 1e-3 * gradient.abs().max().item()
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=atol)


def _scaled_down_to_what_is_finite() -> tuple[list[float], str]:
    """The scales of a gradient scaler whose first ones are far too large, and the weights' hash."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    ddp_hook(model, "ring", "exact", micro_batches=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-16)
    scales = []
    for step in range(4):
        for key in range(4 * rank // size, 4 * (rank + 1) // size):
            images = torch.full((2, 3), 2.0**16 * (1 + key + step))
            with contextlib.nullcontext() if key + 1 == 4 * (rank + 1) // size else model.no_sync():
                scaler.scale(model(images).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(math.log2(scaler.get_scale()))
    return scales, weights_sha256(model.module.state_dict())


def test_a_gradient_scaler_finds_its_scale_and_the_bits_stay():
    found = [run_ranks(size, _scaled_down_to_what_is_finite) for size in (1, 2, 4)]
    assert [each == found[0][0] for some in found for each in some] == [True] * 7
    assert found[0][0][0] == [111, 95, 79, 79]


def backward(model: Any, factor: float = 1.0) -> None:
    (model(torch.ones(1, 2)).sum() * factor).backward()


@on_ranks(2)
def test_mistakes_and_what_exact_does_not_support_are_refused_in_one_line():
    def refuses(match: str, call: Callable[..., object], *given: Any, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            call(*given, **options)

    model: Any = DistributedDataParallel(nn.Linear(2, 2))
    refuses("^wire int8:", ddp_hook, model, wire="int8")
    refuses("^allreduce tree:", ddp_hook, model, "tree", "exact")  # and nothing of it stays in the model
    refuses("^micro_batches:", ddp_hook, model, micro_batches=4)
    refuses("^micro_batches:", ddp_hook, model, micro_batches=0, wire="exact")
    refuses("^portable arithmetic:", portable()(ddp_hook), model)
    refuses("^wire exact:", hooked, nn.Linear(2, 2).double())
    # Each thing that hands DDP gradients past it.
    if torch.cuda.is_available() or not torch.version.cuda:  # else DDP itself asks for a driver before we can refuse it
        refuses("mixed_precision", hooked, nn.Linear(2, 2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    refuses("sparse", ddp_hook, DistributedDataParallel(nn.Embedding(5, 2, sparse=True)), "ring")
    static = hooked(nn.Linear(2, 2), static_graph=True)
    with static.no_sync():
        refuses("static_graph=True: ", backward, static)
    refuses("of 1 parameters", ddp_hook(model, "ring", "exact").load_state_dict, {"bounds": [1.0]})
    backward(model)
    refuses(r"all passes of a step but the last under no_sync\(\)", backward, model)
    model = hooked(nn.Linear(2, 2))  # since in DDP itself the refused pass is still under way

    def passes(change: Callable[[], object]) -> None:
        model.zero_grad()
        with model.no_sync():
            backward(model)
            change()
            backward(model)

    changed = r"\.grad was changed between two passes of a step"
    refuses(changed, passes, lambda: model.zero_grad(set_to_none=False))
    refuses(changed, passes, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    model.zero_grad()
    with pytest.raises(RuntimeError, match="the gradient of weight is a million times"):
        backward(model, 1e9)  # beyond what the sum has bits for, though a float has them
    model = hooked(nn.Linear(2, 2))
    refuses(r"got Linear$", ddp_hook, model.module, "ring")
    refuses("create_graph", model(torch.ones(1, 2)).square().sum().backward, create_graph=True)
    assert weakref.ref(hooked(nn.Linear(2, 2)))() is None, "a hook kept its model"


@on_ranks(2)
def test_a_rank_that_has_joined_adds_nothing():
    """Ranks have 2 and 3 batches, and passes of `torch.autograd.grad` between."""
    model = hooked(nn.Linear(2, 1, bias=False))
    found = []
    with model.join():
        for step in range(2 + dist.get_rank()):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + step)).sum().backward()
            torch.autograd.grad(model.module(torch.ones(1, 2)).sum(), list(model.parameters()))
            found.append(model.module.weight.grad[0, 0].item())
    assert found == [1.0, 2.0, 1.5][: 2 + dist.get_rank()]


@on_ranks(2, expected=1)
def test_a_lost_rank_is_an_error_of_backward():
    """Rank 1 ends after the first step."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    ddp_hook(model, "ring")
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(0)
    # By the hook's own message or by one of DDP's, which torch words.
    with pytest.raises(RuntimeError, match=r"connection to rank 1 is lost|no answer within|Connection"):
        model(torch.ones(1, 3)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("wire", [None, "exact"])
def test_a_compiled_function_may_call_backward(wire):
    """The compiler went on into the hook, and failed in what sends the messages."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = hooked(nn.Linear(6, 3), wire)

        def step(images, model=model):
            model(images).square().mean().backward()

        run = torch.compile(step, backend="eager") if compiled else step
        for number in range(2):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            run(torch.randn(4, 6))
        found.append(model.module.weight.grad)
    assert torch.equal(*found)

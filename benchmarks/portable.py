"""Portable arithmetic: errors of its rules against float64, beside float32's and bfloat16's, and what a step costs.

    python benchmarks/portable.py rules                       products, with operands of an amax/rms from 3 to 1,000
    python benchmarks/portable.py gradients --model resnet50  a network's gradient on one batch
    python benchmarks/portable.py speed --model resnet18      a training step, in turn with float32's
    python benchmarks/portable.py families                    two steps of torchvision's and timm's: a hash, or why not

Errors are |found - exact| / |exact| in the Euclidean norm, exact in float64. The times are of the thread's own clock,
with one thread, so that other work on the machine counts less; the ratio is that of the medians.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tools.model_families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.arithmetic import portable
from torusgd.errors import UserError, in_one_line
from torusgd.models.registry import construct
from torusgd.models.resnet import digits_net, fashion_net, resnet18, resnet50
from torusgd.recipe.schema import Model
from torusgd.weights import weights_sha256

Case = Callable[..., Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (lambda: digits_net(classes=10, channels=1), (32, 1, 8, 8)),
    "fashion": (lambda: fashion_net(classes=10, channels=1), (32, 1, 28, 28)),
    "resnet18": (lambda: resnet18(classes=100, channels=3), (16, 3, 64, 64)),
    "resnet50": (lambda: resnet50(classes=100, channels=3), (8, 3, 96, 96)),
}


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def with_ratio(shape: tuple[int, ...], ratio: float, seed: int) -> Tensor:
    """Normal numbers to a power, so that the largest magnitude is `ratio` times the root mean square.

    There is none above the root of the number of values.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    low, high = 0.1, 20.0
    for _ in range(40):
        power = (low + high) / 2
        values = x.abs().pow(power)
        low, high = (power, high) if values.max() / values.square().mean().sqrt() < ratio else (low, power)
    return (x.sign() * x.abs().pow(low)).float()


def cosines(out: Tensor) -> Tensor:
    return torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)


def rules() -> None:
    """A table: the output, and the gradients of both operands, by amax/rms of both operands."""
    print(f"{'rule':22} {'amax/rms':>8}  {'portable':>28}  {'float32':>28}  {'bfloat16':>28}")
    shapes: dict[str, tuple[Case, tuple[int, ...], tuple[int, ...]]] = {
        "linear 1024x1024x64": (F.linear, (1024, 1024), (64, 1024)),
        "conv 3x3 64-64": (lambda x, w: F.conv2d(x, w, padding=1), (16, 64, 32, 32), (64, 64, 3, 3)),
        "depthwise 3x3 64": (lambda x, w: F.conv2d(x, w, padding=1, groups=64), (16, 64, 32, 32), (64, 1, 3, 3)),
    }
    for name, (case, left, right) in shapes.items():
        for ratio in (3, 10, 30, 100, 300, 1000):
            inputs = [with_ratio(left, ratio, 1), with_ratio(right, min(ratio, 30), 2)]
            upstream = cosines(case(*inputs))

            def run(inputs: list[Tensor], case: Case = case, upstream: Tensor = upstream) -> list[Tensor]:
                leaves = [x.detach().clone().requires_grad_() for x in inputs]
                out = case(*leaves)
                out.backward(upstream.to(out.dtype))
                return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

            exact = run([x.double() for x in inputs])
            with portable():
                own = run(inputs)
            others = run(inputs), run([x.bfloat16() for x in inputs])
            cells = [
                " ".join(f"{error(a, b):9.1e}" for a, b in zip(found, exact, strict=True)) for found in (own, *others)
            ]
            print(f"{name:22} {ratio:8}  {cells[0]}  {cells[1]}  {cells[2]}")


def batch_of(shape: tuple[int, ...], classes: int = 10) -> tuple[Tensor, Tensor]:
    """Blobs of the labels' own colours with noise, so that there is something to learn."""
    labels = torch.arange(shape[0]) % classes
    draws = torch.Generator().manual_seed(3)
    means = torch.randn(classes, *shape[1:], generator=draws)
    return means[labels] + torch.randn(shape, generator=draws), labels


def network_gradients(name: str, steps: int) -> None:
    """Errors of a network's gradient, after some float32 steps from random weights."""
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model = make()
    images, labels = batch_of(shape)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def gradient(dtype: torch.dtype, context: AbstractContextManager[Any]) -> Tensor:
        fresh = make()
        fresh.load_state_dict(state)
        fresh.to(dtype)
        with context:
            F.cross_entropy(fresh(images.to(dtype)), labels).backward()
        return torch.cat([p.grad.double().flatten() for p in fresh.parameters() if p.grad is not None])

    exact = gradient(torch.float64, nullcontext())
    for kind, context in (
        ("portable", portable()),
        ("float32", nullcontext()),
        ("bfloat16", torch.autocast("cpu", torch.bfloat16)),
    ):
        print(f"{name} after {steps} steps, {kind}: {error(gradient(torch.float32, context), exact):.2e}")


class Counted(TorchDispatchMode):
    """Counts operators, below the rules or, without them, torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def speed(name: str, count: int, last: bool) -> None:
    """Milliseconds of a step (forward, loss, backward, update), in turn with float32's."""
    make, shape = MODELS[name]
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {"float32": nullcontext, "portable": portable}
    runs = {}
    for kind, context in kinds.items():
        with context():
            torch.manual_seed(1)
            model = make()
        images, labels = batch_of(shape)
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch does not declare memory_format here
            images = images.contiguous(memory_format=torch.channels_last)
        runs[kind] = (context, model, torch.optim.SGD(model.parameters(), 0.01, 0.9, foreach=False), images, labels)

    def step(kind: str) -> float:
        context, model, optimizer, images, labels = runs[kind]
        start = time.thread_time()
        with context():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.thread_time() - start) * 1e3

    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(count + 2):
        for kind, found in times.items():
            found.append(step(kind))
            if number < 2:  # the first steps try methods
                found.clear()
    with Counted() as counted:
        step("float32")
    base = statistics.median(times["float32"])
    for kind, found in times.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        print(
            f"{name} {shape} {kind}: {middle:.1f} ms ({low:.1f} to {high:.1f}, n = {count}), ratio {middle / base:.2f}"
        )
    print(f"operators a step: {sum(counted.calls.values())}")


def family(name: str) -> str:
    """The weights' hash after two steps of two images of 64 px (Inception's 96), all drawn in the context."""
    side = 96 if "inception_v3" in name else 64
    with portable():
        torch.manual_seed(0)
        network = construct(Model(name=name, options=FAMILIES[name]), classes=10, channels=3)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, foreach=False)
        images, labels = torch.rand(2, 3, side, side), torch.tensor([1, 7])
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
        return weights_sha256(network.state_dict())[:12]


def families() -> None:
    for name in FAMILIES:
        try:
            print(name, family(name), flush=True)
        except (UserError, RuntimeError, TypeError, AssertionError) as error:
            print(name, "none:", in_one_line(error), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rules", "gradients", "speed", "families"))
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--steps", type=int, default=0, help="float32 steps before the gradient is compared")
    parser.add_argument("--count", type=int, default=7, help="timed steps")
    parser.add_argument("--channels-last", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "rules":
        rules()
    elif args.what == "gradients":
        network_gradients(args.model, args.steps)
    elif args.what == "families":
        families()
    else:
        speed(args.model, args.count, args.channels_last)


if __name__ == "__main__":
    main()

"""Semantic segmentation on fixed crops, whose loss is a mean over labelled pixels, not over images or ranks.

    torchrun --standalone --nproc-per-node 1 examples/segmentation.py
    torchrun --standalone --nproc-per-node 3 examples/segmentation.py

Some pixels have no label, in some pictures more than in others. So a micro-batch gives the gradient of its *sum* over
labelled pixels and their number, as in causal_text.py, and each crop is drawn by its position in the stream. The
network has group norm: batch norm's running statistics would depend on who computes which micro-batch.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torusgd import StreamSampler, exact_all_reduce
from torusgd.rng import keyed_integer
from torusgd.weights import weights_sha256

SIZE, CROP, CLASSES, NO_LABEL = 48, 32, 3, 255


def picture(index: int) -> tuple[Tensor, Tensor]:
    """A disc on a field: float32 [1, 48, 48], and labels int64 [48, 48] of field and disc; a strip has none."""
    x, y, radius, strip = (int(keyed_integer(count, 8, index, place)) for place, count in enumerate((48, 48, 16, 20)))
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    disc = (rows - y) ** 2 + (columns - x) ** 2 < (4 + radius) ** 2
    labels = torch.where(disc, 1 + index % 2, 0)
    image = labels.float() - 0.5 + torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(index)) / 4
    labels[: 2 * strip] = NO_LABEL
    return image[None], labels


def cropped(samples: list[tuple[Tensor, Tensor]], positions: range) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 32, 32] and labels [n, 32, 32], each cut out where its position in the stream says."""
    cut = []
    for position, (image, labels) in zip(positions, samples, strict=True):
        top, left = (int(keyed_integer(SIZE - CROP + 1, 9, position, axis)) for axis in (0, 1))
        window = slice(top, top + CROP), slice(left, left + CROP)
        cut.append((image[:, *window], labels[window]))
    images, targets = zip(*cut, strict=True)
    return torch.stack(images), torch.stack(targets)


def main() -> None:
    """Trains for some steps and prints the loss of the last one and the weights' hash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=6)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(n, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()) for n in (1, 16, 16)]
    model = nn.Sequential(*blocks, nn.Conv2d(16, CLASSES, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    sampler = StreamSampler(600, 24, micro_batches=options.micro_batches)
    sampler.follow(optimizer)
    pictures = [picture(index) for index in range(600)]
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        pictures,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=list,
    )
    loss = mean = torch.zeros(())
    for mine in zip(*[iter(loader)] * len(sampler.positions()), strict=True):
        sums, counts = [], []
        for samples, positions in zip(mine, sampler.positions(), strict=True):
            images, labels = cropped(samples, positions)
            total = nn.functional.cross_entropy(model(images), labels, ignore_index=NO_LABEL, reduction="sum")
            gradients = torch.autograd.grad(total, parameters)
            sums.append(torch.cat([total.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)]))
            counts.append((labels != NO_LABEL).sum().double().reshape(1))
        mean = exact_all_reduce(sums) / exact_all_reduce(counts).float()
        loss, *means = mean.split([1, *map(torch.numel, parameters)])
        for parameter, gradient in zip(parameters, means, strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        if sampler.steps == options.steps:
            break
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.micro_batches} micro-batches: loss {loss.item():.9f}, "
              f"gradient {mean[1:].norm():.9f}, weights {weights_sha256(model.state_dict())[:8]}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""An ordinary DistributedDataParallel script with one line more: its gradients are summed by torusgd's all-reduces.

    torchrun --standalone --nproc-per-node 4 examples/ddp_hook.py
    torchrun --standalone --nproc-per-node 4 examples/ddp_hook.py --algorithm torus --wire exact
    torchrun --standalone --nproc-per-node 4 examples/ddp_hook.py --plain

On several machines, start it with torchrun's --nnodes and --rdzv-endpoint as any other script; there the choice of the
all-reduce matters. Data are random: it shows the seconds a step, and that the loss falls as without the line.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torusgd import ddp_hook


def main() -> None:
    """Trains a small network on random images and prints the loss and the median time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plain", action="store_true", help="without the line")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--wire", choices=["float16", "bfloat16", "exact"])
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = DistributedDataParallel(network.append(nn.Linear(512, 10)).to(device), bucket_cap_mb=1)
    if not options.plain:
        hook = ddp_hook(model, options.algorithm, options.wire)  # the one line
        if dist.get_rank() == 0:
            print(hook.explanation)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    images, labels = torch.rand(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
    seconds = []
    for step in range(options.steps):
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        seconds.append(time.perf_counter() - begin)
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {value:.4f}, {statistics.median(seconds[2:]) * 1e3:.1f} ms a step")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

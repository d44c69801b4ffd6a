"""A loop of your own whose weights are the same, bit for bit, on any number of ranks, and which goes on in mid-epoch.

    torchrun --standalone --nproc-per-node 4 examples/own_loop.py    # or 1, or 12
    torchrun --standalone --nproc-per-node 3 examples/own_loop.py --checkpoint state.pt    # stop it, start it again

A step is twelve micro-batches, dealt out to the ranks that there are. Three things make the bits the same: the sampler
gives each micro-batch the same samples, dropout draws by its position in the stream, and gradients are summed exactly.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torusgd import StreamSampler, ddp_hook
from torusgd.weights import weights_sha256

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoint", type=Path)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
model = nn.parallel.DistributedDataParallel(network)
hook = ddp_hook(model, "ring", wire="exact", micro_batches=12)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
sampler = StreamSampler(len(data), 240, micro_batches=12)
parts = {"model": network, "optimizer": optimizer, "sampler": sampler, "sums": hook}
if options.checkpoint is not None and options.checkpoint.exists():
    state = torch.load(options.checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])

while sampler.steps < options.steps:  # an epoch, or what is left of one
    batches, passes = iter(DataLoader(data, batch_sampler=sampler, num_workers=1)), len(sampler.positions())
    for _, *mine in zip(range(sampler.steps, options.steps), *[batches] * passes, strict=False):  # of this rank
        for span, (images, labels) in zip(sampler.positions(), mine, strict=True):
            torch.manual_seed(span.start)
            with nullcontext() if span == sampler.positions()[-1] else model.no_sync():
                nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.step()
        if options.checkpoint is not None and dist.get_rank() == 0:
            new = options.checkpoint.with_suffix(".new")
            torch.save({name: part.state_dict() for name, part in parts.items()}, new)
            new.replace(options.checkpoint)

if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, step {sampler.steps}: weights {weights_sha256(network.state_dict())[:8]}")
dist.destroy_process_group()

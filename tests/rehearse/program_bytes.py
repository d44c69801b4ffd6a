"""Sums a tensor by torus and by ring, and prints the kernel's counts at this host's interfaces, an all-reduce."""

import json
import sys

import torch
import torch.distributed as dist

from torusgd.comm.allreduce import create
from torusgd.rehearse.lab import interface_bytes

REPEAT = 3
dist.init_process_group("gloo")
counted = {}
for name in ("torus", "ring"):
    allreduce = create(name)
    tensor = torch.ones(int(sys.argv[1]))
    allreduce.start(tensor).wait()
    assert bool((tensor == dist.get_world_size()).all())
    dist.barrier()
    before = interface_bytes()
    for _ in range(REPEAT):
        allreduce.start(tensor).wait()
    dist.barrier()
    after = interface_bytes()
    counted[name] = [(after[link].sent - before[link].sent) / REPEAT for link in ("lo", "tun0")]
    dist.barrier()
    allreduce.close()
print("found:", json.dumps(counted))

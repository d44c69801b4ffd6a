"""Sums until a link is cut; exit code 3 if the all-reduce reports that."""

import os
import time

import torch
import torch.distributed as dist

from torusgd.comm import CommError, create

dist.init_process_group("gloo")
allreduce = create("ring", timeout=2)
allreduce.start(torch.ones(1000)).wait()
print("summed", flush=True)
begin = time.monotonic()
while time.monotonic() < begin + 20:
    try:
        allreduce.start(torch.ones(1000)).wait()
    except CommError:
        time.sleep(3)  # the first to know must not, by ending, be how the others learn
        os._exit(3)

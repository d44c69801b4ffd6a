"""Which GPU of its machine a rank takes, and whether every rank has one of its own, whatever its launcher did."""

import os
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from ..comm import store_keys as keys
from ..errors import UserError
from ..text import named

# Variables that hold a rank's number on its machine, the first that is set counts.
LOCAL_RANK = (
    "LOCAL_RANK",  # torchrun, and our own launcher
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # Intel MPI, and MPICH's hydra
    "MV2_COMM_WORLD_LOCAL_RANK",  # MVAPICH
    "PALS_LOCAL_RANKID",  # HPE's launcher
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",  # IBM's jsrun
)
# Of torch: whether its watchdog ends the process after an error of NCCL, and another thread a watchdog that hangs.
WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This rank's number among those of its machine; 0 if no launcher has said.

    >>> local_rank({"SLURM_LOCALID": "3"})
    3
    """
    name = next((name for name in LOCAL_RANK if name in environment), "")
    try:
        return int(environment.get(name, 0))
    except ValueError:
        raise UserError(f"{name} = {environment[name]}: must be a rank's number on its machine") from None


def own_gpu(ranks_per_gpu: int) -> torch.device:
    """The GPU of this rank, which so many share: the only one that it sees, else by its number on the machine."""
    count, local = torch.cuda.device_count(), local_rank()
    index = local // ranks_per_gpu if count > 1 else 0
    if index >= count:
        remedy = f"start at most {count * ranks_per_gpu} ranks here, or give more --set runtime.ranks_per_gpu"
        raise UserError(f"rank {local} of this machine: it has {count} GPUs; {remedy}")
    return torch.device("cuda", index)


def free_local_rank(taken: Collection[int]) -> int:
    """The lowest number that no rank on this machine has: one that joins takes the GPU of one that was lost.

    >>> free_local_rank({0, 1, 3})
    2
    """
    return min({*range(len(taken) + 1)} - {*taken})


def device_of(device: str, ranks_per_gpu: int) -> torch.device:
    """`cpu`, or for `cuda` this rank's own GPU, which becomes the current one; UserError as `own_gpu`."""
    if device == "cpu":
        return torch.device(device)
    target = own_gpu(ranks_per_gpu)
    torch.cuda.set_device(target)
    # A late rank is found by its heartbeats and named. NCCL's watchdog would end the healthy ones without a word.
    os.environ.update({name: "0" for name in WATCHDOG if name not in os.environ})
    return target


def claim_gpu(store: Store, rank: int, device: torch.device, ranks_per_gpu: int) -> None:
    """Leaves in the ranks' common store which GPU this rank has taken; each rank with one calls it before they meet."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    store.set(keys.GPU.format(rank=rank), gpu)
    if store.add(keys.GPU_RANKS.format(gpu=gpu), 1) > ranks_per_gpu:
        store.set(keys.SHARED_GPU, "")


def check_shared_gpus(store: Store, ranks: Sequence[int], ranks_per_gpu: int) -> None:
    """Once all have met: UserError, the same line on every rank, if too many have the same GPU, by its UUID."""
    # Two processes that compute on one GPU without knowing take turns there, and NCCL refuses them or stands still.
    if store.check([keys.SHARED_GPU]):
        gpus = [its.decode() for its in store.multi_get([keys.GPU.format(rank=rank) for rank in ranks])]
        for gpu in dict.fromkeys(gpus):
            if len(who := [rank for rank, its in zip(ranks, gpus, strict=True) if its == gpu]) > ranks_per_gpu:
                own = "let the launcher set LOCAL_RANK or show each rank its own GPU"
                share = f"let them share it by --set runtime.ranks_per_gpu={len(who)}"
                raise UserError(f"{named('rank', who)} have the same GPU ({gpu}): {own}, or {share}")

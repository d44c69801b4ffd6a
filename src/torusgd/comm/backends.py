"""Torch's process groups outside its own registry: Gloo for CPU tensors, and NCCL for those of a GPU.

What `torch.distributed.init_process_group` and `split_group` do between the rendezvous and the registry, so that a
group can be made of any ranks, at any time, in a process that lives on.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from .base import ConnectionLost

_POLL_SECONDS = 0.02


class NcclSplit(NamedTuple):
    """A communicator that ncclCommSplit makes, which is quicker than a rendezvous and takes fewer connections."""

    parent: Any
    """torch's ProcessGroupNCCL, whose members all take part"""
    color: int
    """the number of the new communicator that this rank joins"""


def connected(
    store: Store,
    ranks: Sequence[int],
    group_rank: int,
    device: torch.device,
    limit: timedelta,
    nccl: bool,
    split: NcclSplit | None = None,
    is_given_up: Callable[[], bool] | None = None,
) -> ProcessGroup:
    """A process group outside torch's registry; every member calls it, and returns when all have.

    Args:
        store: A store or a prefix of one that no group has used before.
        ranks: The members, in group order.
        group_rank: Index of this process in `ranks`.
        device: Where the members' tensors live, beside CPU tensors.
        limit: Time for the members to meet, and for each collective.
        nccl: True sends CUDA tensors by NCCL, False by Gloo, which copies them to the host and back.
        split: Communicator from which NCCL's is made; None: a new one.
        is_given_up: Polled while the members connect; ConnectionLost once it returns True.
    """
    if is_given_up is None:
        return _connect(store, ranks, group_rank, device, limit, nccl, split)
    own: Store = store.clone()  # type: ignore[attr-defined]  # whoever waits in a store holds up all its users
    return _unless(is_given_up, partial(_connect, own, ranks, group_rank, device, limit, nccl, split))


def _unless(is_given_up: Callable[[], bool], connect: Callable[[], ProcessGroup]) -> ProcessGroup:
    """The result of `connect()`, or ConnectionLost once `is_given_up()`."""
    # Nothing interrupts torch's rendezvous, so it runs in a thread that may be left behind, with its store.
    answer: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            answer.set_result(connect())
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="torusgd-connect").start()
    while not wait_for([answer], _POLL_SECONDS).done:
        if is_given_up():
            raise ConnectionLost("a rank was lost while a group was formed")
    return answer.result()


def _connect(
    store: Store,
    ranks: Sequence[int],
    group_rank: int,
    device: torch.device,
    limit: timedelta,
    nccl: bool,
    split: NcclSplit | None,
) -> ProcessGroup:
    size, gpu = len(ranks), torch.device("cuda")
    group = ProcessGroup(store, group_rank, size)
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), group_rank, size, limit)
    # As torch's own `new_group` does: its debug modes compare these numbers among ranks.
    gloo._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if nccl:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group = limit, list(ranks)
        if split is not None:
            options.split_from, options.split_color = split
        backend = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), group_rank, size, options)
        backend._set_sequence_number_for_group()
        group._register_backend(gpu, ProcessGroup.BackendType.NCCL, backend)
        # At once, for a split needs all members of the parent, and a first batch of messages has not all of them.
        backend.eager_connect_single_device(device)
    elif device.type == "cuda":
        group._register_backend(gpu, ProcessGroup.BackendType.GLOO, gloo)
    return group

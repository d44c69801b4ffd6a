"""All that NCCL is given is launched in one order, whichever communicator it belongs to."""

from types import SimpleNamespace

import torch
from tests.comm.fake_cuda import fake_cuda

from torusgd.comm.groups import Group, launch_order

GPU = torch.device("cuda", 0)


def nccl_group(name: str, trace: list[str]) -> Group:
    """A group of two ranks whose torch group only notes what it is given."""

    def work() -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: trace.append(f"waits for {name}"))

    def begin(*arguments: object) -> SimpleNamespace:
        trace.append(f"begins {name}")
        return work()

    fake = SimpleNamespace(allreduce=begin, broadcast=begin, _reduce_scatter_base=begin)
    return Group(fake, (0, 1), 0, GPU, None, 60.0, nccl=True)


def tensor(trace: list[str]) -> SimpleNamespace:
    return SimpleNamespace(device=GPU, record_stream=lambda stream: trace.append(f"{stream.name} holds"))


def test_collectives_of_different_communicators_follow_each_other_on_one_stream() -> None:
    launch_order.cache_clear()
    with fake_cuda() as trace:
        rows, columns = nccl_group("rows", trace), nccl_group("columns", trace)
        rows.start_all_reduce(tensor(trace))
        columns.start_broadcast(tensor(trace))
        work = rows.start_all_reduce(tensor(trace))
    begins = ["order 0 waits for caller", "order 0 holds"]
    assert trace == [
        *(*begins, "begins rows", "waits for rows"),
        *(*begins, "begins columns", "waits for columns"),
        *(*begins, "begins rows", "waits for rows"),
    ]
    assert work.done()
    assert work.ended() is None
    launch_order.cache_clear()


def test_what_an_engine_enqueues_is_one_piece_of_the_order() -> None:
    """A reduce-scatter and the all-reduce after it stay together, and wait for the caller once."""
    launch_order.cache_clear()
    with fake_cuda() as trace:
        rows, columns = nccl_group("rows", trace), nccl_group("columns", trace)

        def both() -> None:
            rows.start_reduce_scatter_single(tensor(trace), tensor(trace)).wait()
            columns.start_all_reduce(tensor(trace)).wait()

        launch_order(GPU).enqueue([tensor(trace)], both)
    assert trace == [
        *("order 0 waits for caller", "order 0 holds"),
        *("begins rows", "waits for rows", "begins columns", "waits for columns"),
    ]
    launch_order.cache_clear()

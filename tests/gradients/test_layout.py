"""Which gradients travel together: rules, the papers' groups, and the best by a profile."""

from functools import partial
from itertools import combinations, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.gloo_world import alike, on_ranks
from tests.plan.measured import link, network, timing
from torch import nn

from torusgd.comm.allreduce import create
from torusgd.comm.groups import group_of
from torusgd.comm.tuning.profile import InStep, Profile
from torusgd.gradients.layout import Bucket, best_buckets, finish, group, lay_out
from torusgd.gradients.reducer import REBUILD_STEPS, BucketRebuild, Channel, Reducer, hook_parameters, parameter_slots


def profile(latency: float, per_byte: float) -> Profile:
    """Of a network of two ranks on which n bytes take latency + n * per_byte."""
    timings = tuple(
        timing(size, name, factor * (latency + size * per_byte))
        for size in (1 << 10, 1 << 16, 1 << 22)
        for name, factor in (("ring", 1), ("native", 2))
    )
    return network(message=0.0, between=link(latency / 2, per_byte), timings=timings)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    st.sampled_from(["auto", "cubic"]) | st.floats(1e-6, 10) | st.lists(st.integers(1, 9), max_size=9).map(tuple),
)
def test_every_tensor_lies_in_one_bucket_in_order(numels, rule):
    buckets = lay_out(rule, numels)
    assert [n for b in buckets for n in b.numels] == numels
    assert [b.first for b in buckets] == [0, *[b.stop for b in buckets[:-1]]]
    for b in buckets:
        assert b.offsets == tuple(sum(b.numels[:i]) for i in range(len(b.numels)))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 0.1)), min_size=1, max_size=7),
    st.floats(1e-5, 1e-1), st.floats(1e-10, 1e-7), st.just(0.0) | st.floats(1e-6, 1e-1),
)  # fmt: skip
def test_no_other_layout_is_summed_earlier_for_as_little_work(tensors, latency, per_byte, work):
    numels, ready = [n for n, _ in tensors], [-when for _, when in tensors]
    in_steps = (InStep(size=1, hidden=work, waited=latency + per_byte),)
    network = profile(latency, per_byte).model_copy(update={"in_steps": in_steps})

    def ends(layout: list[Bucket]) -> float:
        return finish(network, layout, ready) + work * len(layout)

    best = ends(best_buckets(network, numels, ready))
    inner = range(1, len(numels))
    for cuts in (cuts for many in range(len(numels)) for cuts in combinations(inner, many)):
        layout = group([b - a for a, b in pairwise([0, *cuts, len(numels)])], numels)
        assert best <= ends(layout) + 1e-12


def test_the_groups_of_the_published_systems_and_few_buckets_where_latency_is():
    numels = [1] * 161  # ResNet-50
    assert [b.stop - b.first for b in lay_out("cubic", numels)] == [3, 21, 57, 80]
    assert [b.stop - b.first for b in lay_out((3, 21, 57), numels)] == [3, 21, 57, 80]
    assert [b.length for b in lay_out(20 * 4 / 2**20, numels)] == [20] * 8 + [1]
    # Buckets are few where latency is and many where it is not.
    ready = [(i - 99) / 100 for i in range(100)]
    numels = [1 << 16] * 100
    late, near = (best_buckets(profile(latency, 1e-8), numels, ready) for latency in (0.2, 1e-5))
    assert len(late) < len(near)
    assert near[-1].length < near[0].length or len(near) == 100  # what leaves last is waited for


def reducer_of(model: nn.Module) -> Reducer:
    channels, maximum = {1: Channel(create("native"))}, partial(group_of().all_reduce, maximum=True)
    return Reducer(parameter_slots(model), "exact", 2, channels, maximum, rule="auto")


@on_ranks(2)
def test_buckets_are_rebuilt_once_on_all_ranks_alike_and_change_no_bit():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    reducer = reducer_of(model)
    hook_parameters(reducer)
    bucket_rebuild = BucketRebuild(reducer, profile(1e-9, 1e-6), group_of())
    lines, means = [], []
    inputs = torch.arange(64.0).repeat(8, 1) / 64

    def backward() -> None:
        reducer.begin_worker(last=True)
        model(inputs).sum().backward()
        reducer.end_worker()

    for _ in range(REBUILD_STEPS[-1] + 3):
        report = reducer.reduce(backward).report
        assert (report.overflow, report.nonfinite) == ([], [])
        reducer.apply_mean(2)
        means.append(torch.cat([t.grad.flatten() for t in reducer.owned if t.grad is not None]).tolist())
        lines.append(bucket_rebuild.after_step())
    alike([lines, means, [(b.first, b.stop) for b in reducer.layout.buckets]])
    assert [bool(line) for line in lines] == [False] * REBUILD_STEPS[-1] + [True] + [False] * 2
    assert "buckets auto: " in lines[REBUILD_STEPS[-1]]
    assert len(reducer.layout.buckets) > 1  # they began as one
    assert all(mean == means[0] for mean in means)


def test_without_a_profile_nothing_is_decided():
    bucket_rebuild = BucketRebuild(reducer_of(nn.Linear(4, 4)), None, group_of())
    assert {bucket_rebuild.after_step() for _ in range(REBUILD_STEPS[-1] + 2)} == {""}

"""A step as a timeline, and its messages: by hand, by what must hold, and as a run's own all-reduces are priced."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from torusgd.comm.algorithms import OTHER_PROGRAMS
from torusgd.comm.tuning.cost import rank_candidates
from torusgd.comm.tuning.profile import InStep, Profile
from torusgd.comm.tuning.profile import Link as MeasuredLink
from torusgd.gradients.layout import lay_out_slots
from torusgd.gradients.reducer import parameter_slots
from torusgd.models import MODELS
from torusgd.plan import model_cost
from torusgd.plan.cluster import Buckets, Cluster, Communication, Device, Link, Software, load_cluster, load_software
from torusgd.plan.model_cost import Gradient, Kernels, ModelCost, kernel_seconds, known_cost, update_seconds
from torusgd.plan.program import program_for
from torusgd.plan.step_script import Send, compose, cut_buckets
from torusgd.plan.timeline import grid_of, phases, slowest, step_time, step_work, topology_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import BucketSizes, RuntimeOptions

DEVICE = Device(name="any", peak={"float16": 1e12, "float32": 1e12}, memory_bandwidth=1e11)
LINK = Link(alpha=0.0, bandwidth=1e9)
TWO = Cluster(name="two", source="by hand", backend="gloo", device=DEVICE, inside=LINK, between=LINK)


def toy() -> ModelCost:
    """One forward and two backward kernels of 1 GFLOP an image; each backward kernel completes 1 M values."""

    def kernels(count: int) -> Kernels:
        zeros, ones = np.zeros(count), np.ones(count)
        return Kernels(ones * 1e9, zeros, zeros, ones, zeros, zeros)

    gradients = (Gradient("b", 10**6, False, 1), Gradient("a", 10**6, False, 2))
    return ModelCost(kernels(1), kernels(2), gradients, (), 0, 0.0)


def program(**options: object) -> Software:
    communication = Communication.model_validate({"algorithm": "ring", "buckets": {"rule": "layer"}, **options})
    zeros: Any = {"launch": 0.0, "jitter": 0.0, "update_bytes": 0}
    return Software(name="toy", source="", math=1.0, memory=1.0, communication=communication, **zeros)


def test_the_roofline_adds_up_and_fused_kernels_leave_their_arithmetic_behind() -> None:
    kernels = Kernels(*(np.array([value]) for value in (2e9, 1e6, 5e5, 2.0, 0.0, 0.0)))
    software = Software(name="x", source="", math=0.5, memory=0.8, launch=1e-5)
    expected = 2 * 1e-5 + 3 * 2e9 / 0.5e12 + (3 * 1e6 + 5e5) * 4 / 0.8e11
    assert kernel_seconds(kernels, DEVICE, software, images=3)[0] == pytest.approx(expected)
    kernels = Kernels(*(np.array([value]) for value in (0.0, 1e6, 0.0, 1.0, 1.0, 0.0)))
    apart, fused = (Software(name="x", source="", fused=flag) for flag in (False, True))
    assert kernel_seconds(kernels, DEVICE, apart, 4)[0] > 0 == kernel_seconds(kernels, DEVICE, fused, 4)[0]


@pytest.mark.parametrize(("how", "images", "passes", "expected"), [
    # A ring of two sends each byte once: 2 * 4 MB at 1 GB/s.
    ({"overlap": False}, 1, 1, {"forward": 1e-3, "backward": 2e-3, "exposed": 8e-3, "seconds": 11e-3}),
    # The first bucket is ready after 1 ms and takes 4; the second is ready after 2 and ends at 9: 7 ms late.
    ({"overlap": True}, 1, 1, {"exposed": 7e-3, "hidden": 1e-3}),
    ({"overlap": True, "contention": 0.5}, 1, 1, {"contention": 0.5e-3}),
    # Ten times the images: the first bucket hides wholly, the second not at all.
    ({"overlap": True}, 10, 1, {"exposed": 4e-3}),
    # Only the last of several passes hides anything.
    ({"overlap": True}, 1, 3, {"exposed": 7e-3, "compute": 9e-3}),
])  # fmt: skip
def test_what_is_ready_early_hides_behind_backward(how, images: int, passes: int, expected: dict[str, float]) -> None:
    step = step_time(toy(), TWO, program(**how), devices=2, images=images, passes=passes)
    assert {part: getattr(step, part) for part in expected} == pytest.approx(expected)


def test_local_steps_update_a_copy_each_and_send_their_change_after_the_last() -> None:
    # An update of 2 M weights moves 20 bytes of each at 100 GB/s: 0.4 ms.
    routine = model_cost.Routine(local_steps=4)
    step = step_time(toy(), TWO, program(overlap=True), devices=2, images=4, passes=2, routine=routine)
    expected = {"forward": 2 * 4e-3, "backward": 2 * 4 * 2.4e-3, "exposed": 8e-3, "hidden": 0.0}
    assert {part: getattr(step, part) for part in expected} == pytest.approx(expected)


def test_messages_slow_what_hides_them_and_a_pipelined_grid_works_on_both_axes_at_once() -> None:
    link = MeasuredLink(latency=0.0, latency_error=0.0, per_byte=1e-9, per_byte_error=0.0)
    measured = Profile(backend="gloo", hosts=(0, 1, 2), message=0.0, inside=None, between=link, timings=())
    measured = measured.model_copy(update={"in_steps": (InStep(size=1, hidden=1e-3, waited=1.0),)})
    here = TWO.model_copy(update={"profile": measured, "crowding": {2: 1.0, 3: 4.0}})
    alone, slower = (step_time(toy(), where, program(overlap=True), devices=2, images=10) for where in (TWO, here))
    # Two messages, of which the half is hidden, at a quarter of what they cost three ranks.
    assert slower.contention == pytest.approx(alone.contention + 2 * 1e-3 / 2 / 4)
    assert slower.seconds == pytest.approx(alone.seconds + 1e-3 / 4)
    for devices_per_node, gains in ((2, True), (1, False), (4, False)):  # else both axes have one kind of link
        four = TWO.model_copy(update={"devices_per_node": devices_per_node})
        programs = (program(algorithm="torus", overlap=True, pipelined=flag) for flag in (False, True))
        apart, at_once = (step_time(toy(), four, each, devices=4, images=1) for each in programs)
        assert (at_once.exposed < 0.999 * apart.exposed) == gains


def test_the_slowest_of_many_against_drawn_ones() -> None:
    draws = np.random.default_rng(0).normal(size=(4000, 256)).max(axis=1)
    for quantile in (0.05, 0.5, 0.95):
        assert slowest(256, quantile) == pytest.approx(float(np.quantile(draws, quantile)), abs=0.05)


@settings(max_examples=40)
@given(devices=st.integers(1, 100_000), images=st.integers(1, 256))
def test_more_of_anything_bad_never_helps(devices: int, images: int) -> None:
    abci, nnl, cost = load_cluster("abci"), load_software("nnl-fp16"), known_cost("resnet50")
    step = step_time(cost, abci, nnl, devices, images)
    assert math.isfinite(step.seconds)
    assert min(vars(step).values()) >= -1e-12
    assert step_time(cost, abci, nnl, devices, images + 1).compute > step.compute
    low, high = (step_time(cost, abci, nnl, devices, images, quantile=q).seconds for q in (0.05, 0.95))
    assert low <= step.seconds <= high
    shaky = nnl.model_copy(update={"jitter": nnl.jitter * 2})
    assert step_time(cost, abci, shaky, devices, images).seconds >= step.seconds


@pytest.mark.parametrize("part", ["compute", "update"])
def test_crowded_nodes_are_slower(part: str) -> None:
    full = TWO.model_copy(update={"crowding": {2: 1.3, 4: 2.3}})
    software = program().model_copy(update={"update_bytes": 24.0})
    alone, *others = (getattr(step_time(toy(), full, software, n, 1), part) for n in (1, 2, 3, 9))
    assert alone > 0
    assert others == pytest.approx([1.3 * alone, 1.8 * alone, 2.3 * alone])


def unsplit(software: Software, **options: object) -> Software:
    """Whose linear layers are whole on each device."""
    communication = software.communication.model_copy(update={"linear_groups": None, **options})
    return software.model_copy(update={"communication": communication})


def test_splitting_heavy_layers_trades_weights_for_activations_and_weights_first_leave_earlier() -> None:
    cori, pcl, vgg = load_cluster("cori"), load_software("pcl-dnn"), known_cost("vgg-a")
    split, whole = (step_time(vgg, cori, software, 64, 4) for software in (pcl, unsplit(pcl)))
    assert split.exchange > 0 == whole.exchange
    assert split.seconds < whole.seconds
    cost, late = known_cost("vgg-a"), Software(name="x", source="")
    early = late.model_copy(update={"weights_first": True})
    a, b = (model_cost.pass_seconds(cost, DEVICE, s, 4) for s in (late, early))
    assert a.backward == b.backward
    assert (b.ready <= a.ready).all()
    assert (b.ready < a.ready).sum() == 16  # weight and bias of 8 convolutions


def test_a_measured_step_is_met_and_slow_input_coordinators_and_sharded_updates_take_their_time() -> None:
    cost, software = known_cost("resnet50"), Software(name="x", source="", jitter=0.0)
    fitted = model_cost.matched(software, cost, DEVICE, images=8, seconds=3.5, update=0.25, workers=4)
    step = step_time(cost, TWO, fitted, 1, 8, passes=4)
    assert (step.compute, step.update) == pytest.approx((3.5, 0.25))
    assert step_time(cost, TWO, fitted, 2, 8, passes=2).update == pytest.approx(0.25)
    more, fewer = (model_cost.memory_bytes(cost, software, images) for images in (32, 16))
    assert more - fewer == 16 * cost.activations * 4
    step = step_time(toy(), TWO, program().model_copy(update={"input_rate": 100.0}), devices=1, images=5)
    assert step.seconds == pytest.approx(5 / 100)
    assert step.input > 0
    steps = [step_time(toy(), TWO, program(coordination=1e-5), n, 1).coordination for n in (1, 100)]
    assert steps == [0.0, pytest.approx(1e-3)]
    whole = Software(name="x", source="", memory=1.0, update_bytes=20)
    shard = whole.model_copy(update={"sharded_update": True})
    assert update_seconds(toy(), TWO, whole, 8) == pytest.approx(2e6 * 20 / 1e11)
    assert update_seconds(toy(), TWO, shard, 8) == pytest.approx(2e6 * 20 / 1e11 / 8)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.sampled_from([
    Buckets(), Buckets(rule="layer"), Buckets(rule="parts", parts=7), Buckets(rule="values", values=999),
]))  # fmt: skip
def test_buckets_carry_every_byte_once_and_in_order(sizes: list[int], rule: Buckets) -> None:
    gradients = tuple(Gradient(f"g{i}", size, i % 3 == 0, i + 1) for i, size in enumerate(sizes))
    found = cut_buckets(gradients, np.arange(1.0, len(sizes) + 1), rule, wire_bytes=2)
    assert sum(bucket.bytes for bucket in found) == pytest.approx(2 * sum(sizes))
    assert [bucket.ready for bucket in found] == sorted(bucket.ready for bucket in found)
    assert found[-1].ready == len(sizes)
    if rule.values:
        assert all(bucket.bytes <= 2 * rule.values + 1e-6 for bucket in found)


def test_fujitsus_groups_and_bad_ones() -> None:
    """3, 21, 57 and 80 tensors; batch norm's gradients and the bias at the end in 32 bits (0.21 MB)."""
    cost, ready = known_cost("resnet50"), np.linspace(0, 1, 161)
    found = cut_buckets(cost.gradients, ready, Buckets(rule="cubic"), wire_bytes=2)
    assert [bucket.ready for bucket in found] == pytest.approx([ready[i] for i in (2, 23, 80, 160, 160)])
    # MXNet numbers a block's shortcut elsewhere, which moves 4 MB between the second and the third.
    assert [bucket.bytes / 1e6 for bucket in found] == pytest.approx([4.1, 17.83, 23.2, 5.88, 0.21], rel=0.25)
    assert sum(bucket.bytes for bucket in found[:-1]) == 2 * (25_557_032 - 53_120 - 1000)
    with pytest.raises(ValidationError, match="parts: "):
        Buckets(rule="parts")


@pytest.mark.parametrize("option", ["cubic", "auto", 1.0, (3, 21, 57)])
def test_batch_norms_gradients_leave_last_in_32_bits_as_in_a_run(option: BucketSizes) -> None:
    cost, ready = known_cost("resnet50"), np.linspace(0, 1, 161)
    is_wide = [gradient.is_norm for gradient in cost.gradients]
    found = cut_buckets(cost.gradients, ready, Buckets(rule="torusgd", option=option), 2, is_wide)
    with torch.device("meta"):
        slots = parameter_slots(MODELS["resnet50"](classes=1000, channels=3), wide_norms=True)
    layout = lay_out_slots(slots, option)
    assert [(bucket.first, bucket.stop) for bucket in found] == [(b.first, b.stop) for b in layout.buckets]
    sizes = [(4 if layout.held[b.first].is_wide else 2) * b.length for b in layout.buckets]
    assert [bucket.bytes for bucket in found] == sizes
    assert sum(bucket.values for bucket in found) == cost.parameters
    assert [bucket.ready for bucket in found] == sorted(bucket.ready for bucket in found)
    assert (found[-1].bytes, found[-1].ready) == (4 * 53_120, 1.0)


def test_a_plan_sends_float32_norms_where_the_recipe_asks_for_them() -> None:
    sizes, cost, runtime = {}, known_cost("resnet50"), RuntimeOptions(workers=16, buckets="cubic", update="sharded")
    for switch in ("true", "false"):
        recipe = load_recipe("fujitsu-62s", [f"float32_norms={switch}"]).recipe
        how = program_for(recipe, runtime, load_cluster("abci"), load_software("torusgd"))
        script = compose(cost, TWO, how, 16, 28, 1, step_work(cost, TWO, how, 16, 28))
        sent = [action for action in script if isinstance(action, Send)]
        sizes[switch] = [send.bytes for send in sent if send.content == "gradients"]
        # Weights are gathered in 32 bits, whatever their gradients travel in.
        assert sum(send.bytes for send in sent if send.content == "weights") == 4 * cost.parameters
    assert sum(sizes["false"]) == 2 * 25_557_032 == sum(sizes["true"]) - 2 * 53_120
    assert (len(sizes["false"]), len(sizes["true"]), sizes["true"][-1]) == (4, 5, 4 * 53_120)


def test_a_sharded_update_hides_its_gathers_behind_the_next_forward_pass() -> None:
    """Forward 10 ms; scatters end 1 and 5 ms after backward as in an all-reduce's first halves; gathers take 4 each."""
    ahead = program(overlap=True, gather_ahead=True).model_copy(update={"sharded_update": True})
    replicated = step_time(toy(), TWO, program(overlap=True), devices=2, images=10)
    sharded = step_time(toy(), TWO, ahead, devices=2, images=10)
    # Both layers of the toy are needed by its one forward kernel, so that both gathers are waited for before it.
    assert sharded.exposed == pytest.approx(2e-3 + 4e-3, rel=1e-4)
    assert replicated.exposed == pytest.approx(4e-3)
    vgg, aws, pcl = known_cost("vgg-a"), load_cluster("aws-c4.8xlarge"), load_software("pcl-dnn")
    programs = (unsplit(pcl), unsplit(pcl, gather_ahead=True))
    late, soon = (step_time(vgg, aws, software, 16, 16).exposed for software in programs)
    assert soon < 0.8 * late


def cluster(**changes: object) -> Cluster:
    near, far = Link(alpha=1e-6, bandwidth=100e9), Link(alpha=5e-6, bandwidth=20e9)
    values = {"name": "test", "source": "by hand", "backend": "gloo", "device": DEVICE, "inside": near, "between": far}
    return Cluster.model_validate({**values, "devices_per_node": 4, **changes})


def total(machine: Cluster, ranks: int, size: float, **communication: Any) -> float:
    return sum(p.seconds for p in phases(machine, Communication.model_validate(communication), ranks, size))


@pytest.mark.parametrize("size", [4096.0, 1e9])
def test_native_is_that_of_the_backend(size: float) -> None:
    gpus = cluster(backend="nccl")
    assert total(gpus, 512, size, algorithm="native") == total(gpus, 512, size, algorithm="nccl")
    assert total(cluster(), 512, size, algorithm="native") == total(gpus, 512, size, algorithm="ring")


@pytest.mark.parametrize(("how", "ranks", "expected"), [
    # Of 4 hops of a ring 3 are inside; the one flow that leaves a node has its 20 GB/s for itself.
    ({"algorithm": "ring"}, 16, 30 * (3 * 1e-6 + 5e-6) / 4 + 30 / 16 * 1e6 / 20e9),
    ({"algorithm": "ring", "message": 1e-3}, 16, 30 * (1e-3 + (3 * 1e-6 + 5e-6) / 4) + 30 / 16 * 1e6 / 20e9),
    # Rows of one node, as on ABCI.
    ({"algorithm": "torus", "grid": "node"}, 32,
     6 * 1e-6 + 14 * 5e-6 + 2 * 3 / 4 * 1e6 / 100e9 + 2 * 7 / 8 * 1e6 / 4 / 5e9),
    ({"algorithm": "tree"}, 32, 2 * (3 * 1e-6 + 3 * 5e-6 + 1e6 / 20e9)),
    # Every card sends and receives each byte of its part once.
    ({"algorithm": "in-network"}, 32, 2 * (3 * 1e-6 + 0.75e6 / 100e9) + 2 * 5e-6 + 1e6 / 20e9),
])  # fmt: skip
def test_a_megabyte_by_hand(how: dict[str, Any], ranks: int, expected: float) -> None:
    """Formulas of a run's own all-reduces: tests/comm/tuning/test_cost.py."""
    assert total(cluster(), ranks, 1e6, **how) == pytest.approx(expected)


def test_a_clusters_limits_are_those_of_the_topology_and_a_given_grid_goes_before_the_rule() -> None:
    slow = Link(alpha=5e-6, bandwidth=20e9, efficiency=0.5, stream=1e9)
    limited = cluster(between=slow, rack_nodes=8, taper=0.25)
    found = topology_of(limited, 64, Communication(message=1e-3, streams=2))
    assert (found.per_host, found.message, found.rack_hosts, found.taper) == (4, 1e-3, 8, 0.25)
    assert (found.between.beta, found.stream) == pytest.approx((1 / 10e9, 1 / 2e9))
    assert topology_of(limited, 2, Communication()).per_host == 2
    communication = Communication(algorithm="torus", grids=((48, 72),))
    assert [grid_of(communication, cluster(), ranks) for ranks in (3456, 1024)] == [(48, 72), (32, 32)]
    rows = Communication(algorithm="torus", grid="node")
    assert [grid_of(rows, cluster(), ranks) for ranks in (2048, 12, 4, 6)] == [(512, 4), (3, 4), (1, 4), (3, 2)]
    assert phases(cluster(), Communication(), 4, 1e9, "sum", 1, 4) == ()
    assert phases(cluster(), Communication(), 1, 1e9) == ()


@pytest.mark.parametrize(("apart", "columns"), [(4, 4), (2, 2)])
def test_rings_beside_each_other_share_the_cards_of_a_node(apart: int, columns: int) -> None:
    """Groups of 8 ranks: each of a node's 4 ranks in a group of its own, or two in each of two groups."""
    (phase,) = phases(cluster(), Communication(algorithm="ring"), 8 * apart, 1e6, "sum", 8, apart)
    alpha = 5e-6 if apart == 4 else (1e-6 + 5e-6) / 2
    assert phase.seconds == pytest.approx(2 * 7 * (alpha + 1e6 / 8 / (20e9 / columns)))


ALGORITHMS = (
    "auto", "native", "ring", "halving-doubling", "doubling", "direct", "torus", "torus:halving/ring",
    "torus:doubling/direct", "torus:doubling", "hierarchical", "hierarchical:halving/direct", *OTHER_PROGRAMS,
)  # fmt: skip


@settings(max_examples=60)
@given(st.sampled_from(ALGORITHMS), st.integers(2, 3000), st.floats(1, 1e9), st.sampled_from([1, 2, 4, 8]))
def test_better_hardware_and_fewer_bytes_never_cost_more(algorithm: str, ranks: int, size: float, per_node) -> None:
    def cost(size: float, alpha: float = 5e-6, bandwidth: float = 20e9, taper: float = 1.0) -> float:
        link = Link(alpha=alpha, bandwidth=bandwidth)
        machine = cluster(devices_per_node=per_node, between=link, rack_nodes=16, taper=taper)
        return total(machine, ranks, size, algorithm=algorithm)

    base = cost(size)
    assert 0 < base < math.inf
    assert min(cost(size, alpha=1e-5), cost(size, bandwidth=10e9), cost(size, taper=0.3)) >= base
    assert cost(size * 2) > base


@settings(max_examples=60)
@given(st.sampled_from(ALGORITHMS), st.integers(2, 500), st.floats(1, 1e9), st.sampled_from([1, 3, 4, 8]))
def test_shards_are_summed_and_gathered_in_halves(algorithm: str, ranks: int, size: float, per_node: int) -> None:
    """Where an algorithm leaves no shards, another one stands for it, as in a run."""
    how = cluster(devices_per_node=per_node), Communication(algorithm=algorithm), ranks, size
    whole, scatter, gather = phases(*how, "sum"), phases(*how, "scatter"), phases(*how, "gather")
    assert [phase.link for phase in gather] == [phase.link for phase in reversed(scatter)]
    moved = sum(phase.seconds for phase in (*scatter, *gather))
    if "doubling" in algorithm or algorithm.startswith("hierarchical") or algorithm == "auto":
        assert moved > 0
    else:
        assert moved == pytest.approx(sum(phase.seconds for phase in whole))


@settings(max_examples=60)
@given(st.integers(2, 3000), st.integers(1, 1 << 28), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1e-6, 1e-4]))
def test_auto_plans_what_a_run_would_take(ranks: int, size: int, per_node: int, message: float) -> None:
    """A run ranks the same candidates by the same price; in one chunk no other one of them is quicker."""
    machine = cluster(devices_per_node=per_node)
    topology = topology_of(machine, ranks, Communication(algorithm="auto", message=message))
    quickest = min(
        total(machine, ranks, size, algorithm=each.name, grids=(each.grid,), message=message)
        for each, _ in rank_candidates(size, ranks, topology)
    )
    assert total(machine, ranks, size, algorithm="auto", message=message) == pytest.approx(quickest)


@pytest.mark.parametrize("name", ["magic", "ring:halving", "torus:best", "hierarchical:ring/doubling"])
def test_an_all_reduce_that_there_is_not_is_named(name: str) -> None:
    with pytest.raises(ValidationError, match=f"allreduce {name}: "):
        Communication(algorithm=name)

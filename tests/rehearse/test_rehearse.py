"""Rehearsals: the script of a step, the scale, the walk by formulas, and a short play in the network lab."""

import io
import json
import os
import sys
from functools import partial
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.messages import refuses
from tests.plan.measured import VGG, vgg
from tests.rehearse.marks import needs_lab
from torusgd.errors import RunError
from torusgd.plan.cluster import Communication, Software, load_cluster, load_software
from torusgd.plan.forecast import with_communication
from torusgd.plan.model_cost import update_seconds
from torusgd.plan.program import as_torusgd, program_for
from torusgd.plan.step_script import Action, Compute, Send, Wait, compose
from torusgd.plan.timeline import Phase, compute_seconds, price_of, step_time, step_work, waited_seconds
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.rehearse import lab, wire
from torusgd.rehearse.player import dump, elements
from torusgd.rehearse.rehearsal import SHARE, Ceiling, choose_scale
from torusgd.tensor_parallel.tail import hybrid_volume

AWS = load_cluster("aws-c4.8xlarge")


def program(linear_groups: int | None = None, overlap: bool = True, **runtime: object) -> Software:
    options = RuntimeOptions.model_validate({"workers": 16, "allreduce": "ring", **runtime})
    ours = program_for(VGG, options, AWS, as_torusgd(load_software("pcl-dnn")))
    return with_communication(ours, linear_groups=linear_groups, overlap=overlap)


def script_of(software: Software, devices: int = 16) -> list[Action]:
    (stage,) = vgg().stages
    work = step_work(vgg().cost, AWS, software, devices, stage.images)
    return compose(vgg().cost, AWS, software, devices, stage.images, stage.workers // devices, work)


def sent(script: list[Action]) -> dict[str, Send]:
    return {action.name: action for action in script if isinstance(action, Send)}


@pytest.mark.parametrize(
    ("how", "devices"), [*product(({}, {"update": "sharded"}, {"overlap": False}), (2, 16)), ({"linear_groups": 2}, 16)]
)
def test_a_script_computes_what_the_plan_does_and_waits_for_all_that_it_sends(how, devices):
    software = program(**how)
    script = script_of(software, devices)
    step = step_time(vgg().cost, AWS, software, devices, 16, 16 // devices)
    assert compute_seconds(script) == pytest.approx(step.compute + step.update)
    names = [action.name for action in script if isinstance(action, Send)]
    assert len(set(names)) == len(names) > 0
    assert {action.name for action in script if isinstance(action, Wait)} == set(names)
    waited = waited_seconds(script, partial(price_of, AWS, software.communication, devices), pipelined=True)
    assert waited == pytest.approx(step.exposed + step.exchange)


def test_a_sharded_update_sends_every_gradient_to_its_strip_and_gathers_first_what_is_needed_first():
    script = script_of(program(update="sharded"))
    scatters, gathers = ([s for s in sent(script).values() if s.kind == kind] for kind in ("scatter", "gather"))
    assert sum(send.bytes for send in scatters) == sum(send.bytes for send in gathers) == 4 * vgg().cost.parameters
    waits = [action.name for action in script if isinstance(action, Wait) and action.name.startswith("weights")]
    assert [send.name for send in gathers] == waits
    first, last = script.index(Wait(waits[0])), script.index(Wait(waits[-1]))
    assert compute_seconds(script[:first]) == 0 < compute_seconds(script[first:last])


def test_a_walk_by_hand() -> None:
    """Two messages of 3 s on one line; the second is waited for in the next step."""
    first: list[Action] = [Wait("b"), Compute(1.0), Send("a", "sum", "gradients", 1.0)]
    script = [*first, Wait("a"), Send("b", "gather", "weights", 1)]
    price = lambda message: (Phase("line", 3.0),)  # noqa: E731
    assert waited_seconds(script, price, pipelined=True) == pytest.approx(6.0)
    hidden: list[Action] = [Compute(1.0), Wait("b"), Compute(9.0), Send("b", "gather", "weights", 1.0)]
    assert waited_seconds(hidden, price, pipelined=True) == pytest.approx(2.0)
    axes: list[Action] = [Send("a", "sum", "gradients", 1.0), Send("b", "sum", "gradients", 1.0), Wait("a"), Wait("b")]
    both = lambda message: (Phase("h", 2.0), Phase("v", 1.0))  # noqa: E731
    assert waited_seconds(axes, both, pipelined=True) == pytest.approx(5.0)
    assert waited_seconds(axes, both, pipelined=False) == pytest.approx(6.0)


@settings(max_examples=80)
@given(
    st.builds(Ceiling, st.floats(1e-5, 1e-2), st.floats(1e6, 1e9)), st.floats(1e-3, 10), st.floats(1e3, 1e9),
    st.integers(2, 64), st.floats(1, 30),
)  # fmt: skip
def test_a_scaled_message_takes_as_much_longer_as_a_step_does(ceiling, seconds, size, ranks, limit):
    scale = choose_scale(AWS, Communication(message=1e-5), ceiling, seconds, size, ranks, limit)
    alpha, bandwidth = AWS.between.alpha, AWS.between.bandwidth * AWS.between.efficiency
    assert size / scale.shrink / scale.rate == pytest.approx(scale.stretch * size / bandwidth)
    # What the lab adds to its own round, or what its own is too long, makes up a scaled one.
    assert ceiling.round + scale.latency - scale.stretch * scale.excess == pytest.approx(scale.stretch * (alpha + 1e-5))
    assert min(scale.stretch, scale.shrink) >= 1
    assert scale.rate <= SHARE * ceiling.rate * (1 + 1e-9) or scale.stretch * scale.shrink == 1
    assert scale.stretch * seconds <= max(limit, seconds) * (1 + 1e-9)


def test_messages_shrink_but_never_vanish_and_a_part_survives_its_file():
    send = Send("a", "sum", "gradients", 4000.0)
    assert [elements(send, shrink, torch.int32) for shrink in (1, 10, 1e9)] == [1000, 100, 1]
    assert elements(send, 1, torch.float16) == 2000
    script: list[Action] = [Compute(0.5), Send("a", "sum", "gradients", 8.0, 2, 4), Wait("a")]
    part = json.loads(dump(script, 3, 2.0, 4.0, "ring", None, "int32"))
    assert part["actions"] == [["Compute", 0.5], ["Send", "a", "sum", "gradients", 8.0, 2, 4], ["Wait", "a"]]


@pytest.mark.parametrize("flags", ["--cluster dgx2h", "--cluster abci --devices 6", "--devices 17", "--allreduce nccl"])
def test_mistakes_are_one_line(flags, mistake):
    mistake("rehearse", "intel-aws-vgga-16", "--cluster", "aws-c4.8xlarge", "--devices", 16, *flags.split())


def test_split_layers_send_what_the_balance_equations_say_and_are_updated_where_they_are_kept():
    script = script_of(program(linear_groups=4))
    layers = {layer.name: layer for layer in vgg().cost.layers if layer.linear}
    assert len(layers) == 3
    for name, layer in layers.items():
        messages = sent(script)
        inputs, back = messages[f"inputs of {name}"], messages[f"gradients of the inputs of {name}"]
        shards = messages[f"gradients of {name}"]
        activations, weights = hybrid_volume(layer.ifm * layer.in_area, layer.weights, 16, 256, 4)
        assert (inputs.members, inputs.apart, shards.members, shards.apart) == (4, 1, 4, 4)
        # A reduce-scatter or an all-gather moves all but a rank's own part; a sum is both.
        assert (inputs.bytes + back.bytes) * 3 / 4 == pytest.approx(activations)
        assert 2 * shards.bytes * 3 / 4 == pytest.approx(weights)
    assert not any("classifier" in message.name and message.members is None for message in sent(script).values())
    whole, split = (update_seconds(vgg().cost, AWS, program(linear_groups=g), 16) for g in (None, 4))
    linear = sum(layer.weights for layer in layers.values())
    assert split / whole == pytest.approx((vgg().cost.parameters - 0.75 * linear) / vgg().cost.parameters)


def test_without_a_lab_it_says_so(monkeypatch, run_cli):
    monkeypatch.setattr(wire, "why_not", lambda: "the network lab needs root, for network namespaces")
    code, _, err = run_cli("rehearse", "intel-aws-vgga-16", "--cluster", "aws-c4.8xlarge", "--devices", 16)
    assert (code, err) == (1, "torusgd: rehearse: the network lab needs root, for network namespaces\n")


def test_a_lab_that_root_may_not_make_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(wire, "unshare", Mock(side_effect=PermissionError(1, "a new network namespace: Not permitted")))
    monkeypatch.setattr(wire, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([1, [[0.0, 1e6]], ["10.77.0.1"], 16, 1500, 1500, {}])))
    wire.main()
    read, write = os.pipe()
    os.write(write, capsys.readouterr().out.encode())
    os.close(write)
    helper = object.__new__(lab._Helper)
    with open(read) as helper._output:
        refuses("a lab in a container", helper.answer, 5.0, about="the network lab can't be made:", kind=RunError)


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("more", [(), ("--update", "sharded", "--model-parallel", 2)])
def test_a_short_rehearsal(tmp_path, run_cli, more):
    """CD-DNN on 2 nodes, or 4 in groups of 2: far more to send than to compute, so that waiting can't be missed."""
    path = tmp_path / "found.json"
    machine = ("--cluster", "endeavor", "--devices", 4 if more else 2)
    code, printed, err = run_cli(
        "rehearse", "intel-cddnn-16", *machine, "--steps", 1, "--seconds", 0.5, "--json", path, *more
    )
    assert code == 0, err
    assert "exposed communication" in printed
    assert "bytes / " in printed
    found = json.loads(path.read_text())
    # No link of the lab is faster than it was set to be, so that what must be sent bounds the wait from below.
    assert found["exposed_rehearsed"] > 0.5 * found["exposed_predicted"] > 0
    assert found["seconds"] == pytest.approx(
        found["seconds_predicted"] - found["exposed_predicted"] + found["exposed_rehearsed"]
    )

"""Profiles: fitted, saved, checked when read, and what is chosen by them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refuses
from tests.plan.measured import link, network, timing

from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.tuning.profile import InStep, Profile, expect, explain, hidden, ranks_a_host, waited
from torusgd.comm.tuning.tune import fit

ROWS = [(4096, "native", 0.3), (4096, "doubling", 0.03), (4096, "torus:direct", 0.04, (4, 4))]
ROWS += [(1 << 20, "native", 0.3), (1 << 20, "doubling", 0.1), (1 << 20, "torus:direct", 0.05, (4, 4))]


def profile(per_byte: float = 8e-9, rows: Sequence[tuple[Any, ...]] = ROWS) -> Profile:
    """Of 16 hosts."""
    timings = tuple(timing(*row) for row in rows)
    return network(tuple(range(16)), message=1e-4, between=link(5e-3, per_byte), timings=timings)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-6), st.integers(0, 1000))
def test_the_fit_finds_latency_and_bandwidth_within_its_own_error(latency, per_byte, seed):
    sizes = [1 << 10, 1 << 15, 1 << 18, 1 << 20] * 6
    noise = 1 + 0.05 * np.random.default_rng(seed).standard_normal(len(sizes))
    found = fit(sizes, [(latency + per_byte * size) * n for size, n in zip(sizes, noise, strict=True)])
    assert abs(found.latency - latency) <= 5 * found.latency_error + 1e-12
    assert abs(found.per_byte - per_byte) <= 5 * found.per_byte_error + 1e-18
    assert found.latency_error > 0


def test_the_fit_never_goes_below_zero():
    assert fit([1000, 2000, 4000], [3e-3, 2e-3, 1e-3]).per_byte == 0
    assert fit([1000, 2000, 4000], [1e-6, 4e-6, 16e-6]).latency == 0


def test_a_profile_is_read_as_it_was_written_and_a_missing_one_refused(tmp_path):
    path = tmp_path / "none.json"
    refuses("a missing profile", Profile.load, path, about=f"profile {path}", FILE=path)
    path.write_text(profile().dump())
    assert Profile.load(path) == profile()


def test_what_a_message_adds_is_even_between_the_points_and_grows_with_the_message_beyond() -> None:
    points = (InStep(size=4096, hidden=0.001, waited=0.01), InStep(size=12288, hidden=0.003, waited=0.02))
    measured = profile().model_copy(update={"in_steps": points})
    assert (hidden(profile(), 4096), waited(profile(), 4096)) == (0, expect(profile(), 4096)[1])
    assert [hidden(measured, size) for size in (1, 4096, 8192, 12288)] == pytest.approx([0.001, 0.001, 0.002, 0.003])
    assert [waited(measured, size) for size in (1, 8192, 12288)] == pytest.approx([0.01, 0.015, 0.02])
    long, last = (expect(measured, size)[1] for size in (1 << 22, 12288))
    costly = measured.model_copy(update={"in_steps": (InStep(size=12288, hidden=9 * last, waited=0.02),)})
    grown, both = (0.003 * long / last, 8 * last + long), (hidden(measured, 1 << 22), hidden(costly, 1 << 22))
    assert (*both, waited(measured, 1 << 22)) == pytest.approx((*grown, 0.02 + long - last))


def change(**values: object) -> str:
    return json.dumps({**json.loads(profile().model_dump_json()), **values})


def timed_by(algorithm: str, grid: object = None) -> str:
    return change(timings=[{"size": 1, "algorithm": algorithm, "grid": grid, "chunks": 1, "median": 1}])


@pytest.mark.parametrize(("text", "wrong"), [
    ("nonsense", "JSON"), (change(version=1), "version"), (change(hosts=[]), "hosts"), (change(message=-1), "message"),
    (change(extra=1), "extra"), (change(between={"latency": "fast"}), "between.latency"), (timed_by("tree"), "tree"),
    (timed_by("torus", [3, 3]), "3x3"), (timed_by("ring"), "native"), (change(between=None), "between"),
    (change(hosts=[0] * 16), "inside"), (change(hosts=[0] * 70000), "hosts.too"),
    (timed_by("native").replace('"size": 1', f'"size": {10**400}'), "size"),
    (timed_by("native").replace('"median": 1', '"median": 0'), "median"),
])  # fmt: skip
def test_a_wrong_profile_is_refused_in_one_line(tmp_path, text, wrong):
    path = tmp_path / "p.json"
    path.write_text(text)
    refuses(f"a profile with a wrong {wrong}", Profile.load, path, about=f"profile {path}", FILE=path)


def chosen(measured: Profile, size: int) -> str:
    return str(expect(measured, size)[0] or "native")


def test_what_was_fastest_runs_and_beyond_the_timed_sizes_the_formulas_carry_on():
    assert chosen(profile(), 4096) == "doubling"
    assert expect(profile(), 1 << 20) == (parse_algorithm("torus:direct", 16, (4, 4)), 0.05, 0.3)
    assert chosen(profile(rows=[(4096, "native", 0.03), *ROWS[1:]]), 4096) == "native"
    # Doubling moves four times what a torus does: however fast at 4 KiB, it must not be taken for 64 MiB.
    assert not chosen(profile(rows=ROWS[:3]), 1 << 26).startswith("doubling")
    # Far beyond the timed sizes native stays unless much is won.
    for ours, size, name in ((0.745, 1 << 22, "torus"), (0.745, 1 << 24, "native"), (0.3, 1 << 24, "torus")):
        rows = [(1 << 22, "native", 0.872), (1 << 22, "torus:direct", ours, (4, 4)), (1 << 22, "ring", 1.05 * ours)]
        assert chosen(profile(8e-8, rows), size).startswith(name)
    rows = [(1 << 22, "native", 0.866), (1 << 22, "ring", 0.691), (1 << 22, "torus", 0.726, (4, 4))]
    assert chosen(profile(8e-8, rows), 1 << 23).startswith("ring"), "the formulas add the same to both"


def test_the_choice_is_explained_in_one_line():
    text = explain(profile(), "from p.json")
    assert text.startswith("allreduce auto: 16 ranks on 16 hosts; 5.00 ms and 1.00 Gb/s between hosts; doubling to")
    assert "KiB, torus:direct 4x4 to" in text
    assert text.endswith("above (from p.json)")


def test_hosts_of_different_sizes_share_the_link_of_the_fullest():
    uneven = profile().model_copy(update={"hosts": (0, 0, 0, 1), "inside": link(1e-5, 1e-10)})
    topology = uneven.topology
    assert topology.per_host == 1
    assert topology.between.beta == pytest.approx(3 * 8e-9)
    near = uneven.model_copy(update={"hosts": (0, 0), "between": None}).topology
    assert near.between == near.inside == (1e-5, 1e-10)


@pytest.mark.parametrize(("hosts", "each"), [
    ((0,), 1), ((0, 0), 2), ((0, 0, 1, 1), 2), ((0, 1, 2), 1), ((0, 0, 1), 1), ((0, 1, 0, 1), 1), ((0, 0, 1, 0), 1),
])  # fmt: skip
def test_ranks_a_host(hosts, each):
    assert ranks_a_host(hosts) == each

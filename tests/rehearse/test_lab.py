"""The network lab: its links, its counters, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.rehearse.hybrid import volume

from tests.messages import refuses
from tests.polling import until
from tests.rehearse.marks import needs_lab
from tests.run.processes import descendants, is_alive
from torusgd.errors import RunError
from torusgd.rehearse.lab import Host, Lab

pytestmark = needs_lab
PROGRAMS = str(Path(__file__).with_name("programs.py"))


def outputs(hosts: list[Host], name: str, *arguments: object) -> list[str]:
    with Lab(hosts) as lab:
        return lab.run([PROGRAMS, name, *map(str, arguments)], timeout=240)


def records(hosts: list[Host], name: str, *arguments: object) -> list[Any]:
    """The JSON of each rank that prints some, among warnings of torch."""
    lines = [line for text in outputs(hosts, name, *arguments) for line in text.splitlines()]
    return [json.loads(line.removeprefix("found: ")) for line in lines if line.startswith("found: ")]


@pytest.mark.slow
def test_latency_and_bandwidth_are_at_least_as_set() -> None:
    pings, slow, transfer = records([Host(latency=each, rate=50e6) for each in (0.02, 0.02, 0.06)], "links")[0]
    assert pings >= 0.04
    assert slow >= 0.08
    assert transfer >= 8 * 1_000_000 / 50e6


def test_nothing_is_sent_twice_on_slow_links_where_nothing_is_lost() -> None:
    """Answers wait for a quarter of a second behind a packet of the other direction."""
    assert records([Host(latency=0.001, rate=2e6)] * 2, "both_ways") == [0, 0]


def test_bytes_on_the_wire_follow_the_formula_on_each_axis() -> None:
    """4 hosts of 3 ranks: a grid of 4 x 3 has its horizontal axis on loopback and its vertical one on the links."""
    length = 600_000
    found = records([Host(ranks=3, latency=0.001, rate=1e9)] * 4, "sent_bytes", length)
    for rank in range(0, 12, 3):
        for name, (inside, between) in found[rank].items():
            want = {"torus": (3 * 2 * (2 / 3), 3 * 2 * (3 / 4) / 3), "ring": (2 * 2 * (11 / 12), 2 * (11 / 12))}[name]
            assert inside == pytest.approx(4 * length * want[0], rel=0.05)
            assert between == pytest.approx(4 * length * want[1], rel=0.05)


def test_a_cut_link_ends_an_all_reduce_within_its_timeout() -> None:
    with Lab([Host(latency=0.001, rate=1e9)] * 3) as lab:
        ranks = lab.start([PROGRAMS, "cut"])
        until(lambda: all("summed" in output for output in ranks.outputs()), "a sum on every rank", state=ranks.outputs)
        lab.cut(1)
        assert ranks.wait(timeout=240) == [3, 3, 3], ranks.outputs()


@pytest.mark.slow
@pytest.mark.parametrize("error", ["SystemExit", "UserError"])
def test_a_failing_rank_is_named_with_what_it_said(tmp_path: Path, error: str) -> None:
    program = tmp_path / "fails.py"
    text = f"if os.environ['RANK'] == '1': raise {error}('no luck')\n"
    program.write_text(f"import os\nfrom torusgd.errors import UserError\n{text}")
    with Lab([Host()] * 2) as lab, pytest.raises(RunError, match=r"rank 1 ended with 1: no luck$"):
        lab.run([str(program)], timeout=240)


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    with Lab([Host(ranks=2)]) as lab:
        ranks = lab.start([str(program)])
        refuses("a lab that takes too long", ranks.wait, timeout=3, about="the network lab:", kind=RunError)
        assert all(map(is_alive, ranks.processes))
        ranks.end()
        until(lambda: not any(map(is_alive, ranks.processes)), "their end")


@pytest.mark.slow
def test_nothing_outlives_a_lab_whose_owner_is_killed(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import time\nfrom torusgd.rehearse.lab import Host, Lab\n"
        "with Lab([Host()] * 2) as lab:\n"
        f"    lab.start([{str(tmp_path / 'sleeps.py')!r}])\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    devices = Path("/proc/net/dev").read_text().count(":")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    owner = subprocess.Popen(
        [sys.executable, str(driver)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    started = descendants(owner.pid)
    assert len(started) == 4  # the wire, the spawner, two ranks
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not any(map(is_alive, started)), f"the end of {started}")
    assert Path("/proc/net/dev").read_text().count(":") == devices


def test_a_rank_that_begins_late_is_found_in_the_skew_and_not_in_the_time() -> None:
    found = records([Host(latency=0.005, rate=1e9)] * 4, "skew")
    assert all(each["late"] == found[0]["late"] for each in found), "all ranks agree"
    (_, usual), (seconds, skew), old = (found[0][name] for name in ("on_time", "late", "from_barrier"))
    assert skew > max(usual, 0.045), "it sleeps for 50 ms"
    assert seconds < old, "from a barrier on the time of the others has it"


@pytest.mark.slow
def test_hybrid_parallelism_sends_what_the_formula_of_das_et_al_says() -> None:
    ranks, images = 4, 48
    words = ["--rank", "--images", str(images), "--model-parallel", "1,2,4", "--repetitions", "1"]
    with Lab([Host(latency=0.0005, rate=4e9)] * ranks) as lab:
        printed = lab.run(["-m", "benchmarks.rehearse.hybrid", *words], timeout=240)[0]
    line = next(line for line in printed.splitlines() if line.startswith("told: "))
    found = {record["model_parallel"]: record["bytes"] for record in json.loads(line.removeprefix("told: "))}
    assert found == {m: pytest.approx(volume(ranks, images, m), rel=0.05) for m in (1, 2, 4)}

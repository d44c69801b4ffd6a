"""`torusgd train` on several hosts: slow ones are named with the reason, lost ones end a run in good order or go on."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.polling import until
from tests.rehearse.marks import needs_lab
from tests.run.processes import RECIPE, last_step, results, summary
from torusgd.ranks.join import make_token
from torusgd.rehearse.lab import Host, Lab

pytestmark = needs_lab
ROOT = Path(__file__).parents[2]
NEAR = Host(latency=1e-3, rate=1e9)
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

COMMAND = """
import json, os, sys, time
rank = int(os.environ["RANK"])
for name in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME".split():
    del os.environ[name]
while rank and not os.path.exists(os.environ["STARTED"]):
    time.sleep(0.1)
os.execv(sys.executable, [sys.executable, "-m", "torusgd", *json.loads(os.environ["WORDS"])[rank]])
"""
"""each host has a command of its own, without a launcher's variables"""


def train(recipe: Path, out: Path, *flags: str) -> list[str]:
    return ["-m", "torusgd", "train", str(recipe), "--out", str(out), *flags]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "hosts", "cause"), [
    (["--set", "data.options={pause: 0.05, rank: 2}"], [NEAR] * 3, "data"),
    (["--set", "model={name: 'tests.run.slow:Late', options: {pause: 0.2, rank: 2}}"], [NEAR] * 3, "compute"),
    ([], [NEAR, NEAR, Host(latency=2e-2, rate=2e7)], "network"),
])  # fmt: skip
def test_one_slow_host_is_named_with_its_reason(
    tmp_path: Path, recipe: Path, flags: list[str], hosts: list[Host], cause: str
) -> None:
    with Lab(hosts) as lab:
        lab.run(train(recipe, tmp_path / "out", "--max-steps", "11", *flags), timeout=240, environment=ENVIRONMENT)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    named = [event["slowest"] for event in events if "slowest" in event]
    assert [(late["rank"], late["cause"]) for late in named] == [(2, cause)]
    assert all(0 <= event["hidden_share"] <= 1 for event in events if "loss" in event and "event" not in event)


@pytest.mark.slow
def test_a_cut_link_ends_a_run_with_the_rank_named_and_a_good_checkpoint(tmp_path: Path, undisturbed) -> None:
    out, impatient = tmp_path / "out", tmp_path / "impatient.yaml"
    impatient.write_text(RECIPE.replace("runtime: {", "runtime: {timeout: 2, "))
    words = train(impatient, out, "--set", "data.options.pause=0.005")
    with Lab([NEAR] * 3) as lab:
        ranks = lab.start(words, ENVIRONMENT)
        until(lambda: last_step(out) >= 6, "step 6", state=ranks.outputs)
        lab.cut(2)
        assert ranks.wait(timeout=240) == [1, 1, 1], ranks.outputs()
        lines = [line for text in ranks.outputs() for line in text.splitlines() if line.startswith("torusgd: ")]
    assert len(lines) == 2, lines
    assert re.fullmatch(
        r"torusgd: rank 2 on \S+ in \w+ of step \d+: no heartbeat for 2 s, frozen or lost, says rank [01] on \S+; "
        r"the same command goes on from the checkpoint of step [48]",
        lines[0],
    )
    assert lines[1].startswith("torusgd: rank 2 on ")
    assert "can't reach the others, or rank 0 is lost" in lines[1]
    with Lab([NEAR] * 2) as lab:
        lab.run(words, timeout=240, environment=ENVIRONMENT)
    assert summary(out)["resumed_from"] >= 4
    assert results(summary(out)) == undisturbed


@pytest.mark.slow
def test_a_machine_joins_and_is_cut_off_and_the_run_goes_on(tmp_path: Path, undisturbed) -> None:
    recipe, out, script, token = (tmp_path / name for name in ("recipe.yaml", "out", "command.py", "token"))
    recipe.write_text(RECIPE.replace("runtime: {", "runtime: {timeout: 3, "))
    script.write_text(COMMAND)
    make_token(token)
    pause = ["--set", "data.options.pause=0.05"]
    with Lab([NEAR] * 2) as lab:
        where = f"{lab.addresses[0]}:7000"
        words = [
            ["train", str(recipe), "--out", str(out), "--workers", "1", "--listen", where, "--token-file", str(token)],
            ["join", where, "--workers", "2", "--token-file", str(token)],
        ]
        own = {"WORDS": json.dumps([words[0] + pause, words[1]]), "STARTED": str(out / "events.jsonl")}
        ranks = lab.start([str(script)], ENVIRONMENT | own)
        until(
            lambda: "ranks 1, 2 join; ranks 0, 1, 2 go on" in ranks.outputs()[0], "ranks 1 and 2", state=ranks.outputs
        )
        begun = last_step(out)
        until(lambda: last_step(out) > begun + 2, "their steps", state=ranks.outputs)
        lab.cut(1)
        until(lambda: "; rank 0 goes on" in ranks.outputs()[0], "rank 0 alone", state=ranks.outputs)
        assert ranks.wait(timeout=240) == [0, 1], ranks.outputs()
        root, joined = ranks.outputs()
    assert "no heartbeat for 3 s, frozen or lost" in root or "nothing was heard of it for 3 s" in root
    assert f"the run at {where} is gone: " in joined
    assert (summary(out)["restarts"], results(summary(out))) == (0, undisturbed)

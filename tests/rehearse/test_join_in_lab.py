"""A machine joins a run through a network, and is cut off: the run goes on to the same weights without it."""

import json
import os
from pathlib import Path

import pytest

from tests.polling import until
from tests.rehearse.marks import needs_lab
from tests.run.processes import RECIPE, last_step, results, run_alone, summary
from torusgd.ranks.join import make_token
from torusgd.rehearse.lab import Host, Lab

pytestmark = needs_lab
ROOT = Path(__file__).parents[2]
COMMAND = """
import json, os, sys, time
rank = int(os.environ["RANK"])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
del os.environ["GLOO_SOCKET_IFNAME"]
while rank and not os.path.exists(os.environ["STARTED"]):
    time.sleep(0.1)
os.execv(sys.executable, [sys.executable, "-m", "torusgd", *json.loads(os.environ["WORDS"])[rank]])
"""
"""each host has a command of its own, without a launcher's variables"""


@pytest.mark.slow
def test_a_machine_joins_and_is_cut_off(tmp_path: Path) -> None:
    recipe, out, script, token = (tmp_path / name for name in ("recipe.yaml", "out", "command.py", "token"))
    recipe.write_text(RECIPE.replace("runtime: {", "runtime: {timeout: 3, "))
    script.write_text(COMMAND)
    make_token(token)
    pause = ["--set", "data.options.pause=0.05"]
    with Lab([Host(latency=1e-3, rate=1e9)] * 2) as lab:
        where = f"{lab.addresses[0]}:7000"
        words = [
            ["train", str(recipe), "--out", str(out), "--workers", "1", "--listen", where, "--token-file", str(token)],
            ["join", where, "--workers", "2", "--token-file", str(token)],
        ]
        environment = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "WORDS": json.dumps([words[0] + pause, words[1]]),
            "STARTED": str(out / "events.jsonl"),
        }
        ranks = lab.start([str(script)], environment)
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
    assert summary(out)["restarts"] == 0
    assert results(summary(out)) == results(run_alone(tmp_path / "alone", recipe))

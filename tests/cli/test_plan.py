"""`torusgd plan`: its flags, what it prints and writes, and the mistakes that it names."""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.plan.measured import measured_run, network
from tests.run.runs import events, run_here, sets

from torusgd.plan.cluster import names_in

Run = Callable[..., tuple[int, str, str]]
SIZES = sets("data.train_images=1000", "data.classes=10")


def test_it_prints_and_writes_a_plan_or_the_published_table(plan) -> None:
    out, found = plan("fujitsu-74s", "--cluster", "abci", "--devices", 2048, "--sweep", "--best", "--cost", 2.5)
    assert all(word in out for word in ("images/s", "efficiency", "time to train", "limit:", "knee:", "cost", "saves"))
    assert found["cost"] == pytest.approx(2048 * found["seconds"] / 3600 * 2.5)
    assert found["sweep"][-1]["seconds"] == found["seconds"]
    assert found["best"]["seconds"] <= found["seconds"]
    assert found["stages"][0]["batch"] == 81920
    out, records = plan("--published", Path(__file__).parents[2] / "src/torusgd/plan/published.csv")
    assert "16 parameters for 37 rows" in out
    assert len(records) == 37
    assert {"id", "metric", "published", "predicted", "low", "high", "error"} == set(records[0])


@pytest.mark.parametrize(("record", "devices", "software", "wish"), [
    ("sony-224s", 2176, "nnl-v1", ("--allreduce", "ring")),
    ("fujitsu-62s", 2048, "mxnet-fujitsu", ("--buckets", 1)),
    ("fujitsu-62s", 3072, "mxnet-fujitsu", ("--buckets", 1)),
])  # fmt: skip
def test_a_record_is_planned_as_its_own_software_unless_something_else_is_named(plan, record, devices, software, wish):
    """Its block describes what the profile is known to have done, and is not a user's wish."""
    command = (record, "--cluster", "abci", "--devices", devices)
    found, named = (plan(*command, *words)[1] for words in ((), ("--software", software)))
    assert found["software"] == software
    assert (found["seconds"], found["stages"]) == (named["seconds"], named["stages"])
    for other in (wish, ("--software", software, *wish), ("--software", "torusgd")):
        assert plan(*command, *other)[1]["stages"] != found["stages"]


def test_a_runtime_block_has_the_flags_of_torusgd_which_override_it(plan, run_cli: Run, tmp_path: Path) -> None:
    torus = ("sony-224s", "--cluster", "abci", "--devices", 2176, "--software", "torusgd")
    assert plan(*torus)[1]["stages"] == plan(*torus, "--allreduce", "torus", "--grid", "34x64")[1]["stages"]
    # torusgd's own groups are the profile's, and so is the last message.
    fujitsu = ("fujitsu-62s", "--cluster", "abci", "--devices", 3072)
    groups = plan(*fujitsu, "--buckets", "cubic")[1]["seconds"]
    assert groups == pytest.approx(plan(*fujitsu)[1]["seconds"], rel=5e-3)
    file = tmp_path / "mine.yaml"
    _, source, _ = run_cli("recipes", "resnet50")
    file.write_text(source + "\nruntime: {workers: 16, allreduce: 'torus:halving/ring', update: sharded}\n")
    flags = ("--workers", 16, "--allreduce", "torus:halving/ring", "--update", "sharded")
    _, by_flags = plan("resnet50", "--cluster", "abci", *flags)
    _, by_block = plan(file, "--cluster", "abci")
    assert by_block["stages"] == by_flags["stages"]
    _, otherwise = plan(file, "--cluster", "abci", "--devices", 8, "--update", "replicated")
    assert (otherwise["devices"], otherwise["stages"] == by_block["stages"]) == (8, False)


@pytest.mark.parametrize("cluster", names_in("clusters"))
def test_a_plan_is_of_torusgd_unless_another_program_is_named(plan, cluster: str) -> None:
    out, found = plan("digits", *SIZES, "--cluster", cluster, "--devices", 2)
    assert (found["software"], "not torusgd" in out) == ("torusgd", False)


@pytest.mark.parametrize(("words", "program"), [
    ("--software mxnet-v30", "NVIDIA's MXNet program of MLPerf v3.0"),
    ("--software mxnet-v30 --to 75.9%", "NVIDIA's MXNet program of MLPerf v3.0"),
    ("--set runtime.software=nnl-v1", "Sony's NNL program of November 2018"),
])  # fmt: skip
def test_another_program_is_named_in_the_first_line(plan, words: str, program: str) -> None:
    out, found = plan("resnet50", "--cluster", "hgx-h100", "--devices", 8, *words.split())
    assert found["title"].endswith(f", as {program}, not torusgd")
    assert " ".join(out.split()).startswith(found["title"])


def test_one_device_is_not_compared_with_itself_and_many_share_the_batch_of_the_virtual_workers(plan) -> None:
    out, found = plan("digits", "--cluster", "hgx-h100", "--devices", 1)
    assert found["efficiency"] == pytest.approx(1.0)
    assert "times one device" not in out
    assert "a device" in out
    out, found = plan("resnet50-90ep", "--cluster", "abci", "--devices", 2048)
    assert "32 virtual workers; planned with its batch cut for 2,048 devices, 1 > 1 > 2 images" in out
    assert [stage["batch"] for stage in found["stages"]] == [1024, 2048, 4096]
    assert found["images_per_second"] < 4096 / found["stages"][2]["seconds"]
    assert found["efficiency"] < 0.5


def test_a_sweep_plans_every_number_of_devices_with_the_same_options(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--allreduce", "torus", "--grid", "4x4", "--model-parallel", 2, "--sweep")
    out, found = plan("resnet50", "--cluster", "abci", "--devices", 16, *flags)
    assert [forecast["devices"] for forecast in found["sweep"]] == [2, 4, 8, 16]
    assert found["sweep"][-1]["stages"] == found["stages"]
    assert "note: torusgd train refuses this: model_parallel = 2: " in out
    for words, said in (
        (("--devices", 4, "--weights-first"), "a GPU is given both gradients in advance"),
        (("--devices", 1024, "--to", "75.9%"), "note: v100-10gbe has 192 devices"),
    ):
        assert said in plan("resnet50", "--cluster", "v100-10gbe", *words)[0]
    assert "a run leaves out" in plan("fashion-backup", "--cluster", "abci", "--devices", 2, *SIZES)[0]
    # No figure is cut off on a narrow screen.
    monkeypatch.setenv("COLUMNS", "80")
    command = ("resnet50", "--cluster", "hgx-h100", "--devices", 1024, "--to", "75.9%", "--cost", 2.5, "--sweep")
    out, found = plan(*command)
    assert f"{found['sweep'][-1]['images_per_second']:,.0f}" in out
    assert "\u2026" not in out


def test_relaxed_synchrony_stands_beside_synchronous_steps_with_delays_of_a_run_too(plan, tmp_path: Path) -> None:
    words = ("fujitsu-74s", "--cluster", "abci", "--devices", 64, "--delays", "lognormal:0.1")
    out, found = plan(*words, "--synchrony", "backup:8", "--best")
    forms = [each["form"] for each in found["relaxed"]]
    assert forms == ["synchronous", "backup:8", "cutoff", "backup:2", "local:4", "local:16", "local:64"]
    assert found["relaxed"][1]["share"] == 56 / 64
    assert "It changes the result" in out
    out, _ = plan(*words[:-1], "constant", "--synchrony", "backup:8")
    assert "It changes the result" not in out
    run_here(tmp_path / "run", "stages=[{until: 40st, images_per_worker: 3}]", "evaluate.every=null", "polish=null")
    # A quiet machine's steps are alike: here every fourth takes 2 s more.
    late = [{**event, "step_seconds": 1.0 + 2.0 * (event["step"] % 4 == 0)} for event in events(tmp_path / "run")]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in late))
    _, found = plan(*words[:-1], tmp_path / "run", "--synchrony", "cutoff")
    assert [each["form"] for each in found["relaxed"]] == ["synchronous", "cutoff"]
    assert found["relaxed"][0]["seconds"] > found["stages"][0]["seconds"]


def test_wrong_flags_and_missing_ones_are_one_line(mistake: Callable[..., None]) -> None:
    for flags in (
        "--devices 0", "--devices 2:8", "--cost -1", "--cost 1e308", "--cost nan", "--allreduce nccl:ring",
        "--cluster abcx", "--plot x.pdf",
        "--data /no/such/folder", "--json /no/such/folder/x.json", "--profile p.json",
        "--to 75.9%", "--to high", "--to 75.9% --best",
        "--synchrony cutoff", "--synchrony gossip --delays lognormal", "--synchrony cutoff --delays lognorm",
    ):  # fmt: skip
        mistake("plan", "fujitsu-74s", "--cluster", "abci", "--devices", 2048, *flags.split())
    for words in ("", "digits --cluster abci", "digits --devices 2"):
        mistake("plan", *words.split())


def test_the_way_to_an_accuracy(plan) -> None:
    command = ("resnet50", "--cluster", "hgx-h100", "--software", "mxnet-v30", "--to", "75.9%", "--cost", 2.5)
    out, found = plan(*command, "--devices", 64)
    for word in ("to 75.9% on 64", "quickest: batch", "leave-one-out error 3.5% at the median, 7.4% at worst", "cost"):
        assert word in " ".join(out.split())
    assert found["seconds"] == min(tried["seconds"] for tried in found["batches"])
    assert found["cost"] == pytest.approx(64 * found["seconds"] / 3600 * 2.5)
    assert found["low"] < found["seconds"] < found["high"]
    out, swept = plan(*command, "--devices", 4, "--sweep")
    assert "quickest: 4 devices" in out
    assert [tried["devices"] for tried in swept["sweep"]] == [1, 2, 4]
    assert swept["sweep"][-1]["seconds"] < swept["sweep"][0]["seconds"] / 3
    assert swept["knee"] <= swept["useful"] == 4


def test_a_picture_or_what_is_missing_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Run) -> None:
    path, accuracy = tmp_path / "curve.svg", tmp_path / "accuracy.svg"
    command = ("plan", "fujitsu-74s", "--cluster", "abci", "--devices", 64, "--plot", path)
    if find_spec("matplotlib"):
        assert run_cli(*command)[0] == 0
        assert path.read_text().startswith("<?xml")
        assert run_cli("plan", "resnet50", *command[2:-1], accuracy, "--to", "75.9%")[0] == 0
        assert "minutes to the accuracy" in accuracy.read_text()
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib (the extra plot)" in run_cli(*command)[2]


def test_a_users_own_model_and_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan, mistake) -> None:
    (tmp_path / "mymodel.py").write_text(
        "from torch import nn\n"
        "def build(*, classes, channels, width=8):\n"
        "    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "                         nn.Linear(width, classes))\n"
    )
    (tmp_path / "mine.yaml").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    keys = sets("model.name=mymodel:build", "model.options={width: 16}")
    command = ["folder", *keys, *SIZES, "--cluster", "mine.yaml", "--devices", 2]
    assert plan(*command)[1]["cluster"] == "odd"
    mistake("plan", *command, "--set", "model.options={depth: 2}")


def test_a_device_on_which_the_program_has_not_run_is_named_and_this_machine_measured(tmp_path: Path, plan, mistake):
    command = ("digits", *SIZES, "--cluster", "hgx-h100")
    alone = (*command, "--devices", 1, "--software", "torusgd")
    assert "torusgd was never measured on such a device (H100-SXM5-80GB)" in " ".join(plan(*alone)[0].split())
    assert "never measured" not in plan(*command, "--devices", 1, "--software", "mxnet-v30")[0]
    # A run with one worker on such a device is all that it takes; its steps were handed over in advance.
    printed, found = plan(*alone, "--measured", measured_run(tmp_path, 0.002, update=0.0))
    assert "never measured" not in printed
    assert found["stages"][0]["seconds"] == pytest.approx(0.002, rel=0.05)
    profile = tmp_path / "profile.json"
    profile.write_text(network().dump())
    here = ("digits", *SIZES, "--cluster", "local", "--devices", 2, "--profile", profile)
    printed = plan(*here, "--measured", measured_run(tmp_path / "one", 0.2))[0]
    said = [words in printed for words in ("one worker here", "never measured", "not its own")]
    assert said == [True, False, False]
    printed = plan(*here, "--measured", measured_run(tmp_path / "two", 0.2, disturbed=(1.0, 2.5, 1.0, 0.5)))[0]
    assert "took 175 to 275 ms: the machine was not its own" in " ".join(printed.split())
    mistake("plan", *here, TMP=tmp_path)


def test_the_design_points_of_a_record_and_of_an_odd_machine(plan, tmp_path: Path, mistake) -> None:
    """Das et al.: OverFeat on 64 nodes, 42 times as fast as on one with the same batch."""
    page = tmp_path / "design.html"
    out, found = plan("intel-overfeat-64", "--cluster", "cori", "--devices", 64, "--design", "--report", page)
    for word in ("weak scaling", "critical: features.0", "next limit: ", "pays most: ", "knee", "####"):
        assert word in out
    assert found["speedup"] == pytest.approx(42, rel=0.05)
    assert found["design"]["layers"][-3]["groups"] == 2
    assert found["design"]["steps"]["links twice as fast"] > found["design"]["steps"]["as it is"]
    assert all(word in page.read_text() for word in ("<svg", "knee ends at"))
    # The slowest machine, as many devices as there can be, and one; the names of layers stay whole.
    odd = tmp_path / "odd.yaml"
    odd.write_text(ODD)
    small = ("digits", *SIZES, "--design", "--cluster")
    assert "pays most" in plan(*small, odd, "--devices", 16)[0]
    odd.write_text(ODD.replace("bandwidth: 1e3}", "bandwidth: 1e-300}"))
    mistake("plan", *small, odd, "--devices", 16, TMP=tmp_path)
    assert "twice the devices" not in plan(*small, "cori", "--devices", 2**20)[1]["design"]["steps"]
    out, alone = plan(*small, "cori", "--devices", 1)
    assert alone["design"]["efficiency"] == 1
    assert "blocks.1.downsample.0" in out


ODD = """
{name: odd, source: mine, backend: gloo, devices_per_node: 2, inside: {alpha: 10, bandwidth: 1e3},
 device: {name: Toy, peak: {float32: 1e6}, memory_bandwidth: 1e6, memory: 1}, between: {alpha: 10, bandwidth: 1e3}}
"""

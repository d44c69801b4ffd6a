"""What a run leaves for other programs says what the run says."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import ran
from tests.report.test_page import copied
from tests.run.runs import run_here, sets, train

from torusgd.errors import RunError
from torusgd.export import formats
from torusgd.export.formats import example_images
from torusgd.export.model_card import card
from torusgd.report.read_run import read_run
from torusgd.run.trained_weights import open_model
from torusgd.weights import load_weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_here(folder)
    return folder


@pytest.mark.slow
def test_torch_export_gives_the_same_logits_for_any_batch(run: Path, tmp_path: Path, run_cli: Any) -> None:
    code, output, errors = run_cli("export", run, "--format", "torch", "--out", tmp_path)
    assert (code, errors) == (0, "")
    assert "logits as the network's" in output
    trained = open_model(run)
    images = example_images(trained, 7)
    with torch.no_grad():
        known = {"records_sha256": ""}
        program = torch.export.load(tmp_path / "model.pt2", extra_files=known)
        assert torch.equal(program.module()(images), trained.model(images))
    assert known["records_sha256"] == json.loads((run / "summary.json").read_text())["records"]["sha256"]


def test_a_graph_with_other_logits_is_not_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "TOLERANCE", -1.0)
    with pytest.raises(RunError) as caught:  # of how much, no sentence can be compared
        formats.export_torch(open_model(run), tmp_path / "model.pt2")
    assert "differ" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-net", "resnet18"])
def test_onnx_gives_the_same_logits_for_any_batch(name: str, tmp_path: Path, run_cli: Any) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    size = {"digits-net": 8, "resnet18": 32}[name]
    run_here(tmp_path / "run", "polish=null", f"model={{name: {name}}}", f"data.image_size={size}")
    code, output, errors = run_cli("export", tmp_path / "run")
    assert (code, errors) == (0, ""), output
    path = tmp_path / "run" / "export" / "model.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"], "one file, weights and all"
    trained = open_model(tmp_path / "run")
    images = example_images(trained, 3)
    (found,) = runtime.InferenceSession(str(path)).run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), trained.model(images), rtol=1e-3, atol=1e-4)
    known = {each.key: json.loads(each.value) for each in onnx.load(str(path)).metadata_props}
    assert known["classes"] == list(trained.classes)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert known["weights_sha256"] == summary["weights_sha256"]
    assert known["records_sha256"] == summary["records"]["sha256"]


def test_a_card_has_what_the_hub_reads_and_what_was_measured(run: Path, tmp_path: Path, run_cli: Any) -> None:
    code, _, errors = run_cli("export", run, "--format", "hub", "--license", "mit", "--out", tmp_path)
    assert (code, errors) == (0, "")
    text, summary = (tmp_path / "hub" / "README.md").read_text(), json.loads((run / "summary.json").read_text())
    _, front, body = text.split("---\n", 2)
    head = yaml.safe_load(front)
    assert summary["records"]["sha256"] in body
    assert (tmp_path / "hub" / "records.jsonl").read_bytes() == (run / "records.jsonl").read_bytes()
    assert load_weights(tmp_path / "hub" / "model.safetensors")[1]["records_sha256"] == summary["records"]["sha256"]
    assert (head["license"], head["pipeline_tag"]) == ("mit", "image-classification")
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == summary["top1"]
    assert summary["weights_sha256"] in body
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [1, 8, 8]
    assert config["num_classes"] == len(config["label_names"]) == 4
    assert open_model(tmp_path / "hub" / "model.safetensors").recipe == open_model(run).recipe


def test_a_card_says_how_to_train_the_same_elsewhere_and_no_text_of_a_stranger_breaks_it(
    run: Path, tmp_path: Path
) -> None:
    record = read_run(run)
    for status, command in (
        ({}, "torusgd train recipe.yaml\n"),
        ({"data": "/home/me/flowers", "init": "w.pth"}, "torusgd train recipe.yaml --data PATH --init WEIGHTS\n"),
        ({"data": "hf:a/b@main", "init": "timm", "max_steps": 3},
         "torusgd train recipe.yaml --data hf:a/b@main --init timm --max-steps 3\n"),
        ({"data": "hf:a/b <script>"}, "torusgd train recipe.yaml --data PATH\n"),
    ):  # fmt: skip
        assert f"    {command}" in card(replace(record, status=status), None)
    folder = copied(run, tmp_path / "<b>|\n---", conditions={"cpu": "a|b\n# <script>"})
    text = card(read_run(folder), None)
    assert "<" not in text.split("---\n", 2)[2]
    assert "\n# &lt;script" not in text
    assert yaml.safe_load(text.partition("\n\n# ")[0].strip().strip("-"))["model-index"][0]["name"] == folder.name


def test_the_hubs_own_reader_takes_the_card(run: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    found = hub.ModelCard(card(read_run(run), "apache-2.0"))
    assert found.data.eval_results[0].metric_type == "accuracy"


def test_mistakes_are_one_line(run: Path, tmp_path: Path, mistake: Any) -> None:
    for words in ("--format jpeg", "--format mlperf --division x", "--out /proc/none"):
        mistake("export", run, *words.split(), RUN=run)
    cut_off = copied(run, tmp_path / "cut off")
    for name in ("hub", "mlperf"):
        mistake("export", cut_off, "--format", name, TMP=tmp_path)
    damage: dict[str, Any] = {"seconds": None, "train_images": "x", "world_size": {}}
    for key, value in damage.items():
        folder = copied(run, tmp_path / f"damaged {key}", None, **{key: value})
        mistake("export", folder, "--format", "mlperf", TMP=tmp_path, REASON=re.compile("(?<=are damaged: ).*"))


def test_an_mlperf_log_has_its_intervals_in_order(run: Path, tmp_path: Path, run_cli: Any) -> None:
    code, _, errors = run_cli("export", run, "--format", "mlperf", "--out", tmp_path)
    assert (code, errors) == (0, "")
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    keys, times = [line["key"] for line in lines], [line["time_ms"] for line in lines]
    assert times == sorted(times)
    assert keys[-1] == "run_stop"
    # What did not happen is not claimed: caches are as they were, and setting up took its time.
    assert [line["value"] for line in lines if line["key"] == "cache_clear"] == [False]
    assert times[keys.index("init_stop")] > times[keys.index("init_start")]
    assert keys.count("eval_accuracy") == keys.count("block_start") == keys.count("block_stop") == 2
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("block_start") < keys.index("eval_start")


@pytest.mark.slow
def test_mlperfs_own_checker_passes_a_scaled_down_run(tmp_path: Path, run_cli: Any) -> None:
    pytest.importorskip("mlperf_logging")
    # The rules' hyperparameters: end rate 1e-4, power 2, epsilon 0, a decay of 1e-4 times a power of two.
    rules = sets(
        "stages=[{until: 15ep, images_per_worker: 8}]", "rate.decay.floor=2.5e-5", "optimizer.eps=0.0",
        "optimizer.weight_decay=2e-4",
    )  # fmt: skip
    summary = train(tmp_path / "run", "--workers", "1", *rules)
    assert 0.759 <= summary["top1"] < 1
    words = ("-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0")
    log = tmp_path / "run" / "export" / "mlperf.log"
    for division in ("open", "closed"):
        code, _, errors = run_cli("export", tmp_path / "run", "--format", "mlperf", "--division", division)
        assert (code, errors) == (0, "")
        done = ran([sys.executable, *words, log], cwd=tmp_path)
        assert "SUCCESS" in done.stdout + done.stderr

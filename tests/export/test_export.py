"""What a run leaves for other programs says what the run says."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import ran
from tests.report.test_page import copied
from tests.run.processes import summary as summary_of
from tests.run.runs import run_here, sets, train

from torusgd.errors import RunError
from torusgd.export import formats
from torusgd.export.formats import example_images
from torusgd.export.mlperf import write_mlperf_log
from torusgd.export.model_card import card, crop_share
from torusgd.recipe.schema import Decay, Rate, Warmup
from torusgd.recipe.section import Duration
from torusgd.report.read_run import read_run
from torusgd.run.trained_weights import open_model
from torusgd.weights import load_weights


@pytest.fixture
def export(run_cli: Any) -> Any:
    """`torusgd export` to its good end: what it prints."""

    def exported(*words: object) -> str:
        code, output, errors = run_cli("export", *words)
        assert (code, errors) == (0, ""), output
        return str(output)

    return exported


@pytest.mark.slow
def test_torch_export_gives_the_same_logits_for_any_batch(run: Path, tmp_path: Path, export: Any) -> None:
    assert "logits as the network's" in export(run, "--format", "torch", "--out", tmp_path)
    trained = open_model(run)
    images = example_images(trained, 7)
    with torch.no_grad():
        known = {"records_sha256": ""}
        program = torch.export.load(tmp_path / "model.pt2", extra_files=known)
        assert torch.equal(program.module()(images), trained.model(images))
    assert known["records_sha256"] == summary_of(run)["records"]["sha256"]


def test_a_graph_with_other_logits_is_not_left_and_mistakes_are_one_line(run, tmp_path, monkeypatch, mistake) -> None:
    monkeypatch.setattr(formats, "TOLERANCE", -1.0)
    with pytest.raises(RunError, match="differ"):  # of how much, no sentence can be compared
        formats.export_torch(open_model(run), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
    for words in ("--format jpeg", "--format mlperf --division x", "--out /proc/none"):
        mistake("export", run, *words.split(), RUN=run)
    cut_off = copied(run, tmp_path / "cut off")
    for name in ("hub", "mlperf"):
        mistake("export", cut_off, "--format", name, TMP=tmp_path)
    adamw = copied(run, tmp_path / "adamw", seed=0)
    text = (run / "recipe.yaml").read_text()
    tree = yaml.safe_load(text) | {"optimizer": {"name": "adamw"}}
    (adamw / "recipe.yaml").write_text(f"{text.splitlines()[0]}\n{yaml.safe_dump(tree)}")
    mistake("export", adamw, "--format", "hub", "--format", "mlperf", TMP=tmp_path)
    assert not (adamw / "export" / "hub").exists()
    for key, value in (("seconds", None), ("train_images", "x"), ("world_size", 0)):
        folder = copied(run, tmp_path / f"damaged {key}", None, **{key: value})
        mistake("export", folder, "--format", "mlperf", TMP=tmp_path, REASON=re.compile("(?<=are damaged: ).*"))


def test_a_card_of_other_weights_is_refused(run: Path, tmp_path: Path, mistake: Any) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    shutil.copy(other / "checkpoints" / "step-00000004" / "model.safetensors", other)
    mistake("export", other, "--format", "hub", FOLDER=tmp_path)
    assert not (other / "export" / "hub").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-net", "resnet18"])
def test_onnx_gives_the_same_logits_for_any_batch(name: str, tmp_path: Path, export: Any) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    size = {"digits-net": 8, "resnet18": 32}[name]
    run_here(tmp_path / "run", "polish=null", f"model={{name: {name}}}", f"data.image_size={size}")
    export(tmp_path / "run")
    path = tmp_path / "run" / "export" / "model.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"], "one file, weights and all"
    trained = open_model(tmp_path / "run")
    images = example_images(trained, 3)
    (found,) = runtime.InferenceSession(str(path)).run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), trained.model(images), rtol=1e-3, atol=1e-4)
    known = {each.key: json.loads(each.value) for each in onnx.load(str(path)).metadata_props}
    summary = summary_of(tmp_path / "run")
    wanted = {"weights_sha256": summary["weights_sha256"], "records_sha256": summary["records"]["sha256"]}
    assert known.items() >= {"classes": list(trained.classes), **wanted}.items()


def test_a_card_has_what_was_measured_and_says_how_to_train_the_same_elsewhere(run: Path, tmp_path: Path, export: Any):
    export(run, "--format", "hub", "--license", "mit", "--out", tmp_path)
    hub, summary = tmp_path / "hub", summary_of(run)
    _, front, body = (hub / "README.md").read_text().split("---\n", 2)
    head, config = yaml.safe_load(front), json.loads((hub / "config.json").read_text())
    assert all(sha256 in body for sha256 in (summary["records"]["sha256"], summary["weights_sha256"]))
    assert (hub / "records.jsonl").read_bytes() == (run / "records.jsonl").read_bytes()
    assert load_weights(hub / "model.safetensors")[1]["records_sha256"] == summary["records"]["sha256"]
    assert (head["license"], head["pipeline_tag"]) == ("mit", "image-classification")
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == summary["top1"]
    assert config["pretrained_cfg"]["input_size"] == [1, 8, 8]
    assert config["pretrained_cfg"]["classifier"] == ["fc"]
    assert config["num_classes"] == len(config["label_names"]) == 4
    assert open_model(hub / "model.safetensors").recipe == open_model(run).recipe
    record = read_run(run)
    for status, words in (
        ({}, ""),
        ({"data": "/home/me/flowers", "init": "w.pth"}, " --data PATH --init WEIGHTS"),
        ({"data": "hf:a/b@main", "init": "timm", "max_steps": 3}, " --data hf:a/b@main --init timm --max-steps 3"),
        ({"data": "hf:a/b <script>"}, " --data PATH"),
    ):
        assert f"    torusgd train recipe.yaml{words}\n" in card(replace(record, status=status), None)
    without = copied(run, tmp_path / "without records", records=None)
    printed = export(without, "--format", "hub").split()
    assert printed[-4:] == ["README.md,", "config.json,", "model.safetensors,", "recipe.yaml"]
    folder = copied(run, tmp_path / "<b>|\n---", conditions={"cpu": "a|b\n# <script>"})
    text = card(read_run(folder), None)
    assert "<" not in text.split("---\n", 2)[2]
    assert "\n# &lt;script" not in text
    assert yaml.safe_load(text.partition("\n\n# ")[0].strip().strip("-"))["model-index"][0]["name"] == folder.name


def test_timm_scales_to_the_recipes_size() -> None:
    sizes = [(side, resize) for side in (32, 224, 299) for resize in range(side, 2 * side)]
    assert [math.floor(side / crop_share(side, resize)) for side, resize in sizes] == [each for _, each in sizes]


def test_the_hubs_own_reader_takes_the_card(run: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard(card(read_run(run), "apache-2.0")).data.eval_results[0].metric_type == "accuracy"


def test_a_warm_up_as_long_as_the_run_has_a_log_too(run: Path, tmp_path: Path) -> None:
    record = read_run(run)
    rate = Rate(lr=1.0, warmup=Warmup(length=Duration.parse("4st")), decay=Decay(shape="constant"))
    recipe = record.recipe.model_copy(update={"rate": rate})
    write_mlperf_log(replace(record, recipe=recipe), tmp_path / "log", "open")
    assert re.search(r'warmup_epochs", "value": 0\.66', (tmp_path / "log").read_text())


def test_an_mlperf_log_has_its_intervals_in_order(run: Path, tmp_path: Path, export: Any) -> None:
    export(run, "--format", "mlperf", "--out", tmp_path)
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    keys, times = [line["key"] for line in lines], [line["time_ms"] for line in lines]
    assert times == sorted(times)
    assert keys[-1] == "run_stop"
    # What did not happen is not claimed: caches are as they were, and setting up took its time.
    assert [line["value"] for line in lines if line["key"] == "cache_clear"] == [False]
    assert times[keys.index("init_stop")] > times[keys.index("init_start")]
    assert keys.count("block_start") == keys.count("block_stop") == 2
    assert keys.count("eval_accuracy") == 3, "the polished weights are evaluated too"
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("block_start") < keys.index("eval_start")


@pytest.mark.parametrize(("target", "status"), [(0.5, "success"), (0.7, "aborted")])
def test_an_mlperf_log_counts_a_target_that_the_polish_reaches(
    run: Path, tmp_path: Path, target: float, status: str
) -> None:
    record = read_run(run)
    top1 = {"evaluation": 0.4, "polished": 0.6}
    evaluations = tuple({**event, "top1": top1[event["event"]]} for event in record.evaluations)
    recipe = record.recipe.model_copy(update={"target_top1": target})
    write_mlperf_log(replace(record, recipe=recipe, evaluations=evaluations), tmp_path / "log", "open")
    assert f'"status": "{status}"' in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_mlperfs_own_checker_passes_a_scaled_down_run(tmp_path: Path, export: Any) -> None:
    pytest.importorskip("mlperf_logging")
    # The rules' hyperparameters: end rate 1e-4, power 2, epsilon 0, a decay of 1e-4 times a power of two.
    rules = sets(
        "stages=[{until: 15ep, images_per_worker: 8}]", "rate.decay.floor=2.5e-5", "optimizer.eps=0.0",
        "optimizer.weight_decay=2e-4",
    )  # fmt: skip
    assert 0.759 <= train(tmp_path / "run", "--workers", "1", *rules)["top1"] < 1
    words = ("-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0")
    for division in ("open", "closed"):
        export(tmp_path / "run", "--format", "mlperf", "--division", division)
        done = ran([sys.executable, *words, tmp_path / "run" / "export" / "mlperf.log"], cwd=tmp_path)
        assert "SUCCESS" in done.stdout + done.stderr

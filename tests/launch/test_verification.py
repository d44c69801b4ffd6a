"""What `torusgd verify` finds in a run that somebody has changed, and that it finds nothing in one that nobody has."""

import errno
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.comm.gloo_world import on_ranks
from tests.commands import command, ran
from tests.data.buckets import bucket
from tests.polling import until
from tests.run.processes import summary
from tests.run.runs import DIGITS_NET, run_here, sets
from tests.run.runs import TINY as BASE
from tests.run.sources import small_net
from tests.step.trainers import train_on_ranks
from torch import Tensor

from torusgd.comm.groups import group_of
from torusgd.launch import verification
from torusgd.launch.verification import Range, drawn
from torusgd.models import MODELS
from torusgd.precision import arithmetic_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.run.job import Job
from torusgd.run.run import Run
from torusgd.run.saving import RunResult
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag
from torusgd.step.journal import Journal, JournalEntry, parse_journal
from torusgd.step.model_state import StepState
from torusgd.step.records import StateLine, line_sha256, parse_records, tensor_digests
from torusgd.storage import CACHE, Store
from torusgd.weights import load_weights, weights_sha256

TINY = (
    "precision=float32", "virtual_workers=2", "average={half_life: 2st}", "polish.images=16",
    "model={name: small-net, options: {width: 4, dropout: 0.1}}",
    "data={source: digits, train_images: 60, eval_images: 20, image_size: 8, channels: 1, mean: [0.3], std: [0.4], "
    "augment: {crop: shift, shift: 1, flip: 0.5}}",
    "stages=[{until: 6st, images_per_worker: 3}]", "rate={lr: 1.0, warmup: {length: 1st, start: 0.5}}",
)  # fmt: skip
EVERY_TWO = RuntimeOptions(verify_every=Duration(2, "st"))


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A small network counts as built in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small-net", small_net)
        yield


def of_two(out: Path, *overrides: str, **job: Any) -> Path:
    run_here(out, *TINY, *overrides, options=EVERY_TWO, **job)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_two(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_two(tmp_path_factory.mktemp("runs") / "other", "seed=1")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def verify(run_cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The command with its rank in this process, to its end with an exit code: what was found, by name."""

    def here(job: Job, fresh: bool) -> RunResult:
        with arithmetic_of(job.recipe):
            return Run(job, group_of(), StopFlag(), restarts=0).run()

    monkeypatch.setattr(verification, "launch", here)
    monkeypatch.setattr("torusgd.cli.verify.start_forkserver", lambda: None)

    def call(*words: object, code: int = 0) -> dict[str, str]:
        report = tmp_path / "found.json"
        assert run_cli("verify", *words, "--json", report)[0] == code
        found = json.loads(report.read_text())["found"] if report.exists() else []
        report.unlink(missing_ok=True)
        return {each["name"]: f"{each['state']} {each['text']}" for each in found}

    return call


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes lines of the records, and chains them anew as whoever cheats would, with the summary."""
    before, lines = "", []
    for line in (folder / "records.jsonl").read_text().splitlines():
        tree = json.loads(line)
        if change(tree) == "drop":
            continue
        tree["before"] = before
        lines.append(json.dumps(tree))
        before = line_sha256(lines[-1])
    write_lines(folder / "records.jsonl", lines)
    change_summary(folder, records={**summary(folder)["records"], "sha256": before})
    change_metadata(folder / "model.safetensors", records_sha256=before)


def change_metadata(path: Path, **news: str) -> None:
    tensors, metadata = load_weights(path)
    save_file(tensors, path, metadata | news)


def forge_lines(folder: Path, record: str, **news: object) -> None:
    """Forges all lines of a kind, but for that of step 0."""
    forge(folder, lambda line: line.update(news) if line["record"] == record and line["step"] else None)


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def change_summary(folder: Path, **news: object) -> None:
    (folder / "summary.json").write_text(json.dumps(summary(folder) | news))


def light(folder: Path, step: int) -> Path:
    return folder / "verify" / f"step-{step:08d}.safetensors"


def add_one_in(path: Path, begin: str = "", end: str = "") -> tuple[str, Tensor]:
    """Changes the first tensor of a file with such a name: its name, and what it is now."""
    tensors, metadata = load_weights(path)
    name = next(name for name in sorted(tensors) if name.startswith(begin) and name.endswith(end))
    add_one(tensors[name])
    save_file(tensors, path, metadata)
    return name, tensors[name]


def add_one(tensor: Tensor) -> None:
    tensor.view(-1)[0] += 1


def leave_out_lines(folder: Path, first: int, stop: int | None) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines()
    write_lines(folder / "records.jsonl", lines[:first] + ([] if stop is None else lines[stop:]))


def test_a_whole_run_is_equal_and_nothing_is_written_into_it(copy: Path, verify: Any) -> None:
    def all_of_it() -> dict[Path, Any]:
        return {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in copy.rglob("*")}

    before, paths = all_of_it(), [copy, *copy.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & 0o555)
    found, after = verify(copy, "--all"), all_of_it()
    for path in paths:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert (set(found), after) == ({"steps 0:2", "steps 2:4", "steps 4:6", "result"}, before)


def test_parts_are_equal_and_begin_from_a_checkpoint(run: Path, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    compute = verification.Verifier._compute

    def noted(self: Any, segment: Any, begin: Any) -> Any:
        begun.append(segment.start)
        return compute(self, segment, begin)

    monkeypatch.setattr(verification.Verifier, "_compute", noted)
    for words in ("--steps 2:4", "--sample 2 --seed x", "--final", "", "--steps 4:6"):
        assert verify(run, *words.split())
    assert (begun[0], begun[-1]) == (2, 4)


# A changed tensor: the checkpoint is not that of its record, whether or not it is begun from.
@pytest.mark.parametrize("begin", ["model/", "optimizer/momentum_buffer", "average"])
def test_a_changed_tensor_of_a_checkpoint_is_found_with_its_amount(begin: str, copy: Path, verify: Any) -> None:
    name, _ = add_one_in(light(copy, 2), begin)
    found = verify(copy, "--all", code=1)
    assert re.match(rf"differs .*{name}.*1 of .*by up to 1\)", found["checkpoint 2"])
    assert found["steps 2:4"].startswith("equal"), "the records are those of the steps all the same"
    verify(copy, "--steps", "2:4", code=1)


def test_a_record_forged_to_agree_with_a_changed_weight_is_found_by_the_next(copy: Path, verify: Any) -> None:
    name, changed = add_one_in(light(copy, 2), "model/", "weight")
    digest = weights_sha256({name: changed})

    def agree(line: dict[str, Any]) -> None:
        if (line["record"], line["step"]) == ("state", 2):
            line["tensors"][name] = digest

    forge(copy, agree)
    found = verify(copy, "--steps", "2:4", code=1)
    assert re.search("first after step 4.*; equal after step 2, ", found["steps 2:4"])
    found = verify(copy, "--all", code=1)
    assert re.search(f"first after step 2: {name}.*1 of", found["steps 0:2"])
    # Without the new chain, no step need be computed.
    (copy / "records.jsonl").write_text((copy / "records.jsonl").read_text().replace(digest, "0" * 64))
    assert list(verify(copy, "--steps", "2:4", code=1)) == ["records.jsonl"]


def forge_begin(line: dict[str, Any]) -> None:
    if (line["record"], line["step"]) == ("state", 0):
        line["tensors"][sorted(line["tensors"])[-1]] = "0" * 64


def end_later(folder: Path, step: int) -> None:
    forge_lines(folder, "result", step=step)
    change_summary(folder, steps=step)


def put_in(folder: Path, place: int, record: str, step: int, **news: object) -> None:
    """One record more at a place among the lines: the last of its kind but for the news."""
    lines = (folder / "records.jsonl").read_text().splitlines()
    last = next(line for each in reversed(lines) if (line := json.loads(each))["record"] == record)
    write_lines(folder / "records.jsonl", [*lines[:place], json.dumps({**last, "step": step, **news}), *lines[place:]])
    forge(folder, lambda line: None)


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a statistic": (lambda folder: add_one_in(light(folder, 4), end="running_mean"), ["--steps", "4:6"]),
    "an initial weight": (lambda folder: forge(folder, forge_begin), ["--steps", "0:2"]),
    "the rates": (lambda folder: forge_lines(folder, "state", rates=[0.25, 0.9, 1.0]), ["--all"]),
    "the images": (lambda folder: forge_lines(folder, "state", images="0" * 64), ["--all"]),
    "an evaluation": (lambda folder: forge_lines(folder, "evaluation", figures={"top1": 1.0}), ["--all"]),
    "the result": (lambda folder: forge_lines(folder, "result", weights_sha256="0" * 64), ["--all"]),
    "a summary's steps": (lambda folder: change_summary(folder, steps=450), ["--final"]),
    "a summary's data": (lambda folder: change_summary(folder, data_sha256="0" * 64), ["--final"]),
    "a summary's images": (lambda folder: change_summary(folder, train_images=9), ["--final"]),
    "a line that is left out": (lambda folder: leave_out_lines(folder, 4, 5), ["--all"]),
    "the last line": (lambda folder: leave_out_lines(folder, -1, None), ["--all"]),
    "two records of a step": (lambda folder: put_in(folder, 5, "state", 4), ["--all"]),
    "a state behind the result": (lambda folder: put_in(folder, 99, "state", 7), ["--all"]),
    "an evaluation behind it": (lambda folder: put_in(folder, 99, "evaluation", 7), ["--final"]),
    "another result behind it": (lambda folder: put_in(folder, 99, "result", 7, weights_sha256="0" * 64), ["--all"]),
    "an evaluation of no step": (lambda folder: put_in(folder, 3, "evaluation", 0), ["--all"]),
    "steps after the last": (lambda folder: end_later(folder, 1000), ["--final"]),
    "a checkpoint without end": (lambda folder: put_a_pipe(light(folder, 4)), ["--steps", "4:6"]),
    "a summary's figures": (lambda folder: change_summary(folder, top1=0.99), ["--steps", "0:2"]),
}
FOUND = {
    "two records of a step": {"records.jsonl": "differs two state records of step 4 differ$"},
    "a checkpoint without end": {"steps 4:6": r"equal\s*$", "checkpoint 4": ".* is no file"},
    "a summary's figures": {"summary.json": "differs top1 is 0.99, in the records TOP1$"},
}
"""of these changes all that is found"""


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_found(what: str, copy: Path, run: Path, verify: Any) -> None:
    change, words = CHANGES[what]
    change(copy)
    found = verify(copy, *words, code=1)
    assert found.keys() == FOUND.get(what, found).keys()
    for name, pattern in FOUND.get(what, {}).items():
        assert re.match(pattern.replace("TOP1", str(summary(run)["top1"])), found[name])


def test_a_changed_result_is_found(copy: Path, verify: Any) -> None:
    add_one_in(copy / "model.safetensors")
    assert list(verify(copy, "--final", code=1)) == ["model.safetensors"]

    # The forger agrees with himself all over, and the computed polish does not agree with him.
    digest, whole = weights_sha256(load_file(copy / "model.safetensors")), (copy / "summary.json").read_text()
    change_summary(copy, weights_sha256=digest)
    forge_lines(copy, "result", weights_sha256=digest)
    assert "1 of" in verify(copy, "--final", code=1)["result"]
    (copy / "model.safetensors").rename(copy / "aside")
    assert verify(copy, "--final", code=1) == {"result": "differs weights_sha256"}
    (copy / "aside").rename(copy / "model.safetensors")

    # A folder that seems unfinished hides nothing: with a result in the records its weights are compared.
    forge_lines(copy, "result", weights_sha256=json.loads(whole)["weights_sha256"])
    for text in ("{", '{"records": [1]}', '{"journal": "x"}'):
        (copy / "summary.json").write_text(text)
        verify(copy, "--final", code=2)
    (copy / "summary.json").unlink()
    assert list(verify(copy, "--final", code=1)) == ["model.safetensors"]


@pytest.mark.parametrize("key", ["classes", "recipe", "recipe_sha256", "records_sha256"])
def test_what_the_weights_file_wrongly_says_of_itself_is_found(key: str, copy: Path, verify: Any) -> None:
    """With other names of classes what is exported would call each image something else."""
    said = load_weights(copy / "model.safetensors")[1][key]
    change_metadata(copy / "model.safetensors", **{key: said[::-1] if "sha256" in key else said.replace("1", "2")})
    assert verify(copy, "--final", code=1)["model.safetensors"].endswith(f"another {key} than the run")


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "recipe.yaml", "records.jsonl"])
def test_a_pipe_in_place_of_a_file_is_refused(name: str, copy: Path, verify: Any) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    verify(copy, "--final", code=2)


def test_a_run_of_another_seed_is_found(tmp_path: Path, run: Path, other: Path, verify: Any) -> None:
    folder = Path(shutil.copytree(other, tmp_path / "run"))
    shutil.copy(run / "recipe.yaml", folder)
    begin = json.loads((run / "records.jsonl").read_text().splitlines()[0])["recipe_sha256"]
    verify(folder, "--all", code=1)  # recipe.yaml is not that of the records
    forge(folder, lambda line: line.update(recipe_sha256=begin) if line["record"] == "begin" else None)
    verify(folder, "--all", code=1)


@pytest.mark.parametrize("what", ["image", "label", "order", "step", "rate", "weight", "momentum", "statistic"])
def test_another_computation_is_found(what: str, tmp_path: Path, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of a trainer that cheats, whose folder says that it did what its recipe says."""
    with monkeypatch.context() as patch:
        cheat(what, patch)
        folder = of_two(tmp_path / "run")
    found = verify(folder, "--all", code=1)
    first = "steps 0:2" if what == "order" else "steps 2:4"
    assert found[first].startswith("differs first after"), found
    if what in ("image", "label", "order"):
        assert "images" in found[first]
    if what == "statistic":
        assert re.search(r"\(\d+ of \d+ elements of model/.*, by up to ", found[first])
    if what in ("step", "rate", "weight"):  # of the third step: the loss of the fourth is that of other weights
        assert "equal after step 2, and the loss of step 4 is" in found[first]


def cheat(what: str, patch: pytest.MonkeyPatch) -> None:
    """The third step, or the second virtual worker's images of the fourth, is another; the order is one throughout."""
    from torusgd.data.loader import Loader
    from torusgd.data.order import StreamOrder
    from torusgd.gradients.update import Update

    owner, name = {
        "image": (Loader, "_make"), "label": (Loader, "_make"), "order": (StreamOrder, "at"),
        "step": (Update, "step"), "rate": (Update, "set_rates"),
    }.get(what, (Run, "_note"))  # fmt: skip
    usual, calls = getattr(owner, name), itertools.count()

    def other(self: Any, *given: Any) -> Any:
        if what == "order":
            return tuple(each[::-1].copy() for each in usual(self, *given))
        if what == "step":
            return None if next(calls) == 2 else usual(self)
        if what == "rate":
            return usual(self, replace(given[0], lr=2 * given[0].lr) if given[0].index == 2 else given[0])
        if what in ("image", "label"):
            batch = usual(self, *given)
            if (given[0].step, given[0].worker) == (3, 1):
                add_one(batch.images if what == "image" else batch.targets)
            return batch
        if given[0].step.index == 2:
            change_state(self.trainer.step.state, what)
        return usual(self, *given)

    patch.setattr(owner, name, other)


@torch.no_grad()
def change_state(state: StepState, what: str) -> None:
    if what == "momentum":
        whole = {name: each.clone() for name, each in state.update.state(keep=True).items()}
        name = min(name for name in whole if name.startswith("momentum_buffer"))
        state.update.load_state(name, whole[name].add_(1))
    else:
        add_one(next(state.model.parameters()) if what == "weight" else state.batch_norm.running)


def test_checkpoints_that_vanish_are_done_without(copy: Path, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = verification.Verifier._check_checkpoints

    def vanishing(self: Any, ranges: Any) -> None:
        check(self, ranges)
        light(copy, 4).unlink()

    monkeypatch.setattr(verification.Verifier, "_check_checkpoints", vanishing)
    assert set(verify(copy, "--steps", "4:6")) == {"steps 4:6"}


def test_a_run_that_goes_on_is_checked_as_far_as_it_has_come(copy: Path, verify: Any) -> None:
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints")
    text = (copy / "records.jsonl").read_text()
    (copy / "records.jsonl").write_text(text[: text.rindex('{"step":6')] + '{"step":6,"bef')
    assert "model.safetensors" in verify(copy, "--all", code=2), "what it holds no record says"
    (copy / "model.safetensors").unlink()
    assert "result" not in verify(copy, "--all")
    verify(copy, "--final", code=2)


def test_ranks_of_their_own_compute_it_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    run = of_two(tmp_path / "run", DIGITS_NET, "precision=portable", 'name="mine\\e[2J"')
    words, environment = command("verify", run, "--all", "--workers", "1"), {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("torusgd-verify-*/run/recipe.yaml")), "steps are computed")
    process.terminate()
    assert (process.communicate(timeout=240)[1], process.returncode) == ("torusgd: stopped by SIGTERM\n", 143)
    assert not list(tmp_path.glob("torusgd-verify-*"))
    done = ran(command("verify", run, "--all", "--workers", "2"))
    assert (done.stderr, "steps 2:4  equal" in done.stdout) == ("", True)
    assert "mine\\x1b[2J, 6 steps" in done.stdout, "a name that steers a terminal is text"


def test_a_full_disk_says_which(run: Path, verify: Any, run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{tempfile.gettempdir()}/torusgd-verify-1/run")

    monkeypatch.setattr(verification, "write_checkpoint", full)
    code, _, errors = run_cli("verify", run, "--steps", "2:4")
    assert (code, f"TMPDIR names another folder than {tempfile.gettempdir()}" in errors) == (2, True), errors


@pytest.mark.parametrize("precision", ["float32", pytest.param("portable", marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_sharded_update_leaves_the_same_records(precision: str, tmp_path: Path, run: Path) -> None:
    MODELS["small-net"] = small_net
    recipe = resolve_auto(load_recipe("digits", [*BASE, *TINY, f"precision={precision}"]).recipe, "cpu")
    for update in ("replicated", "sharded"):
        options = RuntimeOptions(verify_every=Duration(2, "st"), update=update)
        with arithmetic_of(recipe):
            train_on_ranks(tmp_path / update, recipe, options, max_steps=4)
    replicated, sharded = (states_of(tmp_path / update) for update in ("replicated", "sharded"))
    assert len(sharded) == 3
    assert sharded == replicated
    if precision == "float32":
        assert sharded == {step: found for step, found in states_of(run).items() if step <= 4}


def states_of(folder: Path) -> dict[int, dict[str, str]]:
    """The digests of the recorded states, by step."""
    lines = parse_records((folder / "records.jsonl").read_text())[0]
    return {line.step: line.tensors for line in lines if isinstance(line, StateLine)}


def test_a_light_checkpoint_is_what_its_record_hashes_of_the_bytes_said(run: Path, tmp_path: Path, capsys, run_cli):
    for step, digests in states_of(run).items():
        assert step == 0 or tensor_digests(load_file(light(run, step))) == digests
    assert sorted(path.name for path in (run / "verify").iterdir()) == [light(run, step).name for step in (2, 4, 6)]
    capsys.readouterr()
    wide = "model.options.width=16"  # a plan counts no names, of which a small network has many
    of_two(tmp_path / "run", wide, max_steps=2)
    said = capsys.readouterr().out
    size = light(tmp_path / "run", 2).stat().st_size / 1024
    words = ["--verify-every", "2st", *sets(*TINY, wide)]
    _, plan, _ = run_cli("plan", "digits", "--cluster", "hgx-h100", "--devices", "1", *words)
    for text, what, error in ((said, "1 light checkpoint", 0.02), (plan, "3 light checkpoints", 0.1)):
        found = re.search(rf"{what} of about ([0-9.]+) KiB", " ".join(text.split()))
        assert found is not None, text
        assert float(found[1]) == pytest.approx(size, rel=error)


def test_a_light_checkpoint_that_can_not_be_written_is_a_warning(run, tmp_path, monkeypatch, capsys, verify) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("torusgd.rundir.checkpoint.shutil.disk_usage", lambda path: full)
    folder = of_two(tmp_path / "run")
    told = [line for line in capsys.readouterr().err.splitlines() if "verify" in line]
    assert [line.rpartition(": ")[2] for line in told] == [
        "the disk has no room for 3 more checkpoints; the run goes on", "lacks 3 checkpoints that could not be written"
    ]  # fmt: skip
    assert not any((folder / "verify").iterdir())
    assert (folder / "records.jsonl").read_text() == (run / "records.jsonl").read_text()
    verify(folder, "--steps", "4:6")


def test_a_run_of_given_weights_begins_with_them(tmp_path: Path, other: Path, run: Path, verify: Any) -> None:
    init = str(other / "model.safetensors")
    folder = of_two(tmp_path / "run", init=init)
    found = verify(folder, "--all", code=2)
    assert found["steps 2:4"].strip() == "equal"
    assert "only with the run's --init" in found["steps 0:2"]
    verify(folder, "--all", "--init", init)
    assert list(verify(folder, "--all", "--init", run / "model.safetensors", code=1)) == ["initial weights"]


@pytest.mark.parametrize("form", [
    "{form: backup, backups: 1, warmup: 2, delays: exponential}", "{form: cutoff, threshold: 1.5, warmup: 2}",
    "{form: local, local_steps: 3}",
])  # fmt: skip
def test_relaxed_forms_are_verified_by_their_journal(form: str, tmp_path: Path, verify: Any) -> None:
    folder = of_two(tmp_path / "run", "virtual_workers=4", f"synchrony={form}")
    if "delays" in form:
        assert summary(folder)["left_out_workers"] > 0
    verify(folder, "--all")
    verify(folder, "--steps", "4:6")
    (folder / "journal.txt").unlink()
    verify(folder, "--all", code=2)


def test_sums_whose_bits_depend_on_the_ranks_are_not_compared(tmp_path: Path, verify: Any) -> None:
    found = verify(of_two(tmp_path / "run", "reduction=float32"), "--all", code=2)
    assert "summed as float32: the bits depend on the ranks" in found["steps 0:2"]


def test_a_run_in_s3_is_checked(tmp_path: Path, verify: Any, monkeypatch: pytest.MonkeyPatch, run_cli: Any) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    with bucket("s3", monkeypatch) as (_, url):
        out = f"{url}/run"
        options = ["--workers", "1", "--verify-every", "2st", *sets(*TINY, DIGITS_NET)]
        ran(command("train", "digits", "--out", out, *options))
        monkeypatch.setenv(CACHE, str(tmp_path / "elsewhere"))
        assert len(verify(out, "--all")) == 4
        store, name = Store(out), "verify/step-0000000{}.safetensors"
        store.delete(name.format(2))
        verify(out, "--steps", "2:4")
        store.write(name.format(2), store.read(name.format(4)))
        assert "checkpoint 2" in verify(out, "--steps", "2:4", code=1), "a file of it is that of another step"


def test_nothing_is_equal_without_a_comparison(copy: Path, tmp_path: Path, verify: Any) -> None:
    verify(tmp_path / "none", "--all", code=2)
    for words in (["--all", "--data", tmp_path / "none"], ["--steps", "4:9"], ["--steps", "x"], ["--all", "--final"]):
        verify(copy, *words, code=2)
    recipe, path = copy / "recipe.yaml", copy / "records.jsonl"
    text = recipe.read_text().replace("source: digits", "source: 'os:getcwd'")
    for spoil in (lambda: recipe.write_text(text), lambda: put_a_pipe(path), path.unlink):
        spoil()
        verify(copy, "--all", code=2)


def test_arithmetic_of_other_conditions_is_apart(tmp_path: Path, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = of_two(tmp_path / "run")
    verify(folder, "--all")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    found = verify(folder, "--all", code=2)
    assert "environment was" in found["steps 0:2"]
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in found["result"]


def drop_states(folder: Path, *steps: int) -> Path:
    forge(folder, lambda line: "drop" if line["record"] == "state" and line["step"] in steps else None)
    return folder


def test_what_no_record_shows_is_computed_or_not_called_equal(tmp_path: Path, verify: Any, monkeypatch) -> None:
    """Without the first state, the last one, or those where conditions change; a result of more steps."""
    short = of_two(tmp_path / "run", max_steps=5)
    assert "steps 0:2" in verify(drop_states(shutil.copytree(short, tmp_path / "first"), 0), "--all")
    verify(drop_states(shutil.copytree(short, tmp_path / "last"), 5), "--all")
    forge_lines(more := shutil.copytree(short, tmp_path / "more"), "result", step=6)
    change_summary(more, steps=6)
    assert verify(more, "--all", code=1)["result"].startswith("differs")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    found = verify(drop_states(of_two(short), 5), "--all", code=2)
    assert "changed within them, after step 5" in found["steps 4:6"]


def test_a_journal_that_was_edited_is_found(tmp_path: Path, verify: Any) -> None:
    """A cutoff run: its journal says whose work entered each update."""
    folder = of_two(tmp_path / "run", "virtual_workers=4", "synchrony={form: cutoff, count: 3}")
    verify(folder, "--all")
    path, text = folder / "journal.txt", (folder / "journal.txt").read_text()
    path.write_text(text.replace("\n2 - ", "\n2 1 "))
    verify(folder, "--all", code=1)

    path.write_text(text)
    recipe_sha256 = text.split()[1]
    whole, journal = parse_journal(text, "", recipe_sha256, 4), Journal(recipe_sha256, 4)
    journal.open(path)
    for step in range(6):
        journal.add(JournalEntry(step, whole.entry(step).workers if step != 3 else {0}))
    journal.close()
    change_summary(folder, journal=journal.head.as_summary(6))
    assert "journal" in verify(folder, "--all", code=1)["steps 2:4"]


def test_a_sample_is_drawn_by_steps_and_by_everybody_alike() -> None:
    ranges = [Range(0, 1), Range(1, 99), Range(99, 100)]
    assert sum(drawn(ranges, 1, str(seed)) == [Range(1, 99)] for seed in range(50)) > 40
    assert drawn(ranges, 9, "x") == ranges
    assert drawn(ranges, 1, "x") == drawn(ranges, 1, "x")


def test_records_of_any_number_of_attempts_are_one_chain(tmp_path: Path, run: Path) -> None:
    out = tmp_path / "run"
    of_two(out, max_steps=3)
    for left in ("checkpoints", "summary.json", "model.safetensors"):  # it begins anew
        shutil.rmtree(out / left) if left == "checkpoints" else (out / left).unlink()
    of_two(out, max_steps=3)
    of_two(out)
    _, head, problem = parse_records((out / "records.jsonl").read_text())
    records = summary(out)["records"]
    assert (problem, records["sha256"], records["states"], records["seconds"] > 0) == ("", head, 5, True)
    assert states_of(out)[6] == tensor_digests(load_file(light(run, 6)))

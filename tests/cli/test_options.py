"""The options of all commands: what their help says, and that the runtime's mean the same to all."""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
import yaml
from tests.commands import ran
from tests.messages import refuses
from tests.plan.measured import measured_run, network
from tests.run.runs import sets
from typer.main import get_command

from torusgd.cli import COMMANDS, app, doctor
from torusgd.cli.help import EXAMPLES, GROUPS
from torusgd.cli.options import RuntimeFlags, expand
from torusgd.comm.algorithms import OTHER_PROGRAMS, SCHEDULED
from torusgd.recipe.load import recipe_source
from torusgd.recipe.runtime_options import STEPS, RuntimeOptions, flags_of

Run = Callable[..., tuple[int, str, str]]
PANELS = {
    "train": "Recipe Data Runtime Network Output", "eval": "Recipe Data Runtime Output",
    "polish": "Recipe Data Runtime Output", "plan": "Cluster Recipe Data Runtime Network Output",
    "rehearse": "Cluster Recipe Data Runtime Network Output", "simulate": "Recipe Data Output",
    "report": "Data Runtime Output", "bench allreduce": "Runtime Network Output", "tune": "Runtime Network Output",
}  # fmt: skip
NEUTRAL = {name for names in {  # options that change no plan, and why
    "device workers_range": "a plan is of one number of its cluster's devices",
    "ranks_per_gpu": "a plan prices devices, each with one rank",
    "cuda_graphs cuda_streams": "a profile is of the one form that was measured",
    "checkpoint_every checkpoint_minutes": "a thread writes checkpoints beside the steps; a plan counts none",
    "keep_checkpoints": "of the disk",
    "track": "rank 0 sends a line a step, which a plan does not count",
    "audit": "a share of the computation on top, which the user has chosen; a plan is of the run without it",
    "shares": "equal devices take equal shares",
    "work_stealing": "a plan knows of no pauses",
    "loader_processes": "a plan takes images to arrive in time",
    "node_memory": "at most a hundredth of the time, under torchrun alone",
    "streams": "on clusters whose links one connection fills; others: tests/plan/test_program.py",
    "mixed timeout start_timeout": "of ranks that are let in or lost; a plan has none",
    "drift_every": "less than a thousandth of a step by default",
} for name in names.split()}  # fmt: skip
CHANGED: dict[str, Any] = {
    "device": "cuda", "workers": 8, "workers_range": [2, 16], "ranks_per_gpu": 2, "cuda_graphs": True,
    "cuda_streams": 2, "allreduce": "torus:halving/ring", "grid": "2x8", "buckets": [3, 4], "update": "sharded",
    "model_parallel": 4, "weights_first": True, "checkpoint_every": "3st", "checkpoint_minutes": 3.0,
    "keep_checkpoints": 5, "track": ["tensorboard"], "drift_every": 3, "timeout": 7.0, "audit": 0.5, "shares": "even",
    "work_stealing": True, "loader_processes": 2, "node_memory": False, "streams": 4, "mixed": True,
    "start_timeout": 8.0, "verify_every": "3st",
}  # fmt: skip


def help_of(run_cli: Run, command: str) -> str:
    code, out, _ = run_cli(*command.split(), "--help")
    assert code == 0
    return out


def _joined(text: str) -> str:
    return re.sub(r"-\s+", "-", " ".join(text.split()))


def test_help_comes_without_torch_and_pydantic_and_a_shell_completes_commands_and_their_options() -> None:
    script = (
        "import sys, torusgd.cli\n"
        "sys.argv = ['torusgd', '--help']\n"
        "try: torusgd.cli.main()\n"
        "except SystemExit: print({'torch', 'pydantic', 'numpy'} & set(sys.modules))\n"
    )
    assert ran([sys.executable, "-c", script]).stdout.endswith("set()\n")
    asked = {"_TORUSGD_COMPLETE": "complete_bash", "COMP_WORDS": "torusgd verify --fi", "COMP_CWORD": "2"}
    script = "import sys; sys.argv = ['torusgd']; from torusgd.__main__ import main; main()"
    assert ran([sys.executable, "-c", script], code=None, env=os.environ | asked).stdout.split() == ["--final"]


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_begins_with_an_example_that_the_command_takes_and_fits_80_columns(command: str, run_cli: Run) -> None:
    text = help_of(run_cli, command)
    first, *lines = text.splitlines()
    assert first == f"Example: torusgd {EXAMPLES[command]}"
    assert max(map(len, lines)) <= 80
    found: Any = get_command(app())
    for word in command.split():
        found = found.commands[word]
    words = EXAMPLES[command].split()[len(command.split()) :]
    if hasattr(found, "commands"):  # of a group: the example of one of its commands
        assert f"{command} {words[0]}" in EXAMPLES
    else:
        found.make_context(command, words)
    if command in ("train", "plan", "rehearse", "bench allreduce"):  # names of algorithms come from the table
        others = () if command == "bench allreduce" else OTHER_PROGRAMS
        assert {name for name in ("native", "auto", *SCHEDULED, *others) if name not in text} == set()
    if command in PANELS:  # nothing but --help is left over
        options = text.partition("\nOptions:\n")[2]
        assert {f"{panel}:" for panel in PANELS[command].split()} <= set(lines)
        assert set(re.findall(r"--[a-z-]+", options)) <= {"--help", "--seconds", "--mistakes", "--verified", "--json"}


def test_every_command_is_listed_in_a_group(run_cli: Run) -> None:
    code, out, error = run_cli()
    assert (code, out, error) == (2, run_cli("--help")[1], "")
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(COMMANDS)
    assert [line.strip(":") for line in out.splitlines() if line.endswith(":")] == [*GROUPS, "Options"]
    assert re.findall(r"^  ([a-z]+)  ", out, re.MULTILINE) == names


def test_a_tree_of_sources_that_is_not_installed_has_no_version(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert run_cli("--version")[:2] == (0, "torusgd from a tree of sources\n")
    assert run_cli("doctor")[1].startswith("torusgd   from a tree of sources on Python ")


def test_doctor_says_what_works_here_what_to_install_and_that_ranks_have_no_shared_memory(run_cli: Run, monkeypatch):
    code, out, _ = run_cli("doctor")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    parts = ("torusgd", "machine", "device", "ranks", "memory", "portable", "pictures", "extras", "missing", "fit")
    assert (code, tuple(lines)) == (0, parts)
    assert torch.__version__ in lines["torusgd"]
    assert "float64" in lines["portable"]
    assert "digits" in lines["extras"].split(", ")
    monkeypatch.setattr(doctor, "LEAST_SHARED", 1 << 60)
    code, out, _ = run_cli("doctor")
    assert re.search(r"^memory    NO: /dev/shm has .*--shm-size", out, re.MULTILINE)
    assert (code, out.endswith("not fit to train: memory\n")) == (1, True)


def test_commands_that_plan_have_a_flag_of_each_option_that_changes_a_plan() -> None:
    flags = {name for name in RuntimeOptions.model_fields if "plan" in getattr(flags_of(name)[0], "commands", ())}
    assert set(RuntimeOptions.model_fields) - flags == NEUTRAL - {"device", "streams"} | {"software"}


@pytest.mark.parametrize("command", [*STEPS, "bench allreduce", "tune", "eval", "polish", "report", "verify"])
def test_a_command_has_the_flags_that_its_options_name_with_their_text_as_help(command: str, run_cli: Run) -> None:
    text = _joined(help_of(run_cli, command))
    for name, field in RuntimeOptions.model_fields.items():
        flag, names = flags_of(name)
        has_it = flag is not None and command in flag.commands
        assert (_joined(str(field.description)) in text) == has_it
        assert not has_it or all(f" {each}" in text or f",{each}" in text for each in names)


def test_a_group_becomes_options_which_are_checked_as_a_recipe_file_is_and_override_it() -> None:
    block = RuntimeOptions(update="sharded", grid="2x2")
    given = {"grid": "4x4", "model_parallel": "auto", "profile": "a/b"}
    found = RuntimeFlags(**given, buckets="[1, 2]").over(block)
    assert found.model_dump(exclude_unset=True) == {"update": "sharded", "buckets": (1, 2), **given}
    assert RuntimeFlags(buckets="8", model_parallel="2").over(block).buckets == 8
    assert RuntimeFlags(track=["wandb"]).over(block).track == ("wandb",)
    for wrong, about in (("many", "flags: buckets"), ("[", "--buckets")):
        refuses(f"--buckets {wrong}", RuntimeFlags(buckets=wrong).over, block, about=about)
    app = typer.Typer()
    seen: list[object] = []

    def command(runtime: RuntimeFlags, name: Annotated[str, typer.Option("--name")] = "x") -> None:
        seen.extend((runtime.given, name))

    app.command()(expand(command, "plan"))
    app(["--devices", "3", "--name", "y", "--no-weights-first"], standalone_mode=False)
    assert seen == [{"workers": "3", "weights_first": False}, "y"]


@pytest.mark.parametrize("name", [name for name in RuntimeOptions.model_fields if name not in ("profile", "software")])
def test_a_runtime_option_changes_a_plan_or_is_neutral_with_a_reason(name: str, tmp_path: Path, plan) -> None:
    """The option stands in the recipe's `runtime:` block; 16 of AWS's nodes, whose network is slow."""

    def planned(**options: Any) -> dict[str, Any]:
        file = tmp_path / "mine.yaml"
        block = {"workers": 16, "allreduce": "torus", **options}
        source = recipe_source("resnet50-90ep").split("\nruntime:")[0]
        file.write_text(f"{source}\n{yaml.safe_dump({'runtime': block})}")
        _, found = plan(file, "--cluster", "aws-c4.8xlarge", "--software", "torusgd")
        notes = [note for note in found["notes"] if not note.startswith("torusgd train refuses")]
        # Of nine digits: in sums, options that change nothing may move the last one.
        return json.loads(json.dumps({**found, "notes": notes}), parse_float=lambda each: f"{float(each):.9g}")

    assert CHANGED[name] != RuntimeOptions.model_fields[name].default
    assert (planned(**{name: CHANGED[name]}) == planned()) == (name in NEUTRAL)


def test_a_grid_of_the_block_gives_way_to_other_ranks_with_a_line_and_a_flag_does_not(caplog, mistake, tmp_path):
    block, flags = RuntimeOptions(allreduce="torus", grid="34x64", model_parallel=2), RuntimeFlags()
    assert flags.fitted(block, block, 2176) == block
    assert not caplog.messages
    assert flags.fitted(block, block, 2) == RuntimeOptions(allreduce="torus", model_parallel=2)
    assert "for another number of ranks than 2: left out grid = 34x64" in caplog.text
    asked = RuntimeFlags(grid="4x4")
    assert asked.fitted(asked.over(block), block, 2).grid == "4x4"
    itself = RuntimeOptions(workers=3, grid="2x2")
    assert flags.fitted(itself, itself, 3) == itself
    assert RuntimeFlags(allreduce="ring").over(block) == RuntimeOptions(allreduce="ring", model_parallel=2)
    # A record trains on two ranks as far as its data.
    caplog.clear()
    mistake("train", "sony-224s", "--workers", 2, "--data", tmp_path / "none", "--out", tmp_path / "run", TMP=tmp_path)
    assert "left out grid = 34x64" in caplog.text


def test_a_profile_of_the_runtime_block_changes_a_plan_of_this_machine(tmp_path: Path, plan) -> None:
    seconds, profile, file = [], tmp_path / "profile.json", tmp_path / "mine.yaml"
    block = {"runtime": {"workers": 2, "profile": str(profile)}}
    file.write_text(f"{recipe_source('digits')}\n{yaml.safe_dump(block)}")
    words = (*sets("data.train_images=1000", "data.classes=10"), "--measured", measured_run(tmp_path, 0.2))
    for latency in (1e-3, 1e-2):
        profile.write_text(network(latency=latency).dump())
        seconds.append(plan(file, *words, "--cluster", "local")[1]["seconds"])
    assert seconds[0] < seconds[1]


def test_a_variable_that_lowers_the_precision_is_ignored(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"):
        monkeypatch.setenv(name, "BF16")
        code, _, err = run_cli("recipes")
        assert (code, err) == (0, f"torusgd: {name} is ignored: the recipe decides the precision\n")
        assert name not in os.environ


def test_a_mistake_is_one_line_whatever_was_typed(mistake: Callable[..., None]) -> None:
    for words in ("plan digits --no-such 8", "plan digits one more", "no-such"):
        mistake(*words.split())
    for more in (("9" * 30,), ("8", "--set", "seed=\n1\x1b[2J=\n: [")):
        mistake("plan", "digits", "--cluster", "abci", "--devices", *more)

"""The options of all commands: what their help says, and that the runtime's mean the same to all."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml
from tests.messages import refused
from tests.plan.measured import measured_run, network

from torusgd.cli.options import RuntimeFlags, expand
from torusgd.comm.algorithms import OTHER_PROGRAMS, SCHEDULED
from torusgd.recipe.load import recipe_source
from torusgd.recipe.runtime_options import STEPS, RuntimeOptions, flags_of

Run = Callable[..., tuple[int, str, str]]
COMMANDS = (
    "train", "status", "stop", "resize", "replay", "eval", "polish", "plan", "rehearse", "simulate", "recipes", "tune",
    "bench allreduce", "data fetch", "data info",
)  # fmt: skip
PANELS = {
    "train": {"Recipe", "Data", "Runtime", "Network", "Output"},
    "eval": {"Recipe", "Data", "Runtime", "Output"},
    "polish": {"Recipe", "Data", "Runtime", "Output"},
    "plan": {"Cluster", "Recipe", "Data", "Runtime", "Network", "Output"},
    "rehearse": {"Cluster", "Recipe", "Data", "Runtime", "Network", "Output"},
    "simulate": {"Recipe", "Data", "Output"},
    "report": {"Data", "Runtime", "Output"},
    "bench allreduce": {"Runtime", "Network", "Output"},
    "tune": {"Runtime", "Network", "Output"},
}
NEUTRAL = {
    "device": "a plan is of its cluster's devices",
    "workers_range": "a plan is of one number of devices",
    "ranks_per_gpu": "a plan prices devices, each with one rank",
    "cuda_graphs": "what it gains was never measured",
    "cuda_streams": "what it gains was never measured",
    "checkpoint_every": "a thread writes checkpoints beside the steps; a plan counts none",
    "checkpoint_minutes": "as checkpoint_every",
    "keep_checkpoints": "of the disk",
    "track": "rank 0 sends a line a step, which a plan does not count",
    "audit": "a share of the computation on top, which the user has chosen; a plan is of the run without it",
    "shares": "equal devices take equal shares",
    "work_stealing": "a plan knows of no pauses",
    "loader_processes": "a plan takes images to arrive in time",
    "node_memory": "at most a hundredth of the time, under torchrun alone",
    "streams": "on clusters whose links one connection fills; others: tests/plan/test_program.py",
    "mixed": "whether ranks are let in; a plan has none",
    "drift_every": "less than a thousandth of a step by default",
    "timeout": "of a rank that is lost; a plan has none",
    "start_timeout": "of a rank that is lost; a plan has none",
}
"""options that change no plan, and why"""
CHANGED: dict[str, Any] = {
    "device": "cuda", "workers": 8, "workers_range": [2, 16], "ranks_per_gpu": 2, "cuda_graphs": True,
    "cuda_streams": 2, "allreduce": "torus:halving/ring", "grid": "2x8", "buckets": [3, 4], "update": "sharded",
    "model_parallel": 4, "weights_first": True, "checkpoint_every": "3st", "checkpoint_minutes": 3.0,
    "keep_checkpoints": 5, "track": ["tensorboard"], "drift_every": 3, "timeout": 7.0, "audit": 0.5, "shares": "even",
    "work_stealing": True, "loader_processes": 2, "node_memory": False, "streams": 4, "mixed": True,
    "start_timeout": 8.0, "verify_every": "3st",
}  # fmt: skip


def help_of(run_cli: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run_cli(*command.split(), "--help")
    assert code == 0
    return out


def test_help_comes_without_torch_and_pydantic() -> None:
    script = (
        "import sys, torusgd.cli\n"
        "sys.argv = ['torusgd', '--help']\n"
        "try: torusgd.cli.main()\n"
        "except SystemExit: print({'torch', 'pydantic', 'numpy'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_in_its_panel(command: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(run_cli, monkeypatch, command)
    found = set(re.findall(r"^╭─ ([A-Z].*?) ─", text, re.MULTILINE))
    assert found >= PANELS.get(command, set())
    if command in PANELS:  # nothing but --help is left over
        left_over = re.search(r"^╭─ Options ─.*?╰", text, re.MULTILINE | re.DOTALL)
        options = re.findall(r"--[a-z-]+", left_over[0]) if left_over else []
        assert set(options) <= {"--help", "--seconds", "--mistakes"}


@pytest.mark.parametrize("command", ["train", "plan", "rehearse", "bench allreduce"])
def test_names_of_algorithms_come_from_the_table(command: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(run_cli, monkeypatch, command)
    others = () if command == "bench allreduce" else OTHER_PROGRAMS
    assert {name for name in ("native", "auto", *SCHEDULED, *others) if name not in text} == set()


def test_commands_that_plan_have_a_flag_of_each_option_that_changes_a_plan() -> None:
    flags = {name for name in RuntimeOptions.model_fields if "plan" in getattr(flags_of(name)[0], "commands", ())}
    assert set(RuntimeOptions.model_fields) - flags == NEUTRAL.keys() - {"device", "streams"} | {"software"}


@pytest.mark.parametrize("command", [*STEPS, "bench allreduce", "tune", "eval", "polish", "report", "verify"])
def test_a_command_has_the_flags_that_its_options_name_with_their_text_as_help(
    command: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"[\s│]+", " ", help_of(run_cli, monkeypatch, command))
    for name, field in RuntimeOptions.model_fields.items():
        flag, names = flags_of(name)
        has_it = flag is not None and command in flag.commands
        assert (" ".join(str(field.description).split()) in text) == has_it
        assert not has_it or all(f" {each}" in text or f",{each}" in text for each in names)


def test_the_earlier_name_of_resize_is_hidden_and_works(run_cli: Run, tmp_path: Path) -> None:
    assert "scale" not in run_cli("--help")[1]
    lines = [run_cli(name, tmp_path, "--workers", 2)[2] for name in ("resize", "scale")]
    assert lines[0] == lines[1]
    assert "holds no run" in lines[0]


def test_flags_are_checked_as_a_recipe_file_is_and_override_it() -> None:
    block = RuntimeOptions(update="sharded", grid="2x2")
    found = RuntimeFlags(grid="4x4", buckets="[1, 2]", model_parallel="auto", profile="a/b").over(block)
    assert found.model_dump(exclude_unset=True) == {
        "update": "sharded", "grid": "4x4", "buckets": (1, 2), "model_parallel": "auto", "profile": "a/b",
    }  # fmt: skip
    assert RuntimeFlags(buckets="8", model_parallel="2").over(block).buckets == 8
    assert RuntimeFlags(track=["wandb"]).over(block).track == ("wandb",)
    for wrong, about in (("many", "flags: buckets"), ("[", "--buckets")):
        with refused(f"--buckets {wrong}", about):
            RuntimeFlags(buckets=wrong).over(block)


@pytest.mark.parametrize("name", [name for name in RuntimeOptions.model_fields if name not in ("profile", "software")])
def test_a_runtime_option_changes_a_plan_or_is_neutral_with_a_reason(name: str, tmp_path: Path, run_cli: Run) -> None:
    """The option stands in the recipe's `runtime:` block; 16 of AWS's nodes, whose network is slow."""

    def planned(**options: Any) -> dict[str, Any]:
        file, found = tmp_path / "mine.yaml", tmp_path / "plan.json"
        block = {"workers": 16, "allreduce": "torus", **options}
        source = recipe_source("intel-aws-vgga-16").split("\nruntime:")[0]
        file.write_text(f"{source}\n{yaml.safe_dump({'runtime': block})}")
        words = ("--cluster", "aws-c4.8xlarge", "--software", "torusgd", "--json", found)
        code, _, err = run_cli("plan", file, *words)
        assert code == 0, err
        plan = dict(json.loads(found.read_text()))
        plan["notes"] = [note for note in plan["notes"] if not note.startswith("torusgd train refuses")]
        return plan

    assert CHANGED[name] != RuntimeOptions.model_fields[name].default
    assert (planned(**{name: CHANGED[name]}) == planned()) == (name in NEUTRAL)


def test_a_grid_of_the_block_gives_way_to_other_ranks_with_a_line_and_a_flag_does_not(caplog) -> None:
    block = RuntimeOptions(allreduce="torus", grid="34x64", model_parallel=2)
    flags = RuntimeFlags()
    assert flags.fitted(block, block, 2176) == block
    assert not caplog.messages
    assert flags.fitted(block, block, 2) == RuntimeOptions(allreduce="torus", model_parallel=2)
    assert "for another number of ranks than 2: left out grid = 34x64" in caplog.text
    asked = RuntimeFlags(grid="4x4")
    assert asked.fitted(asked.over(block), block, 2).grid == "4x4"
    itself = RuntimeOptions(workers=3, grid="2x2")
    assert flags.fitted(itself, itself, 3) == itself
    assert RuntimeFlags(allreduce="ring").over(block) == RuntimeOptions(allreduce="ring", model_parallel=2)


def test_a_record_trains_on_two_ranks_as_far_as_its_data(mistake, tmp_path: Path, caplog) -> None:
    mistake("train", "sony-224s", "--workers", 2, "--data", tmp_path / "none", "--out", tmp_path / "run", TMP=tmp_path)
    assert "left out grid = 34x64" in caplog.text


def test_a_profile_of_the_runtime_block_changes_a_plan_of_this_machine(tmp_path: Path, run_cli: Run) -> None:
    measured_run(tmp_path, 0.2)
    seconds = []
    for latency in (1e-3, 1e-2):
        profile, file, found = (tmp_path / name for name in ("profile.json", "mine.yaml", "plan.json"))
        profile.write_text(network(latency=latency).dump())
        block = {"workers": 2, "profile": str(profile)}
        file.write_text(recipe_source("digits") + "\n" + yaml.safe_dump({"runtime": block}))
        sizes = ("--set", "data.train_images=1000", "--set", "data.classes=10")
        code, _, err = run_cli("plan", file, *sizes, "--cluster", "local", "--measured", tmp_path, "--json", found)
        assert code == 0, err
        seconds.append(json.loads(found.read_text())["seconds"])
    assert seconds[0] < seconds[1]


def test_a_group_becomes_options_of_its_own() -> None:
    app = typer.Typer()
    seen: list[object] = []

    def command(runtime: RuntimeFlags, name: Annotated[str, typer.Option("--name")] = "x") -> None:
        seen.extend((runtime.given, name))

    app.command()(expand(command, "plan"))
    app(["--devices", "3", "--name", "y", "--no-weights-first"], standalone_mode=False)
    assert seen == [{"workers": "3", "weights_first": False}, "y"]


@pytest.mark.parametrize("name", ["DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_a_variable_that_lowers_the_precision_is_ignored(run_cli: Run, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv(name, "BF16")
    code, _, err = run_cli("recipes")
    assert (code, err) == (0, f"torusgd: {name} is ignored: the recipe decides the precision\n")
    assert name not in os.environ


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "digits", "--no-such", "8"],
        ["plan", "digits", "one", "more"],
        ["no-such"],
        ["plan", "digits", "--cluster", "abci", "--devices", "9" * 30],
        ["plan", "digits", "--cluster", "abci", "--devices", "8", "--set", "seed=\n1\x1b[2J=\n: ["],
    ],
)
def test_a_mistake_is_one_line_whatever_was_typed(words: list[str], mistake: Callable[..., None]) -> None:
    mistake(*words)


def test_no_command_at_all_shows_the_help(run_cli: Run) -> None:
    code, out, err = run_cli()
    assert (code, err) == (2, "")
    assert "Usage: " in out

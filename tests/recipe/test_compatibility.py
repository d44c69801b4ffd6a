"""What does not go with what: each rule of the table has a run that breaks it, with one line and exit code 2."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.messages import assert_sentence, refuses
from tests.run.runs import sets

from torusgd.recipe import compatibility
from torusgd.recipe.compatibility import RECIPE_RULES, RUN_RULES, Rule, Setup, check, fixed_ranks, obstacle
from torusgd.recipe.load import load_recipe
from torusgd.run.job import Job, with_graphs

Run = Callable[..., tuple[int, str, str]]
GPU = {"device": "cuda"}
CUTOFF, LOCAL = "synchrony={form: cutoff, count: 3}", "synchrony={form: local, local_steps: 2}"
BY_DELAYS = "synchrony={form: cutoff, count: 3, delays: lognormal}"
PORTABLE = "precision=portable"
INEXACT, BLOCKS, SHARDED = "reduction=float32", "column_blocks=2", "runtime.update=sharded"
GRAPHS, STREAMS, STEALING = "runtime.cuda_graphs=true", "runtime.cuda_streams=2", "runtime.work_stealing=true"
EACH, EXTRA = "model.batch_norm_workers=each", "stages.0.extra_pass=true"
FIRST, RANGE = "runtime.weights_first=true", "runtime.workers_range=[1, 4]"

CHANGES: list[tuple[list[str], dict[str, Any]]] = [([SHARDED], {}), ([BLOCKS], {}), ([INEXACT], {}), ([GRAPHS], GPU)]
BROKEN: list[list[str]] = [  # overrides of digits, for each rule of recipes in their order
    ["loss_scale.initial=2.0"], ["compile=true", BLOCKS], ["compile=true", CUTOFF],
    *([BLOCKS, other] for other in ("loss=binary-cross-entropy", INEXACT, "model.freeze=[body]")),
    [BLOCKS, "data.augment.mixup=0.2"], [LOCAL, "clip_grad_norm=1.0"], [LOCAL, "optimizer={name: adamw}"],
    [CUTOFF, INEXACT], [CUTOFF, BLOCKS], [LOCAL, EACH], [LOCAL, EXTRA], [BLOCKS, EXTRA],
    *([PORTABLE, other] for other in ("compile=true", INEXACT, "data.decoder=nvjpeg", BY_DELAYS)),
    ["data.pixels=portable", "data.decoder=nvjpeg"], [PORTABLE, "data.resize=9"],
]  # fmt: skip
REFUSED: list[tuple[list[str], dict[str, Any]]] = [  # overrides of digits, fields of `Setup`, for each rule of runs
    ([], {"ranks": 1000}), (["runtime.grid=1x2", "runtime.allreduce=ring"], {"ranks": 2}),
    (["runtime.streams=2", "runtime.allreduce=native"], {"ranks": 2}), (["synchrony={form: stale, staleness: 2}"], {}),
    ([CUTOFF], GPU), ([LOCAL, "precision=float16"], {}), ([], {"delays": "lognormal"}),
    (["runtime.audit=0.5"], {"ranks": 1}),
    *((["runtime.audit=1.0", other], {"ranks": 2}) for other in (INEXACT, BLOCKS, "runtime.mixed=true", BY_DELAYS)),
    ([BY_DELAYS, "runtime.mixed=true"], {"ranks": 2}),
    *((["runtime.shares=speed", other], {}) for other in (INEXACT, BLOCKS, CUTOFF)),
    *(([STEALING, other], {"ranks": 2}) for other in ("runtime.audit=0.5", SHARDED, INEXACT, BLOCKS, CUTOFF)),
    ([FIRST], GPU), ([FIRST, "compile=true"], {}), ([FIRST, LOCAL], {}),
    (["runtime.model_parallel=2"], {"ranks": 2}), (["column_blocks=6", "runtime.model_parallel=3"], {"ranks": 4}),
    (["virtual_workers=3", BLOCKS, "runtime.model_parallel=2"], {"ranks": 2}), ([STREAMS], {}), ([STREAMS], GPU),
    *(([GRAPHS, other], {**GPU, "ranks": 2}) for other in (
        INEXACT, BY_DELAYS, BLOCKS, "clip_grad_norm=1.0", "optimizer={name: adamw}", SHARDED, "runtime.audit=0.5",
        STEALING, EACH, EXTRA,
    )),
    ([GRAPHS, PORTABLE, BLOCKS], GPU), ([GRAPHS, PORTABLE, LOCAL], GPU), ([GRAPHS, PORTABLE, STREAMS], GPU),
    (["data.decoder=nvjpeg"], {}), (["data.decoder=nvjpeg", "runtime.loader_processes=2"], GPU),
    ([], {"listens": True, "launcher": "other"}), ([], {"deletes": "s3://bucket/run", "launcher": "torchrun"}),
    *(([RANGE, *overrides], fields) for overrides, fields in CHANGES),
    *((overrides, {"listens": True, **fields}) for overrides, fields in CHANGES),
]  # fmt: skip


def name_of(rule: Rule) -> str:
    """As docs/recipe-keys.md names it, and messages.yaml."""
    return f"{rule.part.words} with {rule.other.words}".replace("`", "")


def setup_of(overrides: list[str], fields: dict[str, Any]) -> Setup:
    recipe, options = load_recipe("digits", overrides)
    return replace(Setup(recipe, options), **fields)


@pytest.mark.parametrize(
    ("rule", "overrides"), list(zip(RECIPE_RULES, BROKEN, strict=True)), ids=map(name_of, RECIPE_RULES)
)
def test_a_recipe_that_breaks_a_rule(run_cli: Run, rule: Rule, overrides: list[str]) -> None:
    code, _, error = run_cli("train", "digits", *sets(*overrides))
    assert code == 2
    assert rule.why in error
    assert_sentence(name_of(rule), f"torusgd: recipe digits: {rule.part.key}", error.rstrip("\n"))


@pytest.mark.parametrize(("rule", "case"), list(zip(RUN_RULES, REFUSED, strict=True)), ids=map(name_of, RUN_RULES))
def test_a_run_that_breaks_a_rule(rule: Rule, case: tuple[list[str], dict[str, Any]]) -> None:
    setup = setup_of(*case)
    broken = [each for each in RUN_RULES if each.is_broken(setup)]
    assert broken[0] is rule
    refuses(name_of(rule), check, setup, about=rule.part.key)
    check(setup, {each.part for each in RUN_RULES} - {each.part for each in broken})


@pytest.mark.parametrize(("name", "words"), [
    ("audit with one rank", "--audit 0.5 --workers 1"),
    ("grid with allreduce other than torus or hierarchical", "--grid 1x2 --allreduce ring --workers 2"),
    ("workers with fewer virtual_workers", "--workers 1000"),
    ("work_stealing: true with update: sharded", "--work-stealing --update sharded --workers 2"),
    ("--workers MIN:MAX with update: sharded", "--update sharded --workers 1:4"),
    ("--listen with update: sharded", "--update sharded --listen 127.0.0.1:0"),
    ("--delays with a run without late work that clocks leave out", "--delays lognormal --workers 2"),
    ("data.decoder: nvjpeg with device: cpu", "--set data.decoder=nvjpeg"),
])  # fmt: skip
def test_train_refuses_it_before_ranks_are_started(run_cli: Run, monkeypatch, tmp_path, name: str, words: str) -> None:
    monkeypatch.setattr("torusgd.ranks.supervisor.Supervisor.__init__", None)
    code, _, error = run_cli("train", "digits", "--out", tmp_path / "run", "--device", "cpu", *words.split())
    assert code == 2
    assert_sentence(name, "", error.removeprefix("torusgd: ").rstrip("\n"))


def test_a_plan_notes_what_a_run_refuses_and_a_joined_rank_refuses_flags_of_a_launcher(plan, run_cli, monkeypatch):
    words = ("digits", "--cluster", "abci", "--devices", 4, "--update", "sharded")
    _, found = plan(*words, "--set", "runtime.work_stealing=true", "--set", "data.train_images=1000")
    assert [note for note in found["notes"] if note.startswith("torusgd train refuses this: work_stealing = true")]
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(variable, value)
    code, _, error = run_cli("train", "digits", "--device", "cpu", "--listen", "127.0.0.1:0")
    assert (code, error.startswith("torusgd: --listen: ")) == (2, True)


def test_what_goes_together_is_not_refused_and_an_obstacle_is_found_before_the_part_is_there() -> None:
    setup = setup_of(["runtime.audit=0.1", "runtime.workers_range=[2, 4]"], {"ranks": 2})
    inexact = setup_of([INEXACT], {})
    assert not compatibility.refusals(setup)
    check(setup)
    assert (obstacle(compatibility.BY_SPEED, setup), fixed_ranks(setup)) == ("", "")
    assert obstacle(compatibility.BY_SPEED, inexact)
    assert fixed_ranks(inexact)
    assert obstacle(compatibility.CUDA_GRAPHS, replace(inexact, device="cuda"))


@pytest.mark.parametrize(("device", "ranks", "listens", "changes", "graphs"), [
    ("cuda", 1, False, [], True), ("cpu", 1, False, [], None), ("cuda", 2, False, [], None),
    ("cuda", 1, True, [], False), ("cuda", 1, False, [RANGE], False), ("cuda", 1, False, [INEXACT], False),
    ("cuda", 1, False, [PORTABLE], False), ("cuda", 1, False, ["runtime.cuda_graphs=false"], False),
    ("cuda", 1, False, ["compile=true"], True), ("cuda", 1, False, ["optimizer={name: adamw}"], False),
    ("cuda", 2, False, [GRAPHS], True),
])  # fmt: skip
def test_a_gpus_only_rank_takes_cuda_graphs_where_nothing_forbids_them(
    device, ranks, listens, changes, graphs, monkeypatch
) -> None:
    monkeypatch.setattr("torusgd.run.job.runs_kernels", lambda: True)
    job = Job(*load_recipe("digits", changes), device, Path("nowhere"))
    assert with_graphs(job, ranks, listens).options.cuda_graphs == graphs

"""Training in virtual time: limits in which forms are one another, and the same bits each time."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.messages import refused, refuses

from torusgd.data import Pipeline, open_sources
from torusgd.recipe.load import load_recipe
from torusgd.simulate import FORMS, Passes, Setting, Simulation, Workers, moments, simulate
from torusgd.synchrony.delays import delay_model

OVERRIDES = ["data.source=synthetic", "data.train_images=64", "data.eval_images=16", "data.classes=4", "polish=null",
             "model.options.width=4", "stages=[{until: 2ep, images_per_worker: 4}]", "target_top1=null"]  # fmt: skip


@cache
def small(form: str, workers: int = 4, delays: str = "exponential", more: tuple[str, ...] = ()) -> Simulation:
    recipe = load_recipe("digits", [*OVERRIDES, *more]).recipe
    return simulate(Setting(recipe, form, workers, delays, lr=0.1), images=24 * 4, points=2)


@pytest.mark.parametrize(("form", "same"), [
    ("pbsp:4", "bsp"), ("ssp:0", "bsp"), ("pssp:4x2", "ssp:2"), ("pbsp:0", "asp"), ("threshold:1xinf", "bsp"),
    ("cutoff:4", "bsp"), ("{form: sampled, sample: 4, staleness: 2}", "ssp:2"),
    ("{form: stale, staleness: 2}", "ssp:2"), ("{form: asynchronous}", "asp"),
    ("{form: gossip, probability: 0.5}", "gossip:0.5"), ("{form: elastic, pull_every: 2}", "elastic:2"),
    ("{form: backup, backups: 1, warmup: 2}", "cutoff:3"), ("{form: local, local_steps: 3}", "diloco:3"),
])  # fmt: skip
def test_limits_and_what_a_recipe_says_have_the_same_hash(form: str, same: str) -> None:
    more: tuple[str, ...] = ()
    if form.startswith("{"):
        # Local steps of a recipe take their part of the images of a virtual worker.
        images = 12 if "local" in form else 4
        more = (f"stages=[{{until: 2ep, images_per_worker: {images}}}]", "virtual_workers=4", f"synchrony={form}")
    found, expected = small("" if more else form, more=more), small(same)
    assert found.weights_sha256 == expected.weights_sha256
    assert [point.error for point in found.points] == [point.error for point in expected.points]


def test_a_form_that_is_given_takes_nothing_of_the_recipes() -> None:
    local = ("virtual_workers=4", "synchrony={form: local, local_steps: 4}")
    assert small("bsp", more=local).weights_sha256 == small("bsp").weights_sha256


def test_where_workers_pause_a_backup_worker_brings_more_images_a_second() -> None:
    full, first = (small(form, delays="pause:0.1x20").points[-1] for form in ("bsp", "backup:1"))
    assert first.time / first.images < full.time / full.images
    # A threshold that leaves work out ends its steps at the threshold.
    assert small("threshold:2x3", delays="lognormal:1").points[-1].time % 3 == 0
    # Without an end a run takes the images of the recipe.
    recipe = load_recipe("digits", [*OVERRIDES, "virtual_workers=4", "rate={lr: 0.1}"]).recipe
    setting = Setting(recipe, "bsp", 4, "constant", lr=0.1)
    assert simulate(setting, points=1).points[-1].images == 128
    assert simulate(setting, seconds=300, images=300, points=1).points[-1].images >= 300
    refuses("a simulation without an end", simulate, setting, seconds=float("nan"), about="simulate: needs seconds")


def test_other_forms_other_weights_and_a_wrong_one_is_one_line() -> None:
    forms = ("bsp", "ssp:1", "asp", "pbsp:1", "threshold:2x2.5", "local:3", "diloco:3", "gossip:0.5", "elastic:2")
    hashes = {form: small(form).weights_sha256 for form in forms}
    assert len(set(hashes.values())) == len(hashes)
    small.cache_clear()
    assert small("gossip:0.5").weights_sha256 == hashes["gossip:0.5"]
    for form in FORMS:
        name, _, letters = form.partition(":")
        moments(name + (":" + letters.translate(str.maketrans("SBMTHPC", "2132111")) if letters else ""))
    for form in WRONG:
        refuses("a form that is none", moments, form, about=f"simulate: no form {form!r};", FORM=repr(form))


def workers_of(count: int, lr: float = 0.1) -> Workers:
    recipe = load_recipe("digits", OVERRIDES).recipe
    pipelines = [Pipeline(source, recipe.data, recipe.seed) for source in open_sources(recipe.data, None, recipe.seed)]
    return Workers(Passes(recipe, *pipelines), count, delay_model("constant", seed=0), compute=1.0, lr=lr, seed=0)


def assert_is_sgd(form: str, workers: Workers) -> None:
    """To a millionth: four steps by the mean of all workers' gradients, with the server's momentum."""
    weights, velocity = workers.passes.initial.clone(), torch.zeros_like(workers.passes.initial)
    for step, moment in zip(range(4), moments(form)(workers), strict=False):
        numbers = range(step * workers.count, (step + 1) * workers.count)
        gradients = [workers.passes.gradient(weights, number) for number in numbers]
        velocity = workers.momentum * velocity + torch.stack(gradients).mean(dim=0)
        weights = weights - workers.lr * velocity
        assert (moment.weights() - weights).abs().max() < 1e-6
        weights = moment.weights()


def test_momentum_under_a_barrier_of_all_is_sgds() -> None:
    """And so are local steps of one, and gossip of two in step, who always take the mean."""
    assert_is_sgd("local:1", workers_of(4))
    assert_is_sgd("gossip:1", workers_of(2))
    assert_is_sgd("bsp", replace(workers_of(3), momentum=0.5))
    recipe = load_recipe("digits", OVERRIDES).recipe
    for form, momentum in (("gossip:0.5", 0.9), ("bsp", 1.5)):
        with refused("a momentum that no barrier takes", "--momentum", MOMENTUM=f"{momentum:g}"):
            simulate(Setting(recipe, form, 4, "constant", lr=0.1, momentum=momentum))


def test_elastic_averaging_keeps_the_centre_between_the_workers() -> None:
    """With no steps of their own the workers and the centre stay where they are; with steps the centre follows."""
    workers, moving = workers_of(2, lr=1e-30), workers_of(2)
    for _, moment in zip(range(3), moments("elastic:1")(workers), strict=False):
        assert moment.gradients == 2
        assert torch.allclose(moment.weights(), workers.passes.initial, rtol=0, atol=1e-20)
    ran = [moment.weights() for _, moment in zip(range(3), moments("elastic:1")(moving), strict=False)]
    assert torch.equal(ran[0], moving.passes.initial)
    assert not torch.equal(ran[1], ran[0])


WRONG = (
    "", "sync", "gossip", "gossip:2", "local:0", "local:1.5", "local:2x3", "threshold:2", "threshold:2xnan",
    "elastic:0", "cutoff:0", "cutoff:guessed",
)  # fmt: skip


def test_the_command_prints_errors_over_virtual_time(run_cli: Any, tmp_path: Path) -> None:
    overrides = [word for override in OVERRIDES for word in ("--set", override)]
    words = ["--synchrony", "ssp:2", "--workers", 4, "--lr", 0.1, "--images", 96, *overrides]
    code, out, err = run_cli("simulate", "digits", *words, "--json", tmp_path / "found.json")
    assert code == 0, err
    assert "virtual seconds" in out
    assert json.loads((tmp_path / "found.json").read_text())["weights_sha256"] == small("ssp:2").weights_sha256
    for mistake in ("--seconds 0", "--seconds 9 --synchrony sync", "--seconds 9 --workers 0", "--images 9 --delays x",
                    "--images 9 --synchrony backup:6 --workers 6", "--images 9 --compute 1e300"):  # fmt: skip
        code, _, err = run_cli("simulate", "digits", *mistake.split())
        assert (code, err.count("\n")) == (2, 1)
    code, out, err = run_cli("simulate", "digits", *words, "--lr", 1e30)
    assert (code, out, err.count("\n"), "not finite after" in err) == (1, "", 1, True)

"""Sets pages: what runs and plans say, put into the templates. Nothing in a page is code, and nothing is fetched.

In the tables a row is a fact and a column a run, so that one run and several are the same table.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plan.timeline import PARTS
from ..text import NONE, count, duration, is_number, listed, milliseconds, percent, plain, plural
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, log_charts, run_charts, stacked_bar, sweep_charts
from .read_run import Log, RunRecord

if TYPE_CHECKING:
    from .mistakes import Mistakes

# Runtime options with a flag of the same name that change how long a run takes.
_FLAGS = ("update", "model_parallel", "allreduce", "grid", "profile", "buckets", "shares")


class Row(NamedTuple):
    label: str
    cells: tuple[str, ...]


class Table(NamedTuple):
    title: str
    rows: tuple[Row, ...]
    note: str = ""


Fact = tuple[str, Callable[[RunRecord], str]]  # a row's label, and what a run has there


def training_table(runs: Sequence[RunRecord]) -> Table:
    rows: list[Fact] = [
        ("recipe", lambda run: run.recipe.name),
        ("network", lambda run: _with_options(run.recipe.model.name, run.recipe.model.options)),
        ("data", lambda run: _with_options(run.recipe.data.source, run.recipe.data.options)),
        ("training images", lambda run: count(run.summary.get("train_images"))),
        ("image size", lambda run: str(run.recipe.data.image_size)),
        ("virtual workers", lambda run: count(run.recipe.virtual_workers)),
        ("batch by stage", _batches),
        ("stages end at", lambda run: " > ".join(str(stage.until) for stage in run.recipe.stages)),
        ("batch up to which more images would pay", _noise_scales),
        ("optimiser", lambda run: f"{run.recipe.optimizer.name}, rate {run.recipe.rate.lr:g}"),
        ("gradients are summed", lambda run: run.recipe.reduction),
        ("precision", lambda run: run.recipe.precision),
        ("seed", lambda run: str(run.recipe.seed)),
    ]
    note = "The batch up to which more images would pay is the gradient noise scale at each stage's end."
    is_measured = any(_noise_scales(run) != NONE for run in runs)
    return _table("What was trained", runs, rows, note * is_measured)


def result_table(runs: Sequence[RunRecord]) -> Table:
    rows: list[Fact] = [
        ("top-1", lambda run: percent(final(run).get("top1"))),
        ("top-5", lambda run: percent(final(run).get("top5"))),
        ("loss on held-out images", lambda run: plain(final(run).get("loss"))),
        ("held-out images", lambda run: count(run.summary.get("eval_images", final(run).get("images")))),
        ("top-1 before the polish", lambda run: percent(run.summary.get("top1_before_polish"))),
        ("steps", lambda run: count(_last(run, "step"))),
        ("epochs", lambda run: plain(_last(run, "epoch"))),
        ("time to the target", _to_target),
    ]
    note = "" if all(run.evaluations for run in runs) else "A run without a figure has not been evaluated yet."
    return _table("Result", runs, rows, note)


def time_table(runs: Sequence[RunRecord]) -> Table:
    def beside(run: RunRecord, part: str) -> str:
        found = time_shares(run).get(part)
        return f"{duration(found[0])} ({found[1]:.1%})" if found else NONE

    parts = dict.fromkeys(part for run in runs for part in time_shares(run))
    rows: list[Fact] = [
        ("training time", lambda run: duration(run_seconds(run))),
        *((part, partial(beside, part=part)) for part in parts),
        ("communication that was hidden", lambda run: percent(run.summary.get("hidden_share"))),
        ("images a second", lambda run: count(images_per_second(run))),
    ]
    note = (
        "By the clock of rank 0. Exposed communication is time that a rank waits for messages, which includes waiting "
        "for slower ranks; what travels during computation is hidden and costs nothing."
    )
    return _table("Where the time went", runs, rows, note)


def ranks_table(runs: Sequence[RunRecord]) -> Table:
    rows: list[Fact] = [
        ("ranks", lambda run: count(run.summary.get("world_size", len(_shares(run)) or None))),
        ("virtual workers of each rank", lambda run: _counts(_shares(run))),
        ("ranks most often behind", _stragglers),
        ("virtual workers moved off slow ranks", lambda run: count(run.summary.get("moved_workers"))),
        ("virtual workers taken over from late ranks", lambda run: count(run.summary.get("taken_over_workers"))),
        ("ranks lost", lambda run: listed(run.summary.get("lost_ranks") or []) or "none"),
        ("restarts", lambda run: count(run.summary.get("restarts"))),
        ("resumed from step", lambda run: str(run.summary.get("resumed_from") or "none")),
        ("steps redone after an overflow", lambda run: count(_sum(run, "redone"))),
        ("updates skipped (not finite)", lambda run: count(sum(bool(step.get("skipped")) for step in run.steps))),
        ("unreadable training images replaced", lambda run: count(_sum(run, "replaced"))),
        ("virtual workers left out for being late", lambda run: count(_sum(run, "left_out"))),
        ("virtual workers computed twice (audit)", lambda run: count(_sum(run, "audited"))),
    ]
    return _table("Ranks and mishaps", runs, rows)


def plan_table(runs: Sequence[RunRecord]) -> Table | None:
    """Predicted against measured; None if no run was given a plan."""
    if not any(run.summary.get("predicted") for run in runs):
        return None

    def beside(run: RunRecord, name: str, show: Callable[[object], str]) -> str:
        found = run.summary.get("predicted") or {}
        error = found.get(f"{name}_error")
        beside = f" (plan {error:+.1%})" if is_number(error) else ""
        return f"{show(found.get(name))} / {show(found.get(f'measured_{name}'))}{beside}"

    rows: list[Fact] = [
        ("a step", lambda run: beside(run, "step_seconds", milliseconds)),
        ("images a second", lambda run: beside(run, "images_per_second", count)),
    ]
    note = "Predicted / measured: medians over steps, without evaluations, checkpoints and the first step."
    return _table("Predicted against measured", runs, rows, note)


def conditions_table(runs: Sequence[RunRecord]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.summary.get("conditions", {}))
    rows: list[Fact] = [
        ("weights (SHA-256)", lambda run: str(run.summary.get("weights_sha256") or NONE)),
        ("recipe (SHA-256)", lambda run: run.recipe.sha256()),
        ("data (SHA-256)", lambda run: str(run.summary.get("data_sha256") or NONE)),
        ("initial weights (SHA-256)", lambda run: str(run.summary.get("init_sha256") or "drawn from the seed")),
        ("last record (SHA-256)", lambda run: records_sha256(run) or NONE),
        ("records", lambda run: run.records or NONE),
        ("computed anew by torusgd verify", _verified),
        *((name, lambda run, name=name: str(run.summary.get("conditions", {}).get(name) or NONE)) for name in names),
        ("changes of conditions on resuming", lambda run: str(len(run.summary.get("other_conditions") or []))),
        ("ranks under other conditions", lambda run: str(len(run.summary.get("mixed_conditions") or []))),
    ]
    note = (
        "The recipe decides the result, the cluster only the time: under these conditions the same recipe, data and "
        "initial weights give the same weights, bit for bit, on any number of ranks."
    )
    exact = all(run.recipe.reduction == "exact" for run in runs)
    return _table("Conditions and hashes", runs, rows, note if exact else "")


def command_of(run: RunRecord) -> str:
    """The command that does the same again, in a shell in which the paths that the run was given still exist."""
    words = ["torusgd", "train", str(run.folder / "recipe.yaml")]
    given: dict[str, Any] = {key: run.status.get(key) for key in ("data", "init", "max_steps")}
    given["workers"] = run.summary.get("world_size", len(_shares(run)))
    options = run.status.get("runtime", {})
    flags = {key: value for key, value in given.items() if value}
    flags |= {key: options[key] for key in _FLAGS if key in options}
    for key, value in flags.items():
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        words += [f"--{key.replace('_', '-')}", text]
    return shlex.join([*words, "--out", f"{run.folder}-again"])


def time_shares(run: RunRecord) -> dict[str, tuple[float, float]]:
    """Seconds and fractions of a run's training time by part, in the order of a step; empty before the first step."""
    total = run_seconds(run)
    if not run.steps or not total:
        return {}
    data, sync, update = (sum(run.numbers(f"{name}_seconds")) for name in ("data", "sync", "update"))
    steps = sum(run.numbers("step_seconds"))
    # What a step does not wait for is computation; what lies between steps is no part of any.
    parts = {
        "compute": steps - data - sync - update,
        "waiting for images": data,
        "exposed communication": sync,
        "update": update,
        "evaluation, checkpoints, start": total - steps,
    }
    return {name: (max(0.0, seconds), max(0.0, seconds) / total) for name, seconds in parts.items()}


def run_seconds(run: RunRecord) -> float | None:
    """Of all steps, evaluations and waits; None before the first step."""
    seconds = run.summary.get("seconds", _last(run, "seconds"))
    return max(seconds, sum(run.numbers("step_seconds"))) if is_number(seconds) else None


def images_per_second(run: RunRecord) -> float | None:
    seconds = sum(run.numbers("step_seconds"))
    return sum(run.numbers("batch")) / seconds if seconds else None


def final(run: RunRecord) -> Mapping[str, Any]:
    """The accuracy of a finished run's weights, else its last evaluation; empty if there is none."""
    return run.summary if "top1" in run.summary else next(reversed(run.evaluations), {})


def _batches(run: RunRecord) -> str:
    return " > ".join(f"{run.recipe.virtual_workers * stage.images_per_worker:,}" for stage in run.recipe.stages)


def records_sha256(run: RunRecord) -> str:
    """Hash of a finished run's last record; empty if it has none."""
    return str(run.summary.get("records", {}).get("sha256", ""))


def _verified(run: RunRecord) -> str:
    states = dict.fromkeys(state for _, state in run.verified)
    return "; ".join(f"{state}: {listed(n for n, each in run.verified if each == state)}" for state in states) or NONE


def _table(title: str, runs: Sequence[RunRecord], rows: Sequence[Fact], note: str = "") -> Table:
    return Table(title, tuple(Row(label, tuple(show(run) for run in runs)) for label, show in rows), note)


def _with_options(name: str, options: dict[str, Any]) -> str:
    return f"{name} ({listed(f'{key}={value}' for key, value in options.items())})" if options else name


def _last(run: RunRecord, key: str) -> float | None:
    value = run.steps[-1].get(key) if run.steps else None
    return value if is_number(value) else None


def _sum(run: RunRecord, key: str) -> float:
    return sum(value for step in run.steps if is_number(value := step.get(key)))


def _to_target(run: RunRecord) -> str:
    target = run.recipe.target_top1
    if target is None:
        return "no target"
    seconds = run.summary.get("seconds_to_target")
    if is_number(seconds):
        return f"{percent(target)} after {duration(seconds)}"
    top1 = run.summary.get("top1")
    return f"{percent(target)} {'by the polish alone' if is_number(top1) and top1 >= target else 'not reached'}"


def _noise_scales(run: RunRecord) -> str:
    measured = [step for step in run.steps if is_number(step.get("noise_scale")) and is_number(step.get("stage"))]
    last = {step["stage"]: step["noise_scale"] for step in measured}
    return " > ".join(count(last.get(stage)) for stage in range(len(run.recipe.stages))) if last else NONE


def _shares(run: RunRecord) -> dict[str, Any]:
    return run.summary.get("shares") or run.status.get("shares") or {}


def _counts(shares: dict[str, Any]) -> str:
    """How many ranks take how many, such as: 5 (2 ranks), 2 (1 rank)."""
    counted = Counter(str(value) for value in shares.values())
    return listed(f"{workers} ({plural(ranks, 'rank')})" for workers, ranks in counted.most_common()) or NONE


def _stragglers(run: RunRecord) -> str:
    """The three ranks that were last most often, by how much, and why."""
    behind: dict[int, list[float]] = defaultdict(list)
    causes: dict[int, Counter[str]] = defaultdict(Counter)
    for step in run.steps:
        late = step.get("slowest")
        if isinstance(late, dict) and is_number(late.get("rank")) and is_number(late.get("behind")):
            behind[int(late["rank"])].append(late["behind"])
            causes[int(late["rank"])][str(late.get("cause"))] += 1
    worst = sorted(behind, key=lambda rank: (-len(behind[rank]), rank))[:3]
    compared = sum(map(len, behind.values()))
    lines = [
        f"rank {rank} in {len(behind[rank])} of {compared} comparisons, by {milliseconds(median(behind[rank]))} "
        f"(median), mostly {causes[rank].most_common(1)[0][0]}"
        for rank in worst
    ]
    return "; ".join(lines) or "none"


def run_page(runs: Sequence[RunRecord], mistakes: "Sequence[Mistakes | None]") -> str:
    """Runs as a page of HTML, with the mistakes of those whose weights were looked at; equal runs give equal bytes."""
    sections = (result_table, training_table, plan_table, ranks_table)
    shares = [{part: share for part, (_, share) in time_shares(run).items()} for run in runs]
    return _rendered(
        "run.html", title=" beside ".join(run.name for run in runs), runs=runs, notes=_notes(runs),
        tiles=_tiles(runs[0]) if len(runs) == 1 else [], charts=run_charts(runs), times=time_table(runs),
        bars=[stacked_bar(run.name, each) for run, each in zip(runs, shares, strict=True)],
        tables=[table for section in sections if (table := section(runs)) is not None],
        mistakes=[(run, found) for run, found in zip(runs, mistakes, strict=True) if found is not None],
        conditions=conditions_table(runs), commands=[(run.name, command_of(run)) for run in runs],
    )  # fmt: skip


def log_page(logs: Sequence[Log]) -> str:
    names = [log.name for log in logs]
    return _rendered("logs.html", title=" beside ".join(names), names=names, charts=log_charts(logs))


def plan_page(plan: Mapping[str, Any], command: str) -> str:
    """What `torusgd plan --sweep --json` writes, with `--to` or without, as a page of HTML; `command` made it."""
    curve = plan.get("sweep") or []
    stages, columns, best = plan.get("stages") or [], _columns(curve), plan.get("best") or {}
    parts = {name: [float(stage.get(key) or 0) for stage in stages] for key, name in PARTS.items()}
    parts = {name: seconds for name, seconds in parts.items() if any(seconds)}
    whole = [stage["seconds"] for stage in stages]
    timed = {"a step": whole, **parts}
    shares = [{name: seconds[at] / step for name, seconds in parts.items()} for at, step in enumerate(whole)]
    rows = [Row(name, tuple(f"{1e3 * each:.2f} ms" for each in seconds)) for name, seconds in timed.items()]
    return _rendered(
        "plan.html", title=plan["title"], plan=plan, tiles=_plan_tiles(plan),
        charts=sweep_charts(curve, plan.get("knee")), steps=Table("Where a step's time goes", tuple(rows)),
        bars=[stacked_bar(f"batch {stage['batch']:,}", each) for stage, each in zip(stages, shares, strict=True)],
        heads=[head for _, head, _ in columns],
        sweep=[(each["devices"] == plan.get("knee"), [show(each) for _, _, show in columns]) for each in curve],
        choices=[(c["setting"], c["value"], duration(c["saves"])) for c in best.get("choices", [])],
        best=duration(best.get("seconds")), command=command,
    )  # fmt: skip


_BOX = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # The page's policy forbids scripts, and every value is escaped, so that a class, a folder or an error message of a
    # stranger stays text.
    environment = Environment(
        loader=PackageLoader("torusgd.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(box=_BOX, **values)


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    notes = [f"{run.name}: {run.why}" if len(runs) > 1 else run.why for run in runs if run.why]
    for run in runs:
        if run.unread:
            notes.append(f"{run.name}: left out {plural(run.unread, 'line')} of events.jsonl that can't be understood.")
        if not run.steps:
            notes.append(f"{run.name}: no step is recorded, so there is nothing to draw.")
    return notes


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    result = final(run)
    return _known(
        ("top-1", percent(result.get("top1"))), ("top-5", percent(result.get("top5"))),
        ("loss", plain(result.get("loss"))), ("training time", duration(run_seconds(run))),
        ("images a second", count(images_per_second(run))), ("ranks", count(run.summary.get("world_size"))),
    )  # fmt: skip


def _known(*tiles: tuple[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in tiles if value != NONE]


def _plan_tiles(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    band = f"{duration(plan['low'])} to {duration(plan['high'])}" if "low" in plan else NONE
    return _known(
        ("devices", count(plan.get("devices"))), ("time to train", duration(plan.get("seconds"))), ("90 % band", band),
        ("images a second", count(plan.get("images_per_second"))), ("efficiency", percent(plan.get("efficiency"))),
        ("top-1 to reach", percent(plan.get("target"))), ("devices at the knee", count(plan.get("knee"))),
        ("devices of the quickest run", count(plan.get("useful"))),
        ("cost", f"{plan['cost']:,.2f}" if "cost" in plan else NONE),
    )  # fmt: skip


Column = tuple[str, str, Callable[[Mapping[str, Any]], str]]


def _columns(curve: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Key, heading and text of each figure of a sweep's points; plans to an accuracy also have the batch."""
    columns: list[Column] = [
        ("devices", "devices", lambda each: count(each["devices"])),
        ("batch", "batch", lambda each: count(each["batch"])),
        ("epochs", "epochs", lambda each: f"{each['epochs']:.1f}"),
        ("images_per_second", "images/s", lambda each: count(each["images_per_second"])),
        ("efficiency", "efficiency", lambda each: f"{each['efficiency']:.1%}"),
        ("seconds", "time to train", lambda each: duration(each["seconds"])),
        ("low", "90 % band", lambda each: f"{duration(each['low'])} to {duration(each['high'])}"),
        ("cost", "cost", lambda each: f"{each['cost']:,.2f}"),
        ("limit", "limited by", lambda each: str(each["limit"]).partition(";")[0]),
    ]
    return [column for column in columns if curve and column[0] in curve[0]]

"""Sets pages: what runs and plans say, put into the templates. Nothing in a page is code, and nothing is fetched."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..plan.timeline import PARTS
from ..text import NONE, count, duration, percent, plain, plural
from . import tables
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, log_charts, run_charts, stacked_bar, sweep_charts
from .read_run import Log, RunRecord
from .tables import Row, Table

if TYPE_CHECKING:
    from jinja2 import Environment

    from .mistakes import Mistakes


def run_page(runs: Sequence[RunRecord], mistakes: "Sequence[Mistakes | None]") -> str:
    """One or more runs as a page of HTML, with the mistakes of those whose weights were looked at.

    The same runs give the same bytes.
    """
    sections = (tables.result_table, tables.training_table, tables.plan_table, tables.ranks_table)
    shares = [{part: share for part, (_, share) in tables.time_shares(run).items()} for run in runs]
    return _environment().get_template("run.html").render(
        title=" beside ".join(run.name for run in runs),
        runs=runs,
        notes=_notes(runs),
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        charts=run_charts(runs),
        bars=[stacked_bar(run.name, each) for run, each in zip(runs, shares, strict=True)],
        times=tables.time_table(runs),
        tables=[table for section in sections if (table := section(runs)) is not None],
        mistakes=[(run, found) for run, found in zip(runs, mistakes, strict=True) if found is not None],
        conditions=tables.conditions_table(runs),
        commands=[(run.name, tables.command_of(run)) for run in runs],
        box=_BOX,
    )  # fmt: skip


def log_page(logs: Sequence[Log]) -> str:
    """Logs of other trainers as a page of HTML."""
    names = [log.name for log in logs]
    return (
        _environment()
        .get_template("logs.html")
        .render(title=" beside ".join(names), names=names, charts=log_charts(logs), box=_BOX)
    )


def plan_page(plan: Mapping[str, Any], command: str) -> str:
    """What `torusgd plan --sweep --json` writes, with `--to` or without, as a page of HTML; `command` made it."""
    curve = plan.get("sweep") or []
    stages, columns = plan.get("stages") or [], _columns(curve)
    return _environment().get_template("plan.html").render(
        title=plan["title"],
        plan=plan,
        tiles=_plan_tiles(plan),
        charts=sweep_charts(curve, plan.get("knee")),
        bars=_stage_bars(stages),
        steps=_step_table(stages),
        heads=[head for _, head, _ in columns],
        sweep=[(each["devices"] == plan.get("knee"), [show(each) for _, _, show in columns]) for each in curve],
        choices=[(c["setting"], c["value"], duration(c["saves"])) for c in (plan.get("best") or {}).get("choices", [])],
        best=duration((plan.get("best") or {}).get("seconds")),
        command=command,
        box=_BOX,
    )  # fmt: skip


_BOX = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}


def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # The page's policy forbids scripts, and every value is escaped, so that a class, a folder or an error message of a
    # stranger stays text.
    return Environment(
        loader=PackageLoader("torusgd.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    notes = [f"{run.name}: {run.why}" if len(runs) > 1 else run.why for run in runs if run.why]
    for run in runs:
        if run.unread:
            notes.append(f"{run.name}: left out {plural(run.unread, 'line')} of events.jsonl that can't be understood.")
        if not run.steps:
            notes.append(f"{run.name}: no step is recorded, so there is nothing to draw.")
    return notes


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    result = tables.final(run)
    return _known(
        ("top-1", percent(result.get("top1"))),
        ("top-5", percent(result.get("top5"))),
        ("loss", plain(result.get("loss"))),
        ("training time", duration(tables.run_seconds(run))),
        ("images a second", count(tables.images_per_second(run))),
        ("ranks", count(run.summary.get("world_size"))),
    )


def _known(*tiles: tuple[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in tiles if value != NONE]


def _plan_tiles(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    band = f"{duration(plan['low'])} to {duration(plan['high'])}" if "low" in plan else NONE
    return _known(
        ("devices", count(plan.get("devices"))),
        ("time to train", duration(plan.get("seconds"))),
        ("90 % band", band),
        ("images a second", count(plan.get("images_per_second"))),
        ("efficiency", percent(plan.get("efficiency"))),
        ("top-1 to reach", percent(plan.get("target"))),
        ("devices at the knee", count(plan.get("knee"))),
        ("devices of the quickest run", count(plan.get("useful"))),
        ("cost", f"{plan['cost']:,.2f}" if "cost" in plan else NONE),
    )


def _stage_bars(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step of each stage as a stacked bar."""
    parts = _parts(stages)
    return [
        stacked_bar(
            f"batch {stage['batch']:,}",
            {name: float(stage.get(key) or 0.0) / stage["seconds"] for key, name in parts.items()},
        )
        for stage in stages
    ]


def _step_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    names = {"seconds": "a step", **_parts(stages)}
    rows = (
        Row(name, tuple(f"{1e3 * float(stage.get(key) or 0):.2f} ms" for stage in stages))
        for key, name in names.items()
    )
    return Table("Where a step's time goes", tuple(rows))


def _parts(stages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Those parts of a step that any stage has."""
    return {key: name for key, name in PARTS.items() if any(stage.get(key) for stage in stages)}


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

"""What a run reports: a progress line, `events.jsonl`, and trackers if there are any; and its steps beside a plan."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..errors import UserError, as_run_error, printable
from ..line_file import LineFile
from ..recipe.schedule import Schedule, Step
from ..recipe.schema import Recipe
from ..rundir.run_view import StatusFile
from ..step.evaluate import Evaluation
from ..step.membership import Membership
from ..step.stats import StepStats
from ..text import json_text, listed, plural
from ..untrusted import check_regular, is_there, parse_json, read_text
from .trackers import Trackers

# Between progress lines if the output is no terminal.
PLAIN_SECONDS = 5.0
# Columns of a terminal in which the progress line fits; in others it is cut in two.
WIDE = 150
# Fraction of the images from which on the line says how many are left out.
_LEFT_OUT_FROM = 0.005
_BLOCK = 1 << 12


class Telemetry:
    """Rank 0's: writes events and shows progress of a run that takes the first `steps` steps of its schedule.

    `first_step` steps were done before, and `evaluated` was the last one that was evaluated; later events of an earlier
    attempt are dropped. The trackers, which were opened, also take every event, and stay open.
    """

    def __init__(
        self, folder: Path, schedule: Schedule, steps: int, first_step: int, evaluated: int, about: Mapping[str, Any],
        trackers: Trackers, is_quiet: bool = False,
    ) -> None:  # fmt: skip
        self.console = Console(highlight=False, soft_wrap=True, markup=False, quiet=is_quiet)
        self._schedule, self._steps = schedule, steps
        self._stop_images = schedule[steps - 1].start + schedule[steps - 1].batch
        self._path = folder / "events.jsonl"
        _drop_later_events(self._path, first_step, evaluated)
        self._trackers = trackers
        trackers.catch_up(self._path)
        self._file = LineFile(self._path)
        self.status = StatusFile(folder, about)
        self.status.update(now=True, phase="start", step=first_step, steps=steps)
        self._progress: Progress | None = None
        self._last_line = time.perf_counter()
        self._pace = self._left_out = 0.0  # seconds an image, share of images
        self._slowest = ""
        if self.console.is_terminal and not is_quiet:
            columns = BarColumn(bar_width=16), TextColumn("{task.description}", markup=False)
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("starting", total=steps, completed=first_step)
            self._progress.start()

    def step(self, stats: StepStats, seconds: float, membership: Membership) -> None:
        """One step, after so many seconds of training; `membership` takes the next one."""
        step = stats.step
        event = stats.as_event(self._schedule.train_images, seconds)
        self._write(event)
        if stats.overflowed:
            what = "gradient grew past the integer range; the scale was measured again and the step redone"
            self.say(f"step {step.index + 1}: {stats.overflowed[0]}: {what}")
        if stats.skipped:
            self.say(f"step {step.index + 1}: {stats.skipped[0]}: gradient not finite; step skipped, loss scale halved")
        for line in stats.lines:
            self.say(line)
        if stats.balance is not None and stats.balance.move is not None:
            self.say(f"step {step.index + 1}: {stats.balance.move}")
        self._show(stats)
        if stats.balance is not None:
            self.status.update(slow_ranks=stats.balance.slow)
        figures = {name: event[name] for name in ("step", "epoch", "loss", "seconds")}
        figures |= {"images_per_second": round(self._entering, 1), "seconds_left": round(self._seconds_left(step))}
        self.status.update(phase="train", **figures, shares=membership.by_rank)

    def evaluation(self, step: int, evaluation: Evaluation, seconds: float, polished: bool = False) -> None:
        self._write(evaluation_event(step, evaluation, seconds, polished))
        epoch = self._schedule_epoch(step)
        self.say(f"{'polished ' if polished else ''}epoch {epoch:.4g}  step {step}  {evaluation}  {seconds:.1f} s")

    def complete(self, event: Mapping[str, Any]) -> None:
        """Writes the last event of a run whose rank 0 was lost, unless that rank has written it itself."""
        with self._path.open("rb") as file:
            last = _line_before(file, file.seek(0, os.SEEK_END))
        written = json.loads(last) if last else {}
        if (written.get("step"), written.get("event")) != (event["step"], event.get("event")):
            self._write(event)

    def initial(self, fit: Mapping[str, Any], line: str) -> None:
        """What the network took of initial weights: for the event the names of all tensors, and a line."""
        self._write({"event": "initial", "step": 0, **fit})
        self.say(printable(line))

    def say(self, text: str) -> None:
        """A line of its own, above the progress line."""
        self.console.print(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._trackers.flush()
        self._file.close()

    def _show(self, stats: StepStats) -> None:
        if (late := stats.slowest) is not None:
            self._slowest = f"  slowest rank {late.rank} (+{1e3 * late.behind:.0f} ms, {late.cause})"
        now = stats.times.seconds / stats.step.batch  # averaged so, since of steps in advance some take no time here
        self._left_out += 0.1 * (stats.images_left_out / stats.step.batch - self._left_out)
        self._pace = 0.9 * self._pace + 0.1 * now if self._pace else now
        if self._progress is not None:
            gap = "  " if self.console.width >= WIDE else "\n"
            self._progress.update(self._task, completed=stats.step.index + 1, description=self._line(stats, gap))
        elif time.perf_counter() - self._last_line >= PLAIN_SECONDS and not self.console.quiet:
            self._last_line = time.perf_counter()
            print(self._line(stats), flush=True)

    def _line(self, stats: StepStats, gap: str = "  ") -> str:
        step, schedule = stats.step, self._schedule
        data, sync = stats.times.data_seconds / stats.times.seconds, stats.times.sync_seconds / stats.times.seconds
        hidden = "" if stats.hidden_share is None else f", {stats.hidden_share:.0%} hidden"
        left_out = f"  left out {self._left_out:.0%}" if self._left_out >= _LEFT_OUT_FROM else ""
        return (
            f"stage {step.stage + 1}/{len(schedule.spans)}  epoch {self._schedule_epoch(step.index + 1):.2f}"
            f"/{self._stop_images / schedule.train_images:.4g}  step {step.index + 1}/{self._steps}  "
            f"loss {stats.loss:.4f}  lr {step.lr:.4g}{gap}{self._entering:,.0f} images/s  "
            f"data {data:.0%}  sync {sync:.0%}{hidden}{left_out}  {clock(self._seconds_left(step))} left{self._slowest}"
        )

    @property
    def _entering(self) -> float:
        """Images a second whose gradients enter updates."""
        return (1 - self._left_out) / self._pace

    def _seconds_left(self, step: Step) -> float:
        return (self._stop_images - step.start - step.batch) * self._pace

    def _schedule_epoch(self, step: int) -> float:
        last = self._schedule[step - 1]
        return (last.start + last.batch) / self._schedule.train_images

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(json_text(event).encode() + b"\n")
        self._trackers.feed(event)


def evaluation_event(step: int, evaluation: Evaluation, seconds: float, polished: bool = False) -> dict[str, Any]:
    """The line of events.jsonl for an evaluation after `step` steps; `seconds` is the training time so far."""
    return {
        "event": "polished" if polished else "evaluation", "step": step, "seconds": round(seconds, 6),
        "top1": evaluation.top1, "top5": evaluation.top5, "loss": evaluation.loss, "images": evaluation.images,
        "excluded": evaluation.excluded,
    }  # fmt: skip


def plan_table(recipe: Recipe, schedule: Schedule, ranks: int) -> Table:
    """The batch plan: one row a stage."""
    target = f", target top-1 {recipe.target_top1:.2%}" if recipe.target_top1 is not None else ""
    title = f"{recipe.name}: {recipe.description}" if recipe.description else recipe.name
    how = f"{recipe.optimizer.name}, {recipe.precision}, reduction {recipe.reduction}, seed {recipe.seed}{target}"
    caption = f"{recipe.virtual_workers} virtual workers on {plural(ranks, 'rank')}, {how}"
    table = Table(title=printable(title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    has_plain = any(not span.stage.augment for span in schedule.spans)
    columns = ["stage", "steps", "epochs", "images/worker", "batch", "rate", "last", "momentum"]
    for column in [*columns, *(["augment"] if has_plain else [])]:
        table.add_column(column, justify="right", overflow="fold")
    for number, span in enumerate(schedule.spans, 1):
        first, last = schedule[span.first_step], schedule[span.stop_step - 1]
        epochs = f"{first.epoch:.3g}-{span.stop / schedule.train_images:.3g}"
        row = [str(number), f"{span.first_step}-{span.stop_step - 1}", epochs, str(span.stage.images_per_worker)]
        row += [f"{span.batch:,}", f"{span.lr:.4g}", f"{last.lr:.2g}", f"{span.momentum:.4g}"]
        table.add_row(*row, *(["yes" if span.stage.augment else "no"] if has_plain else []))
    return table


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _drop_later_events(path: Path, first_step: int, evaluated: int) -> None:
    if not is_there(path):
        return
    # Events stand in the order of their steps, so the file is read from its end, as far as there is something to drop.
    with as_run_error(f"{path}: can't be read", of=(OSError, ValueError)), check_regular(path).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end and not _stays(line := _line_before(file, end), first_step, evaluated):
            end -= len(line)
        file.truncate(end)


def _line_before(file: BinaryIO, end: int) -> bytes:
    """The line that ends at `end`, with its line feed if it has one."""
    begin, found = end, b""
    while begin and b"\n" not in found[:-1]:
        begin = max(0, begin - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin)
    return found[found.rfind(b"\n", 0, len(found) - 1) + 1 :]


def _stays(line: bytes, first_step: int, evaluated: int) -> bool:
    with suppress(ValueError, KeyError, TypeError):
        event = json.loads(line)
        others = {"evaluation": min(first_step, evaluated), "polished": first_step - 1}
        return line.endswith(b"\n") and event["step"] <= others.get(event.get("event"), first_step)
    return False


@dataclass(frozen=True)
class PlanComparison:
    """What a plan says of a run's steps."""

    path: Path
    recipe: str
    devices: int
    stages: Sequence[tuple[int, float]]  # of each the batch, and seconds of a step

    @classmethod
    def load(cls, path: Path) -> "PlanComparison":
        """Reads a plan; UserError if it is none."""
        try:
            tree = parse_json(read_text(path))
            stages = [(int(stage["batch"]), float(stage["seconds"])) for stage in tree["stages"]]
            return cls(path, str(tree["recipe"]), int(tree["devices"]), stages)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "is no plan"
            raise UserError(f"--plan {path}: {why}; make one with torusgd plan ... --json {path}") from None

    def check(self, recipe: str, batches: Sequence[int], ranks: int) -> None:
        """UserError unless it is a plan of this recipe and stages of these batches, on so many ranks."""
        if recipe != self.recipe or list(batches) != [batch for batch, _ in self.stages]:
            what = f"its batches {listed(batches)}" if recipe == self.recipe else recipe
            raise UserError(f"--plan {self.path}: is of {self.recipe} and not of {what}; plan it with the same --set")
        if ranks != self.devices:
            raise UserError(f"--plan {self.path}: is of {self.devices} devices, the run has {ranks} ranks")

    def beside(self, events: Path) -> dict[str, float]:
        """Predicted and measured (medians by stage, without the run's first) steps and throughput, relative errors."""
        steps: dict[int, list[float]] = {}
        for line in events.read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            if event.get("step", 0) > 1 and "step_seconds" in event:
                steps.setdefault(event["stage"], []).append(event["step_seconds"])
        if not steps:  # fewer than two
            return {}
        number = sum(map(len, steps.values()))
        images, predicted = (sum(self.stages[at][i] * len(times) for at, times in steps.items()) for i in (0, 1))
        measured = sum(median(times) * len(times) for times in steps.values())
        return {
            "step_seconds": predicted / number, "measured_step_seconds": measured / number,
            "step_seconds_error": predicted / measured - 1, "images_per_second": images / predicted,
            "measured_images_per_second": images / measured, "images_per_second_error": measured / predicted - 1,
        }  # fmt: skip

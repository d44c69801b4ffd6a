"""What a step did and how long it took: one record for events, totals, the console and the summary."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from math import isnan
from typing import Any

from ..comm.monitor import Mark, Monitor, hidden_share
from ..data.loader import Loader
from ..recipe.schedule import Step
from .journal import JournalEntry
from .rank_times import Balance, Straggler
from .work_stealing import TakenOver


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on this rank: in all, and of waits for images (`data`) and for messages (`sync`)."""

    seconds: float
    data_seconds: float
    sync_seconds: float
    on_way_seconds: float  # with at least one message under way; nan if nobody can measure it (NCCL)
    update_seconds: float  # this rank's own work after its last backward pass: status, mean, optimizer, statistics


# Metadata of a field that stands in an event only if it is not empty or zero.
_RARE = {"rare": True}


def _counted(summary: str) -> Any:
    """A field that counts something rare; the run's total stands in summary.json under this key."""
    return field(default=0, metadata={**_RARE, "summary": summary})


@dataclass(frozen=True)
class StepStats:
    """One step; the same on every rank, but for the times."""

    step: Step
    times: StepTimes
    loss: float  # mean over virtual workers
    entry: JournalEntry
    replaced: int = _counted("replaced_images")
    stop: bool = False
    save: bool = False
    keep: bool = False
    record: bool = False
    change: bool = False
    redone: int = _counted("redone_steps")
    overflowed: list[str] = field(default_factory=list, metadata=_RARE)  # tensors whose sum left its range at first
    skipped: list[str] = field(default_factory=list, metadata=_RARE)  # with a gradient that is not finite: no update
    audited: int = _counted("audited_workers")
    left_out: int = _counted("left_out_workers")  # virtual workers whose gradients did not enter the update
    # Microseconds after which each virtual worker had finished, 0 if it was left out; empty if no clock decides.
    finished: list[int] = field(default_factory=list)
    underflow: float = field(default=0.0, metadata=_RARE)  # fraction of all gradients' elements that a sum made zero
    # Fraction of the pairs of factors that multiplied to nothing in portable arithmetic; in most steps nobody looks.
    lost_pairs: float = field(default=0.0, metadata=_RARE)
    loss_scale: float = 1.0  # factor of the loss in this step; 1 unless the precision is float16
    # In most steps nobody looks at the ranks' times.
    slowest: Straggler | None = None  # rank whose gradients were ready last in the step before
    balance: Balance | None = None  # speeds of the ranks, and better shares if there are any
    taken_over: TakenOver | None = None
    lines: list[str] = field(default_factory=list)
    figures: dict[str, float | str] = field(default_factory=dict)  # figures of watchers, by their names in the event

    @property
    def images_left_out(self) -> int:
        return self.left_out * self.step.images_per_worker

    @property
    def hidden_share(self) -> float | None:
        """Share of the time with messages under way that nobody waited; None without messages, or unknown."""
        return hidden_share(self.times.on_way_seconds, self.times.sync_seconds)

    def as_event(self, train_images: int, seconds: float) -> dict[str, Any]:
        """A line of events.jsonl, after so many seconds of training; an epoch has `train_images`."""
        step, times, samples = self.step, self.times, self.step.start + self.step.batch
        event: dict[str, Any] = {"step": step.index + 1, "samples": samples, "epoch": round(samples / train_images, 6)}
        event |= {"stage": step.stage, "loss": self.loss, "lr": step.lr, "momentum": step.momentum, "batch": step.batch}
        event |= {"seconds": round(seconds, 6), "step_seconds": round(times.seconds, 6)}
        event |= {name: round(getattr(times, name), 6) for name in ("data_seconds", "sync_seconds", "update_seconds")}
        if self.hidden_share is not None:
            event["hidden_share"] = round(self.hidden_share, 4)
        if self.loss_scale != 1.0:
            event["loss_scale"] = self.loss_scale
        rare = [each.name for each in fields(self) if each.metadata.get("rare")]
        event |= {name: value for name in rare if (value := getattr(self, name))} | self.figures
        if self.images_left_out:
            event["images_left_out"] = self.images_left_out
        if self.slowest is not None:
            event["slowest"] = asdict(self.slowest)
        if (over := self.taken_over) is not None:
            event["taken_over"] = {"late": over.late, "helpers": over.helpers, "saved_seconds": round(over.saved, 3)}
        if self.balance is not None and (move := self.balance.move) is not None:
            event["shares"] = {"counts": move.membership.by_rank, "moved": move.moved, "gain": round(move.gain, 4)}
            event["shares"]["slow"] = self.balance.slow
        return event


STATS = frozenset(each.name for each in fields(StepStats))
# Fields of StepStats that are added over a run, and their keys in its summary.
_COUNTED = {each.name: str(each.metadata["summary"]) for each in fields(StepStats) if "summary" in each.metadata}


@dataclass
class StepTotals:
    """Sums over the steps of a run, in all its attempts."""

    samples: int = 0
    replaced: int = 0
    redone: int = 0
    skipped: int = 0
    audited: int = 0
    moved: int = 0
    saved_seconds: float = 0.0  # seconds that even shares would have taken longer, by the ranks' measured speed
    # Ranks from which work was moved away, and how many times the median a virtual worker took them at last.
    slow_ranks: dict[str, float] = field(default_factory=dict)
    taken_over: int = 0
    late_ranks: dict[str, int] = field(default_factory=dict)  # virtual workers that were taken over, by late rank
    taken_over_saved_seconds: float = 0.0  # seconds that the steps would have taken longer (`TakenOver.saved`)
    left_out: int = 0
    images_left_out: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    sync_seconds: float = 0.0
    on_way_seconds: float | None = 0.0
    train_loss: float | None = None
    underflow: float = 0.0  # sum of the steps' fractions, each times its images
    lost_pairs: float = 0.0  # the largest of the steps' fractions

    def add(self, stats: StepStats) -> None:
        self.samples = stats.step.start + stats.step.batch
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.skipped += bool(stats.skipped)
        if stats.balance is not None:
            self.saved_seconds += stats.balance.saved
            if stats.balance.move is not None:
                self.moved += stats.balance.move.moved
                self.slow_ranks |= {str(rank): times for rank, times in stats.balance.slow.items()}
        if stats.taken_over is not None:
            for rank, count in stats.taken_over.late.items():
                self.taken_over += count
                self.late_ranks[str(rank)] = self.late_ranks.get(str(rank), 0) + count
            self.taken_over_saved_seconds += stats.taken_over.saved
        self.images_left_out += stats.images_left_out
        self.underflow += stats.underflow * stats.step.batch
        self.lost_pairs = max(self.lost_pairs, stats.lost_pairs)
        times = stats.times
        self.step_seconds += times.seconds
        self.data_seconds += times.data_seconds
        self.sync_seconds += times.sync_seconds
        known = self.on_way_seconds is not None and not isnan(times.on_way_seconds)
        self.on_way_seconds = (self.on_way_seconds or 0.0) + times.on_way_seconds if known else None
        self.train_loss = stats.loss

    def as_summary(self) -> dict[str, Any]:
        seconds = max(self.step_seconds, 1e-9)
        return {
            **{key: getattr(self, key) for key in ("train_loss", "samples", "slow_ranks", "late_ranks", "lost_pairs")},
            **{key: getattr(self, name) for name, key in _COUNTED.items()},
            "skipped_steps": self.skipped,
            "moved_workers": self.moved,
            "saved_seconds": round(self.saved_seconds, 3),
            "taken_over_workers": self.taken_over,
            "taken_over_saved_seconds": round(self.taken_over_saved_seconds, 3),
            "left_out_share": round(self.images_left_out / max(self.samples, 1), 4),
            "underflow": self.underflow / max(self.samples, 1),
            "images_per_second": round((self.samples - self.images_left_out) / seconds, 2),
            "data_wait_share": round(self.data_seconds / seconds, 5),
            "sync_wait_share": round(self.sync_seconds / seconds, 5),
            "hidden_share": hidden_share(self.on_way_seconds or 0.0, self.sync_seconds),
        }


class StepClock:
    """Reads the clocks of a step; `speed` gives a virtual worker's seconds here, images included (0: not known)."""

    def __init__(self, loader: Loader, monitor: Monitor) -> None:
        self.loader, self.monitor = loader, monitor
        self._started = self._passed = self._waited_before = 0.0
        self._before = self._waits()
        self._work_began: Mark = time.perf_counter
        self.speed: Callable[[], float] = lambda: 0.0

    def start(self) -> None:
        self.speed = lambda: 0.0
        self._started, self._before = time.perf_counter(), self._waits()

    def data_seconds(self) -> float:
        return self.loader.wait_seconds - self._before[0]

    def begin_work(self, mark: Mark) -> None:
        self._work_began, self._waited_before = mark, self.monitor.waited

    def end_work(self, mark: Mark, workers: int) -> None:
        """The last backward pass of so many virtual workers ends."""
        begin, waited = self._work_began, self.monitor.waited - self._waited_before
        self.speed = lambda: (mark() - begin() - waited) / workers

    def passes_done(self) -> None:
        self._passed = time.perf_counter() - self.monitor.waited

    def stop(self) -> StepTimes:
        end = time.perf_counter()
        data, sync, on_way = (now - then for now, then in zip(self._waits(), self._before, strict=True))
        # What is waited for messages after the last pass is no work of this rank's own.
        return StepTimes(end - self._started, data, sync, on_way, end - self.monitor.waited - self._passed)

    def _waits(self) -> tuple[float, float, float]:
        return self.loader.wait_seconds, self.monitor.waited, self.monitor.on_way

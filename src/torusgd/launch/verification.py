"""Steps of somebody's run computed anew on ranks of this machine, and compared with what its records say.

A range lies between two records. It is computed from the newest checkpoint before it, or from the beginning, by an
ordinary run in a folder of its own (`Job.expected`), which ends at the first state that differs. The run that is
checked is only read, without its lock: it may be at work meanwhile, and its checkpoints may go.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.registry import open_sources
from ..errors import RunError, UserError
from ..run.claims import Claims
from ..run.fingerprint import changes, conditions, fingerprint_of
from ..run.job import Job
from ..run.saving import RunState
from ..rundir.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from ..rundir.mirror import RunCheckpoints
from ..rundir.run_dir import RunDir, dump_recipe
from ..rundir.run_view import STATUS
from ..runtime import prepare_process
from ..signals import Stopped
from ..step import records
from ..step.journal import parse_journal
from ..step.stats import StepTotals
from ..text import listed
from ..untrusted import is_there, parse_json, read_text
from ..weights import Tensors, load_weights
from .local import launch

EQUAL, DIFFERS, UNKNOWN = "equal", "differs", "not compared"
# Seconds from one look at how far the ranks are to the next.
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Checked:
    """What was found (EQUAL, DIFFERS, UNKNOWN) of a range of steps, of a checkpoint, or of the result, and why."""

    name: str
    state: str
    text: str = ""
    first: int = 0
    last: int = 0  # steps done before and after a range; equal: it is no range


def verdict(found: Sequence[Checked]) -> int:
    """Exit code: 0 if all is equal, 1 if something differs, 2 if something, or all, could not be compared."""
    states = {each.state for each in found}
    return 1 if DIFFERS in states else 0 if states == {EQUAL} else 2


class Range(NamedTuple):
    """Steps between two records, or after the last one the result (`is_result`)."""

    first: int
    last: int
    is_result: bool = False

    @property
    def name(self) -> str:
        return "result" if self.is_result else f"steps {self.first}:{self.last}"


def drawn(ranges: Sequence[Range], count: int, seed: str) -> list[Range]:
    """So many ranges, by steps that are drawn by SHA-256 of the seed and a number, the same for everybody."""
    found: set[Range] = set()
    number, first, steps = 0, ranges[0].first, ranges[-1].last - ranges[0].first
    while len(found) < min(count, len(ranges)):
        draw = int(hashlib.sha256(f"{seed} {number}".encode()).hexdigest(), 16) % steps + first
        found.add(next(each for each in ranges if each.first <= draw < each.last))
        number += 1
    return sorted(found, key=lambda each: each.first)


class Segment(NamedTuple):
    """Consecutive ranges that one run computes from one state."""

    start: int
    ranges: list[Range]

    @property
    def stop(self) -> int:
        return self.ranges[-1].last


@dataclass
class Verifier:
    """Checks ranges of a run with `data` and `init` of this machine; `progress` takes steps computed and to compute."""

    claims: Claims
    job: Job
    scratch: Path
    progress: Callable[[int, int], object] = lambda done, total: None
    found: list[Checked] = field(default_factory=list)
    computed: int = 0  # steps that were computed

    def __post_init__(self) -> None:
        recipe, device = self.job.recipe, torch.device(self.job.device)
        prepare_process(recipe, device)
        self._checkpoints = RunCheckpoints(self.claims.run, self.claims.folder, self.scratch / "copy")
        self._conditions = conditions(recipe, device)
        self._bad, self._total = dict[int, str](), 0
        train, held_out = open_sources(recipe.data, self.job.data, recipe.seed)
        self._fingerprint = fingerprint_of(self.job, train, held_out, "", self._conditions, self.claims.begin.operators)
        self._classes = list(train.classes)

    def differing_inputs(self) -> list[Checked]:
        """What the run was trained on, if it is not what is here, and what its weights' file wrongly says of itself."""
        names, found = {"data_sha256": "data", "train_images": "data"}, []
        names |= {"init_sha256": "initial weights"} if self.job.init is not None else {}
        for key, what in names.items():
            then, now = getattr(self.claims.begin, key), getattr(self._fingerprint, key)
            if then != now:
                found.append(Checked(what, DIFFERS, f"{key} was {then}, here it is {now}: other {what} than the run's"))
        return found + [
            Checked("model.safetensors", DIFFERS, text) for text in self.claims.other_metadata(self._classes)
        ]

    def check(self, wanted: Sequence[Range]) -> list[Checked]:
        """Computes the ranges, in their order; what was found."""
        # Without the record of its result, and the summary, a run seems unfinished; its weights may be anybody's.
        if self.claims.result is None and is_there(RunDir(self.claims.folder).model):
            self.found.append(Checked("model.safetensors", UNKNOWN, "the records have no result to compare it with"))
        left = [each for each in wanted if not self._is_refused(each)]
        self._check_checkpoints(left)
        self._total, barrier = sum(each.stop - each.start for each in self._segments(left, 0)), 0
        while left:
            segment = next(iter(self._segments(left, barrier)), None)
            if segment is None:
                none = "no checkpoint of their conditions before, and from the beginning only with the run's --init"
                later = f"no checkpoint between the difference after step {barrier} and these steps"
                self._note(left.pop(0), UNKNOWN, later if barrier else none)
                continue
            # {} for the beginning of the run; None: the state is gone or wrong.
            begin = self._digest(segment.start) if segment.start else {}
            if begin is None:
                continue
            left = left[len(segment.ranges) :]
            refuted = self._compute(segment, begin)
            barrier = max(barrier, refuted or 0)
            if refuted is not None:
                noted = {checked.name for checked in self.found}
                left = [each for each in segment.ranges if each.first >= refuted and each.name not in noted] + left
        return self.found

    def _note(self, each: Range, state: str, text: str = "") -> None:
        self.found.append(Checked(each.name, state, text, each.first, each.last))

    def _is_refused(self, each: Range) -> bool:
        """Whether the bits of a range can't be had here, since its conditions were others; it is noted."""
        line = self.claims.conditions.get(each.last)
        if self.claims.recipe.reduction != "exact":
            why = f"gradients are summed as {self.claims.recipe.reduction}: the bits depend on the ranks"
        elif line is None:
            why = "no record says under what conditions they were computed"
        elif line.mixed:
            why = f"ranks computed under mixed conditions ({changes(line.conditions, line.mixed[0])})"
        elif line.conditions != self._conditions:
            why = f"float arithmetic under other conditions ({changes(line.conditions, self._conditions)})"
        elif line.step > each.first:
            begins = each.first < self.claims.begin.step
            why = f"{'the records begin' if begins else 'the conditions changed within them,'} after step {line.step}"
        else:
            return False
        self._note(each, UNKNOWN, why)
        return True

    def _segments(self, left: Sequence[Range], barrier: int) -> list[Segment]:
        """What is to be computed; none if the first range has nothing to begin from."""
        begin, steps, segments = self.claims.begin, {*self._checkpoints.steps()}, list[Segment]()
        if begin.step == 0 and (not begin.init_sha256 or self.job.init is not None):
            steps.add(0)
        starts = {step for step in steps if step >= barrier and step not in self._bad}
        for each in left:
            # From no state before its conditions began: what lies between has the bits of others.
            since = self.claims.conditions[each.last].step
            start = max((step for step in starts if since <= step <= each.first), default=None)
            if start is None:
                break
            if segments and start <= segments[-1].stop:
                segments[-1].ranges.append(each)
            else:
                segments.append(Segment(start, [each]))
        return segments

    def _check_checkpoints(self, ranges: Sequence[Range]) -> None:
        """Compares checkpoints within or just before the ranges with the records of their steps."""
        self._digests: dict[int, dict[str, str]] = {}
        steps = self._checkpoints.steps()
        for each in ranges:
            before = max((step for step in steps if step <= each.first), default=-1)
            for step in steps:
                if before <= step <= each.last:
                    self._digest(step)

    def _digest(self, step: int) -> Tensors | None:
        """Reads a checkpoint and compares it with its record; None if it is gone or not to begin from."""
        try:
            tensors = records.recorded_tensors(self._checkpoints.read(step))
        except UserError as error:
            self._bad[step] = str(error)
            if step in self._checkpoints.steps():  # it has not gone: it is damaged
                self._note_checkpoint(step, str(error))
            return None
        digests, is_new, wrong = records.tensor_digests(tensors), step not in self._digests, []
        self._digests[step] = digests
        if (recorded := self.claims.states.get(step)) is not None:
            wrong = records.first_differences(recorded, recorded.model_copy(update={"tensors": digests}))
        if not wrong:
            return tensors
        self._bad[step] = f"{named(wrong)} not those of its record"
        if is_new:
            self._note_checkpoint(step, self._bad[step])
        return None

    def _note_checkpoint(self, step: int, text: str) -> None:
        self.found = [each for each in self.found if each.name != f"checkpoint {step}"]
        self.found.append(Checked(f"checkpoint {step}", DIFFERS, text))

    def _compute(self, segment: Segment, begin: Tensors) -> int | None:
        """Computes a segment and notes its ranges; the step after which the state differs, None if it never does."""
        claims, (start, stop), folder = self.claims, (segment.start, segment.stop), self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        expected = records.Expected(
            states={step: line for step, line in claims.states.items() if start <= step <= stop},
            checkpoints={step: found for step, found in self._digests.items() if start < step <= stop},
            evaluations=frozenset(step for step in claims.evaluations if start < step <= stop),
            is_final=segment.ranges[-1].is_result,
        )
        job = replace(self.job, out=folder, max_steps=max(stop, 1), expected=expected, replay=claims.journal)
        self._write_start(job, start, begin)
        del begin
        problem = ""
        try:
            with _watched(folder, lambda step: self.progress(self.computed + step - start, self._total)):
                result = launch(job, fresh=False)
            if result.signal:
                raise Stopped(result.signal)
            problem = str(result.summary.get("diverged", ""))
        except (UserError, RunError) as error:
            for each in segment.ranges:
                self._note(each, UNKNOWN, f"can't be computed: {error}")
            return None
        self.computed += stop - start
        return self._compare(segment, folder, records.parse_records(RunDir(folder).records.read_text())[0], problem)

    def _write_start(self, job: Job, step: int, tensors: Tensors) -> None:
        folder, journal = RunDir(job.out), None
        folder.path.mkdir(parents=True)
        folder.recipe.write_text(dump_recipe(job.recipe))
        if not step:
            return
        if self.claims.journal_text:
            text = "".join(line + "\n" for line in self.claims.journal_text.split("\n")[: step + 1])
            folder.journal.write_text(text)
            journal = parse_journal(text, "journal", job.recipe.sha256(), job.recipe.virtual_workers).head
        fingerprint = replace(self._fingerprint, replayed_sha256="" if job.replay is None else job.replay.head.sha256)
        totals = StepTotals(skipped=0 if any(name.startswith("optimizer/") for name in tensors) else step)
        state = RunState(fingerprint, step=step, evaluated=step, journal=journal, totals=totals)
        write_checkpoint(folder.checkpoints, Checkpoint(tensors, state.as_dict()), {})

    def _compare(self, segment: Segment, folder: Path, lines: Sequence[records.Line], diverged: str) -> int | None:
        states, (start, stop) = records.states_of(lines), (segment.start, segment.stop)
        recorded = {step: line for step, line in self.claims.states.items() if start <= step <= stop}
        refuted, text = None, ""
        for step in sorted(recorded.keys() & states.keys()):
            if names := records.first_differences(recorded[step], states[step]):
                what, since = self._described(step, names, folder), self._since(start, step, states, folder)
                refuted, text = step, f"first after step {step}: {what}; {since}"
                break
        if diverged and refuted is None:
            reached = max(states, default=start)
            refuted, text = reached + 1, f"after step {reached} no step can be taken: {diverged}"
        for step, digests in self._digests.items():
            mine = states[step].tensors if step in states else digests
            if altered := [name for name in mine if mine[name] != digests.get(name)]:
                self._note_checkpoint(step, f"not what is computed: {self._described(step, altered, folder)}")
        if refuted == 0:
            self._bad[0] = text
        last = stop if refuted is None else refuted
        for each in segment.ranges:
            if refuted is not None and each.first < refuted <= each.last:
                self._note(each, DIFFERS, text)
            elif each.last <= last and not (each.is_result and refuted is not None):
                is_whole = each.last in states or start == each.last or each.is_result
                wrong = self._wrong_figures(each, lines, folder)
                self._note(each, DIFFERS if wrong else EQUAL if is_whole else UNKNOWN, wrong)
        if refuted is not None and not any(each.text == text for each in self.found):
            self.found.append(Checked(f"step {refuted}", DIFFERS, text))
        return refuted

    def _wrong_figures(self, each: Range, lines: Sequence[records.Line], folder: Path) -> str:
        """What differs between the evaluations of a range, or the results; empty: nothing."""
        found = {line.step: line.figures for line in lines if isinstance(line, records.EvaluationLine)}
        wrong = "; ".join(filter(None, (
            _wrong(f"the evaluation after step {step}", line.figures, found.get(step, {}))
            for step, line in self.claims.evaluations.items() if each.first < step <= each.last
        )))  # fmt: skip
        if each.is_result and not wrong:
            recorded, computed = self.claims.result, next((x for x in lines if isinstance(x, records.ResultLine)), None)
            assert recorded is not None, "its range is there"
            if computed is None:
                return "the result was not computed"
            if recorded.step != computed.step:
                return f"the result is of step {recorded.step} in the records, the run ends after step {computed.step}"
            if recorded.weights_sha256 != computed.weights_sha256:
                # A run without its weights still says what they are.
                files = [RunDir(path).model for path in (self.claims.folder, folder)]
                theirs, mine = (load_weights(file)[0] if file.exists() else {} for file in files)
                altered = [name for name in theirs if not torch.equal(theirs[name], mine.get(name, torch.empty(0)))]
                return f"{named(altered) or 'weights_sha256'} {_amounts(theirs, mine, altered)}".rstrip()
            return _wrong("the result", recorded.figures, computed.figures)
        return wrong

    def _since(self, start: int, step: int, states: Mapping[int, records.StateLine], folder: Path) -> str:
        """Up to where the run is what was computed, by all that it has of the steps before one that differs."""
        equal = [each for each in states if each < step and each in self.claims.states]
        equal += [each for each, found in self._digests.items() if each in states and states[each].tensors == found]
        last = max((each for each in equal if each < step), default=start)
        recorded, computed = (_losses(path / "events.jsonl", last, step) for path in (self.claims.folder, folder))
        for each in sorted(recorded.keys() & computed.keys()):
            if recorded[each] != computed[each]:
                both = f"{recorded[each]} in events.jsonl, {computed[each]} computed"
                return f"equal after step {last}, and the loss of step {each} is {both}"
        if recorded.keys() != computed.keys():
            return f"equal after step {last}, nothing is left of the steps between"
        return f"equal after step {last}, the losses of all {len(recorded)} steps between are equal"

    def _described(self, step: int, names: Sequence[str], folder: Path) -> str:
        """What differs after a step, with by how much if the run has a checkpoint of that step."""
        text = named(names)
        with suppress(UserError, OSError, StopIteration):
            theirs = self._checkpoints.read(step)
            mine = read_checkpoint(folder / "checkpoints" / f"step-{step:08d}").tensors
            return f"{text} {_amounts(theirs, mine, [name for name in names if name in theirs])}".rstrip()
        return text


def _losses(path: Path, first: int, last: int) -> dict[int, object]:
    """The losses of the steps after `first` up to `last` in a file of events, as far as they can be read."""
    found = {}
    with suppress(OSError, ValueError):
        for line in read_text(path, records.MOST_BYTES).splitlines():
            with suppress(ValueError):
                event = parse_json(line)
                if isinstance(event, dict) and "event" not in event and isinstance(step := event.get("step"), int):
                    found[step] = event.get("loss")
    return {step: loss for step, loss in found.items() if first < step <= last}


def named(names: Sequence[str]) -> str:
    """The first two of the names, and how many more there are."""
    return listed(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _amounts(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """By how much, and in how many elements, the first of the tensors differs; empty: nobody knows."""
    for name in names:
        if name in mine and mine[name].shape == theirs[name].shape:
            one, two = theirs[name].double(), mine[name].double()
            count = int((theirs[name] != mine[name]).sum())
            return f"({count} of {one.numel()} elements of {name}, by up to {float((one - two).abs().max()):.3g})"
    return ""


def _wrong(what: str, recorded: Mapping[str, records.Figure], computed: Mapping[str, records.Figure]) -> str:
    for key in {**recorded, **computed}:
        if (key in recorded) != (key in computed) or recorded.get(key) != computed.get(key):
            return f"{what}: {key} is {recorded.get(key)} in the records, {computed.get(key)} computed"
    return ""


@contextmanager
def _watched(folder: Path, progress: Callable[[int], object]) -> Iterator[None]:
    """Calls `progress` with the step that the run in a folder has reached, as long as the block lasts."""
    is_over = Event()

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            with suppress(OSError, ValueError, KeyError, TypeError):
                progress(int(parse_json(read_text(folder / STATUS))["step"]))

    thread = Thread(target=look, daemon=True, name="torusgd-progress")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

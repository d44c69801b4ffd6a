"""Records of a run: hashes of its state after some steps, each line chained to the line before.

Who has the recipe and the data computes steps anew from a checkpoint and must get the same hashes (`torusgd verify`).
The file is JSON, a line each: what the run is (`begin`), the conditions of what follows (`conditions`), the state after
so many steps (`state`), an evaluation, the result. `before` is the SHA-256 of the whole line before, so that no line
can be changed, added, removed or moved unseen; the hash of the last one stands for all, in a summary or a paper. Jia et
al. (arXiv 2103.05633) have such logs of checkpoints; hashes compared bit for bit, since bits repeat, are ours.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from ..comm.groups import Group
from ..data.pipeline import Batch
from ..data.to_device import look_up
from ..errors import as_run_error, warn
from ..line_file import LineFile
from ..untrusted import check_regular, is_there
from ..weights import weights_sha256
from .control_vector import NO_WORDS, ControlVector
from .evaluate import Evaluation
from .model_state import WATCHERS, StepState
from .watch import StepView, StepWatch

MOST_BYTES = 1 << 30
# The name of a file of records of which a resumed run can't take all lines, in the run's folder.
ASIDE = "records.jsonl.damaged"
# int64 words of a SHA-256.
_WORDS = 4
Figure = float | None  # None: not finite


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step: NonNegativeInt
    before: str = ""  # SHA-256 of the line before; empty in the first


class BeginLine(_Line):
    """What the run is, as its fingerprint says."""

    record: Literal["begin"] = "begin"
    format: Literal["torusgd-records-1"] = "torusgd-records-1"
    recipe_sha256: str
    train_images: int
    data_sha256: str
    init_sha256: str
    operators: str


class ConditionsLine(_Line):
    """Under what conditions the steps that follow were computed; `mixed` are those of ranks that had others."""

    record: Literal["conditions"] = "conditions"
    conditions: dict[str, str | int]
    mixed: list[dict[str, str | int]]


class StateLine(_Line):
    record: Literal["state"] = "state"
    tensors: dict[str, str] = {}
    images: str | None = None  # of the step's images and labels; None: nobody knew before that it would be recorded
    rates: tuple[float, float, float] | None = None  # rate, momentum, weight decay's factor; None before the first step
    journal: str | None = None  # digest of the journal up to here; None: it follows from the recipe


class EvaluationLine(_Line):
    record: Literal["evaluation"] = "evaluation"
    figures: dict[str, Figure]


class ResultLine(_Line):
    record: Literal["result"] = "result"
    weights_sha256: str
    figures: dict[str, Figure]


Line = BeginLine | ConditionsLine | StateLine | EvaluationLine | ResultLine
_ADAPTER: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="record")])


@dataclass(frozen=True)
class Expected:
    """What steps that are computed anew, for `torusgd verify`, are compared with; the run ends at a difference."""

    states: Mapping[int, StateLine]
    checkpoints: Mapping[int, Mapping[str, str]]  # digests of their tensors by step; at a difference the state is saved
    evaluations: frozenset[int]  # steps after which the weights are evaluated
    is_final: bool  # whether polish and result follow the last step


def line_sha256(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def parse_line(text: str) -> Line:
    """A record from its JSON; ValidationError if it is none."""
    return _ADAPTER.validate_json(text)


def parse_records(text: str) -> tuple[list[Line], str, str]:
    """The lines that fit to each other from the file's begin, the last one's hash, and what is wrong with the next one.

    A last line without an end is left out: it may be under way.
    """
    found: list[Line] = []
    head, reached = "", 0
    for number, each in enumerate(text.split("\n")[:-1], 1):
        try:
            line = parse_line(each)
        except ValidationError:
            return found, head, f"line {number} is no record"
        if line.before != head:
            what = f"line {number} does not hold the hash of the line before it"
            return found, head, f"{what}: a line was changed, added, left out or moved"
        # A run writes nothing behind its result, and evaluates nothing before its first step: nobody would compute it.
        is_misplaced = bool(found) and isinstance(found[-1], ResultLine)
        is_misplaced |= isinstance(line, EvaluationLine) and line.step == 0
        if is_misplaced or (number == 1) != isinstance(line, BeginLine) or line.step < reached:
            return found, head, f"line {number} is not where a run writes it"
        found.append(line)
        head, reached = line_sha256(each), line.step
    return found, head, ""


class RecordFile:
    """The records of a run as they grow, on rank 0; what an earlier attempt wrote behind its state is dropped."""

    def __init__(self, path: Path, step: int, evaluated: int) -> None:
        remedy = "mend the disk, and give the same command again"
        with as_run_error(f"{path}: can't be read", remedy, (OSError, ValueError)):
            text = check_regular(path).read_bytes()[:MOST_BYTES].decode(errors="replace") if is_there(path) else ""

        def stays(line: Line) -> bool:
            reached = min(step, evaluated) if isinstance(line, EvaluationLine) else step
            return line.step <= reached and not isinstance(line, ResultLine)

        whole, _, problem = parse_records(text)
        self.lines = list(takewhile(stays, whole))
        kept = text.split("\n")[: len(self.lines)]
        if problem and len(whole) == len(self.lines):  # else it is of steps that are done again
            aside = path.with_name(ASIDE)
            with as_run_error(f"{aside}: can't be written", remedy):
                shutil.copyfile(path, aside)
            warn(f"{path}: {problem}; it is set aside as {ASIDE}, and goes on behind the line before")
        self._file = LineFile(path, sum(len(each.encode()) + 1 for each in kept))
        self.head = line_sha256(kept[-1]) if kept else ""

    def add(self, line: Line) -> None:
        chained = line.model_copy(update={"before": self.head})
        text = chained.model_dump_json(exclude_none=True)
        self._file.write(f"{text}\n".encode())
        self.lines.append(chained)
        self.head = line_sha256(text)

    def close(self) -> None:
        self._file.close()


def figures_of(evaluation: Evaluation) -> dict[str, Figure]:
    return {name: float(value) for name, value in evaluation.as_summary().items()}


def recorded_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a state that steps are computed from: all but those of watchers, which decide no weight."""
    return {name: tensors[name] for name in sorted(tensors) if not name.startswith(WATCHERS)}


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The `weights_sha256` of each of the `recorded_tensors` alone."""
    return {name: weights_sha256({name: tensor}) for name, tensor in recorded_tensors(tensors).items()}


def state_digests(state: StepState, steps: int, world: Group) -> dict[str, str]:
    """`tensor_digests` of the state after so many steps; every rank calls it. With shards rank 0 alone has them."""
    tensors = state.state_dict(steps, keep=world.rank == 0 or not state.reducer.is_sharded)
    if world.size == 1 or state.reducer.is_sharded:
        return tensor_digests(tensors) if world.rank == 0 else {}
    # Every rank holds every tensor: each hashes its part, the large ones first, and the hashes travel as a sum with
    # zeros, so that a record costs the less the more ranks there are.
    names = sorted(recorded_tensors(tensors), key=lambda name: (-tensors[name].nbytes, name))
    loads, table = [0] * world.size, torch.zeros(len(names), _WORDS, dtype=torch.int64)
    for row, name in zip(table, names, strict=True):
        rank = loads.index(min(loads))
        loads[rank] += tensors[name].nbytes
        if rank == world.rank:
            row.copy_(_as_words(weights_sha256({name: tensors[name]})))
    sent = table.to(world.small_device)
    world.all_reduce(sent)
    rows = dict(zip(names, sent.cpu(), strict=True))
    return {name: rows[name].numpy().tobytes().hex() for name in sorted(rows)}


def batch_sha256(batch: Batch) -> str:
    """Of images as the network takes them, normalised float32, with their labels and what they were mixed with."""
    images = batch.images
    if batch.table is not None:  # a GPU normalises them itself, to the same bits
        images = torch.empty(images.shape)
        look_up(batch.images, batch.table, images)
    return weights_sha256({"images": images, **batch.labels()})


class RecordWatch(StepWatch):
    """Has a step's images hashed if the state after it is recorded, which all ranks learn one step before."""

    name = "records"

    def __init__(self, workers: int, is_fixed: Callable[[int], bool], is_wanted: Callable[[int], bool] | None) -> None:
        self.words = 1 + _WORDS * workers
        self._is_fixed, self._is_wanted = is_fixed, is_wanted
        self._announced = self._step = -1
        self._digests: dict[int, Tensor] = {}
        self.images, self.seconds = "", 0.0  # hash over the last recorded step's virtual workers, and what it took

    def is_recorded(self, step: int) -> bool:
        return self._is_fixed(step + 1) or self._announced == step + 1

    def due(self, step: int) -> bool:
        return self._is_fixed(step + 1)

    def with_batch(self, step: int, worker: int, batch: Batch) -> None:
        if not self.is_recorded(step):
            return
        began = time.perf_counter()
        if step != self._step:
            self._step, self._digests, self.seconds = step, {}, 0.0
        self._digests[worker] = _as_words(batch_sha256(batch))
        self.seconds += time.perf_counter() - began

    def before_send(self, view: StepView) -> Tensor:
        step = view.step.index
        if self._is_wanted is None and not self.is_recorded(step):
            return NO_WORDS
        section = torch.zeros(self.words if self.is_recorded(step) else 1, dtype=torch.int64)
        section[0] = self._is_wanted is not None and self._is_wanted(step + 2)
        if step == self._step:
            for worker, digest in self._digests.items():
                section[1 + _WORDS * worker :][:_WORDS] = digest
            self._digests = {}  # passes may be repeated, and then other ranks may have these virtual workers
        return section

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        step, words = view.step.index, control.words(self.name)
        is_recorded = self.is_recorded(step)
        if is_recorded:
            self.images = hashlib.sha256(torch.tensor(words[1:]).numpy().astype("<i8").tobytes()).hexdigest()
        if words and words[0] > 0:
            self._announced = step + 2
        return {"record": is_recorded}


def _as_words(digest: str) -> Tensor:
    """A SHA-256 as int64 [4]."""
    return torch.frombuffer(bytearray.fromhex(digest), dtype=torch.int64)


def first_differences(recorded: StateLine, computed: StateLine) -> list[str]:
    """What differs between two records of the same step, in the order in which a step makes it; empty: nothing."""
    found = [name for name in ("journal", "images", "rates") if getattr(recorded, name) != getattr(computed, name)]
    if None in (recorded.images, computed.images):  # hashed only if the record was expected
        found = [name for name in found if name != "images"]
    names = {name for name, _ in recorded.tensors.items() ^ computed.tensors.items()}
    return found + sorted(names, key=lambda name: (not name.startswith("optimizer/"), name.startswith("average"), name))


def states_of(lines: Sequence[Line]) -> dict[int, StateLine]:
    return {line.step: line for line in lines if isinstance(line, StateLine)}

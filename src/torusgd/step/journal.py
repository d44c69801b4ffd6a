"""Which virtual workers' gradients, of which version of the weights, enter an update: data that a step takes.

The journal of a synchronous run follows from the recipe and is not written. A run that leaves out late work depends on
time; recipe and journal decide the result. A run of local steps keeps one as well, so that all relaxed forms are
replayed, and checked, in one way.

The file is text. Its first line names the format, the recipe's hash and V; then comes a line for each update:

    17 - 5f0c9a31          step 17 took all gradients
    18 2,8-11 77d04be2     step 18 left out the virtual workers 2, 8, 9, 10 and 11

All gradients of a line are of the weights that its step began with. The last word begins a SHA-256 over the line and
the whole digest of the line before: a line that was changed, removed or moved no longer fits there. What was cut off at
the end is found by the head (the last digest), which stands in each checkpoint and in the summary.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import UserError, as_run_error, as_user_error
from ..line_file import LineFile
from ..untrusted import check_regular, read_text

FORMAT = "torusgd-journal-1"
_MOST_BYTES = 1 << 30
# Hexadecimal digits of each digest that are written; the chain goes on from the whole one.
_CHECK = 8
_LINE = re.compile(r"(?P<step>\d{1,9}) (?P<left_out>-|\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*) (?P<check>[0-9a-f]{8})")
Head = Mapping[str, Any] | None


@dataclass(frozen=True)
class JournalEntry:
    """One update; all of its gradients are of the weights that the step began with."""

    step: int
    # Virtual workers that take part, as a range or a frozenset: nothing is made for each of them in a step.
    workers: Collection[int]


def synchronous(step: int, virtual_workers: int) -> JournalEntry:
    """Every virtual worker once."""
    return JournalEntry(step, range(virtual_workers))


@dataclass(frozen=True)
class JournalHead:
    """How far a journal has come: its bytes, its last line and that line's digest, which stands for all before it."""

    size: int
    sha256: str
    last: str

    def as_summary(self, updates: int) -> dict[str, Any]:
        return {"sha256": self.sha256, "bytes": self.size, "bytes_per_update": round(self.size / max(updates, 1), 1)}


class Journal:
    """A journal as it grows: every rank has its head, up to where the run has come, and rank 0 writes the file."""

    def __init__(self, recipe_sha256: str, virtual_workers: int, head: JournalHead | None = None) -> None:
        self._recipe_sha256, self._workers = recipe_sha256, virtual_workers
        first = _first_line(recipe_sha256, virtual_workers)
        self.head = head or JournalHead(len(first), _digest("", first), first)
        self._file: LineFile | None = None

    def open(self, path: Path) -> None:
        """Goes on in a file from the head on; UserError if it is not what the run wrote, RunError if the disk fails."""
        head = self.head
        remedy = "mend the disk, and give the same command again"
        with as_run_error(f"{path}: can't be read", remedy, (OSError, ValueError)):
            try:
                held = b"" if head.size == len(head.last) else check_regular(path).read_bytes()[: head.size]
            except FileNotFoundError:
                what = "is missing, and the run can't go on without it: put it back, or give --fresh"
                raise UserError(f"{path}: {what}") from None
        text = held.decode(errors="replace")
        if len(text) == head.size - len(head.last):  # rank 0 was lost before it had written this line
            text += head.last
        parse_journal(text, str(path), self._recipe_sha256, self._workers, head.as_summary(1))
        self._file = LineFile(path, head.size - len(head.last))
        self._file.write(head.last.encode())

    def add(self, entry: JournalEntry) -> None:
        left_out = sorted(set(range(self._workers)).difference(entry.workers))
        body = f"{entry.step} {_text(left_out)}"
        digest = _digest(self.head.sha256, body)
        line = f"{body} {digest[:_CHECK]}\n"
        self.head = JournalHead(self.head.size + len(line), digest, line)
        if self._file is not None:
            self._file.write(line.encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class Journaled:
    left_out: tuple[tuple[range, ...], ...]  # runs of virtual workers that each update, from step 0 on, has left out
    virtual_workers: int
    head: JournalHead

    def entry(self, step: int) -> JournalEntry:
        return JournalEntry(step, frozenset(range(self.virtual_workers)).difference(*self.left_out[step]))


def read_journal(
    path: Path, recipe_sha256: str, virtual_workers: int, head: Head = None, reached: Head = None
) -> Journaled:
    """As `parse_journal`, of the text in a file; UserError also if it can't be read."""
    what, remedy = f"{path}: the journal can't be read", "a replay needs it as the run left it"
    with as_user_error(what, remedy, (OSError, ValueError)):
        text = read_text(path, _MOST_BYTES)
    return parse_journal(text, str(path), recipe_sha256, virtual_workers, head, reached)


def parse_journal(
    text: str, where: str, recipe_sha256: str, virtual_workers: int, expected: Head = None, reached: Head = None
) -> Journaled:
    """The updates of a journal of a run with this recipe; UserError if it was cut, edited or reordered, naming where.

    `expected` is as the summary has it (`JournalHead.as_summary`; None: the run is not done), `reached` a `JournalHead`
    as the newest checkpoint has it (None: there is none, and a cut is not seen).
    """
    name, _, rest = text.partition("\n")
    first = _first_line(recipe_sha256, virtual_workers)
    if f"{name}\n" != first:
        raise UserError(f"{where}: its first line is {name[:80]!r}, not that of a journal of this recipe")
    digest, last = _digest("", first), first
    updates = []
    lines, size, is_whole = rest.split("\n"), len(first), reached is None
    for number, line in enumerate(lines[:-1]):
        found = _LINE.fullmatch(line)
        digest = _digest(digest, line.rpartition(" ")[0])
        runs = _runs(found["left_out"], virtual_workers) if found is not None else None
        if found is None or runs is None or int(found["step"]) != number or digest[:_CHECK] != found["check"]:
            what = f"line {number + 2}, of step {number}, is not what the run wrote after the lines before it"
            raise UserError(f"{where}: {what}; the journal was cut, edited or reordered: put a good copy there")
        updates.append(runs)
        last = f"{line}\n"
        size += len(last)
        is_whole = is_whole or (reached is not None and (size, digest) == (reached["size"], reached["sha256"]))
    how = "before the run did" if lines[-1] or not is_whole else ""
    if not how and expected is not None and (len(text), digest) != (expected.get("bytes"), expected.get("sha256")):
        how = "otherwise than the run left it"
    if how:
        what = f"ends after {len(updates)} updates, {how}; the journal was cut or edited"
        raise UserError(f"{where}: {what}: put a good copy there")
    return Journaled(tuple(updates), virtual_workers, JournalHead(len(text), digest, last))


def _first_line(recipe_sha256: str, virtual_workers: int) -> str:
    return f"{FORMAT} {recipe_sha256} {virtual_workers}\n"


def _digest(before: str, line: str) -> str:
    return hashlib.sha256(f"{before}\n{line}".encode()).hexdigest()


def _text(numbers: Iterable[int]) -> str:
    """Ascending numbers as text, such as "2,8-10"; "-" for none."""
    # Neighbours have the same distance to their place among all.
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def _runs(text: str, workers: int) -> tuple[range, ...] | None:
    """The runs of a text that `_text` has made of some of so many virtual workers, not all; None: it has not."""
    if text == "-":
        return ()
    ends = [[int(word) for word in run.split("-")] for run in text.split(",")]
    runs = tuple(range(each[0], each[-1] + 1) for each in ends)
    if any(run.stop > workers for run in runs):
        return None
    numbers = sorted({worker for run in runs for worker in run})
    return runs if len(numbers) < workers and _text(numbers) == text else None

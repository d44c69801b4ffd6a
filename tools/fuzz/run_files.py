"""Kinds of inputs that runs leave and others read: journals, records, statuses, requests, logs, cards, messages."""

import csv
import importlib.util
import io
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from torusgd.errors import RunError, UserError
from torusgd.export.model_card import card
from torusgd.ranks.join import Channel, ChannelClosed, _receive_line
from torusgd.recipe.data_schema import Data
from torusgd.recipe.load import load_recipe
from torusgd.report.read_run import read_log, read_run, read_verified
from torusgd.run.claims import read_claims
from torusgd.rundir import run_view
from torusgd.rundir.run_dir import RunDir, dump_recipe
from torusgd.rundir.run_view import HEAD, STATUS, WORKERS, RunRequests, read_status
from torusgd.step.journal import Journal, JournalEntry, JournalHead, read_journal
from torusgd.step.records import BeginLine, ConditionsLine, EvaluationLine, RecordFile, ResultLine, StateLine

from .mutations import WORDS, damaged
from .uses import read_first

File = Callable[[str, bytes], Path]
Inputs = Iterator[tuple[str, Callable[[], object]]]
V = 12


def kinds(file: File) -> dict[str, tuple[int, Callable[[int, random.Random], Inputs]]]:
    """As `Fuzz.kinds`; `file` makes a file of the campaign's folder."""
    made = {
        "journals": (120, journals),
        "records": (120, records),
        "statuses and requests": (160, statuses),
        "logs": (120, logs),
        "model cards": (80, cards),
        "messages": (120, messages),
    }
    if importlib.util.find_spec("pyarrow") is not None:
        made["Parquet"] = (240, tables)
    return {kind: (count, partial(make, file)) for kind, (count, make) in made.items()}


def journals(file: File, count: int, rng: random.Random) -> Inputs:
    """Journals, read for a replay and gone on with by a run."""
    path = file("journal/good", b"")
    journal = Journal("ab" * 32, V)
    journal.open(path)
    for step in range(12):
        journal.add(JournalEntry(step, rng.sample(range(V), rng.randint(1, V))))
    journal.close()
    good, head = path.read_bytes(), journal.head
    for number in range(count):
        path = file(f"journal/{number}", damaged(rng, good) if number % 10 else good)
        known = rng.choice([None, head.as_summary(12)])
        yield f"{path.name} replayed", partial(read_journal, path, "ab" * 32, V, known)
        yield f"{path.name} gone on", partial(_go_on, path, head)


def _go_on(path: Path, head: JournalHead) -> None:
    journal = Journal("ab" * 32, V, head)
    try:
        journal.open(path)
    except RunError as error:
        raise UserError(str(error)) from None
    finally:
        journal.close()


def _run(file: File, name: str) -> dict[str, bytes]:
    """The small files of a run that is done, by their names."""
    recipe = load_recipe("digits").recipe
    folder = file(f"{name}/recipe.yaml", dump_recipe(recipe).encode()).parent
    lines = RecordFile(folder / "records.jsonl", 0, 0)
    known = {"recipe_sha256": recipe.sha256(), "train_images": 1437, "data_sha256": "d", "init_sha256": "i"}
    lines.add(BeginLine(step=0, operators="", **known))
    lines.add(ConditionsLine(step=0, conditions={"cpu": "x", "threads": 1}, mixed=[]))
    for step in (0, 4, 8):
        lines.add(StateLine(step=step, tensors={"a": "0" * 64}, images="1" * 64, rates=(0.1, 0.9, 1.0)))
    lines.add(EvaluationLine(step=8, figures={"top1": 0.5, "loss": None}))
    lines.add(ResultLine(step=8, weights_sha256="2" * 64, figures={"top1": 0.5}))
    lines.close()
    summary = {**known, "steps": 8, "top1": 0.5, "weights_sha256": "2" * 64, "records": {"sha256": lines.head},
               "world_size": 2, "seconds": 1.0, "conditions": {"cpu": "x"}}  # fmt: skip
    status = {"phase": "train", "step": 3, "steps": 8, "loss": 2.0, "host": "elsewhere", "process": 1, "seconds": 1.0}
    file(f"{name}/summary.json", json.dumps(summary).encode())
    file(f"{name}/{STATUS}", json.dumps(status).encode())
    file(f"{name}/events.jsonl", b'{"step": 1, "loss": 2.0, "epoch": 0.1, "seconds": 0.1, "batch": 96}\n')
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _damaged_runs(
    file: File, kind: str, count: int, rng: random.Random, torn: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    good = _run(file, f"{kind}/good")
    for number in range(count):
        chosen = rng.choice(torn)
        for name, content in good.items():
            head = len(HEAD) if name == "recipe.yaml" else 0  # else it is no run's
            data = content[:head] + damaged(rng, content[head:]) if name == chosen else content
            path = file(f"{kind}/{number}/{name}", data)
        yield f"{number} {chosen}", path.parent


def records(file: File, count: int, rng: random.Random) -> Inputs:
    """What `torusgd verify` reads of a run, and what a run reads of its own records."""
    for name, folder in _damaged_runs(
        file, "records", count, rng, ("records.jsonl", "records.jsonl", "recipe.yaml", "summary.json")
    ):
        yield f"{name} claims", lambda folder=folder: read_claims(folder, []).contradictions()  # type: ignore[misc]
        yield f"{name} gone on", partial(RecordFile, folder / "records.jsonl", 4, 4)


def statuses(file: File, count: int, rng: random.Random) -> Inputs:
    """What `status`, `stop`, `resize` and a resumed run read of a folder, and what a run reads of requests."""
    for name, folder in _damaged_runs(file, "statuses", count, rng, (STATUS, STATUS, "summary.json", "recipe.yaml")):
        if rng.random() < 0.5:
            (folder / "summary.json").unlink()
        (folder / WORKERS).write_bytes(damaged(rng, b"3") if rng.random() < 0.5 else rng.choice(WORDS))
        (folder / ".agents").write_bytes(damaged(rng, b"[1, 2]"))
        yield f"{name} status", partial(_look, folder)
        yield f"{name} requests", partial(_requests, folder)


def _look(folder: Path) -> None:
    status, run = read_status(folder), RunDir(folder)
    assert isinstance(status.reported, dict)
    run.data_revision(), run.journal_reached(), run.read_summary(), run.agents()
    read_run(folder)


def _requests(folder: Path) -> None:
    with patch.object(run_view, "SECONDS", 0.0):  # the first look is not put off
        number = RunRequests(folder).workers()
    assert number is None or number > 0


def logs(file: File, count: int, rng: random.Random) -> Inputs:
    """Logs of other programs, and what `verify --json` wrote, for the pages of `torusgd report`."""
    rows = [{"step": step, "loss": 2.0 / (step + 1), "epoch": 0.1 * step} for step in range(5)]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", "loss", "epoch"])
    writer.writeheader()
    writer.writerows(rows)
    good = {
        "metrics.csv": text.getvalue().encode(),
        "log.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "trainer_state.json": json.dumps({"log_history": rows}).encode(),
    }
    verified = json.dumps({"records_sha256": "0", "found": [{"begin": 0, "end": 4, "equal": True}]}).encode()
    for number in range(count):
        name = rng.choice([*good])
        path = file(f"logs/{number}/{name}", damaged(rng, good[name]))
        yield f"{number} {name}", partial(read_log, path)
        yield f"{number} verified", partial(read_verified, file(f"logs/{number}/v.json", damaged(rng, verified)))


def cards(file: File, count: int, rng: random.Random) -> Inputs:
    """Model cards of damaged runs: the YAML at their head is read back, and stays within its bounds."""
    for name, folder in _damaged_runs(file, "cards", count, rng, ("recipe.yaml", "summary.json", STATUS)):
        yield name, partial(_read_card, folder)


def _read_card(folder: Path) -> None:
    text = card(read_run(folder), "mit")
    front, _, rest = text.removeprefix("---\n").partition("\n---\n")
    assert isinstance(yaml.safe_load(front), dict)
    assert "\n---\n" not in rest


def messages(file: File, count: int, rng: random.Random) -> Inputs:
    """Lines that strangers send to the listener, and messages of machines that have joined."""
    line = json.dumps({"nonce": "0" * 64, "purpose": "join", "proof": "1" * 64}).encode() + b"\n"
    message = json.dumps({"exit": 1, "rank": 0, "why": "x"}).encode() + b"\n"
    for number in range(count):
        yield f"line {number}", partial(_told, damaged(rng, line))
        yield f"message {number}", partial(_heard, damaged(rng, message))


@contextmanager
def _sent(data: bytes) -> Iterator[socket.socket]:
    """A connection whose other end has sent the data, and sends no more."""
    mine, other = socket.socketpair()
    with mine, other:
        other.sendall(data[: 1 << 15])
        other.shutdown(socket.SHUT_WR)
        yield mine


def _told(data: bytes) -> None:
    with _sent(data) as connection:
        try:
            assert isinstance(_receive_line(connection, time.monotonic() + 5.0), dict)
        except (OSError, ValueError) as error:  # what the listener answers with nothing, and a line in the log
            raise UserError(str(error)) from None


def _heard(data: bytes) -> None:
    with _sent(data) as connection:
        try:
            assert all(isinstance(each, dict) for each in Channel(connection, 5.0).receive())
        except ChannelClosed as error:
            raise UserError(str(error)) from None


def tables(file: File, count: int, rng: random.Random) -> Inputs:
    """Parquet files with a picture and a label a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    rows: dict[str, Any] = {"image": [{"bytes": picture.getvalue(), "path": None}] * 6, "label": [0, 1] * 3}
    stream = io.BytesIO()
    pq.write_table(pa.table(rows), stream, row_group_size=2)
    good = stream.getvalue()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")  # its length and "PAR1" end the file
    for number in range(count):
        # Most damage to a footer is found when the file is opened; that to pages only when pictures are read.
        bad = damaged(rng, good) if number % 2 else damaged(rng, good[:footer]) + good[footer:]
        split = rng.choice(("train", "test"))
        for name in ("train", "test"):
            file(f"tables/{number}/data/{name}-00000-of-00001.parquet", bad if name == split else good)
        folder = file(f"tables/{number}/README.md", b"").parent
        yield f"{number}", partial(read_first, Data(source="parquet", image_size=8), folder)

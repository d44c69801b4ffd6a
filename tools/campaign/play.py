"""One run of the campaign in this process: the command, the event that strikes it, and the verdict."""

import contextlib
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from torusgd.cli import app
from torusgd.errors import RunError, UserError
from torusgd.ranks import forkserver
from torusgd.rundir.run_view import WORKERS, write_request
from torusgd.signals import Stopped, raise_on_stop

from .draw import STEPS, Draw, Row, options_of, recipe_changes

FOLDER = "TORUSGD_CAMPAIGN"  # as in in_rank.py, which imports torch; here it would only make the start later
LIMIT = 60.0
"""seconds of a command without a new line, after which it hangs: this process ends, all stacks in the file `hang`"""
BUSY_LIMIT = 300.0
"""the same while its processes compute, or wait for a core of a machine that has other work too"""
MOMENTS = (*(("any", step) for step in range(1, STEPS + 1)), ("images", 5), ("train", 7), ("audit", 3), ("evaluate", 4),
           ("checkpoint", 5), ("evaluate", STEPS), ("checkpoint", STEPS), ("polish", STEPS))  # fmt: skip
"""phase and step of a rank at which an event strikes, or at the first progress in a later step"""
LASTING = {"resize": 0.2, "join": 0.5}
"""seconds that each unit of work takes until such an event has had its effect; with all others it has one at once"""


class Player:
    """Carries out runs in a folder, one after the other; `plain` has the known weights of plain runs, by recipe."""

    def __init__(self, folder: Path, plain: dict[str, str]) -> None:
        self.plain, self._run, self._log, self._stacks = plain, folder / "run", folder / "log", folder / "stacks"
        self._slow, self._token, self._folder = folder / "slow", folder / "token", folder
        self._moment, self._reached = folder / "moment", folder / "reached"
        os.environ[FOLDER] = str(folder)
        os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin, of more ranks than cores, take most of the time
        forkserver.PRELOAD = (*forkserver.PRELOAD, "tools.campaign.in_rank")  # type: ignore[assignment]
        # What ranks print goes where this process printed when their fork server began.
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        self._marks = self._stacks.open("a+")
        forkserver.start_forkserver()

    def play(self, draw: Draw) -> dict[str, Any]:
        """A row of the results."""
        started, rng, worked = time.monotonic(), random.Random(draw.index), _cpu_seconds(os.getpid())
        row: dict[str, Any] = {"index": draw.index, "event": draw.event, "struck": False, "row": draw.row}
        refusal, at = draw.refusal, self._size()
        try:
            verdict = self._refused(draw) if refusal else self._same(draw, rng, row)
        except Exception as error:  # the campaign goes on, and the row says it
            traceback.print_exc()
            verdict = f"FAILED {error!r}"
        text = self._text(at)
        if "Traceback" in text:
            verdict = f"TRACEBACK, {verdict}"
        if verdict not in ("same", "refused", "ends well"):
            row["log"] = text[max(text.find("Traceback") - 500, 0) :][:3000] + " ... " + text[-3000:]
        seconds = {"seconds": time.monotonic() - started, "cpu_seconds": _cpu_seconds(os.getpid()) - worked}
        return row | {"verdict": verdict} | {name: round(value, 1) for name, value in seconds.items()}

    def _refused(self, draw: Draw) -> str:
        shutil.rmtree(self._run, ignore_errors=True)  # else it could be refused for the run that is there
        at = self._size()
        code = self._command(self._words(draw.row))
        # Of options that are for another number of ranks a line says that they are left out.
        lines = [line for line in self._text(at).splitlines() if line and " left out " not in line]
        if code != 2 or len(lines) != 1:
            return f"REFUSED with code {code} and {len(lines)} lines"
        is_expected = any(line.partition(" ")[0] in lines[0] for line in draw.refusal)
        return "refused" if is_expected else "REFUSED for another reason"

    def _same(self, draw: Draw, rng: random.Random, row: dict[str, Any]) -> str:
        event, code = draw.event, 0
        exact = draw.row["reduction"] == "" and draw.row["synchrony"].find("form: stale") < 0
        wanted = self._plain(draw.row) if exact else ""
        shutil.rmtree(self._run, ignore_errors=True)
        joiner: subprocess.Popen[bytes] | None = None
        words = self._words(draw.row)
        over = threading.Event()
        if event == "join":
            words = [*words, "--workers", "3:4", "--listen", "127.0.0.1:0", "--token-file", str(self._token)]
        row["moment"] = moment = rng.choice(MOMENTS) if event not in LASTING else ("any", 0)
        striker = threading.Thread(target=self._strike, args=(event, rng, over, row, self._size()))
        if event != "none":
            self._moment.write_text(json.dumps([*moment, LASTING.get(event, 0.1)]))
            striker.start()
        try:
            code = self._command(words)
        finally:
            over.set()
            if event != "none":
                striker.join()
            for path in (self._slow, self._moment, self._reached):
                path.unlink(missing_ok=True)
            joiner = row.pop("joiner", None)
            if joiner is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    joiner.wait(20)
                joiner.kill()
                joiner.wait()
        if event == "stop" and code == 143:
            row["resumed"] = rng.choice([1, 2, 3, 4])
            again = draw.row | ({} if draw.row["model_parallel"] or draw.row["grid"] else {"workers": row["resumed"]})
            code = self._command(self._words(again))
            if code == 2 and "audit" in self._text(0)[-500:]:  # one rank has no other to check it
                code = self._command(words)
        if code:
            return f"CODE {code}"
        found = str(json.loads((self._run / "summary.json").read_text())["weights_sha256"])
        return "ends well" if not wanted else "same" if found == wanted else f"WRONG {found[:8]}, not {wanted[:8]}"

    def _plain(self, row: Row) -> str:
        changes = recipe_changes(row)
        key = json.dumps(changes)
        if key not in self.plain:
            shutil.rmtree(self._run, ignore_errors=True)
            words = ["train", "digits", "--workers", "1", "--max-steps", str(STEPS), "--out", str(self._run)]
            code = self._command([*words, *(word for change in changes for word in ("--set", change))])
            if code:
                return f"plain run: code {code}"
            self.plain[key] = json.loads((self._run / "summary.json").read_text())["weights_sha256"]
        return self.plain[key]

    def _words(self, row: Row) -> list[str]:
        changes = [*recipe_changes(row), *(f"runtime.{key}={value}" for key, value in options_of(row).items())]
        words = ["train", "digits", "--workers", str(row["workers"]), "--max-steps", str(STEPS)]
        return [*words, "--out", str(self._run), *(word for change in changes for word in ("--set", change))]

    def _command(self, words: list[str]) -> int:
        """The exit code of a command, carried out here."""
        done = threading.Event()
        threading.Thread(target=self._end_late, args=(done,), daemon=True).start()
        raise_on_stop()
        try:
            return int(app(words)(words, standalone_mode=False) or 0)
        except SystemExit as exit:
            return int(exit.code or 0)
        except Stopped as stop:
            return 128 + stop.number
        except (UserError, RunError, OSError) as error:
            print(f"torusgd: {error}", file=sys.stderr)
            return 2 if isinstance(error, UserError) else 1
        except Exception as error:
            code = getattr(error, "exit_code", None)  # of typer
            if code is None:
                raise
            return int(code)
        finally:
            done.set()
            sys.stdout.flush()

    def _end_late(self, done: threading.Event) -> None:
        size, last, wanted = -1, time.monotonic(), 0.0
        while (waited := time.monotonic() - last) < BUSY_LIMIT:
            if done.wait(1.0):
                return
            with contextlib.suppress(FileNotFoundError):
                found = self._size() + (self._run / "events.jsonl").stat().st_size
                if found != size:
                    size, last, wanted = found, time.monotonic(), _wanted_seconds(os.getpid())
            if waited > LIMIT and _wanted_seconds(os.getpid()) - wanted < 0.2 * waited:
                break
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGUSR2)
                time.sleep(0.3)
        faulthandler.dump_traceback(self._marks, all_threads=True)
        (self._folder / "hang").write_text(self._stacks.read_text()[-20000:] + self._text(0)[-3000:])
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(70)

    def _strike(self, event: str, rng: random.Random, over: threading.Event, row: dict[str, Any], at: int) -> None:
        while not self._reached.exists():
            if over.wait(0.01):
                return
        over.wait(rng.uniform(0.0, 0.1))
        if event == "join":
            found = re.search(r"torusgd join (\S+)", self._text(at))
            assert found is not None
            words = [sys.executable, "-m", "torusgd", "join", found[1], "--token-file", str(self._token)]
            row["joiner"] = subprocess.Popen([*words, "--workers", "2"], start_new_session=True)
        else:
            self._strike_once(event, rng, row)
        # Until it has had an effect, at most as long as a machine takes that joins.
        until = time.monotonic() + 60.0
        while event in LASTING and time.monotonic() < until and not row["struck"] and not over.wait(0.05):
            row["struck"] = re.search(r"\branks? .*(joins?|leaves?);", self._text(at)) is not None
        self._moment.unlink(missing_ok=True)

    def _strike_once(self, event: str, rng: random.Random, row: dict[str, Any]) -> None:
        server = forkserver.forkserver_process()
        ranks = _children(server)
        victims = {
            "forkserver": [server], "stop": [os.getpid()],
            "tracker": [each for each in _children(os.getpid()) if "resource_tracker" in _command_line(each)],
            "loader": [each for rank in ranks for below in _children(rank) for each in (below, *_children(below))],
        }.get(event, ranks)  # fmt: skip
        if not victims:
            return
        victim, row["struck"] = rng.choice(victims), event not in LASTING
        with contextlib.suppress(ProcessLookupError):
            if event == "resize":
                write_request(
                    self._run / WORKERS, str(rng.choice([n for n in range(1, 5) if n != row["row"]["workers"]]))
                )
            elif event == "slow disk":
                self._slow.touch()
            elif event == "pause":
                for _ in range(4):
                    os.kill(victim, signal.SIGSTOP)
                    time.sleep(0.1)
                    os.kill(victim, signal.SIGCONT)
                    time.sleep(0.02)
            else:
                number = {"freeze": signal.SIGSTOP, "stop": signal.SIGTERM}.get(event, signal.SIGKILL)
                os.kill(victim, number)

    def _size(self) -> int:
        sys.stdout.flush()
        return self._log.stat().st_size

    def _text(self, at: int) -> str:
        with self._log.open("rb") as file:
            file.seek(at)
            return file.read().decode(errors="replace")


def _cpu_seconds(process: int) -> float:
    """Of a process, those below it, and those of them that have ended and were waited for."""
    fields = []
    for each in (process, *_descendants(process)):
        with contextlib.suppress(OSError):
            fields += Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def _wanted_seconds(process: int) -> float:
    """For which threads of a process, and of those below it, have had a core or waited for one."""
    seconds = 0.0
    for each in (process, *_descendants(process)):
        for path in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                seconds += 1e-9 * sum(map(int, path.read_text().split()[:2]))
    return seconds


def _children(process: int | None) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _command_line(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def _descendants(process: int) -> list[int]:
    return [each for child in _children(process) for each in (*_descendants(child), child)]

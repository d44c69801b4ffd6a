"""A run whose folder is in a bucket: it works in a folder of this machine, and what it must keep goes to the bucket.

The bucket decides: another machine that is given the same URL goes on from the newest checkpoint there. A checkpoint's
manifest is written last and deleted first, so a checkpoint with a manifest is whole, and its sums say whether what was
fetched is. A name that the run drew when it began tells what this machine has of the same run from what it has of an
earlier one.

A lock in a bucket: of launchers on several machines one at a time works on a run.

Holders are numbered. The object of the next number is made on the condition that there is none yet, which the store
decides, so of several that try one gets it. A holder writes its own object anew every few seconds. Where that stops for
EXPIRES seconds, by the clock of whoever waits, the holder is gone and the next number is free: two clocks are never
compared. A holder that was only held up finds the higher number before it writes anything else, and ends (leases: Gray
and Cheriton, SOSP 1989; numbers that rise: Kleppmann, "How to do distributed locking", 2016).
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import RunError, UserError
from ..storage import Store, url_of
from ..untrusted import parse_json, read_text
from ..weights import write_text
from .checkpoint import FILES as CHECKPOINT_FILES
from .checkpoint import MANIFEST, list_checkpoints, read_checkpoint
from .run_dir import FILES, RunDir
from .run_view import working_folder
from .status import ASKED, HEAD, STATUS

RENEW = 15.0
"""seconds from one sign of life to the next"""
EXPIRES = 60.0
"""seconds without one after which a holder is gone"""
POLL = 1.0
GIVE_BACK = 30.0
"""seconds that the end of a run waits for a bucket that may not answer any more"""
TOKEN = ".lease"
"""the file in the working folder that names the number held, so that a new start there need not wait for itself"""
_OBJECT = re.compile(r"\.lease-(\d{8})\.json")


@dataclass(frozen=True)
class Holder:
    """What a holder's object says."""

    token: str
    who: str
    """for people"""
    beats: int = 0
    """signs of life so far"""
    released: bool = False


def object_name(number: int) -> str:
    """Of the holder with that number."""
    return f".lease-{number:08d}.json"


def is_lease(name: str) -> bool:
    """Whether an object is one of these locks'.

    >>> is_lease(".lease-00000007.json"), is_lease("recipe.yaml")
    (True, False)
    """
    return _OBJECT.fullmatch(name) is not None


class Lease:
    """The lock of a run in a bucket.

    Args:
        store: The run's.
        folder: Where it works on this machine; whoever calls `acquire` holds that folder's own lock.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder

    def acquire(self, tell: Callable[[str], None]) -> None:
        """Takes the lock, from a holder that is gone if need be.

        Args:
            tell: Gets a line before it waits for a sign of life.

        Raises:
            UserError: Another holder is at work.
            OSError: The bucket can't be used.
        """
        last = self.newest()
        while True:
            number, holder = last
            if holder is not None and not holder.released and holder.token != self._held()[1]:
                tell(f"{self._store.url}: held by {holder.who}; waiting {EXPIRES:g} s for a sign of life")
                self._outlive(number, holder)
            mine = Holder(secrets.token_hex(8), _me())
            # Before the object: a start after a crash in between finds a number that nobody holds.
            (self._folder / TOKEN).write_text(f"{number + 1} {mine.token}")
            created = self._store.create(object_name(number + 1), _data(mine))
            last = self.newest()
            # The number may be free again because holders of it and of a higher one have come since it was looked up.
            if created and last == (number + 1, mine):
                break
        for older in self._numbers()[1:]:
            self._store.delete(object_name(older))

    def check(self) -> None:
        """Asks whether this folder's run still has the lock; RunError where another has taken it, OSError as it comes.

        To be called before anything is written that a later holder may have written.
        """
        number, holder = self.newest()
        if holder is not None and (number, holder.token) != self._held():
            raise RunError(f"{self._store.url}: {holder.who} has taken over, since this machine gave no sign of life")

    @contextmanager
    def renewed(self, tell: Callable[[str], None], beside: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Gives a sign of life every RENEW seconds, and the lock back at the end.

        Args:
            tell: Gets a line where the bucket doesn't take the lock back within GIVE_BACK seconds.
            beside: Called after each; what it raises as an OSError is left aside.
        """
        is_done = threading.Event()
        # A thread that nobody has to wait for, since a store's library may take minutes until it gives up.
        thread = threading.Thread(target=self._renew, args=(is_done, beside), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join(GIVE_BACK)
            if thread.is_alive():
                tell(f"{self._store.url}: no answer for {GIVE_BACK:g} s; the next run there waits {EXPIRES:g} s for it")

    def _renew(self, is_done: threading.Event, beside: Callable[[], object]) -> None:
        number, token = self._held()
        holder = Holder(token, _me())
        while not is_done.wait(RENEW):
            holder = replace(holder, beats=holder.beats + 1)
            with suppress(OSError):  # whoever waits for longer than that takes over, which `check` finds
                try:
                    self.check()
                except RunError:
                    return
                self._store.write(object_name(number), _data(holder))
                beside()
        with suppress(OSError):
            self._store.write(object_name(number), _data(replace(holder, released=True)))

    def newest(self) -> tuple[int, Holder | None]:
        """The highest number and what its object says; 0 and None where nobody has had the lock yet."""
        for number in self._numbers():
            try:
                data = self._store.read(object_name(number))
            except FileNotFoundError:  # deleted by one with a higher number
                continue
            try:
                return number, Holder(**parse_json(data.decode()))
            except (ValueError, TypeError):  # of another version: its sign of life is that the bytes change
                return number, Holder(hashlib.sha256(data).hexdigest(), "a torusgd of another version")
        return 0, None

    def _outlive(self, number: int, holder: Holder) -> None:
        end = time.monotonic() + EXPIRES
        while time.monotonic() < end:
            time.sleep(POLL)
            now, seen = self.newest()
            if seen is not None and (now, seen) != (number, holder):
                if seen.released:
                    return
                raise UserError(f"--out {self._store.url}: in use by {seen.who}; wait for it or choose another place")

    def _numbers(self) -> list[int]:
        found = (_OBJECT.fullmatch(name) for name in self._store.sizes())
        return sorted((int(each[1]) for each in found if each), reverse=True)

    def _held(self) -> tuple[int, str]:
        try:
            number, _, token = read_text(self._folder / TOKEN).partition(" ")
            return int(number), token
        except (OSError, ValueError):
            return 0, ""


def _data(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"


NAME = ".run-name"
"""what the run drew when it began"""
_RECIPE, _SUMMARY = "recipe.yaml", "summary.json"
_SMALL = (_RECIPE, *(name for name in FILES if name not in (STATUS, _SUMMARY)), _SUMMARY)
"""files beside the checkpoints, in the order in which they go there: the summary says that the rest is whole"""


class Mirror:
    """What a run has in a bucket, and the folder in which it works.

    Args:
        url: Of the run, as given by --out.
        warn: Gets a line for a checkpoint in the bucket that is not whole.

    Raises:
        UserError: The package for that kind of bucket is missing.
    """

    def __init__(self, url: str, warn: Callable[[str], None] = lambda line: None) -> None:
        self.url = url
        self.folder = working_folder(url)
        self._store = Store(url)
        self._lease = Lease(self._store, self.folder)
        self._warn = warn
        self._is_seen = False

    @classmethod
    def at(cls, out: Path, warn: Callable[[str], None] = lambda line: None) -> "Mirror | None":
        """That of a run's `--out`; None: it is a folder."""
        url = url_of(out)
        return None if url is None else cls(url, warn)

    @contextmanager
    def held(self, fresh: bool) -> Iterator[None]:
        """Takes the run's lock and makes the working folder one of the run in the bucket; gives the lock back.

        Args:
            fresh: The run there is deleted.

        Raises:
            UserError: The bucket can't be reached, holds what no run left there, or another machine is at work.
            RunError: It holds checkpoints, none of which is good.
        """
        try:
            with RunDir(self.folder).lock():
                self._refuse_strangers(fresh)
                self._lease.acquire(self._warn)
                self._begin(fresh)
        except OSError as error:
            raise UserError(f"--out {self.url}: can't be used: {error}") from error
        with self._lease.renewed(self._warn, self._exchange):
            yield

    def put_checkpoint(self, checkpoint: Path, keep: int) -> None:
        """Copies a checkpoint there, with the files beside it, and leaves the newest `keep`; OSError as it comes."""
        self._lease.check()
        self._put_small(but=_SUMMARY)
        for name in (*CHECKPOINT_FILES, MANIFEST):
            self._store.put(checkpoint / name, f"checkpoints/{checkpoint.name}/{name}")
        for old in [name for name in self._checkpoints() if name <= checkpoint.name][keep:]:
            self._delete(old)

    def put_result(self) -> None:
        """Copies the events there, and the weights and the summary of a finished run.

        Raises:
            RunError: The bucket doesn't take them.
        """
        try:
            self._lease.check()
            self._exchange()
            self._put_small(but="" if (self.folder / _SUMMARY).exists() else _SUMMARY)
        except OSError as error:
            raise RunError(f"{self.url}: can't be written: {error}; the same command tries again") from error

    def _exchange(self) -> None:
        """Now and then, while the run is at work: its status goes there, and what was asked of it comes here."""
        if (self.folder / STATUS).exists():
            if not self._is_seen:  # without them there is no run for others, and the first checkpoint may be far off
                for name in (NAME, _RECIPE):
                    self._store.put(self.folder / name, name)
                self._is_seen = True
            self._store.put(self.folder / STATUS, STATUS)
        for name in ASKED & self._store.sizes().keys():
            write_text(self.folder / name, self._store.read(name).decode(errors="replace"))
            self._store.delete(name)

    def _there(self) -> tuple[dict[str, int], bool]:
        """What is in the bucket beside locks, and whether it is a run."""
        there = {name: size for name, size in self._store.sizes().items() if not is_lease(name)}
        return there, _RECIPE in there and self._store.read(_RECIPE).decode(errors="replace").startswith(HEAD)

    def _refuse_strangers(self, fresh: bool) -> None:
        there, is_run = self._there()
        if there and not is_run and (not fresh or {_RECIPE, *FILES} & there.keys()):
            raise UserError(f"--out {self.url}: holds {min(there)!r} but no run; choose another place")

    def _begin(self, fresh: bool) -> None:
        there, is_run = self._there()
        if fresh and is_run:
            self._clear(list(there))
        if fresh or not is_run or self._name_here() != self._store.read(NAME).decode():
            self._forget()
        if fresh or not is_run:
            write_text(self.folder / NAME, secrets.token_hex(8))
            return
        is_newer = self._fetch_newest()
        for name in (NAME, *_SMALL):
            if name in there and (is_newer or not (self.folder / name).exists()):
                self._store.get(name, self.folder / name)

    def _fetch_newest(self) -> bool:
        """Brings the newest good checkpoint here; False where this machine has it, or a newer one of the same run."""
        here = next((path.name for path in list_checkpoints(self.folder / "checkpoints")), "")
        there = self._checkpoints()
        for name in there:
            if name <= here:
                return False
            partial, final = (self.folder / "checkpoints" / each for each in (f".{name}.partial", name))
            for _ in range(2):  # a bucket may answer once with what was there before
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                try:
                    for file in (MANIFEST, *CHECKPOINT_FILES):
                        self._store.get(f"checkpoints/{name}/{file}", partial / file)
                    read_checkpoint(partial)
                except (UserError, FileNotFoundError) as error:
                    problem = error
                else:
                    partial.rename(final)
                    return True
            shutil.rmtree(partial)
            self._warn(f"{self.url}/checkpoints/{name}: {problem}; an older one is taken")
        if there and not here:
            raise RunError(
                f"{self.url}: none of its {len(there)} checkpoints is good; put a good copy there, or begin anew with "
                "--fresh, which deletes them"
            )
        return False

    def _put_small(self, but: str) -> None:
        for name in (NAME, *_SMALL):
            if name != but and (self.folder / name).exists():
                self._store.put(self.folder / name, name)

    def _checkpoints(self) -> list[str]:
        """The names of the whole ones, newest first."""
        end = f"/{MANIFEST}"
        found = [name.split("/")[1] for name in self._store.sizes() if name.endswith(end) and name.count("/") == 2]
        return sorted((name for name in found if name.startswith("step-")), reverse=True)

    def _delete(self, checkpoint: str) -> None:
        for name in (MANIFEST, *CHECKPOINT_FILES):
            self._store.delete(f"checkpoints/{checkpoint}/{name}")

    def _clear(self, names: list[str]) -> None:
        for checkpoint in self._checkpoints():
            self._delete(checkpoint)
        for name in (_SUMMARY, STATUS, *ASKED, *_SMALL, NAME):
            if name in names:
                self._store.delete(name)

    def _name_here(self) -> str:
        try:
            return read_text(self.folder / NAME)
        except (OSError, ValueError):
            return ""

    def _forget(self) -> None:
        """Empties the working folder, but for the lock that is held."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.name.startswith("."):
                path.unlink()

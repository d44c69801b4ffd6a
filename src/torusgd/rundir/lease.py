"""A lock in a bucket: of launchers on several machines one at a time works on a run.

Holders are numbered, and a holder writes its own object anew every few seconds (leases: Gray and Cheriton, SOSP 1989;
numbers that rise: Kleppmann, "How to do distributed locking", 2016).
"""

import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import RunError, UserError
from ..locks import this_process
from ..storage import Store
from ..untrusted import parse_json, read_text

# Seconds from one sign of life to the next.
RENEW = 15.0
# Seconds without one after which a holder is gone.
EXPIRES = 60.0
POLL = 1.0
# Seconds that the end of a run waits for a bucket that may not answer any more.
GIVE_BACK = 30.0
# The file in the working folder that names the number held, so that a new start there need not wait for itself.
TOKEN = ".lease"
OBJECT = re.compile(r"\.lease-(\d{8})\.json")


@dataclass(frozen=True)
class Holder:
    token: str
    who: str  # for people
    beats: int = 0  # signs of life so far
    released: bool = False


def object_name(number: int) -> str:
    return f".lease-{number:08d}.json"


class Lease:
    """The lock of a run in a bucket; whoever calls `acquire` holds the lock of its folder on this machine."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder

    def acquire(self, tell: Callable[[str], None]) -> None:
        """Takes the lock, from a holder that is gone if need be, for which it waits; UserError if one is at work."""
        last = self.newest()
        while True:
            number, holder = last
            if holder is not None and not holder.released and holder.token != self._held()[1]:
                tell(f"{self._store.url}: held by {holder.who}; waiting {EXPIRES:g} s for a sign of life")
                self._outlive(number, holder)
            mine = Holder(secrets.token_hex(8), this_process())
            # Before the object: a start after a crash in between finds a number that nobody holds.
            (self._folder / TOKEN).write_text(f"{number + 1} {mine.token}")
            # On the condition that there is none yet, which the store decides: of several that try one gets it.
            created = self._store.create(object_name(number + 1), _data(mine))
            last = self.newest(number + 1)
            # The number may be free again because holders of it and of a higher one have come since it was looked up.
            if created and last == (number + 1, mine):
                break
        # The newest stays, which keeps late holders from writing.
        for older in self._numbers()[1:]:
            self._store.delete(object_name(older))

    def check(self) -> None:
        """RunError if another holder has taken the lock over, OSError as it comes."""
        # Called before anything is written that a later holder may have written: one that was only held up finds the
        # higher number, and ends.
        held = self._held()
        number, holder = self.newest(held[0] + 1)
        if holder is not None and (number, holder.token) != held:
            raise RunError(f"{self._store.url}: {holder.who} has taken over, since this machine gave no sign of life")

    @contextmanager
    def renewed(self, tell: Callable[[str], None], beside: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Gives a sign of life, and calls `beside`, every RENEW seconds; gives the lock back at the end."""
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
        holder = Holder(token, this_process())
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

    def newest(self, unlisted: int = 0) -> tuple[int, Holder | None]:
        """The highest number and what its object says; 0 and None if nobody has had the lock yet.

        `unlisted` may be there though it is not listed: some stores list an object some time after it was written.
        """
        for number in sorted({*self._numbers(), unlisted} - {0}, reverse=True):
            try:
                data = self._store.read(object_name(number))
            except FileNotFoundError:  # deleted by one with a higher number
                continue
            try:
                return number, Holder(**parse_json(data.decode()))
            except (ValueError, TypeError):  # of another version: its sign of life is that the bytes change
                return number, Holder(hashlib.sha256(data).hexdigest(), "a torusgd of another version")
        return 0, None

    def next_sign(self, number: int, holder: Holder, seconds: float) -> Holder | None:
        """Who is seen to hold it next, mostly the same one; None: nothing changes for so many seconds."""
        # By the clock of whoever waits, and by whether the bytes change: two clocks are never compared.
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(POLL)
            now, seen = self.newest(number)
            if seen is not None and (now, seen) != (number, holder):
                return seen
        return None

    def _outlive(self, number: int, holder: Holder) -> None:
        seen = self.next_sign(number, holder, EXPIRES)
        if seen is not None and not seen.released:
            raise UserError(f"--out {self._store.url}: in use by {seen.who}; wait for it or choose another place")

    def _numbers(self) -> list[int]:
        found = (OBJECT.fullmatch(name) for name in self._store.sizes())
        return sorted((int(each[1]) for each in found if each), reverse=True)

    def _held(self) -> tuple[int, str]:
        with suppress(OSError, ValueError):
            number, _, token = read_text(self._folder / TOKEN).partition(" ")
            return int(number), token
        return 0, ""


def _data(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()

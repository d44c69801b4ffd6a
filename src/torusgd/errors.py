"""The errors that a user can cause, each one line that says what is wrong, where, and how to mend it."""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")

_MOST_LISTED = 30


def printable(text: str) -> str:
    """A stranger's text for people: line ends, and whatever else steers a terminal, become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(ValueError):
    """The user's input is wrong; the command line prints the message alone and exits with code 2."""

    def __init__(self, line: str) -> None:
        # One line whatever the input was. Error numbers of an `OSError` mean nothing to a user.
        super().__init__(printable(re.sub(r"\[Errno \d+\] ", "", line)))


class RunError(RuntimeError):
    """A run can't go on though its input was right; the message alone is printed and the exit code is 1."""


class DiskError(RunError):
    """A disk, or the network that leads to it, failed in a way that may pass: worth a restart of the ranks."""


class DivergedError(RunError):
    """The numbers of a step are not finite, or out of range: from this state it can't be taken by anyone."""

    def __str__(self) -> str:
        return f"{super().__str__()}; the run has diverged: lower rate.lr or lengthen rate.warmup.length"


class CorruptionError(RunError):
    """A machine computes wrongly, so that the state of its ranks can't be trusted: none of it is saved."""


# By what libraries say at a limit of memory and at one of threads, our line.
_LIMITS = {
    "shared object": "a library can't be loaded: {}; if memory is limited (ulimit -v), raise the limit, else reinstall",
    "Storage size calculation overflowed": "a tensor can't be so large: {}; use a smaller network or smaller batches",
    "can't start new thread": "{}; raise this user's limit (ulimit -u), or the service's or container's of tasks",
}

_AGAIN = (75, 129, 143)  # after SIGUSR1 or a time limit, SIGHUP and SIGTERM; 130 is meant as an end
_TRANSIENT = {
    getattr(errno, name, 0)
    for name in ("EIO", "ESTALE", "EMFILE", "ENFILE", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN",
                 "ENETUNREACH", "ECONNRESET", "ECONNREFUSED", "ENOTCONN", "ENXIO", "EAGAIN", "EBUSY")
}  # fmt: skip


def is_transient(error: OSError) -> bool:
    """Whether the same call may well succeed later: errors of a device or of the network, not a missing file."""
    return error.errno in _TRANSIENT


def output_failure(error: OSError) -> str | None:
    """A line on standard output that can't be written, if that is what the error is of; else None."""
    # The error doesn't say which file it is of. A line end more does no harm; a write of nothing would always do.
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        try:
            os.write(1, b"\n")
        except OSError as again:
            return f"standard output can't be written: {again.strerror}"
    return None


def limit_failure(error: BaseException) -> str | None:
    """A line on a limit of memory or threads, if that is what the error is of; else None."""
    found = (line for text, line in _LIMITS.items() if text in str(error))
    return next(found, "").format(error) or None if isinstance(error, ImportError | RuntimeError) else None


def retry(call: Callable[[], T], pauses: Iterable[float], is_worth: Callable[[Exception], bool]) -> T:
    """The result of a call, repeated after each pause (seconds) as long as it fails with an error that is worth it."""
    for pause in pauses:
        try:
            return call()
        except Exception as error:
            if not is_worth(error):
                raise
            time.sleep(pause)
    return call()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name if that is empty."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def in_one_line(error: BaseException) -> str:
    """An exception's whole text in one line, or its type's name if that is empty.

    >>> in_one_line(ValueError("no\\n  number")), in_one_line(KeyError())
    ('no number', 'KeyError')
    """
    return " ".join(str(error).split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Why a call has failed, without the error number and the path, which the caller's line has."""
    name = getattr(error, "filename", None) or ""
    if isinstance(error, FileExistsError) and os.path.islink(name) and not os.path.exists(name):
        return f"{name} is a link to {os.readlink(name)}, which is not there"
    return getattr(error, "strerror", None) or in_one_line(error)


@contextmanager
def _as_error(
    ours: type[UserError] | type[RunError],
    what: str, remedy: str = "", of: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> Iterator[None]:  # fmt: skip
    """A block in which errors `of` these kinds become one of ours: what is wrong, the reason, the remedy if any."""
    try:
        yield
    except UserError:  # a ValueError of our own
        raise
    except of as error:
        raise ours(f"{what}: {reason_of(error)}" + (f"; {remedy}" if remedy else "")) from error


as_user_error, as_run_error = partial(_as_error, UserError), partial(_as_error, RunError)


@contextmanager
def needs(what: str, packages: str) -> Iterator[None]:
    """A block that imports optional packages; UserError if one is missing: what needs them, and how they are had."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{what} ({error}); pip install {packages}") from error


def end(code: int, line: str) -> NoReturn:
    """Ends this process with a line for people, and one for schedulers (`write_exit`)."""
    print(f"torusgd: {line}", file=sys.stderr)
    write_exit(code, line)
    sys.exit(code)


def write_exit(code: int, reason: str) -> None:
    """Appends the exit code and its reason as one JSON line to the file that TORUSGD_EXIT_FILE names, for schedulers.

    `again` is true if the same command continues from a checkpoint: a signal or the time limit stopped the run.
    """
    if file := os.environ.get("TORUSGD_EXIT_FILE"):
        line = json.dumps({"code": code, "reason": reason, "again": code in _AGAIN})
        with suppress(OSError), open(file, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known word nearest to it, or all known words.

    >>> suggest("digit", ["digits", "folder"]), suggest("x", ["digits", "folder"])
    ('; did you mean digits?', '; there are digits, folder')
    """
    words = list(known)
    near = get_close_matches(word, words, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    more = f" and {len(words) - _MOST_LISTED} more" if len(words) > _MOST_LISTED else ""
    return f"; there are {', '.join(words[:_MOST_LISTED]) or 'none'}{more}"


def warn(text: str) -> None:
    print(f"torusgd: {text}", file=sys.stderr, flush=True)

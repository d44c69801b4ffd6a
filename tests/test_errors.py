"""Errors are one line, and a call that fails for a moment is made again."""

import errno

from torusgd.errors import UserError, is_transient, retry


def test_a_users_mistake_is_one_line() -> None:
    assert str(UserError("seed: can't be '1\n2\x1b'")) == r"seed: can't be '1\n2\x1b'"


def test_what_may_pass_is_tried_again() -> None:
    errors = [OSError(errno.EIO, "Input/output error"), OSError(errno.EBUSY, "Device or resource busy")]

    def read() -> str:
        if errors:
            raise errors.pop()
        return "read"

    assert all(map(is_transient, errors))
    assert not is_transient(OSError(errno.ENOENT, "No such file"))
    assert retry(read, [0.0, 0.0], lambda error: isinstance(error, OSError)) == "read"

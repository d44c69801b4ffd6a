"""The errors that a user can cause, each one line that says what is wrong, where, and how to mend it."""


class UserError(ValueError):
    """The user's input is wrong; the command line prints the message alone and exits with code 2."""


class RunError(RuntimeError):
    """A run can't go on though its input was right; the message alone is printed and the exit code is 1."""

"""Commands that tests run to their end."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(*arguments: object) -> list[str]:
    """The command line of `torusgd` in this interpreter."""
    return [sys.executable, "-m", "torusgd", *map(str, arguments)]


def ran(
    words: Sequence[object],
    *,
    code: int | None = 0,
    cwd: Path | None = None,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command that has ended with an exit code (None: with any); else what it printed is the test's failure."""
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done

"""Commands that tests run to their end."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def command(*arguments: object) -> list[str]:
    """The command line of `torusgd` in this interpreter."""
    return [sys.executable, "-m", "torusgd", *map(str, arguments)]


def ran(words: Sequence[object], *, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended with an exit code (None: with any); else what it printed is the test's failure."""
    options = {"timeout": 240, **options}
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def put_command(file: Path, script: str) -> None:
    """A command of one's own, for PATH."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)

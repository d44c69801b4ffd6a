"""What a process is prepared with before it computes."""

import os
import subprocess
import sys

PAGES = """
import resource
import numpy
from torusgd.runtime import keep_freed_memory
keep_freed_memory()
taken = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
numpy.empty(64 << 20, numpy.uint8).fill(1)
before = taken()
for _ in range(4):
    numpy.empty(64 << 20, numpy.uint8).fill(1)
print(taken() - before)
"""


def pages_taken_again(**environment: str) -> int:
    """Pages that the system hands out anew when 64 MiB are freed and taken four times."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PAGES], env=clean | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def test_freed_memory_is_kept_for_the_next_step():
    assert pages_taken_again() < 1000


def test_an_environment_that_tunes_the_allocator_is_left_alone():
    assert pages_taken_again(MALLOC_TOP_PAD_="131072") > 4 * (64 << 20) // (2 << 20)

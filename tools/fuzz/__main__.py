"""Throws damaged and malicious inputs at everything in torusgd that reads, and prints a table of how each ended.

    python -m tools.fuzz [--seed 0] [--share 1.0] [KIND ...]

Each input must work or be refused: a UserError of one line, or exit code 2 with one line on the error stream; no other
exception, at most 10 s, and at most 1 GB of memory beyond what the process held. The same seed makes the same inputs.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from .inputs import Fuzz


def main() -> int:
    """Prints the table and each problem; exit code 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of each kind's inputs")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    problems: list[str] = []
    print("| kind | inputs | refused | worked | problems | worst seconds | worst memory |\n| --- |" + " --- |" * 6)
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(arguments.seed, Path(folder))
        for kind in arguments.kinds or fuzz.kinds:
            tally = fuzz.run(kind, arguments.share)
            print(tally.line(), flush=True)
            problems += tally.problems
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

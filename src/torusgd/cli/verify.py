"""`torusgd verify`: somebody's run, some steps of it computed anew and compared bit for bit."""

import re
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from ..errors import RunError, UserError, printable
from ..hub import pinned
from ..ranks.forkserver import start_forkserver
from ..storage import place
from ..text import percent, plural
from .options import DATA, DataPath, InitialWeights, JsonFile, RuntimeFlags, flag
from .output import console, write_json

if TYPE_CHECKING:
    from ..launch.verification import Checked, Range
    from ..run.claims import Claims

WHAT = "What to compute"


def verify(
    run: Annotated[Path, Argument(metavar="RUN", help="A run's folder or URL, finished or not.")],
    runtime: RuntimeFlags,
    data: DataPath = None,
    init: InitialWeights = None,
    steps: str | None = flag("Compute these steps, and those up to the next record.", WHAT, "A:B"),
    sample: int | None = flag("Compute so many ranges between two records, drawn by --seed. Default: 1.", WHAT, min=1),
    seed: str | None = flag("Draw by this text. Default: the hash of the last record.", WHAT, "TEXT"),
    final: bool = flag("Compute the last evaluation and the polish.", WHAT, default=False),
    whole: bool = flag("Compute all steps and the result.", WHAT, name="--all", default=False),
    overrides: list[str] | None = flag(
        "Run the code that the recipe names here, such as model.name=mine:net.", DATA, "KEY=VALUE", name="--set"
    ),
    json_file: JsonFile = None,
) -> None:
    """Compute steps of a run anew and compare them bit for bit with its records; nothing is written into RUN.

    Exit code 0: all that was asked for is equal. 1: something differs. 2: something could not be compared.
    """
    start_forkserver()
    from ..launch.verification import DIFFERS, Checked
    from ..run.claims import read_claims
    from ..runtime import ranks_are_given

    if ranks_are_given():
        raise UserError("verify: starts its own ranks; give it without torchrun")
    asked = sum((steps is not None, sample is not None, final, whole))
    if asked > 1 or (seed is not None and (steps or final or whole)):
        raise UserError("verify: give one of --steps, --sample, --final and --all, and --seed with --sample alone")
    try:
        claims = read_claims(run, overrides or [])
        contradictions = (line.partition(": ") for line in claims.contradictions())
        found, computed = [Checked(name, DIFFERS, text) for name, _, text in contradictions], 0
        if not found:
            ranges = _wanted(claims, steps, sample, seed, final, whole)
            found, computed = _check(claims, ranges, runtime, data, init)
    except (RunError, OSError) as error:  # which say nothing of the run that is checked
        scratch = tempfile.gettempdir()
        remedy = f"; TMPDIR names another folder than {scratch} to compute in" if scratch in str(error) else ""
        raise UserError(f"{place(run)}: could not be checked: {error}{remedy}") from error
    raise typer.Exit(_show(claims, found, computed, json_file))


def _wanted(
    claims: "Claims", steps: str | None, sample: int | None, seed: str | None, final: bool, whole: bool
) -> "list[Range]":
    """The ranges that the flags name; UserError if there are none."""
    from ..launch.verification import Range, drawn

    ranges = [Range(*pair) for pair in pairwise(sorted(claims.states))]
    last = ranges[-1].last if ranges else 0
    result = [Range(last, claims.result.step, is_result=True)] if claims.result is not None else []
    if final and not result:
        raise UserError(f"{claims.name}: is not finished, so there is no result to compute; give --steps or --sample")
    if final:
        return result
    if not ranges:
        raise UserError(f"{claims.name}: its records hold one state only; there are no steps between two to compute")
    if whole:  # from the beginning, which a record need not show
        return [Range(0, ranges[0].first)] * (ranges[0].first > 0) + ranges + result
    if steps is None:
        return drawn(ranges, sample or 1, seed if seed is not None else claims.head)
    words = steps.split(":")
    if not re.fullmatch("[0-9]{1,18}:[0-9]{1,18}", steps) or int(words[0]) >= int(words[1]):
        raise UserError(f"--steps {steps}: write it as A:B, such as 100:200")
    first, stop = int(words[0]), int(words[1])
    if first < ranges[0].first or stop > last:
        raise UserError(f"--steps {steps}: the records are of the steps {ranges[0].first}:{last}")
    return [each for each in ranges if each.last > first and each.first < stop]


def _check(
    claims: "Claims", ranges: "list[Range]", runtime: RuntimeFlags, data: Path | None, init: str | None
) -> "tuple[list[Checked], int]":
    """What is found of a run, and how many steps were computed."""
    from rich.progress import Progress

    from ..launch.verification import Verifier
    from ..recipe.section import Duration
    from ..run.job import Job
    from ..rundir.run_dir import RunDir
    from ..runtime import resolve_device

    # In a folder of its own a run writes no checkpoint.
    never = {"checkpoint_every": Duration(1e14, "sa"), "checkpoint_minutes": 1e9, "keep_checkpoints": 1 << 30}
    options = runtime.over().model_copy(update=never)
    data = pinned(data, RunDir(claims.folder).data_revision())
    terminal = console()
    with tempfile.TemporaryDirectory(prefix="torusgd-verify-") as folder:
        scratch = Path(folder)
        job = Job(claims.recipe, options, resolve_device(options), scratch, data, init)
        with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
            task = bar.add_task("steps")
            verifier = Verifier(claims, job, scratch, lambda done, total: bar.update(task, completed=done, total=total))
            found = verifier.differing_inputs()
            return (found, 0) if found else (verifier.check(ranges), verifier.computed)


def _show(claims: "Claims", found: "list[Checked]", computed: int, json_file: Path | None) -> int:
    """Prints what was found; the exit code."""
    from ..launch.verification import DIFFERS, UNKNOWN, verdict

    terminal, steps = console(), max(claims.states, default=0)
    head = f"{plural(steps, 'step')}, {plural(len(claims.states), 'record')}, the last line's hash is {claims.head}"
    terminal.print(printable(f"{claims.name}: {claims.recipe.name}, {head}"))
    width = max((len(each.name) for each in found), default=0)
    for each in sorted(found, key=lambda each: (each.first, each.last)):
        line = f"{each.name:{width}}  {each.state}{': ' * bool(each.text)}{each.text}"
        # Names of tensors and conditions are the owner's, who may have put a terminal's commands into them.
        terminal.print(printable(line))
    covered = sum(each.last - each.first for each in found if each.state not in (DIFFERS, UNKNOWN))
    equal = f"equal: {covered} of {plural(steps, 'step')} ({percent(covered / max(steps, 1))}), {computed} computed"
    code = verdict(found)
    terminal.print((equal, "something differs", "not all that was asked for could be compared")[code])
    about = {"run": claims.name, "records_sha256": claims.head, "steps": steps, "equal_steps": covered}
    write_json(json_file, {**about, "code": code, "found": [asdict(each) for each in found]})
    return code

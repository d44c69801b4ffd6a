"""`torusgd plan`: predicts a run on a described cluster, or every row of a table of published results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

from ..errors import UserError, needs
from .options import OUTPUT, DataPath, JsonFile, Overrides, PlannedMachine, RuntimeFlags, flag
from .output import check_writable, write_json

WANTED = "What to find"
_MOST_PRICE = 1e12  # the cost of any plan is finite


@dataclass(frozen=True)
class Wanted:
    """What a plan is to find beside the run itself, and the files to write."""

    sweep: bool = flag("Also plan for 1 to N devices, and find the knee of the curve.", WANTED, default=False)
    design: bool = flag(
        "Also show layer by layer what limits, the best groups and least images a node, and what would pay most.",
        WANTED, default=False,
    )  # fmt: skip
    best: bool = flag("Also look for better settings.", WANTED, default=False)
    to: str | None = flag(
        "Find time, cost and best batch to this accuracy, such as 75.9%; with --sweep by devices.", WANTED, "TOP1"
    )
    synchrony: str | None = flag(
        "Also plan steps that leave out late work, or exchange every H steps; needs --delays.", WANTED,
        "cutoff|backup:B|local:H",
    )  # fmt: skip
    delays: str | None = flag(
        "Delay ranks by this model, such as lognormal or exponential@0.05, or as in a run's folder; with --best "
        "try every form.", WANTED, "MODEL|RUN",
    )  # fmt: skip
    cost: float | None = flag("Add the cost at this price of a device and hour.", WANTED, "PRICE")
    published: Path | None = flag("Predict every row of a table of published results.", WANTED)
    plot: Path | None = flag("Draw the sweep as .svg or .png.", OUTPUT)
    report: Path | None = flag("Write the plan as a page of HTML, with the sweep of --sweep.", OUTPUT)

    def check(self) -> None:
        """UserError if flags don't go together, or a file can't be written."""
        if self.cost is not None and not 0 <= self.cost <= _MOST_PRICE:
            most = f"a number from 0 to {_MOST_PRICE:g}"
            raise UserError(f"--cost {self.cost}: needs the price of a device and hour, {most}")
        is_alone = self.delays is not None and self.synchrony is None and not self.best
        if is_alone or (self.synchrony is not None and self.delays is None):
            raise UserError("plan: --synchrony and --delays go together, such as --synchrony cutoff --delays lognormal")
        if self.plot is not None:
            if self.plot.suffix not in (".svg", ".png"):
                raise UserError(f"--plot {self.plot}: write a picture as .svg or .png")
            with needs("--plot: needs matplotlib", "matplotlib (the extra plot)"):
                import matplotlib.figure  # noqa: F401 - only whether it is there
            check_writable("--plot", self.plot)
        check_writable("--report", self.report)
        at_its_batch = {"--best": self.best, "--design": self.design, "--delays": self.delays is not None}
        for name, is_given in at_its_batch.items():
            if self.to is not None and is_given:
                raise UserError(f"{name}: is at the recipe's batch, --to looks for a batch; give one of them")

    @property
    def has_sweep(self) -> bool:
        return self.sweep or self.design or self.report is not None or self.plot is not None


def plan(
    machine: PlannedMachine,
    runtime: RuntimeFlags,
    recipe: Annotated[str | None, Argument(metavar="RECIPE", help="A built-in name, or a YAML file.")] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    *,
    wanted: Wanted,
    json_file: JsonFile = None,
) -> None:
    """Predict a run on a cluster: its time, where it goes, what to change."""
    from .planning import Planned, show_planned, show_published

    if wanted.published is not None:
        write_json(json_file, show_published(wanted.published))
        return
    if recipe is None:
        raise UserError("plan: needs RECIPE, --cluster and --devices (or --published FILE alone)")
    wanted.check()
    write_json(json_file, show_planned(Planned.read(recipe, overrides or [], data, machine, runtime), wanted))

"""The named algorithms: each gives every rank its routes for a tensor of a given length."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UserError
from .routes import METHODS, Axis, Round, all_reduce, cut, hierarchical

FLAT = {"ring": "ring", "halving-doubling": "halving", "doubling": "doubling", "direct": "direct"}
GRIDS = ("torus", "hierarchical")
SCHEDULED = (*FLAT, *GRIDS)


@dataclass(frozen=True)
class Plan:
    """How to sum one tensor: an algorithm, its grid, the method of each axis, and in how many chunks.

    `grid` is (Y, X), vertical times horizontal; neighbours in rank order are neighbours on the horizontal axis. Flat
    algorithms have the grid (1, ranks). With `chunks` above 1 the chunks follow each other a round apart, so that the
    axes work at the same time and additions overlap transfers.
    """

    algorithm: str
    grid: tuple[int, int]
    horizontal: str
    vertical: str
    chunks: int = 1

    def routes(self, rank: int, length: int) -> list[list[Round]]:
        """The rounds of `rank` for each chunk of a tensor of `length` elements."""
        edges = cut(0, length, self.chunks)
        horizontal, vertical = self.axes(rank)
        if self.algorithm == "hierarchical":
            return [hierarchical(horizontal, vertical, *span) for span in pairwise(edges)]
        return [all_reduce([horizontal, vertical], *span) for span in pairwise(edges)]

    def axes(self, rank: int) -> tuple[Axis, Axis]:
        """The row and the column of `rank`."""
        rows, columns = self.grid
        y, x = divmod(rank, columns)
        row = tuple(range(y * columns, (y + 1) * columns))
        column = tuple(range(x, rows * columns, columns))
        return Axis(row, x, self.horizontal), Axis(column, y, self.vertical)

    def __str__(self) -> str:
        text = self.algorithm
        if self.algorithm in GRIDS:
            text += f" {self.grid[0]}x{self.grid[1]} ({self.vertical} x {self.horizontal})"
        return text + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


def plan(
    algorithm: str,
    ranks: int,
    grid: tuple[int, int] | None = None,
    methods: Sequence[str] = ("ring", "ring"),
    chunks: int = 1,
) -> Plan:
    """The plan of a named algorithm on `ranks` ranks.

    `grid` and `methods` (vertical, horizontal) are the torus' and the hierarchical algorithm's; without a grid the
    squarest one, rows at least as long as columns. UserError where name, grid and number of ranks don't fit together.

    >>> str(plan("torus", 12, methods=("halving", "ring")))
    'torus 3x4 (halving x ring)'
    """
    if algorithm in FLAT:
        if grid is not None and grid[0] * grid[1] != ranks:
            raise UserError(f"grid {grid[0]}x{grid[1]}: has {grid[0] * grid[1]} places for {ranks} ranks")
        return Plan(algorithm, (1, ranks), FLAT[algorithm], FLAT[algorithm], chunks)
    if algorithm not in GRIDS:
        raise UserError(f"allreduce {algorithm}: unknown; one of auto, native, {', '.join(SCHEDULED)}")
    rows, columns = grid or squarest(ranks)
    if rows * columns != ranks:
        raise UserError(f"grid {rows}x{columns}: has {rows * columns} places for {ranks} ranks; give Y x X = {ranks}")
    vertical, horizontal = methods
    assert {vertical, horizontal} <= set(METHODS), methods
    assert algorithm != "hierarchical" or horizontal != "doubling", "a leader's row needs a reduce-scatter"
    return Plan(algorithm, (rows, columns), horizontal, vertical, chunks)


def squarest(ranks: int) -> tuple[int, int]:
    """The grid Y x X = ranks, Y <= X, nearest to a square; 1 x ranks for a prime."""
    rows = next(y for y in range(int(ranks**0.5), 0, -1) if ranks % y == 0)
    return rows, ranks // rows


def parse_grid(text: str) -> tuple[int, int]:
    """Reads `4x8` as (4, 8), vertical times horizontal."""
    try:
        rows, columns = (int(part) for part in text.lower().split("x"))
    except ValueError:
        rows, columns = 0, 0
    if rows < 1 or columns < 1:
        raise UserError(f"grid {text}: write vertical x horizontal, such as 4x8")
    return rows, columns

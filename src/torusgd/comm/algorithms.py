"""The named algorithms: each gives every rank its rounds for a tensor of a given length."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UserError
from .rounds import METHODS, Axis, Round, all_reduce, cut, hierarchical, reduce_scatter

TREES = {"binomial-tree": "binomial", "double-tree": "double-tree", "chain": "chain"}
"""flat algorithms by way of one rank or two, for comparison: halving-doubling has at most the latency of a tree and
fewer bytes; a double tree and a chain need many chunks to come near a ring"""
FLAT = {"ring": "ring", "halving-doubling": "halving", "doubling": "doubling", "direct": "direct", **TREES}
"""algorithms along one axis of all ranks, and the method that each uses there"""
GRIDS = ("torus", "hierarchical")
"""algorithms on a grid, whose axes have methods of their own"""
SCHEDULED = (*FLAT, *GRIDS)
NAMES = ("auto", "native", *SCHEDULED)
"""names that `create` takes; `auto` measures and picks, `native` is the backend's own"""
OTHER_PROGRAMS = ("tree", "nccl", "in-network")
"""algorithms that only a plan knows: NCCL's double binary tree, the faster of it and a ring, switches that add"""


@dataclass(frozen=True)
class Algorithm:
    """A way to sum one tensor: the algorithm's name, its grid, the method of each axis, and the number of chunks.

    `grid` is (Y, X), vertical times horizontal; neighbours in rank order are neighbours on the horizontal axis. Flat
    algorithms have the grid (1, ranks). With `chunks` above 1 the chunks follow each other a round apart, so that the
    axes work at the same time and additions overlap transfers.
    """

    algorithm: str
    grid: tuple[int, int]
    vertical: str
    horizontal: str
    chunks: int = 1

    @property
    def name(self) -> str:
        """The algorithm as `parse_algorithm` reads it, with the methods of its axes unless they are rings."""
        if self.algorithm in FLAT or self.vertical == self.horizontal == "ring":
            return self.algorithm
        both = self.vertical == self.horizontal
        return f"{self.algorithm}:{self.vertical}" + ("" if both else f"/{self.horizontal}")

    def rounds(self, rank: int, length: int) -> list[list[Round]]:
        """The rounds of `rank` for each chunk of a tensor of `length` elements."""
        edges = cut(0, length, self.chunks)
        # Rows first: neighbours in rank order share a host, so that the fast links carry most of the bytes.
        horizontal, vertical = self.axes(rank)
        if self.algorithm == "hierarchical":
            return [hierarchical(horizontal, vertical, *span) for span in pairwise(edges)]
        return [all_reduce([horizontal, vertical], *span) for span in pairwise(edges)]

    def scatter(
        self, rank: int, length: int, stops: Sequence[int] | None = None
    ) -> tuple[list[Round], tuple[int, int]]:
        """The reduce-scatter of `rank` and the span of the sum that it leaves there; `hierarchical` as a torus."""
        return reduce_scatter(self.axes(rank), 0, length, stops)

    def axes(self, rank: int) -> tuple[Axis, Axis]:
        rows, columns = self.grid
        y, x = divmod(rank, columns)
        row = tuple(range(y * columns, (y + 1) * columns))
        column = tuple(range(x, rows * columns, columns))
        return Axis(row, x, self.horizontal), Axis(column, y, self.vertical)

    def __str__(self) -> str:
        grid = f" {self.grid[0]}x{self.grid[1]}" if self.algorithm in GRIDS else ""
        return self.name + grid + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


def parse_algorithm(name: str, ranks: int, grid: tuple[int, int] | None = None, chunks: int = 1) -> Algorithm:
    """The algorithm of that name on `ranks` ranks.

    `torus` and `hierarchical` take a grid, by default the squarest with rows at least as long as columns, and after a
    colon the methods of the vertical and the horizontal axis, or one for both, rings by default. UserError if name,
    grid and number of ranks don't fit together.

    >>> str(parse_algorithm("torus:halving/ring", 12))
    'torus:halving/ring 3x4'
    """
    algorithm, _, methods = name.partition(":")
    if algorithm not in SCHEDULED or (methods and algorithm in FLAT):
        raise UserError(f"allreduce {name}: unknown; one of {', '.join(NAMES)}")
    if grid is not None and grid[0] * grid[1] != ranks:
        raise UserError(f"grid {grid[0]}x{grid[1]}: holds {grid[0] * grid[1]} ranks; give Y x X = {ranks}")
    if algorithm in FLAT:
        return Algorithm(algorithm, (1, ranks), FLAT[algorithm], FLAT[algorithm], chunks)
    vertical, slash, horizontal = (methods or "ring").partition("/")
    horizontal = horizontal if slash else vertical
    # A leader's row must be a reduce-scatter: doubling leaves the whole sum everywhere.
    rows = METHODS if algorithm == "torus" else tuple(method for method in METHODS if method != "doubling")
    if vertical not in METHODS or horizontal not in rows:
        raise UserError(
            f"allreduce {name}: write {algorithm}:VERTICAL/HORIZONTAL or one for both, of {', '.join(rows)}"
        )
    return Algorithm(algorithm, grid or squarest(ranks), vertical, horizontal, chunks)


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


def usual_chunks(size: int) -> int:
    """The number of chunks for `size` bytes without a measurement: of 2 MiB each, four at most."""
    return max(1, min(4, size >> 21))

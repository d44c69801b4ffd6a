"""The all-reduce algorithms as plain data: what each rank sends, receives and adds, round by round.

In a round a rank sends runs of elements of its tensor as they were before the round, and receives runs that it adds to
its own or puts in their place. Every algorithm is made of reduce-scatters over axes of ranks and of their mirror
images: a reduce-scatter read backwards, with senders and receivers swapped, is an all-gather. Sums have the same bits
on every rank: an element is summed on one rank and copied, or summed by pairs (a + b = b + a).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ..errors import UserError


class Message(NamedTuple):
    """Elements [low, high) of the tensor, to or from rank `peer`."""

    peer: int
    low: int
    high: int


class Round(NamedTuple):
    """One round of one rank: send, then receive and add, or receive in place."""

    sends: tuple[Message, ...] = ()
    adds: tuple[Message, ...] = ()
    copies: tuple[Message, ...] = ()


class Axis(NamedTuple):
    """Ranks that work together, this rank's position among them, and the method they use."""

    members: tuple[int, ...]
    position: int
    method: str


def cut(low: int, high: int, count: int, stops: Sequence[int] | None = None) -> list[int]:
    """The `count` + 1 edges of [low, high) in `count` runs as equal as whole elements allow.

    With `stops`, in ascending order, inner edges lie only there or at the ends: each at the nearest, of two the lower.

    >>> cut(0, 100, 3), cut(0, 100, 3, stops=[30, 70])
    ([0, 33, 66, 100], [0, 30, 70, 100])
    """
    edges = [low + (high - low) * number // count for number in range(count + 1)]
    return edges if stops is None else [_nearest(edge, low, high, stops) for edge in edges]


def _nearest(edge: int, low: int, high: int, stops: Sequence[int]) -> int:
    above = bisect_left(stops, edge)
    upper = min(stops[above], high) if above < len(stops) else high
    lower = max(stops[above - 1], low) if above else low
    return lower if edge - lower <= upper - edge else upper


def _messages(axis: Axis, position: int, edges: Sequence[int], first: int, count: int) -> tuple[Message, ...]:
    # To or from the member at `position`: blocks first, first + 1, ... (modulo), as one run of elements or two.
    size = len(axis.members)
    peer, first = axis.members[position % size], first % size
    runs = [(first, min(first + count, size)), (0, first + count - size)]
    spans = [(edges[begin], edges[end]) for begin, end in runs if end > begin]
    return tuple(Message(peer, low, high) for low, high in spans if high > low)


def _ring(axis: Axis, edges: Sequence[int]) -> list[Round]:
    # P - 1 rounds around the ring, a block each (Patarasuk and Yuan 2009).
    # A block travels once around: block b starts at rank b + 1, each rank on its way adds its own values, and it ends,
    # summed, at rank b. So in round `hop` a rank sends the block `hop` positions before its own, and receives the one
    # before that.
    size, me = len(axis.members), axis.position
    # The block of the first hop is the one before our own, so that the own block, summed, is the last to arrive.
    return [
        Round(_messages(axis, me + 1, edges, me - hop, 1), adds=_messages(axis, me - 1, edges, me - 1 - hop, 1))
        for hop in range(1, size)
    ]


def _halving(axis: Axis, edges: Sequence[int]) -> list[Round]:
    # ceil(log2 P) rounds for any P (Traeff, arXiv 2410.14234).
    # A rank is still in charge of `left` blocks, counted from its own onwards around the ring; at first of all P. In
    # each round it keeps the first `keep` of them, half rounded up, and hands the others to the rank `keep` positions
    # on, whose own block is the first of those. At the same time the rank `keep` positions before hands it just as
    # many, to be added to the first blocks that it keeps. In the end one block is left, its own.
    size, me, rounds = len(axis.members), axis.position, []
    left = size
    while left > 1:
        keep = (left + 1) // 2
        sends = _messages(axis, me + keep, edges, me + keep, left - keep)
        rounds.append(Round(sends, adds=_messages(axis, me - keep, edges, me, left - keep)))
        left = keep
    return rounds


def _direct(axis: Axis, edges: Sequence[int]) -> list[Round]:
    # One round: to each member its block. For few ranks far apart.
    size, me = len(axis.members), axis.position
    sends = [m for hop in range(1, size) for m in _messages(axis, me + hop, edges, me + hop, 1)]
    adds = [m for hop in range(1, size) for m in _messages(axis, me - hop, edges, me, 1)]
    return [Round(tuple(sends), adds=tuple(adds))] if size > 1 else []


_REDUCE_SCATTER = {"ring": _ring, "halving": _halving, "direct": _direct}
METHODS = (*_REDUCE_SCATTER, "doubling")


def mirror(rounds: Sequence[Round]) -> list[Round]:
    """The all-gather that undoes a reduce-scatter."""
    return [Round(r.adds + r.copies, copies=r.sends) for r in reversed(rounds)]


def _doubling(axis: Axis, low: int, high: int) -> list[Round]:
    # log2 P exchanges of the whole: in round b with the rank whose position differs in bit b.
    # Ranks beyond the largest power of two have no such partner: they hand their values over first, and get the sum.
    size, me = len(axis.members), axis.position
    power = 1 << (size.bit_length() - 1)
    bits = range(power.bit_length() - 1)
    if me >= power:
        # Idle rounds between: every rank has the same number of rounds, so that chunks can be woven.
        partner = _whole(axis, [me - power], low, high)
        return [Round(partner), *[Round() for _ in bits], Round(copies=partner)]
    exchanged = [_whole(axis, [me ^ (1 << bit)], low, high) for bit in bits]
    # a + b = b + a: both partners end with the same bits, without one that adds and one that copies.
    rounds = [Round(message, adds=message) for message in exchanged]
    folded = _whole(axis, [me + power] if me + power < size else [], low, high)
    return rounds if power == size else [Round(adds=folded), *rounds, Round(folded)]


def _whole(axis: Axis, positions: Sequence[int], low: int, high: int) -> tuple[Message, ...]:
    return tuple(Message(axis.members[position], low, high) for position in positions if high > low)


def _binomial(axis: Axis, low: int, high: int) -> list[Round]:
    # Up a binomial tree to the first member, ceil(log2 P) rounds, and down again.
    # In round b the members whose position ends in a one and b zeros (binary) send all that they have to the one 2 ** b
    # positions before, and are done until the sum comes back.
    up = _up_tree(axis, axis.position, low, high, parent_of=lambda n: n & (n - 1))
    return up + mirror(up)


def _chain(axis: Axis, low: int, high: int) -> list[Round]:
    # From the last member to the first, each adding its own values, P - 1 rounds, and back again.
    # A link is in use in one round each way: in chunks, which follow each other, all links work at the same time.
    size, me, up = len(axis.members), axis.position, []
    for sender in range(size - 1, 0, -1):
        below, above = [me - 1] if me == sender else [], [sender] if me == sender - 1 else []
        up.append(Round(_whole(axis, below, low, high), _whole(axis, above, low, high)))
    return up + mirror(up)


def _double_tree(axis: Axis, low: int, high: int) -> list[Round]:
    # Up two binary trees, each with half of the elements, ceil(log2 P) rounds, and down again.
    # Half of the ranks of a binary tree are leaves, and receive nothing on the way up. In the second tree, which is the
    # first one mirrored, or for an odd P shifted by one, the leaves of the first are inner nodes: all ranks send and
    # receive about as much (Sanders, Speck and Traeff, Parallel Computing 35, 2009; NCCL since 2.4).
    size, me, middle = len(axis.members), axis.position, (low + high) // 2
    number = (me - 1) % size if size % 2 else size - 1 - me  # of this rank in the second tree
    parent_of = partial(_parent, size=size)
    one = _up_tree(axis, me, low, middle, parent_of)
    two = _up_tree(axis, number, middle, high, parent_of, lambda n: (n + 1) % size if size % 2 else size - 1 - n)
    up = [Round(a.sends + b.sends, a.adds + b.adds) for a, b in zip(one, two, strict=True)]
    return up + mirror(up)


def _up_tree(
    axis: Axis, me: int, low: int, high: int, parent_of: Callable[[int], int],
    position_of: Callable[[int], int] = lambda number: number,
) -> list[Round]:  # fmt: skip
    # Up a tree of numbers: 0 is the root, the others' heights are the zeros that end their numbers (binary).
    # In round h the nodes of height h send what they have summed to their parent, 2 ** h before or after them.
    # `position_of` maps a number to a position on the axis.
    size, rounds = len(axis.members), []
    for height in range((size - 1).bit_length()):
        senders = range(1 << height, size, 2 << height)
        parent = [position_of(parent_of(me))] if me in senders else []
        near = (me - (1 << height), me + (1 << height))
        children = [position_of(number) for number in near if number in senders and parent_of(number) == me]
        rounds.append(Round(_whole(axis, parent, low, high), _whole(axis, children, low, high)))
    return rounds


def _parent(number: int, size: int) -> int:
    # The node above in the binary tree in order: the lowest set bit moves up, or is cleared if that would be beyond the
    # last number.
    bit = number & -number
    above = (number ^ bit) | (bit << 1)
    return above if above < size else number ^ bit


# methods that move the whole tensor and leave no shards: a reduce-scatter takes halving in their place
_UNCUT = {"doubling": _doubling, "binomial": _binomial, "chain": _chain, "double-tree": _double_tree}


def all_reduce(axes: Sequence[Axis], low: int, high: int) -> list[Round]:
    """Sums [low, high) over the grid of `axes`: reduce-scatter along the first, sum over the rest, all-gather."""
    if not axes:
        return []
    first, rest = axes[0], axes[1:]
    # An axis that leaves no shards hands the next one the whole tensor, which costs it as many times more bytes.
    if first.method in _UNCUT:
        return _UNCUT[first.method](first, low, high) + all_reduce(rest, low, high)
    edges = cut(low, high, len(first.members))
    rounds = _REDUCE_SCATTER[first.method](first, edges)
    return rounds + all_reduce(rest, edges[first.position], edges[first.position + 1]) + mirror(rounds)


def hierarchical(inside: Axis, between: Axis, low: int, high: int) -> list[Round]:
    """Reduces onto the first member of `inside`, sums over the leaders' axis `between`, and hands the sum back."""
    edges, size = cut(low, high, len(inside.members)), len(inside.members)
    rounds = _REDUCE_SCATTER[inside.method](inside, edges)
    leaders = all_reduce([between], low, high)
    if inside.position == 0:
        rounds.append(Round(copies=tuple(m for p in range(1, size) for m in _messages(inside, p, edges, p, 1))))
    else:
        rounds.append(Round(_messages(inside, 0, edges, inside.position, 1)))
        # As many empty rounds as the leaders have full ones: waves count rounds (gloo._weave).
        leaders = [Round() for _ in leaders]
    return rounds + leaders + mirror(rounds)


# Flat algorithms by way of one rank or two, for comparison: halving-doubling has at most the latency of a tree and
# fewer bytes; a double tree and a chain need many chunks to come near a ring.
TREES = {"binomial-tree": "binomial", "double-tree": "double-tree", "chain": "chain"}
# Algorithms along one axis of all ranks, and the method that each uses there.
FLAT = {"ring": "ring", "halving-doubling": "halving", "doubling": "doubling", "direct": "direct", **TREES}
GRIDS = ("torus", "hierarchical")  # algorithms on a grid, whose axes have methods of their own
SCHEDULED = (*FLAT, *GRIDS)
# Names that `create` takes; `auto` measures and picks, `native` is the backend's own.
NAMES = ("auto", "native", *SCHEDULED)
# Algorithms that only a plan knows: NCCL's double binary tree, the faster of it and a ring, switches that add.
OTHER_PROGRAMS = ("tree", "nccl", "in-network")


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
        return f"{self.algorithm}:{self.vertical}" + f"/{self.horizontal}" * (self.vertical != self.horizontal)

    def rounds(self, rank: int, length: int) -> list[list[Round]]:
        """The rounds of `rank` for each chunk of a tensor of `length` elements."""
        edges = cut(0, length, self.chunks)
        # Rows first: neighbours in rank order share a host, so that the fast links carry most of the bytes.
        horizontal, vertical = self.axes(rank)
        if self.algorithm == "hierarchical":
            return [hierarchical(horizontal, vertical, *span) for span in pairwise(edges)]
        return [all_reduce([horizontal, vertical], *span) for span in pairwise(edges)]

    def scatter(self, rank: int, length: int, stops: Sequence[int] | None) -> tuple[list[Round], tuple[int, int]]:
        """The reduce-scatter of `rank`, cut at `stops`, and the span of the sum that it leaves there."""
        # `hierarchical` is scattered as the torus of its grid.
        rounds, low, high = list[Round](), 0, length
        for axis in self.axes(rank):
            edges = cut(low, high, len(axis.members), stops)
            rounds += _REDUCE_SCATTER["halving" if axis.method in _UNCUT else axis.method](axis, edges)
            low, high = edges[axis.position], edges[axis.position + 1]
        return rounds, (low, high)

    def axes(self, rank: int) -> tuple[Axis, Axis]:
        rows, columns = self.grid
        y, x = divmod(rank, columns)
        row, column = range(y * columns, (y + 1) * columns), range(x, rows * columns, columns)
        return Axis(tuple(row), x, self.horizontal), Axis(tuple(column), y, self.vertical)

    def __str__(self) -> str:
        grid = f" {self.grid[0]}x{self.grid[1]}" if self.algorithm in GRIDS else ""
        return self.name + grid + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


def parse_algorithm(name: str, ranks: int, grid: tuple[int, int] | None = None, chunks: int = 1) -> Algorithm:
    """The algorithm of that name on `ranks` ranks; UserError if name, grid and number of ranks don't fit together.

    `torus` and `hierarchical` take a grid, by default the squarest with rows at least as long as columns, and after a
    colon the methods of the vertical and the horizontal axis, or one for both, rings by default.
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
    row = METHODS if algorithm == "torus" else tuple(method for method in METHODS if method != "doubling")
    if vertical not in METHODS or horizontal not in row:
        raise UserError(f"allreduce {name}: write {algorithm}:VERTICAL/HORIZONTAL or one for both, of {', '.join(row)}")
    return Algorithm(algorithm, grid or squarest(ranks), vertical, horizontal, chunks)


def squarest(ranks: int) -> tuple[int, int]:
    """The grid Y x X = ranks, Y <= X, nearest to a square; 1 x ranks for a prime."""
    rows = next(y for y in range(int(ranks**0.5), 0, -1) if ranks % y == 0)
    return rows, ranks // rows


def usual_chunks(size: int) -> int:
    """The number of chunks for `size` bytes without a measurement: of 2 MiB each, four at most."""
    return max(1, min(4, size >> 21))

"""All-reduces by name, the one that picks among the algorithms by measurement, and the two halves of each.

The halves are a reduce-scatter, after which each rank has the sum of one shard of a tensor, and an all-gather. Das et
al. (arXiv 1602.06709) call them part-reduce and part-broadcast. The shards are those that the all-reduce's own
algorithm leaves after its first phases; on a torus, after the reduce-scatters of both axes.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from .algorithms import GRIDS, Algorithm, Round, cut, mirror, parse_algorithm, usual_chunks
from .base import Done, Work
from .connection import Connection, connect, hosts_of
from .groups import AnyGroup, group_of
from .tuning.profile import Profile, expect, explain, ranks_a_host
from .tuning.tune import measure
from .works import Followed

Stops = tuple[int, ...] | None  # element offsets at which a shard may begin and end, in ascending order; None: any
# Bytes of an element by which an algorithm is chosen, whatever the dtype: a sum in int32 and the weights in 16 bits
# that are gathered later must have the same shards.
_ELEMENT = 4
_PROBE_SECONDS = 40.0
# sizes in bytes, 8 to 1 TiB, for which `auto` decides; a message uses that of the largest one that it reaches
_SIZES = [round(2 ** (eighth / 8)) for eighth in range(24, 8 * 40)]


class NativeAllReduce:
    """The backend's own all_reduce on a group (None: all ranks); it makes no group of its own."""

    name = "native"
    explanation = "allreduce native: the backend's own"
    profile: None = None

    def __init__(self, group: AnyGroup | None = None) -> None:
        self.group = group_of(group)

    def start(self, tensor: torch.Tensor) -> Work:
        return self.group.start_backend_all_reduce(tensor) if tensor.numel() else Done()

    def close(self) -> None:
        pass


@dataclass(eq=False)
class AlgorithmAllReduce:
    """Sums by the algorithm that `choose` gives for a number of bytes, or natively if it gives None."""

    name: str
    connection: Connection
    choose: Callable[[int], Algorithm | None]
    explanation: str  # one line: what runs, and why
    profile: Profile | None = None  # the measurements by which `auto` chooses

    def __post_init__(self) -> None:
        self.group = self.connection.group  # the ranks, in a group of this all-reduce's own
        # A step starts all-reduces of the same few sizes again and again.
        effective = self.connection.engine.effective
        # The algorithm for a tensor of so many bytes; None for the backend's own all_reduce.
        self.algorithm_for = lru_cache(1024)(lambda size: (chosen := self.choose(size)) and effective(chosen))

    def start(self, tensor: torch.Tensor) -> Work:
        if tensor.stride() != (1,):  # its schedules cut a run of elements
            raise UserError("start: takes contiguous tensors of one dimension; give tensor.view(-1)")
        if tensor.numel() == 0:
            return Done()
        return self.connection.engine.run(tensor, self.algorithm_for(tensor.numel() * tensor.element_size()))

    def close(self) -> None:
        self.connection.close()


AnyAllReduce = AlgorithmAllReduce | NativeAllReduce


def create(
    name: str = "auto",
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    group: AnyGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
    streams: int = 1,
) -> AnyAllReduce:
    """The all-reduce of that name over `group` (None: all ranks). Every rank of the group calls it.

    Args:
        name: One of `algorithms.NAMES`; `torus` and `hierarchical` take the methods of their axes, as
            `torus:halving/ring`, out of ring, halving, doubling and direct.
        grid: (vertical, horizontal), for `torus` and `hierarchical`; None: hosts times ranks a host, else the squarest.
        profile: For `auto`: a file of `torusgd tune`, read by the first rank; None, or one measured on other ranks: a
            probe of a few seconds.
        group: Of torch.distributed, or of `groups.build`.
        device: Where the tensors live; a `Group` has its own device.
        timeout: Seconds that a message may take; None: what `group` allows.
        streams: TCP connections between each two ranks, over which large messages are cut: for links so long and fast
            that one connection doesn't fill them. Not for `native`, nor for NCCL.

    Returns:
        An all-reduce; on one rank the no-op of `native`. Its `explanation` says in one line what runs and why.

    Raises:
        UserError: on every rank, if the name, the grid or the profile don't fit, or are not the same on all ranks.
        CommTimeout: The ranks did not meet in time.

    >>> tensor = torch.ones(3)
    >>> create("ring").start(tensor).wait()  # one rank: nothing to sum
    >>> tensor
    tensor([1., 1., 1.])
    """
    ranks = group_of(group, device)
    ranks.require_same("all-reduce", {"algorithm": name, "grid": grid and list(grid), "streams": streams})
    if grid is not None and name.partition(":")[0] not in GRIDS:
        raise UserError(f"grid {grid[0]}x{grid[1]}: has a meaning for {' and '.join(GRIDS)}, not for {name}")
    if streams > 1 and name == "native":
        raise UserError(f"streams = {streams}: the backend's own all-reduce has one; choose another, such as auto")
    if name not in ("auto", "native"):
        parse_algorithm(name, ranks.size, grid)
    if name == "native" or ranks.size == 1:
        return NativeAllReduce(ranks)
    return over(connect(ranks, timeout=timeout, streams=streams), name, grid, profile)


def over(
    connection: Connection, name: str, grid: tuple[int, int] | None = None, profile: Path | None = None
) -> AlgorithmAllReduce:
    """As `create`, over a connection that several may share; closing one closes it. Not for `native`."""
    size = connection.group.size
    if name == "auto":
        known, source = _profile(profile, connection)
        return AlgorithmAllReduce(name, connection, _decided(known, connection), explain(known, source), known)
    if grid is None and name.partition(":")[0] in GRIDS:
        hosts = hosts_of(connection.group)
        each = ranks_a_host(hosts)
        # Hosts times ranks a host, if both are more than one.
        grid = (len(hosts) // each, each) if 1 < each < len(hosts) else None
    requested = parse_algorithm(name, size, grid)
    runs = connection.engine.effective(requested)
    why = f"allreduce {requested}: " + ("as requested" if runs == requested else f"runs as {runs} on this backend")
    return AlgorithmAllReduce(name, connection, lambda n: parse_algorithm(name, size, grid, usual_chunks(n)), why)


def _decided(profile: Profile, connection: Connection) -> Callable[[int], Algorithm | None]:
    # `expect`'s choice for any number of bytes, with rank 0's decisions on every rank.
    # Two processors can differ in the last bit of a price, and two ranks would then wait for each other's messages. So
    # the first rank decides, and the others only compare sizes.
    plans = [expect(profile, size)[0] for size in _SIZES] if connection.group.rank == 0 else []
    received = connection.group.broadcast_json([plan and asdict(plan) for plan in plans])
    plans = [tree and Algorithm(**{**tree, "grid": tuple(tree["grid"])}) for tree in received]
    return lambda size: plans[max(0, bisect_right(_SIZES, size) - 1)]


def _profile(path: Path | None, connection: Connection) -> tuple[Profile, str]:
    # The profile that all ranks use, and where it comes from: a file that fits these ranks, or a probe.
    text = ""
    # Only rank 0 need see the file. It sends its error as well, or the others would wait for a profile for ever.
    if path is not None and connection.group.rank == 0:
        try:
            text = Profile.load(path).model_dump_json()
        except UserError as error:
            text = f"!{error}"
    text = connection.group.broadcast_text(text)
    if text.startswith("!"):
        raise UserError(text[1:])
    if text:
        known = Profile.parse(text)
        backend = "nccl" if connection.group.has_nccl else "gloo"
        own = hosts_of(connection.group), connection.streams, backend
        if (known.hosts, known.streams, known.backend) == own and known.timings:
            return known, f"from {path}"
    source = "probed just now" if path is None else f"probed just now, for {path} is of other ranks, streams or backend"
    return measure(connection, _PROBE_SECONDS, short=True), source


class ShardCollectives:
    """Sums tensors into shards, one a rank, and gathers shards; by the algorithm, grid and ranks of an all-reduce.

    Every rank makes the same calls in the same order, those of the all-reduce included; several may be on their way.
    The shards depend on the length and the stops alone. `doubling` has no reduce-scatter, halving stands for it;
    `hierarchical` runs as the torus of its grid. Gloo's own reduce-scatter is a whole all-reduce: `native` pays for
    that; if `auto` finds the backend's own best, a ring runs over Gloo. `watch`: see `Monitor.watch`.
    """

    def __init__(self, allreduce: AnyAllReduce, watch: Callable[[Work, float], Work] | None = None) -> None:
        self._watch = watch or (lambda work, left: work)
        self._allreduce, self._group = allreduce, allreduce.group
        self.rank, self.size = self._group.rank, self._group.size
        self._scatter = lru_cache(1024)(self._find_scatter)

    def span(self, rank: int, length: int, stops: Stops = None) -> tuple[int, int]:
        """The shard [low, high) of a rank, of a tensor of `length` elements; it may be empty."""
        return self._scatter(rank, length, stops)[1]

    def start_reduce_scatter(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Sums into shards: after `wait` this rank's shard of `tensor` holds the sum over ranks, the rest anything."""
        rounds, _ = self._scatter(self.rank, tensor.numel(), stops)
        return self._start(tensor, rounds, lambda: self._native_scatter(tensor, stops))

    def start_all_gather(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Gathers shards: `tensor` holds this rank's, and after `wait` those of all."""
        rounds, _ = self._scatter(self.rank, tensor.numel(), stops)
        return self._start(tensor, rounds and mirror(rounds), lambda: self._native_gather(tensor, stops))

    def _start(self, tensor: torch.Tensor, rounds: list[Round] | None, native: Callable[[], Work]) -> Work:
        assert tensor.stride() == (1,), "our schedules cut 1-D contiguous tensors"
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        left = time.perf_counter()
        if rounds is None or isinstance(self._allreduce, NativeAllReduce):
            return self._watch(native(), left)
        return self._watch(self._allreduce.connection.engine.run_rounds(tensor, rounds), left)

    def _find_scatter(self, rank: int, length: int, stops: Stops) -> tuple[list[Round] | None, tuple[int, int]]:
        # A rank's reduce-scatter, None for the backend's own collectives, and its shard.
        if isinstance(self._allreduce, AlgorithmAllReduce):
            algorithm = self._allreduce.algorithm_for(_ELEMENT * max(length, 1))
            if algorithm is None and not self._group.has_nccl:
                algorithm = parse_algorithm("ring", self.size)
            if algorithm is not None:
                return algorithm.scatter(rank, length, stops)
        edges = cut(0, length, self.size, stops)
        return None, (edges[rank], edges[rank + 1])

    def _native_scatter(self, tensor: torch.Tensor, stops: Stops) -> Work:
        # Gloo's reduce-scatter is an all-reduce and a copy: the all-reduce alone is the same sum in place.
        if tensor.device.type == "cpu" or not self._group.has_nccl:
            return self._group.start_backend_all_reduce(tensor)
        shards = self._native_shards(tensor, stops)
        mine, padded = shards[self.rank], pad_sequence(shards, batch_first=True)
        own = tensor.new_empty(padded.shape[1])
        work = self._group.start_reduce_scatter_single(own, padded.view(-1))
        return Followed(work, lambda: mine.copy_(own[: len(mine)]))

    def _native_gather(self, tensor: torch.Tensor, stops: Stops) -> Work:
        # One length for all shards: Gloo takes no others.
        shards = self._native_shards(tensor, stops)
        mine, longest = shards[self.rank], max(map(len, shards))
        gathered = tensor.new_empty(self.size, longest)

        def unpack() -> None:
            for shard, row in zip(shards, gathered, strict=True):
                shard.copy_(row[: len(shard)])

        work = self._group.start_all_gather_single(gathered.view(-1), pad(mine, (0, longest - len(mine))))
        return Followed(work, unpack)

    def _native_shards(self, tensor: torch.Tensor, stops: Stops) -> list[torch.Tensor]:
        return list(tensor.tensor_split(cut(0, tensor.numel(), self.size, stops)[1:-1]))

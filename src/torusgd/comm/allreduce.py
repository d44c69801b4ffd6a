"""All-reduces by name, and the one that picks among the algorithms by measurement."""

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from ..errors import UserError
from .algorithms import GRIDS, Algorithm, parse_algorithm, usual_chunks
from .base import Done, Work, check_tensor
from .connection import Connection, connect, hosts_of
from .groups import Group, group_of
from .tuning.profile import Profile, choose, explain, ranks_a_host
from .tuning.tune import measure

_PROBE_SECONDS = 40.0
_SIZES = [round(2 ** (eighth / 8)) for eighth in range(24, 8 * 40)]
"""sizes in bytes, 8 to 1 TiB, for which `auto` decides; a message uses that of the largest one that it reaches"""


class NativeAllReduce:
    """The backend's own all_reduce on a group (None: all ranks); it makes no group of its own."""

    name = "native"
    explanation = "allreduce native: the backend's own"
    profile: None = None

    def __init__(self, group: Group | ProcessGroup | None = None) -> None:
        self.group = group_of(group)

    def start(self, tensor: torch.Tensor) -> Work:
        check_tensor(tensor)
        if self.group.size == 1 or tensor.numel() == 0:
            return Done()
        return self.group.start_all_reduce(tensor)

    def close(self) -> None:
        """Nothing to end."""


class AlgorithmAllReduce:
    """Sums by the algorithm that `choose` gives for a number of bytes, or natively if it gives None."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        choose: Callable[[int], Algorithm | None],
        explanation: str,
        profile: Profile | None = None,
    ) -> None:
        self.name = name
        self.explanation = explanation
        """one line: what runs, and why"""
        self.profile = profile
        """the measurements by which `auto` chooses"""
        self.connection = connection

        def effective(size: int) -> Algorithm | None:
            chosen = choose(size)
            return None if chosen is None else connection.engine.effective(chosen)

        self._choose = lru_cache(1024)(effective)  # a step starts all-reduces of the same few sizes again and again

    @property
    def group(self) -> Group:
        """The ranks, in a group of this all-reduce's own."""
        return self.connection.group

    def start(self, tensor: torch.Tensor) -> Work:
        check_tensor(tensor)
        if tensor.numel() == 0:
            return Done()
        return self.connection.engine.run(tensor, self._choose(tensor.numel() * tensor.element_size()))

    def algorithm_for(self, size: int) -> Algorithm | None:
        """The algorithm for a tensor of `size` bytes; None for the backend's own all_reduce."""
        return self._choose(size)

    def close(self) -> None:
        self.connection.close()


def native(group: Group | ProcessGroup | None = None) -> NativeAllReduce:
    """The backend's all_reduce; on one rank, or without torch.distributed, a no-op."""
    return NativeAllReduce(group)


def create(
    name: str = "auto",
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    group: Group | ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
    streams: int = 1,
) -> AlgorithmAllReduce | NativeAllReduce:
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
        UserError: on every rank, if the name, the grid or the profile don't fit.
        CommTimeout: The ranks did not meet in time.

    >>> allreduce = create("ring")  # one rank: nothing to sum
    >>> tensor = torch.ones(3)
    >>> allreduce.start(tensor).wait()
    >>> tensor.tolist()
    [1.0, 1.0, 1.0]
    """
    if grid is not None and name.partition(":")[0] not in GRIDS:
        raise UserError(f"grid {grid[0]}x{grid[1]}: has a meaning for {' and '.join(GRIDS)}, not for {name}")
    if streams > 1 and name == "native":
        raise UserError(f"streams = {streams}: the backend's own all-reduce has one; choose another, such as auto")
    ranks = group_of(group, device)
    if name not in ("auto", "native"):
        parse_algorithm(name, ranks.size, grid)
    if name == "native" or ranks.size == 1:
        return NativeAllReduce(ranks)
    return over(connect(ranks, timeout=timeout, streams=streams), name, grid, profile)


def over(
    connection: Connection, name: str, grid: tuple[int, int] | None = None, profile: Path | None = None
) -> AlgorithmAllReduce:
    """As `create`, for any name but `native`, over a connection that several all-reduces may share.

    Closing any of them closes the connection.
    """
    size = connection.size
    if name == "auto":
        known, source = _profile(profile, connection)
        return AlgorithmAllReduce(name, connection, _decided(known, connection), explain(known, source), known)
    if grid is None and name.partition(":")[0] in GRIDS:
        grid = _natural_grid(hosts_of(connection.group))
    requested = parse_algorithm(name, size, grid)
    runs = connection.engine.effective(requested)
    why = f"allreduce {requested}: " + ("as requested" if runs == requested else f"runs as {runs} on this backend")
    return AlgorithmAllReduce(name, connection, lambda n: parse_algorithm(name, size, grid, usual_chunks(n)), why)


def _natural_grid(hosts: tuple[int, ...]) -> tuple[int, int] | None:
    """Hosts times ranks a host, if both are more than one."""
    each = ranks_a_host(hosts)
    return (len(hosts) // each, each) if 1 < each < len(hosts) else None


def _decided(profile: Profile, connection: Connection) -> Callable[[int], Algorithm | None]:
    """`choose` for any number of bytes, with rank 0's decisions on every rank."""
    # Two processors can differ in the last bit of a price, and two ranks would then wait for each other's messages. So
    # the first rank decides, and the others only compare sizes.
    decisions = ""
    if connection.rank == 0:
        plans = [choose(profile, size, connection.size).plan for size in _SIZES]
        decisions = json.dumps([plan and asdict(plan) for plan in plans])
    received = json.loads(connection.group.broadcast_text(decisions))
    plans = [tree and Algorithm(**{**tree, "grid": tuple(tree["grid"])}) for tree in received]
    return lambda size: plans[max(0, bisect_right(_SIZES, size) - 1)]


def _profile(path: Path | None, connection: Connection) -> tuple[Profile, str]:
    """The profile that all ranks use, and where it comes from: a file that fits these ranks, or a probe."""
    text = ""
    # Only rank 0 need see the file. It sends its error as well, or the others would wait for a profile for ever.
    if path is not None and connection.rank == 0:
        try:
            text = Profile.load(path).model_dump_json()
        except UserError as error:
            text = f"!{error}"
    text = connection.group.broadcast_text(text)
    if text.startswith("!"):
        raise UserError(text[1:])
    if text:
        known = Profile.parse(text)
        is_alike = known.hosts == hosts_of(connection.group) and known.streams == connection.streams
        if is_alike and known.timings:
            return known, f"from {path}"
    source = "probed just now" if path is None else f"probed just now, for {path} is of other ranks or streams"
    return measure(connection, _PROBE_SECONDS, short=True), source

"""Who is late: what a wait for a message asks while the message has not come.

How long a message may take depends on what the other ranks are doing, which a message can't tell: its age is no
measure. So waits ask a `Liveness`, which knows what each rank did last. `NoLiveness` knows nothing and leaves every
wait to the timeout of its group.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class LateRank:
    """A rank that has made no progress for too long, and what it did last; None where that is not known."""

    why: str
    """one line, such as `no heartbeat for 12 s`"""
    rank: int | None = None
    """in the run"""
    host: str | None = None
    phase: str | None = None
    """as it was given to `Liveness.progress`, such as `backward`"""
    step: int | None = None

    def __str__(self) -> str:
        """As an error shows it.

        >>> str(LateRank("no heartbeat for 12 s", rank=2, host="a1", phase="backward", step=7))
        'rank 2 on a1 in backward of step 7: no heartbeat for 12 s'
        """
        if self.rank is None:
            return self.why
        host = "" if self.host is None else f" on {self.host}"
        phase = "" if self.phase is None else f" in {self.phase}"
        step = "" if self.step is None else f" of step {self.step}"
        return f"rank {self.rank}{host}{phase}{step}: {self.why}"


class Liveness(Protocol):
    """What all ranks are doing. `launch` implements it by heartbeats through the ranks' common store."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost since all were last started, and whose work the others have taken over."""

    def progress(self, phase: str, step: int, unit: int) -> None:
        """This rank begins a unit (a virtual worker, a bucket) of a phase (such as `forward`) of a step."""

    def outside(self, what: str, where: str) -> None:
        """Until its next progress this rank waits for a disk, or what else is outside the run: (`images`, `/data`)."""

    def late(self) -> list[LateRank]:
        """The ranks for which nobody needs to wait any longer; a wait asks it every `monitor.SLICE` seconds."""

    def ranks_change(self) -> bool:
        """Whether ranks are to join or to leave as soon as a step is done."""

    def lacks_ranks(self) -> bool:
        """Whether these ranks are fewer than the run wants, so that they wait for others before the next step."""


class NoLiveness:
    """Knows of no late rank, ever: waits end by the timeout of their group."""

    lost: tuple[int, ...] = ()

    def progress(self, phase: str, step: int, unit: int) -> None:
        """Does nothing."""

    def outside(self, what: str, where: str) -> None:
        """Does nothing."""

    def late(self) -> list[LateRank]:
        """Nobody."""
        return []

    def ranks_change(self) -> bool:
        """Never."""
        return False

    def lacks_ranks(self) -> bool:
        """Never."""
        return False

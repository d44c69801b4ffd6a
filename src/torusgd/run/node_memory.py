"""The newest state of a run in the memory of its nodes, for ranks that torchrun starts again.

torchrun ends all its workers when one fails, and when a node joins or leaves, and starts them again. So the first rank
of each node saves copies of the state in a folder of the node's shared memory, which belongs to torchrun's agent there.
When ranks begin, they take the newest copy that any node holds, or the newest checkpoint if that is newer.
"""

import os
import re
import shutil
import stat
import time
from contextlib import suppress
from math import inf
from pathlib import Path

from ..errors import RunError, UserError, warn
from ..recipe.compatibility import fixed_ranks
from ..rundir.checkpoint import Checkpoint, CheckpointWriter, list_checkpoints, read_checkpoint
from ..step.model_state import StepState
from ..text import byte_size
from .job import Job, setup_of
from .saving import RunState

SHARED_MEMORY = Path("/dev/shm")
# Seconds from one copy to the next.
LEAST_SECONDS = 1.0
# Fractions of the time at most that copying holds up the steps, and that hashing and writing take a core beside them.
STEP_FRACTION, BESIDE_FRACTION = 0.01, 0.1
_NAME = re.compile(r"torusgd-[0-9]+-([0-9]+)-([0-9]+)-([0-9]+)")


class NodeMemory:
    """This rank's view of the copies in a folder of its node, of which one rank `saves` them."""

    def __init__(self, folder: Path, saves: bool) -> None:
        self._folder, self._began, self._copying = folder, -inf, 0.0
        self.writer = CheckpointWriter(folder, keep=1, metadata={}) if saves else None  # None: saves none

    def is_due(self) -> bool:
        if self.writer is None or self.writer.is_writing:
            return False
        # The dearer a copy was, the longer the pause: its cost stays a fixed fraction of the run.
        pause = max(LEAST_SECONDS, self._copying / STEP_FRACTION, self.writer.seconds / BESIDE_FRACTION)
        return time.monotonic() - self._began >= pause

    def keep(self, state: RunState, step_state: StepState) -> None:
        """Copies the state between two steps and has it written beside the next ones."""
        if self.writer is None:
            return
        self._began = time.monotonic()
        tensors = step_state.state_dict(state.step, keep=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            # The last copy stays until the new one is whole.
            if shutil.disk_usage(self._folder).free < 2 * size:
                raise RunError(f"{SHARED_MEMORY} has no room for {byte_size(2 * size)}")
            self.writer.save(Checkpoint(tensors, state.as_dict()))
        except (OSError, RunError) as error:
            warn(f"the state is no longer saved in this node's memory: {error}")
            self.forget()
        self._copying = time.monotonic() - self._began

    def read(self) -> Checkpoint | None:
        """The newest whole copy on this node, on the rank that saves them; a line reports a damaged one."""
        with suppress(OSError):
            for path in list_checkpoints(self._folder) if self.writer is not None else ():
                try:
                    return read_checkpoint(path)
                except UserError as error:
                    warn(f"{error}; it is not used")
        return None

    def forget(self) -> None:
        """Removes this node's copies, and saves no more."""
        if self.writer is not None:
            self.writer.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self.writer = None


def node_memory(job: Job) -> NodeMemory | None:
    """The memory of this rank's node; None if nobody starts ranks again, or copies of a state are not enough."""
    agent = torchrun_agent()
    # A journal is on the disk alone, and may end before a copy.
    if not agent or not job.options.node_memory or fixed_ranks(setup_of(job)) or job.recipe.synchrony.keeps_journal:
        return None
    folder = SHARED_MEMORY / f"torusgd-{os.getuid()}-{agent}"
    saves = os.environ.get("LOCAL_RANK") == "0"
    if saves:
        # What agents of this user that have ended left behind: shared memory counts as used until it is removed.
        # Containers that share the node's memory number their processes apart, so each leaves the others' folders.
        for path in SHARED_MEMORY.glob(f"torusgd-{os.getuid()}-*"):
            ended = _NAME.fullmatch(path.name)
            if ended is not None and ended[1] == _namespace() and start_of(int(ended[2])) != int(ended[3]):
                shutil.rmtree(path, ignore_errors=True)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(0, "it is not this user's alone")
        except OSError as error:
            warn(f"{folder}: {error.strerror}: the state is not saved in this node's memory")
            saves = False
    return NodeMemory(folder, saves)


def torchrun_agent() -> str:
    """The agent that has started this rank: NAMESPACE-PROCESS-BEGIN, which no other on its machine has; empty: none."""
    began = start_of(agent := os.getppid())
    return "" if "TORCHELASTIC_RUN_ID" not in os.environ or began is None else f"{_namespace()}-{agent}-{began}"


def _namespace() -> str:
    """The number of the namespace in which this process and its agent have their process ids; 0: not known."""
    with suppress(OSError):
        return re.sub("[^0-9]", "", os.readlink("/proc/self/ns/pid")) or "0"
    return "0"


def start_of(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: a later process may have its number; None: there is none."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None

"""The runtime options: by what means a recipe is computed, the same for a run, a plan and a rehearsal.

Nothing here may change the trained weights, so none of it is in the recipe's hash. They stand in the `runtime:` block
of a recipe file, and flags of the command line override them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from .section import Count, Duration, Ranks, Section

RUNTIME, NETWORK, OUTPUT = "Runtime", "Network", "Output"  # panels of --help
STEPS = ("train", "replay", "plan", "rehearse", "bench scaling")  # commands that compute or plan a recipe's steps
BucketSizes = Literal["auto", "cubic"] | Annotated[float, Field(gt=0, le=2**40)] | tuple[Count, ...]


@dataclass(frozen=True)
class Flag:
    """The flag of an option, with the option's text as its help; options without one stand in recipe files only."""

    panel: str
    commands: tuple[str, ...] = STEPS
    metavar: str = ""  # empty: the option's words, or its type
    names: tuple[str, ...] = ()  # words of the flag, more than one for another name; empty: the option's own


class RuntimeOptions(Section):
    """The `runtime:` block of a recipe file and the flags that override it.

    The text of each option is the help of its flag and its meaning in docs/recipe-keys.md. `model_fields_set` has the
    options that the user gave; a plan of somebody else's program takes only these.
    """

    device: Annotated[
        Literal["cpu", "cuda"] | None,
        Flag(RUNTIME, (*STEPS, "bench allreduce", "tune", "eval", "polish", "report", "verify")),
    ] = None
    """Compute on this device. By default on the GPU if there is one; plan and rehearse take their cluster's device."""
    workers: Annotated[
        Ranks | None, Flag(RUNTIME, (*STEPS, "bench allreduce", "tune", "verify"), "N|MIN:MAX", ("workers", "devices"))
    ] = None
    """Start this many ranks. By default as many as this machine's GPUs, or as its cores if it has none; plan and
    rehearse need a number. train also takes MIN:MAX: start with as many as there are cores, accept more up to MAX,
    pause below MIN."""
    workers_range: tuple[Ranks, Ranks] | None = None
    """Pause, after a checkpoint, with fewer ranks than the first number, and accept more up to the second, as
    --workers MIN:MAX does. By default 1 to virtual_workers."""
    ranks_per_gpu: Count = 1
    """Let this many consecutive ranks share a GPU. Above 1 their messages go by Gloo, since NCCL wants a GPU a rank."""
    cuda_graphs: bool | None = None
    """Take the steps of a GPU as CUDA graphs, launched before the last step's end is known: several times as fast with
    small passes, the same bits. By default where train has one rank, on a GPU, and nothing else that is asked for
    forbids it; with several ranks they have never run. In portable arithmetic, where true has to be asked for, only the
    passes are graphs."""
    cuda_streams: Annotated[int, Field(ge=1, le=8)] = 1
    """With cuda_graphs, compute the passes of this many virtual workers at the same time, each on a CUDA stream with
    memory of its own, if one pass is too small to fill the GPU. The bits stay the same."""
    allreduce: Annotated[str, Flag(NETWORK, metavar="ALGORITHM")] = "native"
    """Sum gradients by this all-reduce: native is the backend's own, auto measures several and picks one."""
    grid: Annotated[
        str | None, Field(pattern=r"^[1-9][0-9]*x[1-9][0-9]*$"), Flag(NETWORK, (*STEPS, "bench allreduce"), "YxX")
    ] = None
    """Arrange the ranks in Y rows of X for torus and hierarchical. By default hosts by ranks of a host."""
    streams: Annotated[int, Field(ge=1, le=64), Flag(NETWORK, (*STEPS, "bench allreduce", "tune"), "N")] = 1
    """Open this many TCP connections between each two ranks and cut large messages over them, for links that one
    connection does not fill. Needs an all-reduce other than native; NCCL has connections of its own."""
    profile: Annotated[str | None, Flag(NETWORK, (*STEPS, "bench allreduce"), "FILE")] = None
    """Choose for --allreduce auto by this file of torusgd tune. By default a probe of a few seconds measures the
    network; a plan of --cluster local needs the file."""
    buckets: Annotated[BucketSizes, Flag(NETWORK, metavar="auto|cubic|MIB|[N,...]")] = "auto"
    """Send gradients together: up to this many MiB (of int32 or float32), or these numbers of tensors from the output
    on, or cubic: 3, 21, 57, ... tensors (Fujitsu). auto decides by the first steps' times with --allreduce auto, and
    takes 4 MiB otherwise, on a GPU 25."""
    update: Annotated[Literal["replicated", "sharded"], Flag(RUNTIME)] = "replicated"
    """Update all weights on every rank (replicated), or on each rank a shard of them, with its momentum (sharded)."""
    model_parallel: Annotated[Literal["auto"] | Count, Flag(RUNTIME, metavar="M|auto")] = 1
    """Share the column blocks of the last, linear layers among this many ranks. auto takes for each layer as many as
    send least, and in a plan as many as make the shortest step."""
    weights_first: Annotated[bool, Flag(NETWORK)] = False
    """Compute a layer's weight gradient before its input gradient, and send it meanwhile (Das et al.); on CPUs. Costs
    some 0.1 ms of a core a layer and virtual worker."""
    software: str | None = None
    """Plan a published record as this program did it, by the planner's profile of the program; a run takes the options
    beside it. By default torusgd."""
    checkpoint_every: Annotated[Duration, Flag(OUTPUT, ("train",), "DURATION")] = Duration(1, "ep")
    """Write a checkpoint this often, such as 50st (steps), 1ep (epochs) or 1e6sa (samples)."""
    checkpoint_minutes: Annotated[float, Field(gt=0), Flag(OUTPUT, ("train",))] = 10.0
    """Write a checkpoint after this many minutes at the latest; a slow disk may delay it."""
    keep_checkpoints: Count = 2
    """Retain this many of the newest checkpoints."""
    verify_every: Annotated[Duration | None, Flag(OUTPUT, ("train", "plan"), "DURATION")] = None
    """Retain a checkpoint this often, in verify/ of the run's folder, from which anyone can compute the steps that
    follow and compare (torusgd verify), with a record of the state. By default records alone, as often as costs a
    thousandth of the time."""
    track: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Flag(OUTPUT, ("train",))] = ()
    """Send every step and evaluation to this tracker too; the flag is repeatable. TensorBoard and W&B offline write
    into the run's folder, MLflow and W&B send."""
    audit: Annotated[float, Field(ge=0, le=1), Flag(RUNTIME, ("train",), "FRACTION")] = 0.0
    """Compute this fraction of the virtual workers on a second rank too, to find machines that compute wrongly."""
    shares: Annotated[Literal["speed", "even"], Flag(RUNTIME, ("train",))] = "speed"
    """Give slow ranks fewer virtual workers, by the ranks' measured times (speed), or all ranks as many (even). If sums
    are not exact, or layers are in column blocks, all ranks take as many in any case."""
    work_stealing: Annotated[bool, Flag(RUNTIME, ("train",))] = False
    """Let idle ranks take over virtual workers that late ranks have not begun in a step. Pays if ranks pause for longer
    than a virtual worker takes, and costs each rank some requests to the store a step."""
    loader_processes: Annotated[int, Field(ge=0)] = 0
    """Make each rank's training batches in this many processes; 0: in threads of the rank, enough for a few cores."""
    node_memory: Annotated[bool, Flag(RUNTIME, ("train",))] = True
    """Under torchrun, save the newest state in each node's memory (/dev/shm) too, for workers that it starts again."""
    mixed: Annotated[bool, Flag(RUNTIME, ("train",))] = False
    """Let ranks differ in processor, libraries and other conditions. The weights can't be had again bit for bit."""
    drift_every: Annotated[int | None, Field(ge=0), Flag(RUNTIME, ("train",), "STEPS")] = None
    """Compare the ranks' weights after this many steps, and before each checkpoint, and name a rank whose weights have
    drifted; 0: never. By default as often as costs less than a thousandth of a step, by the images that a rank computes
    in one."""
    timeout: Annotated[float, Field(gt=0)] = 25.0
    """Count a rank as frozen or lost after this many seconds without a heartbeat."""
    start_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Wait this many seconds for the ranks to meet, and as long from there for the first gradient of any of them."""

    @property
    def grid_size(self) -> tuple[int, int] | None:
        """`grid` as (vertical, horizontal)."""
        if self.grid is None:
            return None
        vertical, horizontal = map(int, self.grid.split("x"))
        return vertical, horizontal

    def without(self, names: Collection[str]) -> "RuntimeOptions":
        """The options with these as if nobody had given them."""
        # Made anew, since a copy would still have them in `model_fields_set`.
        return RuntimeOptions(**{name: getattr(self, name) for name in self.model_fields_set - set(names)})

    def unfit(self, ranks: int) -> list[str]:
        """Names of the options that are for another number of ranks."""
        checks = {
            "grid": self.grid_size is not None and math.prod(self.grid_size) != ranks,
            "model_parallel": self.model_parallel != "auto" and ranks % self.model_parallel > 0,
        }
        return [name for name, is_unfit in checks.items() if is_unfit]


def flags_of(option: str) -> tuple[Flag | None, tuple[str, ...]]:
    """An option's flag, and the flag's names; (None, ()) of options in recipe files only."""
    for flag in RuntimeOptions.model_fields[option].metadata:
        if isinstance(flag, Flag):
            return flag, tuple(f"--{name.replace('_', '-')}" for name in flag.names or (option,))
    return None, ()

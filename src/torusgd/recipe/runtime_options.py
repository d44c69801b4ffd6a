"""The runtime options: by what means a recipe is computed, the same for a run, a plan and a rehearsal.

Nothing here may change the trained weights, so none of it is in the recipe's hash. They stand in the `runtime:` block
of a recipe file, and flags of the command line override them.
"""

import math
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from .duration import Duration
from .section import Count, Ranks, Section

BucketSizes = Literal["auto", "cubic"] | Annotated[float, Field(gt=0)] | tuple[Count, ...]


class RuntimeOptions(Section):
    """The `runtime:` block of a recipe file and the flags that override it.

    `model_fields_set` has the options that the user gave; a plan of somebody else's program takes only these.

    >>> RuntimeOptions(allreduce="torus", grid="4x8").grid_size
    (4, 8)
    """

    device: Literal["cpu", "cuda"] | None = None
    """null: cuda where there is a GPU; a plan takes the device of its cluster"""
    workers: Ranks | None = None
    """ranks; null: on this machine as many as GPUs, else as cores, while a plan must be given their number"""
    workers_range: tuple[Ranks, Ranks] | None = None
    """fewest and most ranks, as --workers MIN:MAX gives them: the run begins with as many as cores, takes others up to
    the most, and waits, with a checkpoint written, while it has less than the fewest; null: 1 to virtual_workers"""
    ranks_per_gpu: Count = 1
    """consecutive ranks that share a GPU; above 1 their messages go by Gloo, since NCCL wants a GPU a rank"""
    cuda_streams: Annotated[int, Field(ge=1, le=8)] = 1
    """virtual workers whose passes run at the same time on a GPU, each on a CUDA stream with memory of its own: for
    passes too small to fill it; the bits stay"""
    allreduce: str = "native"
    """an algorithm of `torusgd train --help`, native for the backend's own, or auto, which measures and picks"""
    grid: Annotated[str, Field(pattern=r"^[1-9][0-9]*x[1-9][0-9]*$")] | None = None
    """YxX, vertical by horizontal ranks, for torus and hierarchical; null: hosts by ranks a host"""
    streams: Annotated[int, Field(ge=1, le=64)] = 1
    """TCP connections between each two ranks, over which large messages are cut: for links so long and fast that one
    doesn't fill them; with an all-reduce other than native, and not with NCCL, which has its own"""
    profile: str | None = None
    """for auto: a file of torusgd tune; null: a probe of a few seconds; a plan of --cluster local needs it"""
    buckets: BucketSizes = "auto"
    """which gradients travel together: a size in MiB of int32 or float32; how many tensors each, from the output on;
    cubic: 3, 21, 57, ... tensors (Fujitsu); auto: with allreduce auto by the first steps' times, else 4 MiB"""
    update: Literal["replicated", "sharded"] = "replicated"
    """sharded: each rank updates a shard of the weights and keeps momentum for that only"""
    model_parallel: Literal["auto"] | Count = 1
    """ranks that share the column blocks of the last, linear layers; auto: for each layer as many as send least, and
    in a plan as many as make the shortest step"""
    weights_first: bool = False
    """of each layer the weight gradient is computed before the input gradient, and leaves meanwhile (Das et al.); on
    CPUs; it costs some 0.1 ms of a core a layer and virtual worker"""
    software: str | None = None
    """of a published record: the planner's profile of the program that set it; a plan then takes that program as
    published, and the options beside it are how a run does the same; null: torusgd"""
    checkpoint_every: Duration = Duration(1, "ep")
    """from one checkpoint to the next"""
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 10.0
    """from one checkpoint to the next at most; a slow disk may delay it"""
    keep_checkpoints: Count = 2
    """the newest so many stay"""
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """trackers that take every event: TensorBoard and W&B offline write into the run's folder, MLflow and W&B send"""
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of the virtual workers that a second rank computes too, by which machines that compute wrongly are found"""
    shares: Literal["speed", "even"] = "speed"
    """speed: a slow rank computes fewer virtual workers, as the ranks' measured times say; but even ones where sums are
    not exact or layers are in column blocks"""
    work_stealing: bool = False
    """an idle rank takes over virtual workers that a late one has not begun in this step; it pays where ranks pause for
    longer than a virtual worker takes, and costs each rank some questions to the store a step"""
    loader_processes: Annotated[int, Field(ge=0)] = 0
    """processes of each rank that make its training batches; 0: threads of the rank, which keep a few cores busy"""
    node_memory: bool = True
    """under torchrun the newest state is kept in each node's memory (/dev/shm) too, for workers that it starts again"""
    mixed: bool = False
    """ranks may differ in processor, libraries and other conditions; the weights can't be had again bit for bit"""
    drift_every: Annotated[int, Field(ge=0)] | None = None
    """steps from one comparison of the ranks' weights to the next, each of which names a rank whose weights have
    drifted; before a checkpoint they are compared too; 0: never; null: as often as costs less than a thousandth of a
    step, by the images that a rank computes in one"""
    timeout: Annotated[float, Field(gt=0)] = 25.0
    """seconds without a heartbeat after which a rank counts as frozen or lost"""
    start_timeout: Annotated[float, Field(gt=0)] = 120.0
    """seconds for the ranks to meet, and from there until the first of them has computed a first gradient"""

    @property
    def grid_size(self) -> tuple[int, int] | None:
        """(vertical, horizontal)."""
        if self.grid is None:
            return None
        vertical, horizontal = self.grid.split("x")
        return int(vertical), int(horizontal)

    def without(self, names: Collection[str]) -> "RuntimeOptions":
        """The options with these as if nobody had given them.

        >>> RuntimeOptions(allreduce="torus", grid="4x8").without(["grid"]).model_fields_set
        {'allreduce'}
        """
        return RuntimeOptions(**{name: getattr(self, name) for name in self.model_fields_set - set(names)})

    def unfit(self, ranks: int) -> list[str]:
        """Names of the options that are for another number of ranks.

        >>> RuntimeOptions(allreduce="torus", grid="4x8", model_parallel=2).unfit(2)
        ['grid']
        """
        found = []
        if self.grid_size is not None and math.prod(self.grid_size) != ranks:
            found.append("grid")
        if self.model_parallel != "auto" and ranks % self.model_parallel:
            found.append("model_parallel")
        return found

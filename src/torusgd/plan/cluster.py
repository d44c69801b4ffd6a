"""Machines and programs: the cluster and the software profile, typed, and the YAML files that describe them.

A cluster file describes the hardware, a software profile how well a training program uses it. The files have the values
of data sheets, logs and papers. The published results add one factor a parameter, in calibrated.json: never one a row.
"""

import copy
import json
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from pydantic import AfterValidator, Field, field_validator, model_validator

from ..comm.algorithms import OTHER_PROGRAMS, parse_algorithm
from ..comm.tuning.profile import Backend, Profile, ranks_a_host
from ..errors import UserError, suggest
from ..recipe.load import parse_mapping, read_file, validate
from ..recipe.runtime_options import BucketSizes
from ..recipe.section import Count, Fraction, NotNegative, Positive, Ranks, Section
from ..text import listed

D = TypeVar("D", bound=Section)
Precision = Literal["float32", "bfloat16", "float16"]
Grid = Annotated[tuple[Count, Count], Field(strict=False)]


def _within(least: float, most: float, what: str) -> AfterValidator:
    """Bounds that no machine is beyond, with the reason: a plan of something else would only look like one."""

    def check(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"beyond what machines have ({what}); give {least:g} to {most:g}")
        return value

    return AfterValidator(check)


Compute = Annotated[float, _within(1e6, 1e21, "FLOP/s of one device; a Cray-1 had 1.6e8, a rack of GPUs has 4e17")]
MemoryRate = Annotated[float, _within(1e6, 1e18, "bytes/s of a memory; a wafer of SRAM has 2e16")]
LinkRate = Annotated[float, _within(1e3, 1e18, "bytes/s of a link; a modem had 7e3, a fibre has 1e14")]
Latency = Annotated[float, _within(0, 10, "seconds of a message; light needs 1.3 s to the moon")]
# Seconds that a program takes for a kernel, a message, a rank: beyond these it hangs.
Overhead = Annotated[float, _within(0, 10, "seconds of a program for one of many small things")]
Efficiency = Annotated[float, _within(1e-4, 1, "fraction of what the hardware can do; below a ten-thousandth it idles")]
Slowdown = Annotated[float, _within(1, 1e4, "factor by which devices that share something are slower")]
Speed = Annotated[float, _within(1e-4, 1e4, "speed of a device against another one of the same run")]
Spread = Annotated[float, _within(0, 10, "standard deviation of a logarithm; at 1 times differ by a factor of 3")]
Seconds = Annotated[float, _within(0, 1e9, "seconds of one part of a run; 1e9 are 32 years")]
Images = Annotated[float, _within(1e-6, 1e12, "images/s of one device's input")]
PerWeight = Annotated[float, _within(0, 1e6, "values or bytes of a program for each weight or statistic")]


def _shown(text: str) -> str:
    """Plans print names: what steers a terminal is refused rather than printed."""
    if not text.isprintable():
        raise ValueError("holds characters that can't be printed; write letters and digits")
    return text


Name = Annotated[str, AfterValidator(_shown)]


class Device(Section):
    """One processor that trains: a GPU, or a CPU node or socket."""

    name: Name
    peak: Annotated[dict[Precision, Compute], Field(min_length=1)]  # FLOP/s at each precision, as the vendor states it
    memory_bandwidth: MemoryRate  # bytes/s
    memory: Positive | None = None  # bytes; null: not limited

    def peak_of(self, precision: Precision) -> float:
        if precision not in self.peak:
            known = f"no peak of {precision}, only of {listed(self.peak)}"
            raise UserError(f"{self.name}: its cluster file has {known}; --set precision={next(iter(self.peak))}")
        return self.peak[precision]


class Link(Section):
    """A network in alpha-beta terms."""

    alpha: Latency  # seconds a message takes before its first byte arrives, the library's own part included
    bandwidth: LinkRate  # bytes/s each way: of one device inside a node, of all a node's network cards between nodes
    efficiency: Efficiency = 1.0  # fraction of the bandwidth that payload gets
    stream: LinkRate | None = None  # bytes/s of one connection or process that can't fill the link; null: it can


class Cluster(Section):
    """A machine: nodes of as many devices each, a network inside each node and one between them."""

    name: Name
    source: str
    backend: Backend
    device: Device
    devices_per_node: Ranks = 1
    nodes: Ranks | None = None  # number of nodes; null: any
    # Factor of compute time by devices at work, which share cores, memory or power; linear between, constant beyond.
    crowding: dict[Count, Slowdown] = Field(default_factory=dict)
    # Speed of each device against `device`, such as [1, 1, 0.5], repeated after the last one; empty: all are equal.
    speeds: Annotated[tuple[Speed, ...], Field(strict=False)] = ()
    inside: Link
    between: Link
    rack_nodes: Count | None = None  # number of nodes with full bandwidth among them; null: the whole machine
    taper: Efficiency = 1.0  # fraction of the bandwidth that leaves a rack
    in_network_reduction: bool = False  # whether switches can add (SHARP)
    profile: Profile | None = None  # measurement of torusgd tune, if the machine is this one

    def slowdown(self, devices: int) -> float:
        """The factor of the time of compute with so many devices at work; see `crowding`."""
        known = {1: 1.0, **self.crowding}
        return float(np.interp(devices, sorted(known), [known[count] for count in sorted(known)]))


class Buckets(Section):
    """The rule by which gradients travel together, in the order in which backward completes them."""

    # `layer`: a tensor each; `values`: equal runs of values, which cut tensors; `cubic`: bucket k takes
    # 3((k+1)^3 - k^3) tensors, batch norm's last (Fujitsu); `torusgd`: whole tensors, by torusgd's `buckets` option.
    rule: Literal["one", "layer", "parts", "values", "cubic", "torusgd"] = "one"
    parts: Count | None = None  # number of buckets of equal bytes, for rule: parts
    values: Count | None = None  # number of elements of one bucket, for rule: values
    option: BucketSizes | None = None  # value of the runtime option `buckets`, for rule: torusgd

    @model_validator(mode="after")
    def _check(self) -> "Buckets":
        for key, rule in (("parts", "parts"), ("values", "values"), ("option", "torusgd")):
            if (getattr(self, key) is not None) != (self.rule == rule):
                raise ValueError(f"{key}: needed with rule: {rule}, and only there")
        return self


class Communication(Section):
    """The way in which a program sums gradients."""

    # Name as in a run (`auto`, `native`, `ring`, `torus:halving/ring`, ...), or one of OTHER_PROGRAMS; `auto` is the
    # algorithm with the least price, `native` that of the cluster's backend: NCCL's ring or tree, Gloo's ring.
    algorithm: str = "native"
    # Grid of torus and hierarchical: rows of one node's devices, or as square as the number of devices allows.
    grid: Literal["node", "square"] = "square"
    grids: tuple[Grid, ...] = ()  # Y x X grids that go before `grid` if their product is the number of devices
    wire_bits: Literal[16, 32, 64] = 32  # bits of a gradient's element; 64: exact sums of 8,192 virtual workers or more
    buckets: Buckets = Buckets()
    wide_norms: bool = False  # whether batch norm's gradients leave last, in 32 bits, for rule: torusgd
    overlap: bool = False  # whether buckets leave while backward runs
    pipelined: bool = False  # whether buckets on the links inside and between hosts travel at the same time
    contention: Fraction = 0.0  # fraction of the hidden communication by which it slows the computation that hides it
    streams: Count = 1  # connections between two devices for one message, each as quick as a link's `stream`
    message: Overhead = 0.0  # seconds a message costs the program on top of the link's alpha
    coordination: Overhead = 0.0  # seconds a rank and step that a central coordinator needs
    gather_ahead: bool = False  # whether a sharded update gathers weights as the next forward needs them, hidden
    statistic_bytes: PerWeight = 0.0  # of each batch-norm statistic and the loss, in a message after forward
    linear_groups: Count | None = None  # groups of ranks that split linear layers (Das et al.); null: data-parallel

    @field_validator("algorithm")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ("auto", "native", *OTHER_PROGRAMS):
            try:
                parse_algorithm(name, ranks=1)
            except UserError as error:
                raise ValueError(f"{error}; a plan also knows {', '.join(OTHER_PROGRAMS)}") from None
        return name


class Evaluation(Section):
    """The cost of an evaluation beside its forward pass."""

    every: Positive = 1.0  # epochs between evaluations; a recipe's own value goes before it
    seconds: Seconds = 0.0  # seconds of an evaluation
    norm_sums: Annotated[int, Field(ge=0)] = 0  # all-reduces a batch norm before an evaluation, if steps sum none


class Software(Section):
    """How well a training program uses a machine, in few numbers."""

    name: Name
    program: Name | None = None  # other people's, in words, which a plan's first line names; null: torusgd, or your own
    source: str
    measured_on: tuple[str, ...] | None = None  # devices on which it was measured; null: those of its publication
    precision: Precision = "float32"
    fused: bool = False  # whether activations and additions are done inside the kernel before them
    quartiles: tuple[Positive, Positive] | None = None  # seconds of a measured run's steps; null: of no such run
    math: Efficiency = 0.6  # fraction of the device's peak in convolutions and products
    memory: Efficiency = 0.75  # fraction of the memory bandwidth
    launch: Overhead = 1e-5  # seconds of a kernel beside its work: launch, ramp and framework
    jitter: Spread = 0.01  # relative spread (standard deviation of the logarithm) of a device's step time
    sharded_update: bool = False  # whether each rank updates a shard of the weights
    shares: Literal["even", "speed"] = "even"  # of virtual workers; speed: a slow device computes fewer
    held_values: PerWeight = 2.0  # float32 values that stay for each weight: itself and the optimizer's
    update_bytes: PerWeight = 24.0  # bytes that the optimiser reads and writes a weight
    weights_first: bool = False  # whether a layer's weight gradient precedes its input's, and leaves at once
    norm_group: Count = 1  # number of devices of a node with common batch statistics
    input_rate: Images | None = None  # images/s that the input of one device gives; null: never the limit
    communication: Communication = Communication()
    base_devices: Count = 1  # number of devices that the publication's speed-ups and efficiencies are relative to
    whole_epochs: bool = False  # whether a published run's epochs end with a whole batch, padded from the next epoch
    # Seconds that count as training time beside steps and evaluations: before the first step, and by what the first
    # epoch and the first evaluation were longer than the later ones; by devices if logs of several sizes have them.
    start: Seconds | Annotated[dict[Count, Seconds], Field(min_length=1)] = 0.0
    evaluation: Evaluation = Evaluation()
    error: Spread = 0.1  # relative error (standard deviation of the logarithm) of predictions with this profile

    def start_on(self, devices: int) -> float:
        if not isinstance(self.start, dict):
            return self.start
        # Evenly from one logged size to the next, and beyond the last as there.
        return float(np.interp(devices, sorted(self.start), [self.start[count] for count in sorted(self.start)]))


Factors = dict[str, float]  # factors by the names of their parameters


class Parameter(Section):
    name: str
    meaning: str
    targets: tuple[str, ...]  # values that it multiplies: software/nnl-fp16:math; a star stands for several files
    spread: Positive  # prior standard deviation of its logarithm, without any row

    def keys(self, folder: str, name: str) -> list[str]:
        pairs = [target.partition(":") for target in self.targets]
        return [key for pattern, _, key in pairs if fnmatchcase(f"{folder}/{name}", pattern)]

    def aims_at(self, cluster: str, software: str) -> bool:
        """True if it changes the predictions for that cluster and profile."""
        return bool(self.keys("clusters", cluster) or self.keys("software", software))


class Calibrated(Section):
    """calibrated.json, which tools/calibrate_planner writes."""

    factors: Factors
    errors: dict[str, NotNegative]  # by software profile: spread of the logarithm of its predictions
    left_out: dict[str, Positive]  # predictions by published row, each by the fit of all others
    system_left_out: dict[str, Positive]  # the same, each by the fit of the rows of other clusters and programs
    # By published row of a program with three networks or more: its prediction without any row of its network.
    other_networks: dict[str, Positive]


@cache
def load_parameters() -> tuple[Parameter, ...]:
    tree = parse_mapping(files(__package__).joinpath("parameters.yaml").read_text(), "parameters.yaml")
    return tuple(validate(Parameter, each, "parameters.yaml") for each in tree["parameters"])


@cache
def load_calibrated() -> Calibrated:
    tree = json.loads(files(__package__).joinpath("calibrated.json").read_text())
    return validate(Calibrated, tree, "calibrated.json")


def calibrated(folder: str, name: str, tree: dict[str, Any], factors: Factors | None = None) -> dict[str, Any]:
    """A shipped file, its parameters' targets times their factors; without `factors` the fitted ones, and the error."""
    multiplied_by = load_calibrated().factors if factors is None else factors
    result = copy.deepcopy(tree)  # the files are cached
    for parameter in load_parameters():
        for key in parameter.keys(folder, name):
            *parents, last = key.split(".")
            node = result
            for part in parents:
                node = node.get(part, {})
            if last in node:  # a default, which is not in the file, is not multiplied
                node[last] = float(node[last]) * multiplied_by[parameter.name]
    if factors is None and folder == "software" and name in load_calibrated().errors:
        result["error"] = load_calibrated().errors[name]
    return result


def load_cluster(name: str, factors: Factors | None = None) -> Cluster:
    """A cluster by built-in name or YAML path, as `calibrated`; UserError of one line names what is wrong."""
    # Plan 2: the figures of the cluster, and below those of the program.
    return _load("clusters", "cluster", name, Cluster, factors)


def load_software(name: str, factors: Factors | None = None) -> Software:
    """A software profile by built-in name or YAML path, as `calibrated`; UserError as for a cluster."""
    return _load("software", "software", name, Software, factors)


@cache
def tree_of(folder: str, name: str) -> dict[str, Any]:
    """The plain values of a shipped file, before calibration."""
    return parse_mapping(files(__package__).joinpath(folder, f"{name}.yaml").read_text(), f"{folder}/{name}.yaml")


def names_in(folder: str) -> list[str]:
    """The names of what ships in `clusters` or `software`."""
    entries = files(__package__).joinpath(folder).iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def _load(folder: str, kind: str, name: str, model: type[D], factors: Factors | None) -> D:
    where = f"{kind} {name}"
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return validate(model, parse_mapping(read_file(Path(name), where), where), where)
    if (folder, name) == ("clusters", "local"):
        raise UserError(
            "cluster local: is this machine, as measured; torusgd tune --out profile.json, then --profile it"
        )
    known = names_in(folder)
    if name not in known:
        raise UserError(f"{where}: none of that name{suggest(name, known)} (or give a YAML file of your own)")
    return validate(model, calibrated(folder, name, tree_of(folder, name), factors), where)


_NOMINAL = 1e12  # FLOP/s of a device without a figure; a measured step cancels it


def local_cluster(profile: Profile) -> Cluster:
    """Nodes and links of a measured profile; the device is a nominal one, for `program.measured_software`."""
    # A latency or slope of zero is below the resolution of tune.
    what, links = "a link of the profile", list[Link | None]()
    for each in (profile.inside, profile.between):
        found = {"alpha": each.latency, "bandwidth": 1 / max(each.per_byte, 1e-12)} if each is not None else None
        links.append(None if found is None else validate(Link, found, what))
    known = next(filter(None, links), Link(alpha=0.0, bandwidth=_NOMINAL))
    inside, between = (link or known for link in links)
    peak: dict[Precision, float] = dict.fromkeys(get_args(Precision), _NOMINAL)
    return Cluster(
        name="local", source=f"measured by torusgd tune on {len(profile.hosts)} ranks, {profile.backend}",
        backend=profile.backend, device=Device(name="one worker here", peak=peak, memory_bandwidth=_NOMINAL / 25),
        devices_per_node=ranks_a_host(profile.hosts),
        crowding={crowd.ranks: crowd.slowdown for crowd in profile.crowding},
        inside=inside, between=between, profile=profile,
    )  # fmt: skip

"""What must be equal for two ranks, or two parts of a run, to belong together: one value, compared in one place.

The recipe, the data and the initial weights decide the result: ranks or checkpoints that differ in them are of another
run. The conditions (processor, GPU, builds of libraries, their environment) decide the bits: ranks of one run must have
the same unless the run allows mixed ones, and a run that goes on under others says so.

With portable arithmetic the operators of the network's passes decide the bits. Those of the built-in networks, and of
some of torchvision and timm, are stored (`tools/operator_sequences.py`), so that a torch with others is found.
"""

import copy
import hashlib
import json
import os
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..arithmetic import operators_of
from ..comm.groups import Group
from ..data.decode import SET_VERSION
from ..data.pipeline import Batch
from ..data.registry import PICTURES, data_sha256
from ..data.types import Source
from ..errors import UserError
from ..hub import commit_of
from ..models.registry import construct
from ..recipe.schema import Model, Recipe
from ..recipe.section import sides
from ..runtime import cpu_flags, cpu_info
from ..step.forward_backward import loss_of
from ..text import version_of
from ..weights import weights_sha256
from .job import Job
from .open_data import Data
from .trained_weights import read_initial

Conditions = dict[str, str | int]
Differences = dict[str, tuple[str, str]]  # by key, both values as they are shown

# Of a processor's flags those of which kernels make a choice; others come and go with the version of the kernel.
_ARITHMETIC_FLAG = re.compile(r"\d*s?sse|avx|fma|f16c|amx|vnni|bf16|asimd|sve|sme|fp|i8mm|neon")
_LIBRARY_VARIABLE = re.compile(
    r"(DNNL|ONEDNN|MKL|ATEN|OPENBLAS|NPY|CUBLAS|CUBLASLT|CUDNN|NVIDIA|TORCH_(MKLDNN|CUDNN|ALLOW|BLAS))_"
    r"|(OMP_DYNAMIC|OMP_THREAD_LIMIT|KMP_DETERMINISTIC_REDUCTION)$"
)
# A recipe says how many threads there are, whatever the environment says.
_HARMLESS = re.compile(r"_(VERBOSE|NUM_THREADS|VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_CUDA|CUDA_VERSION)")
# Lines of /proc/cpuinfo, on x86 and on ARM.
_DESIGN = (("cpu family", "CPU implementer"), ("model", "CPU part"), ("stepping", "CPU revision"))
_DECODERS = ("simplejpeg", "opencv-python-headless", "opencv-python", "pillow")
_GPU_DECODERS = ("torchvision", "nvidia-nvjpeg", "nvidia-nvjpeg-cu12")


def conditions(recipe: Recipe, device: torch.device) -> Conditions:
    """Of this process, once `runtime.prepare_process` has prepared it; plain JSON, recorded with a run."""
    # Portable arithmetic has the same bits under all conditions but another version of itself, and decoders that give
    # the pixels of the built-in set are one and the same.
    if recipe.precision == "portable":
        decoders = {"decoder_set": SET_VERSION} if recipe.data.pixels == "portable" else {}
        return {"arithmetic": recipe.arithmetic, **decoders}
    found = machine(device)
    if recipe.data.source in PICTURES or ":" in recipe.data.source:  # it reads pictures, or may
        names = _DECODERS + (_GPU_DECODERS if recipe.data.decoder == "nvjpeg" else ())
        found["decoders"] = " ".join(f"{name}-{version_of(name)}" for name in names if version_of(name))
    return {**found, "threads": recipe.threads}


def machine(device: torch.device) -> Conditions:
    """What decides the bits of a floating-point kernel on this machine, whatever it is used for; plain JSON."""
    # A kernel is chosen by the processor's instructions and caches, by the build of a library, and by variables of the
    # environment. Equal conditions are to mean equal bits, so all of these are in them. What has no part in the
    # arithmetic (clock speeds, the kernel's version, where threads are placed) is not.
    names = [name for name in os.environ if _LIBRARY_VARIABLE.match(name) and not _HARMLESS.search(name)]
    # Family, model and stepping name a design; flags and caches are what a virtual machine shows of it.
    design, caches = [cpu_info(f"{x86}\t") or cpu_info(arm) for x86, arm in _DESIGN], ""
    with suppress(OSError):  # of the first core: libraries cut the blocks of a matrix product by them
        found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        caches = " ".join(path.read_text().strip() for path in found)
    return {
        "device": device.type,
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_design": "-".join(filter(None, design)),
        "cpu_flags": " ".join(sorted(flag for flag in cpu_flags() if _ARITHMETIC_FLAG.match(flag))),
        "cpu_caches": caches,
        "isa": torch.backends.cpu.get_cpu_capability(),
        **(_gpu(device) if device.type == "cuda" else {}),
        "torusgd": version_of(),
        "torch": torch.__version__,
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "numpy": np.__version__,
        # By which libraries may choose other kernels.
        "environment": " ".join(sorted(f"{name}={os.environ[name]}" for name in names)),
    }


def _gpu(device: torch.device) -> Conditions:
    number = None
    with suppress(OSError):
        number = re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text().partition("\n")[0])
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpu_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": str(torch.version.cuda),
        "cudnn": torch.backends.cudnn.version() or 0,
        "driver": number[0] if number else "",
        "triton": version_of("triton"),
    }


_WHAT = {
    "recipe_sha256": "another recipe",
    "train_images": "another data set",
    "data_sha256": "another data set",
    "data_revision": "another commit of the data set",
    "init_sha256": "other initial weights (--init)",
    "replayed_sha256": "another journal",
    "operators": "other operators of the network's passes, by another torch or another network of the same name",
}
# Characters of two values that are shown whole, and words of longer ones.
_LONG, _WORDS = 160, 6


@dataclass(frozen=True)
class Fingerprint:
    """Of a run, as a rank or a checkpoint knows it."""

    recipe_sha256: str
    train_images: int
    data_sha256: str
    init_sha256: str  # of the weights of --init; empty: drawn from the seed
    drawn_sha256: str  # of the network's weights as this rank drew them from the seed; another torch may draw others
    conditions: Conditions
    replayed_sha256: str = ""
    data_revision: str = ""  # the commit of a data set of the hub; empty: it is none of the hub's
    operators: str = ""  # by portable arithmetic, of `operators_of_passes`; empty for other precisions

    def check_same_run(self, other: "Fingerprint", whose: str) -> None:
        """UserError if `other`, a checkpoint's, is of another recipe, data set or initial weights."""
        differing = _differing(other.as_dict(), self.as_dict())
        for key in filter(differing.get, _WHAT):
            both = "{} {}, now {}".format(key, *differing[key])
            raise UserError(f"{whose} was trained with {_WHAT[key]} ({both}); choose another --out, or give --fresh")

    def check_joins(self, run: "Fingerprint", mixed: bool) -> None:
        """UserError if this rank doesn't belong to a `run` at work, which may allow `mixed` conditions."""
        unequal, _ = _unequal(run.as_dict(), self.as_dict(), mixed)
        for key, (theirs, mine) in unequal.items():
            both = f"{key} is {mine} on {socket.gethostname()}, of the run it is {theirs}"
            raise UserError(f"{_WHAT.get(key, 'other conditions')}: {both}; all ranks of a run need the same")

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> "Fingerprint":
        """From what `as_dict` gave; KeyError or TypeError if it is something else."""
        return cls(**{field.name: tree[field.name] for field in fields(cls)})  # type: ignore[arg-type]


def fingerprint_of(
    job: Job, train: Source, held: Source, drawn: str = "", conditions: Conditions | None = None, operators: str = ""
) -> Fingerprint:
    """Of a job with its data, and on a rank with what its network is: the weights as drawn, and the operators."""
    return Fingerprint(
        recipe_sha256=job.recipe.sha256(), train_images=len(train), data_sha256=data_sha256(train, held),
        init_sha256=weights_sha256(read_initial(job.init, job.recipe).tensors) if job.init is not None else "",
        drawn_sha256=drawn, conditions=conditions or {}, data_revision=commit_of(job.data), operators=operators,
        replayed_sha256=job.replay.head.sha256 if job.replay is not None else "",
    )  # fmt: skip


def fingerprint_on_rank(job: Job, data: Data, model: nn.Module, device: torch.device) -> Fingerprint:
    """Of a job on this rank, with the hash of the weights as they were drawn, and the operators of its passes."""
    recipe, drawn, operators = job.recipe, weights_sha256(model.state_dict()), ""
    if recipe.precision == "portable":
        check_stored(recipe.model.name)
        operators = " ".join(sorted(operators_of_passes(model, recipe)))
    sources = (data.training.source, data.held_out.source)
    return fingerprint_of(job, *sources, drawn, conditions(recipe, device), operators)


def check_ranks_agree(mine: Fingerprint, options: Mapping[str, object], world: Group, mixed: bool) -> list[Conditions]:
    """Compares all ranks' fingerprints, and options, which decide what messages there are, with rank 0's.

    Every rank calls it; UserError on every rank, naming the first that differs, its host, the key and both values.
    Returns the conditions of ranks that have others than rank 0, each once, if they may be `mixed`.
    """
    mine_text = json.dumps([socket.gethostname(), {**options, **mine.as_dict()}])
    host, first = json.loads(world.broadcast_text(mine_text))
    differing = torch.zeros(world.size, dtype=torch.int32, device=world.small_device)
    differing[world.rank] = json.loads(mine_text)[1] != first
    world.all_reduce(differing)
    found: list[Conditions] = []
    # Only ranks that differ send theirs: of a good run the start takes two messages, whatever the number of ranks.
    for place in differing.nonzero().flatten().tolist():
        other_host, other = json.loads(world.broadcast_text(mine_text, place))
        unequal, are_conditions = _unequal(first, other, mixed)
        remedy = "all ranks of a run need the same"
        if are_conditions:
            remedy += ", or --mixed, with which the weights can't be had again bit for bit"
        for key, (one, two) in unequal.items():
            both = f"{key} is {two}, of rank {world.ranks[0]} on {host} it is {one}"
            raise UserError(f"rank {world.ranks[place]} on {other_host}: {both}; {remedy}")
        if other["conditions"] not in found:
            found.append(other["conditions"])
    return found


def changes(then: Conditions, now: Conditions) -> str:
    """How conditions differ, for one line."""
    return "; ".join(f"{key} was {one}, is {two}" for key, (one, two) in _differing(then, now).items())


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any], mixed: bool) -> tuple[Differences, bool]:
    """How two fingerprints differ, and whether they do in their conditions alone."""
    result = _differing(*({key: value for key, value in each.items() if key != "conditions"} for each in (one, two)))
    return (result, False) if result or mixed else (_differing(one["conditions"], two["conditions"]), True)


def _differing(one: Mapping[str, object], two: Mapping[str, object]) -> Differences:
    keys = sorted(one.keys() | two.keys())
    return {key: _shown(one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)}


def _shown(one: object, two: object) -> tuple[str, str]:
    """Both values; of long lists of words only the first ones that the other lacks."""
    if not (isinstance(one, str) and isinstance(two, str) and len(one) + len(two) > _LONG):
        return repr(one), repr(two)
    words, others = dict.fromkeys(one.split()), dict.fromkeys(two.split())
    mine, theirs = ([word for word in a if word not in b] for a, b in ((words, others), (others, words)))
    first, second = (repr(" ".join(x[:_WORDS] + ["..."] * (len(x) > _WORDS))) for x in (mine, theirs))
    return first, second


_IMAGES = 2
_CLASSES = 10
STORED = "operators.json"


def operators_of_passes(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """The words (`arithmetic.operators_of`) of forward, loss and backward of a copy of the network, on the CPU."""
    trial, settings = copy.deepcopy(model).cpu().train(), recipe.data.augment
    images, labels = torch.zeros(_IMAGES, recipe.data.channels, *recipe.data.sizes.sides), torch.zeros(_IMAGES).long()
    mixed = (labels, torch.ones(_IMAGES)) if settings.mixup or settings.cutmix else (None, None)
    batch = Batch(images, labels, np.arange(_IMAGES), 0, *mixed)
    with torch.random.fork_rng(devices=[]):
        return operators_of(lambda: loss_of(recipe, trial(images), labels, batch).backward())


def words_of(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    """The words of a network by name, with the options, channels and image size of its stored entry."""
    images, labels = torch.zeros(_IMAGES, entry["channels"], *sides(entry["size"])), torch.zeros(_IMAGES).long()
    with torch.random.fork_rng(devices=[]):
        model = Model(name=name, options=entry["options"])
        trial = construct(model, classes=_CLASSES, channels=entry["channels"]).train()
        return operators_of(lambda: F.cross_entropy(trial(images), labels, label_smoothing=0.1).backward())


def code_of(words: tuple[str, ...]) -> str:
    """A hexadecimal digit for each word: a change reaches nearly all words behind it."""
    return "".join(word[-1] for word in words)


def library_of(name: str) -> str:
    """Name and version of the library that a network is of; empty: torusgd."""
    library, colon, _ = name.partition(":")
    return f"{library} {found}" if colon and (found := version_of(library)) else ""


def check_stored(name: str) -> None:
    """UserError if a network whose operators are stored, by its library's version, has others by this torch."""
    entry = json.loads(files(__package__).joinpath(STORED).read_text()).get(name)
    if entry is None or entry["library"] != library_of(name):
        return
    words = words_of(name, entry)
    # Sorted: C++ may work out the arguments of a function in any order, and builds for x86 and aarch64 differ in it. A
    # word has the hashes of what made its operands, so the same words are the same computation.
    if sorted(code := code_of(words)) != sorted(entry["code"]):
        pairs = zip(code, entry["code"], strict=False)
        place = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(words) - 1)
        both = f"torch {torch.__version__} computes {name} otherwise than torch {entry['torch']}"
        what = f"{both}, from operator {place} of {len(words)} on, {words[place].partition('.')[0]}"
        remedy = f"use torch {entry['torch']}, or precision: float32"
        raise UserError(f"portable arithmetic: {what}: weights would have other bits; {remedy}")

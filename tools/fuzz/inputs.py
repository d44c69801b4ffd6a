"""The kinds of inputs, each with what is done with it; no ranks are started."""

import contextlib
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

import torusgd
from torusgd.data.tar_index import make_index, write_index
from torusgd.errors import UserError
from torusgd.models import build_model
from torusgd.plan.cluster import load_cluster, load_software
from torusgd.recipe.data_schema import Data
from torusgd.recipe.load import load_recipe, recipe_source
from torusgd.recipe.schema import Model
from torusgd.run.fingerprint import Fingerprint
from torusgd.run.saving import RunState
from torusgd.run.trained_weights import open_trained
from torusgd.rundir.checkpoint import FILES, MANIFEST, Checkpoint, write_checkpoint
from torusgd.rundir.run_dir import dump_recipe

from . import run_files
from .mutations import WORDS, damaged, drawn, plain_values, with_size
from .tally import Tally, fed
from .uses import (
    arrays_of,
    chosen,
    compared,
    decoded,
    gone_on,
    predicted,
    read_first,
    read_shards,
    run_command,
    scheduled,
    shown,
)

PACKAGE = Path(torusgd.__file__).parent
FINGERPRINT = Fingerprint("recipe", 100, "", "", "", {})
Inputs = Iterator[tuple[str, Callable[[], object]]]
"""a name, and what is done with the input"""


class Fuzz:
    """The kinds of inputs; each yields (name, what to do with it).

    Args:
        seed: Of all that is drawn.
        folder: An empty one, for files.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.kinds: dict[str, tuple[int, Callable[[int, random.Random], Inputs]]] = {
            "recipes": (250, self.recipes),
            "overrides": (150, self.overrides),
            "commands": (120, self.commands),
            "pictures": (250, self.pictures),
            "arrays": (120, self.arrays),
            "IDX": (60, self.idx),
            "tar shards and lists": (160, self.shards),
            "checkpoints": (120, self.checkpoints),
            "published results": (60, self.tables),
            "network profiles": (80, self.profiles),
            "clusters and software": (120, self.machines),
            "plans": (50, self.plans),
            "runs": (120, self.runs),
            **run_files.kinds(self.file),
        }

    def run(self, kind: str, share: float) -> Tally:
        """All inputs of a kind, or a share of them."""
        count, make = self.kinds[kind]
        tally = Tally(kind)
        for name, use in make(max(5, round(share * count)), random.Random(f"{self.seed} {kind}")):
            fed(tally, name, use)
        return tally

    def file(self, name: str, data: bytes) -> Path:
        """A file of this run's folder with that content."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def recipes(self, count: int, rng: random.Random) -> Inputs:
        """Recipe files: built-in ones damaged, and trees with a drawn value at a drawn place."""
        names = sorted(path.stem for path in (PACKAGE / "recipe").glob("*.yaml"))
        texts = [damaged(rng, recipe_source(rng.choice(names)).encode()) for _ in range(count // 2)]
        for value in drawn(plain_values(), count - len(texts), self.seed):
            tree = load_recipe(rng.choice(names)).recipe.as_dict()
            section = rng.choice([tree, *(each for each in tree.values() if isinstance(each, dict))])
            section[rng.choice(list(section))] = value
            texts.append(json.dumps(tree).encode())
        for number, text in enumerate(texts):
            path = self.file(f"recipe-{number}.yaml", text)
            yield path.name, partial(scheduled, str(path), [])

    def overrides(self, count: int, rng: random.Random) -> Inputs:
        """Items of `--set` on the recipe digits."""
        keys = [
            "seed",
            "data",
            "data.mean",
            "data.options.noise",
            "stages",
            "stages.0.until",
            "stages.9.lr",
            "rate.lr",
            "rate.warmup",
            "x",
        ]
        keys += [
            *[
                "model",
                "evaluate.every",
                "virtual_workers",
                "runtime.buckets",
                "runtime.profile",
                "a.b.c",
                "model.name.x",
            ],
            "",
        ]
        values = [word.decode(errors="replace") for word in WORDS] + drawn(st.text(max_size=20), count // 2, self.seed)
        for _ in range(count):
            item = f"{rng.choice(keys)}={rng.choice(values)}"
            yield item, partial(scheduled, "digits", [item])

    def commands(self, count: int, rng: random.Random) -> Inputs:
        """Command lines that start no ranks: `train` is always given an --out that is a file."""
        taken = self.file("taken", b"no folder")
        broken = self.file("broken.safetensors", b"\xff" * 64)
        lines = [
            ["plan", "digits", "--cluster", "abci", "--devices", "8"],
            [
                "plan",
                "digits",
                "--cluster",
                "abci",
                "--devices",
                "16",
                "--allreduce",
                "torus:halving/ring",
                "--grid",
                "4x4",
            ],
            ["plan", "digits", "--cluster", "abci", "--devices", "8", "--set", "seed=3", "--buckets", "cubic"],
            ["recipes", "digits"],
            ["data", "info", "digits"],
            ["data", "info", str(self.folder)],
            ["eval", str(broken), "--model", "resnet18"],
            ["polish", str(taken), "--set", "seed=1"],
            ["train", "digits", "--out", str(taken), "--workers", "1", "--checkpoint-every", "1ep"],
            ["rehearse", "digits", "--cluster", "abci", "--devices", "x"],
        ]
        for words in lines:  # what a command imports when it first runs, for seconds, is no input's doing
            with contextlib.suppress(UserError):
                run_command(words)
        odd = ["-1", "0", "1e999", "nan", "--", "--no-such", "-x", "/dev/null", "..", "4x", "x4", "0x0", "ring", ""]
        odd += ["auto", "\u202e", "9" * 30]
        for _ in range(count):
            words = list(rng.choice(lines))
            at = rng.randrange(1, len(words))
            if "--out" not in (words[at], words[at - 1]):
                words[at] = rng.choice(odd)
            yield " ".join(words)[:80], partial(run_command, words)

    def pictures(self, count: int, rng: random.Random) -> Inputs:
        """JPEG and PNG bytes: damaged, with other sizes in their headers, and with a scan many times over."""
        noise = np.random.default_rng(self.seed).integers(0, 256, (61, 83, 3), dtype=np.uint8)
        picture = Image.fromarray(noise)
        kinds: list[tuple[str, str, dict[str, Any]]] = [
            ("RGB", "JPEG", {}), ("RGB", "JPEG", {"progressive": True}), ("CMYK", "JPEG", {"progressive": True}),
            ("L", "JPEG", {}), ("RGB", "PNG", {}), ("RGBA", "PNG", {}), ("P", "PNG", {}),
        ]  # fmt: skip
        for number in range(count):
            mode, kind, options = rng.choice(kinds)
            stream = io.BytesIO()
            picture.convert(mode).save(stream, kind, **options)
            data = stream.getvalue()
            match rng.randrange(4):
                case 0 if kind == "JPEG":
                    last = data[data.rindex(b"\xff\xda") : -2]
                    data = data[:-2] + last * rng.choice((10, 90, 5000)) + data[-2:]
                    data = with_size(rng, data)
                case 1:
                    data = with_size(rng, data)
                case _:
                    data = damaged(rng, data)
            yield f"picture {number} {mode} {kind}", partial(decoded, data)

    def arrays(self, count: int, rng: random.Random) -> Inputs:
        """.npz files and folders of .npy files."""
        good = arrays_of(8)
        zipped, packed = io.BytesIO(), io.BytesIO()
        np.savez(zipped, **good)
        np.savez_compressed(packed, **good)
        data = Data(source="numpy", image_size=4, channels=1, mean=(0.5,), std=(0.5,))
        for number in range(count):
            if number % 2:
                path = self.file(f"set-{number}.npz", damaged(rng, rng.choice((zipped, packed)).getvalue()))
            else:
                path, torn = self.folder / f"set-{number}", rng.choice(list(good))
                for name, array in good.items():
                    stream = io.BytesIO()
                    np.save(stream, array)
                    content = stream.getvalue()
                    self.file(f"{path.name}/{name}.npy", damaged(rng, content) if name == torn else content)
            yield path.name, partial(read_first, data, path)

    def idx(self, count: int, rng: random.Random) -> Inputs:
        """Folders as MNIST's, one of the four files damaged."""
        good = arrays_of(8)
        data = Data(source="mnist", image_size=4, channels=1, mean=(0.5,), std=(0.5,))
        for number in range(count):
            path, torn = self.folder / f"idx-{number}", rng.randrange(4)
            for each, (name, array) in enumerate(good.items()):
                stem, dims = name.replace("eval", "t10k").replace("_", "-"), array.ndim
                header = bytes((0, 0, 8, dims)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
                content = header + array.astype(np.uint8).tobytes()
                self.file(f"{path.name}/{stem}-idx{dims}-ubyte", damaged(rng, content) if each == torn else content)
            yield path.name, partial(read_first, data, path)

    def shards(self, count: int, rng: random.Random) -> Inputs:
        """A tar file of two that is damaged before it is indexed, or after; an index; a list of files."""
        picture = io.BytesIO()
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(picture, "JPEG")
        formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
        for number in range(count):
            path = self.folder / f"shards-{number}"
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w", format=rng.choice(formats)) as archive:
                for each in range(4):
                    folder = "long" * rng.choice((1, 30))
                    for kind, content in ((".jpg", picture.getvalue()), (".cls", b"%d" % (each % 2))):
                        member = tarfile.TarInfo(f"{folder}/{each}{kind}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
            good = stream.getvalue()
            for split in ("train", "val"):
                self.file(f"{path.name}/{split}.tar", good)
            torn = rng.choice(("before", "after", "index", "list"))
            if torn == "before":
                self.file(f"{path.name}/train.tar", damaged(rng, good))
            else:
                write_index(path / "index.safetensors", make_index(path))
            if torn == "after":
                self.file(f"{path.name}/train.tar", damaged(rng, good))
            if torn == "index":
                self.file(f"{path.name}/index.safetensors", damaged(rng, (path / "index.safetensors").read_bytes()))
            if torn == "list":
                self.file(f"{path.name}/a.jpg", picture.getvalue())
                for split in ("train", "val"):
                    self.file(f"{path.name}/{split}.csv", damaged(rng, b"path,label\n" + b"a.jpg,cat\n" * 5))
            yield f"{path.name} {torn}", partial(read_shards, path, torn)

    def checkpoints(self, count: int, rng: random.Random) -> Inputs:
        """Checkpoints with one file damaged, half of them with a manifest that says that all is well."""
        recipe = load_recipe("digits").recipe
        model = build_model(Model(name="digits-net"), classes=10, channels=1, image_size=8, seed=0).state_dict()
        tensors = {f"model/{name}": each for name, each in model.items()}
        metadata = {"recipe": json.dumps(recipe.as_dict()), "classes": json.dumps([str(digit) for digit in range(10)])}
        progress = RunState(FINGERPRINT, step=3).as_dict()
        good = write_checkpoint(self.folder / "good", Checkpoint(tensors, progress), metadata)
        contents = {name: (good / name).read_bytes() for name in (*FILES, MANIFEST)}
        for number in range(count):
            torn = rng.choice(list(contents))
            content = contents[torn]
            head = min(len(content), 3000)  # of the weights the header, where all that can go wrong is
            changed = {**contents, torn: damaged(rng, content[:head]) + content[head:]}
            if number % 2 and torn != MANIFEST:
                sums = {name: hashlib.sha256(changed[name]).hexdigest() for name in FILES}
                changed[MANIFEST] = json.dumps(sums).encode()
            for name, each in changed.items():
                self.file(f"checkpoint-{number}/{name}", each)
            path = self.folder / f"checkpoint-{number}"
            yield f"{path.name} {torn}", partial(open_trained, path, None, None, None)
            yield f"{path.name} {torn}", partial(gone_on, path, FINGERPRINT)

    def tables(self, count: int, rng: random.Random) -> Inputs:
        """Tables of published results, cut to three rows."""
        head, *rows = (PACKAGE / "plan" / "published.csv").read_bytes().splitlines(keepends=True)
        for number in range(count):
            path = self.file(f"table-{number}.csv", damaged(rng, head + b"".join(rng.sample(rows, 3))))
            yield path.name, partial(predicted, path)

    def profiles(self, count: int, rng: random.Random) -> Inputs:
        """Network profiles, as `torusgd tune` writes them."""
        link = {"latency": 1e-4, "latency_error": 1e-6, "per_byte": 1e-9, "per_byte_error": 1e-11}
        timings = [
            {"size": size, "algorithm": name, "grid": None, "chunks": 1, "median": 1e-3}
            for size in (4096, 1 << 20)
            for name in ("native", "ring")
        ]
        tree = {
            "version": 2,
            "backend": "gloo",
            "hosts": [0, 0, 1, 1],
            "message": 1e-5,
            "inside": link,
            "between": link,
        }
        good = json.dumps({**tree, "timings": timings, "crowding": [{"ranks": 2, "slowdown": 1.5}]}, indent=1).encode()
        for number in range(count):
            path = self.file(f"profile-{number}.json", damaged(rng, good))
            yield path.name, partial(chosen, path)

    def machines(self, count: int, rng: random.Random) -> Inputs:
        """Cluster and software files, in a plan."""
        for number in range(count):
            folder = rng.choice(("clusters", "software"))
            good = rng.choice(sorted((PACKAGE / "plan" / folder).glob("*.yaml"))).read_bytes()
            path = self.file(f"machine-{number}.yaml", damaged(rng, good))
            load = load_cluster if folder == "clusters" else load_software
            yield f"{path.name} {folder}", partial(load, str(path))
            if number % 10 == 0:
                cluster = str(path) if folder == "clusters" else "abci"
                words = ["plan", "digits", "--cluster", cluster, "--devices", "8"]
                words += ["--software", str(path)] if folder == "software" else []
                yield " ".join(words), partial(run_command, words)

    def plans(self, count: int, rng: random.Random) -> Inputs:
        """Plans for `train --plan`."""
        good = json.dumps({"recipe": "digits", "devices": 8, "stages": [{"batch": 96, "seconds": 0.1}]}).encode()
        for number in range(count):
            path = self.file(f"plan-{number}.json", damaged(rng, good))
            yield path.name, partial(compared, path)

    def runs(self, count: int, rng: random.Random) -> Inputs:
        """Folders of runs, for the pages of `torusgd report`; two folders in three are damaged in one file."""
        step = {"epoch": 0.5, "loss": 2.0, "lr": 0.1, "batch": 96, "seconds": 0.2, "step_seconds": 0.1,
                "data_seconds": 0.0, "sync_seconds": 0.01, "update_seconds": 0.01,
                "slowest": {"rank": 1, "behind": 0.1, "cause": "data"}}  # fmt: skip
        evaluation = {"event": "evaluation", "step": 2, "seconds": 0.3, "top1": 0.5, "top5": 0.9, "loss": 1.0}
        events = [*({"step": number, **step} for number in (1, 2)), evaluation]
        summary = {"top1": 0.5, "seconds": 0.4, "steps": 2, "world_size": 2, "shares": {"0": 6}, "lost_ranks": [1],
                   "predicted": {"step_seconds": 0.1}, "conditions": {"cpu": "x"}}  # fmt: skip
        good = {
            "recipe.yaml": dump_recipe(load_recipe("digits").recipe).encode(),
            "events.jsonl": "".join(json.dumps(event) + "\n" for event in events).encode(),
            "summary.json": json.dumps(summary).encode(),
            "status.json": json.dumps({"phase": "finish", "runtime": {"allreduce": "ring"}, "data": "x"}).encode(),
        }
        for number in range(count):
            for name, data in good.items():
                is_damaged = name == list(good)[number % 6] if number % 6 < len(good) else False
                self.file(f"run-{number}/{name}", damaged(rng, data) if is_damaged else data)
            folder = self.folder / f"run-{number}"
            yield folder.name, partial(shown, folder)

"""A run whose folder is in a bucket: it works in a folder of this machine, and what it must keep goes to the bucket.

The bucket decides: another machine that is given the same URL goes on from the newest checkpoint there.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import RunError, UserError, as_run_error, as_user_error
from ..storage import Store, unusable, url_of
from ..untrusted import is_there, read_text
from ..weights import Tensors, load_weights, write_text
from .checkpoint import FILES as CHECKPOINT_FILES
from .checkpoint import LIGHT, MANIFEST, list_checkpoints, read_checkpoint
from .lease import OBJECT, Lease
from .run_dir import FILES, RunDir
from .run_view import HEAD, REQUEST_OBJECT, STATUS, working_folder

# File with a name that the run drew when it began: what is left here of an earlier run has another one.
NAME = ".run-name"
_RECIPE, _SUMMARY = "recipe.yaml", "summary.json"
# Files beside the checkpoints, in the order in which they go there: the summary says that the rest is whole.
_SMALL = (_RECIPE, *(name for name in FILES if name not in (STATUS, _SUMMARY)), _SUMMARY)

# Names of what there is to begin from, with the step.
_WHOLE = re.compile(r"checkpoints/step-([0-9]{8})")
_LIGHT = re.compile(rf"verify/step-([0-9]{{8}}){re.escape(LIGHT)}")


def _is_own(name: str) -> bool:
    """Whether a run copies a file there under this name."""
    above, _, last = name.rpartition("/")
    return name in _SMALL or bool(_LIGHT.fullmatch(name) or (_WHOLE.fullmatch(above) and last in CHECKPOINT_FILES))


class Mirror:
    """What a run has in a bucket, its --out, and the folder in which it works; `warn` gets lines for people."""

    def __init__(self, url: str, warn: Callable[[str], None] = lambda line: None) -> None:
        self.url, self.folder, self._store, self._warn = url, working_folder(url), Store(url), warn
        self._lease = Lease(self._store, self.folder)
        self._is_seen = False

    @classmethod
    def at(cls, out: Path, warn: Callable[[str], None] = lambda line: None) -> "Mirror | None":
        """That of a run's `--out`; None: it is a folder."""
        return None if (url := url_of(out)) is None else cls(url, warn)

    @contextmanager
    def held(self, fresh: bool) -> Iterator[None]:
        """Takes the run's lock and makes the working folder one of the run in the bucket, or with `fresh` of a new one.

        UserError if the bucket can't be used, or another machine is at work; RunError if it fails, or no checkpoint is
        good.
        """
        try:
            with RunDir(self.folder).lock():
                there, is_run = self._there()
                if there and not is_run and (not fresh or {_RECIPE, *FILES} & there.keys()):
                    raise UserError(f"--out {self.url}: holds {min(there)!r} but no run; choose another place")
                self._lease.acquire(self._warn)
                self._begin(fresh)
        except OSError as error:
            raise unusable(f"--out {self.url}: can't be used", error) from error
        with self._lease.renewed(self._warn, self._exchange):
            yield

    def put_checkpoint(self, checkpoint: Path, keep: int) -> None:
        """Copies a checkpoint there, with the files beside it, and leaves the newest `keep`; OSError as it comes."""
        self._lease.check()
        self._put_small(but=_SUMMARY)
        # The manifest is written last and deleted first: a checkpoint that has one is whole.
        for name in (*CHECKPOINT_FILES, MANIFEST):
            self._store.put(checkpoint / name, f"checkpoints/{checkpoint.name}/{name}")
        # Nothing newer than this one is deleted, as on a disk.
        for old in [name for name in self._checkpoints() if name <= checkpoint.name][keep:]:
            self._delete(old)

    def put_light(self, checkpoint: Path) -> None:
        """Copies a light checkpoint there; OSError as it comes."""
        self._lease.check()
        self._store.put(checkpoint, f"verify/{checkpoint.name}")

    def put_result(self) -> None:
        """Copies the events there, and the weights and the summary of a finished run; RunError if that can't be."""
        with as_run_error(f"{self.url}: can't be written", "the same command tries again"):
            self._lease.check()
            self._exchange()
            self._put_small(but="" if is_there(self.folder / _SUMMARY) else _SUMMARY)

    def _exchange(self) -> None:
        """While the run is at work its status goes there, and requests to it come here."""
        if not (self.folder / STATUS).exists():
            return  # nor is there a rank yet to see a request: as it starts the run forgets those of an earlier one
        if not self._is_seen:  # without them there is no run for others, and the first checkpoint may be far off
            for name in (NAME, _RECIPE):
                self._store.put(self.folder / name, name)
            self._is_seen = True
        self._store.put(self.folder / STATUS, STATUS)
        requests = filter(REQUEST_OBJECT.fullmatch, self._store.sizes())
        for _, name in sorted((self._store.modified(name), name) for name in requests):
            write_text(self.folder / name.rpartition("-")[0], self._store.read(name).decode(errors="replace"))
            self._store.delete(name)

    def _there(self) -> tuple[dict[str, int], bool]:
        """What is in the bucket beside locks, and whether it is a run."""
        there = {name: size for name, size in self._store.sizes().items() if not OBJECT.fullmatch(name)}
        return there, _RECIPE in there and self._store.read(_RECIPE).decode(errors="replace").startswith(HEAD)

    def _begin(self, fresh: bool) -> None:
        with suppress(OSError):  # not everyone who may write may do that; the parts cost their room alone
            self._store.abort_uploads(_is_own)
        there, is_run = self._there()
        (self.folder / STATUS).unlink(missing_ok=True)  # of an earlier part
        # They were of an earlier run, which may have ended before it saw them.
        for name in filter(REQUEST_OBJECT.fullmatch, there):
            self._store.delete(name)
        if fresh and is_run:
            for checkpoint in self._checkpoints():
                self._delete(checkpoint)
            small = [name for name in (_SUMMARY, STATUS, *_SMALL, NAME) if name in there]
            for name in (*filter(_LIGHT.fullmatch, there), *small):
                self._store.delete(name)
        # Another name: what lies here is of an earlier run of this URL, and would be taken for a newer checkpoint.
        name = ""
        with suppress(OSError, ValueError):
            name = read_text(self.folder / NAME)
        is_named = is_run and not fresh and NAME in there  # what was copied there from a disk has no name yet
        if not is_named or name != self._store.read(NAME).decode():
            self._forget()
        if not is_named:
            write_text(self.folder / NAME, secrets.token_hex(8))
        if fresh or not is_run:
            return
        is_newer = self._fetch_newest()
        for name in (NAME, *_SMALL):
            if name in there and (is_newer or not is_there(self.folder / name)):
                self._store.get(name, self.folder / name)

    def _fetch_newest(self) -> bool:
        """Brings the newest good checkpoint here; False where this machine has it, or a newer one of the same run."""
        here = next((path.name for path in list_checkpoints(self.folder / "checkpoints")), "")
        there = self._checkpoints()
        for name in there:
            if name <= here:
                return False
            partial, final = (self.folder / "checkpoints" / each for each in (f".{name}.partial", name))
            for _ in range(2):  # a bucket may answer once with what was there before
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                try:
                    for file in (MANIFEST, *CHECKPOINT_FILES):
                        self._store.get(f"checkpoints/{name}/{file}", partial / file)
                    read_checkpoint(partial)
                except (UserError, FileNotFoundError) as error:
                    problem = error
                else:
                    partial.rename(final)
                    return True
            shutil.rmtree(partial)
            self._warn(f"{self.url}/checkpoints/{name}: {problem}; an older one is taken")
        if there and not here:
            remedy = "put a good copy there, or begin anew with --fresh, which deletes them"
            raise RunError(f"{self.url}: none of its {len(there)} checkpoints is good; {remedy}")
        return False

    def _put_small(self, but: str) -> None:
        for name in (NAME, *_SMALL):
            if name != but and is_there(self.folder / name):
                self._store.put(self.folder / name, name)

    def _checkpoints(self) -> list[str]:
        """The names of the whole ones, newest first."""
        found = map(re.compile(rf"checkpoints/(step-[^/]*)/{re.escape(MANIFEST)}").fullmatch, self._store.sizes())
        return sorted((each[1] for each in found if each), reverse=True)

    def _delete(self, checkpoint: str) -> None:
        for name in (MANIFEST, *CHECKPOINT_FILES):
            self._store.delete(f"checkpoints/{checkpoint}/{name}")

    def _forget(self) -> None:
        """Empties the working folder, but for the lock that is held."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.name.startswith("."):
                path.unlink()


class RunCheckpoints:
    """The checkpoints of a run that may be at work, in its folder, or its bucket by way of `copy`; read only."""

    def __init__(self, run: Path, folder: Path, copy: Path) -> None:
        url = url_of(run)
        self._store = None if url is None or folder == working_folder(url) else Store(url)
        self._folder, self._copy = folder, copy

    def steps(self) -> dict[int, str]:
        """The light one, or the folder, of each step; UserError if they can't be listed."""
        with as_user_error(f"{self._folder}: its checkpoints can't be listed"):
            if self._store is not None:
                names = {name.removesuffix(f"/{MANIFEST}") for name in self._store.sizes()}
            else:
                names = {f"checkpoints/{path.name}" for path in list_checkpoints(self._folder / "checkpoints")}
                names |= {f"verify/{path.name}" for path in list_checkpoints(self._folder / "verify", LIGHT)}
        found = [*filter(None, map(_WHOLE.fullmatch, names)), *filter(None, map(_LIGHT.fullmatch, names))]
        return {int(each[1]): each[0] for each in found}

    def read(self, step: int) -> Tensors:
        """The tensors of a checkpoint; UserError if it is damaged, or is not there any more."""
        name = self.steps().get(step)
        if name is None:
            raise UserError(f"the checkpoint of step {step} is not there any more")
        path, is_light = self._folder / name, name.endswith(LIGHT)
        files = [name] if is_light else [f"{name}/{file}" for file in (MANIFEST, *CHECKPOINT_FILES)]
        with as_user_error(f"{path}: can't be read", of=(OSError, ValueError)):
            if self._store is not None:
                path = self._copy / name
                for file in files:
                    (self._copy / file).parent.mkdir(parents=True, exist_ok=True)
                    self._store.get(file, self._copy / file)
            if not is_light:
                return read_checkpoint(path).tensors
            return load_weights(path)[0]

"""The Hugging Face hub: weights and data sets by name, `hf:ORG/NAME@REVISION`, through huggingface_hub."""

# Files are data and never code: weights are a safetensors file, a data set is its Parquet files; a script that would
# make it is not even downloaded.

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError, first_line, needs, retry

# Seconds before each further attempt, which continues the download of the earlier ones.
PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0)
_WEIGHTS = "model.safetensors"
_TABLES = "*.parquet"
_CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps copies of its data sets as Parquet
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Errors of huggingface_hub after which another attempt would end the same way.
_FOR_GOOD = (
    "GatedRepoError", "RepositoryNotFoundError", "DisabledRepoError", "RevisionNotFoundError", "OfflineModeIsEnabled",
    "RemoteEntryNotFoundError", "HFValidationError", "HfUriError", "BadRequestError",
)  # fmt: skip

_LOG_IN = "log in (hf auth login, or HF_TOKEN)"
_REASONS = {
    "GatedRepoError": f"its owner grants access on request; request it on its page, and {_LOG_IN}",
    "RepositoryNotFoundError": f"there is none of that name, or it is private; for a private one {_LOG_IN}",
    "RevisionNotFoundError": "it has no such revision",
    "RemoteEntryNotFoundError": "the repository holds no such file",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    """The name after `hf:`."""

    repository: str  # ORG/NAME, or NAME alone for a few old data sets
    revision: str  # a branch, tag or commit; empty: the newest

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f"@{self.revision}" if self.revision else "")


def hub_name(text: Path | str | None) -> Name | None:
    """The hub's name that a user gave instead of a path; None: it is none.

    >>> hub_name("hf:org/flowers@v2"), hub_name("runs/digits"), hub_name("hf://datasets/org/flowers")
    (Name(repository='org/flowers', revision='v2'), None, None)
    """
    found = re.fullmatch(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([^@]+))?", str(text)) if text is not None else None
    return Name(found[1], found[2] or "") if found is not None else None


def weight_file(name: Name, flag: str) -> Path:
    """The model.safetensors of a repository, in the hub's cache; its folder has the name of the commit."""
    download = partial(_hub(flag).hf_hub_download, name.repository, _WEIGHTS, revision=name.revision or None)
    return Path(_patiently(download, flag, f"{_WEIGHTS} of {name}"))


def table_folder(name: Name) -> Path:
    """The folder with the Parquet files of a data set in the hub's cache; its name is that of the commit."""
    which = {"repo_type": "dataset", "revision": name.revision or None, "allow_patterns": [_TABLES]}
    download = partial(_hub("--data").snapshot_download, name.repository, **which)
    folder = Path(_patiently(download, "--data", f"the data set {name}"))
    if not any(folder.rglob(_TABLES)):
        raise UserError(
            f"--data {name}: holds no Parquet file, and scripts that make a data set are never run; where the hub has "
            f"converted it, give hf:{name.repository}@{_CONVERTED}"
        )
    return folder


def pinned(path: Path | None, commit: str = "") -> Path | None:
    """A data set of the hub with its commit, so that all ranks and every later start read the same; others unchanged.

    This downloads its files, in the launcher. `commit` is that of a run that continues, for a path without a revision.
    """
    name = hub_name(path)
    if name is None:
        return path
    folder = table_folder(replace(name, revision=name.revision or commit))
    return Path(str(replace(name, revision=folder.name)))


def commit_of(path: Path | None) -> str:
    """The commit that a `pinned` path names; empty if it names none."""
    name = hub_name(path)
    return name.revision if name is not None and _COMMIT.fullmatch(name.revision) else ""


def _hub(flag: str) -> Any:
    with needs(f"{flag}: needs huggingface_hub", "huggingface_hub (the extra huggingface)"):
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    if not sys.stderr.isatty():
        disable_progress_bars()
    # Its warning that no file is there is our own error.
    logging.getLogger("huggingface_hub._snapshot_download").setLevel(logging.ERROR)
    return huggingface_hub


def _patiently(call: Callable[[], T], flag: str, what: str) -> T:
    """The result of a call of the hub's client, tried again after errors that may be transient."""
    try:
        return retry(call, PAUSES, lambda error: _kinds(error).isdisjoint(_FOR_GOOD))
    except Exception as error:  # of the client, of its HTTP library, of the disk
        offline = f"{first_line(error)}; without a net set HF_HOME to a folder that holds it, and HF_HUB_OFFLINE=1"
        # The first that fits: a gated repository's error is a kind of that of a missing one.
        reason = next((reason for kind, reason in _REASONS.items() if kind in _kinds(error)), offline)
        raise UserError(f"{flag}: can't get {what}: {reason}") from None


def _kinds(error: Exception) -> set[str]:
    return {kind.__name__ for cause in (error, error.__cause__) for kind in type(cause).__mro__}

"""Imports: a user's own code named in a recipe as `package.module:factory`, and the folder that torch leaves behind."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .errors import UserError


def import_factory(path: str, *, key: str) -> Callable[..., Any]:
    """The callable that `package.module:factory` names in a recipe, at a key such as `model.name`.

    UserError if the module can't be found, or has no such callable; an error inside the module passes through.

    >>> import_factory("collections:Counter", key="model.name")("aab")["a"]
    2
    """
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise UserError(f"{key}: write a factory of your own as package.module:factory, got {path!r}")
    # Modules in the current folder are found too, after all installed ones: a console script, unlike `python -m`, does
    # not look there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{key}: can't import {module_name} ({error}); run where its folder is, or set PYTHONPATH"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UserError(f"{key}: {module_name} has no callable {name!r} ({module.__file__})")
    return factory


def remove_empty_cache() -> None:
    """Removes, at the end of a process, the folder for compiled code that torch has made on import, if it is empty."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(cache) == tempfile.gettempdir():
        with suppress(OSError):
            os.rmdir(cache)

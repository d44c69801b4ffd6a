"""Weights as files and as one hash: safetensors, atomic writes, and the one place that reads a foreign .pth."""

import errno
import hashlib
import os
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import UserError, first_line
from .untrusted import check_archive, check_regular

Tensors = dict[str, Tensor]


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """One hash over parameters and buffers.

    For each, sorted by name: the bytes of the name, NUL, the dtype's name (`float32`), NUL, the dims joined by commas,
    NUL, then the values in row-major order, little-endian.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        dtype, dims = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{dims}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file whole or not at all, each tensor under all its names; OSError as it comes."""
    plain: Tensors = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # safetensors takes no two tensors of one memory.
        plain[name] = value.clone() if value.numel() and value.data_ptr() in memory else value
        memory.add(value.data_ptr())
    with replacing(path) as temporary:
        try:
            save_file(plain, temporary, metadata=dict(metadata))
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def load_weights(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors by name and the metadata of a weight file: safetensors, or a torch file of plain tensors.

    A torch file has no metadata; it may hold the tensors under `state_dict` or `model`, with a `module.` prefix.
    """
    try:
        check_regular(path)
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as file:
                metadata = dict(file.metadata() or {})
            return load_file(path), metadata
        check_archive(path)
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = first_line(error)
        # An unpickler's message helps nobody, and torch's own text advises people to unpickle it all the same.
        if isinstance(error, pickle.UnpicklingError | EOFError | LookupError):
            reason = "it is damaged, or holds more than tensors"
        raise UserError(
            f"{path}: can't be read as weights ({reason}); give a .safetensors or a .pth of tensors"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    if not isinstance(tree, dict) or not all(map(_is_plain, tree.values())):
        raise UserError(f"{path}: holds no plain table of dense tensors; save model.state_dict()")
    return {str(name).removeprefix("module."): tensor for name, tensor in tree.items()}, {}


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.layout is torch.strided and not value.is_meta and not value.is_quantized


def match_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """UserError naming the first tensor that is missing, unknown, or of another shape or kind."""
    if missing := expected.keys() - tensors.keys():
        raise UserError(f"{where}: lacks {min(missing)!r}; is it a file of another model?")
    if unknown := tensors.keys() - expected.keys():
        raise UserError(
            f"{where}: holds {min(unknown)!r}, which the model doesn't have; is it a file of another model?"
        )
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            shapes = f"{tuple(tensors[name].shape)}, the model's is {tuple(tensor.shape)}"
            raise UserError(f"{where}: {name!r} is of shape {shapes}; is it for another number of classes?")
        if tensors[name].is_floating_point() != tensor.is_floating_point():
            raise UserError(f"{where}: {name!r} is of {tensors[name].dtype}, the model's is {tensor.dtype}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside a file that replaces the file, flushed to disk, when the block ends without an error.

    If `path` is a link, it replaces the target. OSError if the folder can't be written, or `path` is a device or pipe.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "Is a device or a pipe", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(exist_ok=False)
    rights = temporary.stat().st_mode  # by the user's umask; `tempfile` and safetensors make 0600
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(rights)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file whole or not at all; bytes of file names that are no UTF-8 are written as escapes."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")

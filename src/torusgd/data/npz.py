"""Arrays of an .npz file mapped where they lie in it, so that the processes of a machine share one copy.

An .npz is a zip file of .npy files. `np.savez` stores them as they are, one after another, and then nothing keeps a
process from mapping them; NumPy itself reads each into the memory of every process.
"""

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LOCAL_HEADER = 30
"""bytes of a zip file's header before the name of a member"""
_BLOCK = 1 << 24


def map_array(path: Path, name: str) -> npt.NDArray[Any] | None:
    """An array of an .npz as `np.savez` writes it, mapped where it lies in the file; None: compressed, or not there.

    Raises:
        ValueError, EOFError, zipfile.BadZipFile: The file is damaged, or is none.
    """
    with zipfile.ZipFile(path) as archive:
        if name not in archive.namelist() or archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
            return None
        info = archive.getinfo(name)
        with archive.open(info) as member:
            read_header = _HEADERS.get(np.lib.format.read_magic(member))
            if read_header is None:
                return None
            shape, fortran, dtype = read_header(member)
            head = member.tell()
    if dtype.hasobject or min(shape, default=0) < 0 or head + math.prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError("its length is not that of its header, or it holds objects")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(_LOCAL_HEADER)  # ends with the lengths of the name and of the extra field after it
    begin = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", local[-4:]))
    content = np.memmap(path, np.uint8, "r", begin, (info.file_size,))
    check = 0
    for start in range(0, len(content), _BLOCK):
        check = zlib.crc32(content[start : start + _BLOCK].data, check)
    if check != info.CRC:
        raise zipfile.BadZipFile(f"bad CRC-32 for {name!r}")
    return np.memmap(path, dtype, "r", begin + head, shape, "F" if fortran else "C") if math.prod(shape) else None


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an .npz that `np.savez` wrote, mapped; those without elements are made anew."""
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        mapped = {name: map_array(path, f"{name}.npy") for name in names}
        return {name: archive[name] if array is None else array for name, array in mapped.items()}

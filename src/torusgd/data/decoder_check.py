"""Whether this machine's decoders give the specified pixels: tried on a set of small pictures, by kind of file.

Libraries differ by version, build and processor in the inverse transform, in how they blow chroma up, and in what they
make of rare kinds. The set (`decoder_set.json`, by `python -m tools.decoder_set`) has pictures of each kind and SHA-256
hashes of what is to come out of them, whole at each scale, in colour and in grey, and cut and scaled.
"""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files

from ..errors import UserError
from .decode import Undecodable, decode, decode_region
from .types import Region

VERSION = 1
"""of the set: other pixels are another one"""
SET = "decoder_set.json"


def sha256_of(data: bytes) -> str:
    """The hash of a picture's pixels, by all ways in which the package decodes; empty if it can't be decoded."""
    digest = hashlib.sha256()
    try:
        for channels in (3, 1):
            for shrink in (1, 2, 4, 8):
                digest.update(decode(data, channels, shrink).tobytes())
            for side in (24, 14, 7, 3):  # of which the last three are cut out of a smaller picture
                part = decode_region(data, channels, lambda *_, n=side: Region(1, 2, 24, 25, n, n, exact=True))
                digest.update(part.tobytes())
    except Undecodable:
        return ""
    return digest.hexdigest()


@cache
def others(is_jpeg: bool) -> tuple[str, ...]:
    """Names of the set's JPEGs, or PNGs, of which this machine's decoders make other pixels."""
    pictures = json.loads(files(__package__).joinpath(SET).read_text())
    return tuple(
        name
        for name, (data, sha256) in pictures.items()
        if name.startswith("JPEG") == is_jpeg and sha256_of(base64.b64decode(data)) != sha256
    )


def require(data: bytes) -> None:
    """UserError if the decoder of a picture's kind of file gives other pixels than the specified ones."""
    is_jpeg = data.startswith(b"\xff\xd8")
    if wrong := others(is_jpeg):
        kind, remedy = "PNG", "take another version of opencv-python-headless"
        if is_jpeg:
            kind, remedy = "JPEG", "pack the images elsewhere, without loss: torusgd data pack PATH OUT --png"
        raise UserError(f"data.pixels: the {kind} decoder of this machine gives other pixels ({wrong[0]}); {remedy}")

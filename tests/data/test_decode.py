import io
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.pictures import encoded, folder_data, photo, psnr, write_folder
from tests.messages import refused, refuses
from torusgd.data import decode as decoders
from torusgd.data.decode import Undecodable, decode, decode_region, fit, picture_size, require_specified
from torusgd.data.geometry import render, scaled
from torusgd.data.pack import Packing, pack
from torusgd.data.pictures import open_folder
from torusgd.data.pipeline import Pipeline
from torusgd.data.types import Region

TURNED = Image.Exif()
TURNED[0x0112] = 6  # "turn by 90 degrees", which is ignored


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def always(region: Region) -> Callable[[int, int], Region]:
    return lambda height, width: region


PHOTO = photo(61, 83)
PICTURES = {
    "420": encoded(PHOTO, quality=90, subsampling="4:2:0"),
    "444": encoded(PHOTO, quality=90, subsampling="4:4:4"),
    "progressive": encoded(PHOTO, progressive=True), "grey jpeg": encoded(PHOTO.convert("L")),
    "exif": encoded(PHOTO, exif=TURNED), "rgb jpeg": encoded(PHOTO, keep_rgb=True), "one pixel": encoded(photo(1, 1)),
    "png": encoded(PHOTO, "PNG"),
    **{f"png {mode}": encoded(PHOTO.convert(mode), "PNG") for mode in ("L", "P", "RGBA")},
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_those_of_pillow(name: str) -> None:
    data = PICTURES[name]
    assert picture_size(data) == by_pillow(data).shape[:2]
    assert np.array_equal(decode(data, 3), by_pillow(data))
    grey = decode(data, 1)
    assert grey.shape[2] == 1
    assert psnr(grey[..., 0], by_pillow(data, "L")) > 45  # a JPEG's own luma, not one made from clipped RGB


def test_cmyk_is_close_to_what_pillow_makes_of_it_and_16_bits_keep_the_upper_byte() -> None:
    data = encoded(PHOTO.convert("CMYK"), quality=95)
    assert psnr(decode(data, 3), by_pillow(data)) > 40
    assert psnr(decode(data, 1)[..., 0], by_pillow(data, "L")) > 40
    values = (np.arange(100 * 90).reshape(100, 90) * 7).astype(np.uint16)
    assert np.abs(decode(encoded(Image.fromarray(values), "PNG"), 1)[..., 0].astype(int) - (values >> 8)).max() <= 1


def png_bomb(height: int, width: int) -> bytes:
    """A few rows of zeros, behind a header that claims many."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress(bytes(1 + 3 * width) * 100, 9)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


JPEG, PNG = PICTURES["420"], PICTURES["png"]
# A well-formed header that claims 65,535 x 65,535 pixels.
HUGE_JPEG = JPEG.replace((61).to_bytes(2, "big") + (83).to_bytes(2, "big"), b"\xff" * 4)
BAD = {
    "empty": b"", "text": b"not a picture at all\n" * 20, "gif": encoded(photo(9, 9), "GIF"),
    "jpeg cut in half": JPEG[: len(JPEG) // 2], "jpeg without its last bytes": JPEG[:-40],
    "jpeg cut in its header": JPEG[:100], "jpeg of three bytes": JPEG[:3],
    "progressive jpeg cut": PICTURES["progressive"][:-200],
    "huge jpeg": HUGE_JPEG, "huge png": PNG[:16] + (10**5).to_bytes(4, "big") * 2 + PNG[24:],
    "png cut": PNG[: len(PNG) // 2], "png cut in its header": PNG[:20], "png header alone": PNG[:60],
    "png with a wrong checksum": PNG[:200] + bytes([PNG[200] ^ 255]) + PNG[201:], "png bomb": png_bomb(12_000, 12_000),
    # A width of 0xFFD9 looks like an end marker, and no colours follow.
    "a size in the last bytes": JPEG[: JPEG.index(b"\xff\xc0") + 7] + b"\xff\xd9",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_decoded_is_refused(name: str) -> None:
    assert HUGE_JPEG != JPEG
    for read in (decode, partial(decode_region, choose=always(Region(0, 0, 8, 8, 8, 8)))):
        refuses(f"a picture: {name}", read, BAD[name], 3, kind=Undecodable)


def test_cuts_and_scan_bombs_are_found_out_and_flaws_that_every_decoder_tolerates_are_no_damage() -> None:
    for data in (JPEG, PNG):
        for end in range(0, len(data) - 16, 97):
            with pytest.raises(Undecodable):
                decode(data[:end], 3)
    frame = JPEG.index(b"\xff\xc0")
    for data in (JPEG + b"more" * 50, JPEG[:frame] + b"\x00\x00\x00" + JPEG[frame:]):
        assert np.array_equal(decode(data, 3), by_pillow(JPEG))
    # The last scan of a progressive JPEG comes many times over.
    data = PICTURES["progressive"]
    for times, height, width in ((1000, 61, 83), (1, 8000, 8000), (40, 7000, 7000)):
        longer = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * times + data[-2:]
        bomb = longer.replace(struct.pack(">HH", 61, 83), struct.pack(">HH", height, width))
        many = re.compile(r"\d+(?= scans)")  # how many is libjpeg's choice
        with refused(f"a progressive JPEG of {width} x {height} pixels", kind=Undecodable, MANY=many):
            decode_region(bomb, 3, lambda h, w: Region(0, 0, h, w, 8, 8))


@pytest.mark.parametrize("name", ["420", "444", "grey jpeg", "progressive", "exif", "restarts"])
def test_a_region_is_the_same_as_cut_from_the_whole_picture(name: str) -> None:
    """However the decoder saves work below the box, not one bit differs."""
    data = PICTURES.get(name) or encoded(PHOTO, restart_marker_blocks=2)
    whole, random = decode(data, 3), np.random.default_rng(0)
    for _ in range(40):
        top, left = map(int, random.integers((60, 82)))
        height, width = map(int, random.integers(1, (62 - top, 84 - left)))
        region = Region(top, left, height, width, 40, 40)
        assert np.array_equal(decode_region(data, 3, always(region)), render(whole, region))


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_a_smaller_decode_loses_less_than_jpeg_does(subsampling: str) -> None:
    picture, shrinks = photo(700, 900, seed=3), set()
    data = encoded(picture, quality=90, subsampling=subsampling)
    full = decode(data, 3)
    assert psnr(full, picture) < 40
    for region in (Region(5, 7, 601, 699, 64, 64), Region(11, 30, 350, 333, 64, 64), Region(0, 0, 700, 900, 64, 82)):
        shrink, taken = fit(region, 700, 900)
        shrinks.add(shrink)
        assert psnr(decode_region(data, 3, always(region)), by_pillow_region(full, taken)) > 43
    assert shrinks == {2, 4}


def by_pillow_region(pixels: np.ndarray, region: Region) -> np.ndarray:
    box = Image.fromarray(pixels[region.top : region.top + region.height, region.left : region.left + region.width])
    return np.asarray(box.resize((region.columns, region.rows), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


def test_fit_keeps_enough_pixels_and_the_shorter_side_is_scaled_as_torchvision_does() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        height, width = map(int, random.integers(1, 3000, 2))
        tall, wide = map(int, random.integers(1, (height + 1, width + 1)))
        top, left = map(int, random.integers((height - tall + 1, width - wide + 1)))
        shrink, taken = fit(Region(top, left, tall, wide, 64, 64), height, width)
        assert taken.top <= top < top + tall <= taken.top + taken.height <= height
        assert taken.left <= left < left + wide <= taken.left + taken.width <= width
        assert taken.height - tall < 2 * shrink
        assert taken.top % shrink == taken.left % shrink == 0
        assert shrink == 1 or (tall / shrink >= 96 and wide / shrink >= 96)
    assert scaled(375, 500, 256) == Region(0, 0, 375, 500, 256, 341)
    assert scaled(500, 375, 256) == Region(0, 0, 500, 375, 341, 256)
    shard = scaled(1, 100_000, 256)  # else 256 x 25,600,000 pixels
    assert (shard.rows, shard.columns, shard.left) == (256, 1024, (100_000 - 4) // 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(300, 350), (37, 41), (1, 90), (224, 224), (1, 1)])
def test_resizing_gives_the_bits_of_torch(size: tuple[int, int], channels: int) -> None:
    pixels = np.asarray(photo(*size))[..., :channels]
    data = encoded(Image.fromarray(pixels[..., 0] if channels == 1 else pixels), "PNG")
    for rows, columns in ((224, 224), (50, 31), (1, 7), size):
        region = Region(size[0] // 3, size[1] // 4, size[0] - size[0] // 3, size[1] - size[1] // 4, rows, columns)
        box = torch.from_numpy(pixels[region.top :, region.left :].copy()).permute(2, 0, 1)[None]
        expected = torch.nn.functional.interpolate(box, (rows, columns), mode="bilinear", antialias=True)[0].numpy()
        rendered = render(pixels, region)
        assert rendered.flags.c_contiguous
        assert np.array_equal(rendered, expected)
        if channels == 3:
            assert np.abs(rendered.astype(int) - by_pillow_region(pixels, region)).max() <= 1
        assert np.array_equal(decode_region(data, channels, always(region)), expected)


def test_the_decoders_here_give_the_specified_pixels_and_others_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    assert decoders.other_decoders(True) == decoders.other_decoders(False) == ()
    root, right = write_folder(tmp_path / "set", train=1, val=1), decode
    decoders.other_decoders.cache_clear()

    def off(data: bytes, channels: int, *rest: Any) -> np.ndarray:
        pixels = right(data, channels, *rest)
        pixels[-1, -1, -1] ^= 1 if data.startswith(b"\xff\xd8") else 0
        return pixels

    monkeypatch.setattr(decoders, "decode", off)
    sources = open_folder(root, 3)
    pipeline = Pipeline(sources[0], folder_data(pixels="portable"), 0)
    with refused("a JPEG decoder with other pixels"):
        pipeline.training_batch(np.arange(2), np.zeros(2, np.int64), augment=True)
    refuses("a JPEG decoder with other pixels", pack, *sources, tmp_path / "out", Packing(None, None, 5), print)
    require_specified(PNG)
    decoders.other_decoders.cache_clear()

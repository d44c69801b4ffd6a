"""The box of a JPEG by libjpeg-turbo's own library: the same bits, or the same refusal, as without it.

What needs the library itself is skipped where there is none (docs/install.md says where it comes from); the rest runs
against stand-ins everywhere.
"""

import ctypes
import io
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.pictures import encoded, photo
from torusgd.data import libturbojpeg
from torusgd.data.crop_resize import render
from torusgd.data.decode import Undecodable, decode, decode_region, picture_size
from torusgd.data.libturbojpeg import LibTurboJpeg
from torusgd.data.types import Pixels, Region

REAL = libturbojpeg.load(simplejpeg)
needs_library = pytest.mark.skipif(REAL is None, reason="no libturbojpeg.so.0 of libjpeg-turbo 3")


class StandIn:
    """A library made of simplejpeg: the picture whole, then cut; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def box(self, data: bytes, size: Any, block: int, shrink: int, box: Any, channels: int, memory: Any) -> Pixels:
        self.asked.append((*size, block, shrink, *box, channels))
        top, left, height, width = box
        return decode(data, channels, shrink)[top : top + height, left : left + width]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(libturbojpeg, "load", lambda simplejpeg: found)
    return found


def outcome(data: bytes, channels: int, region: Region, library: Any) -> Pixels | str:
    """The pixels of a region, or why there are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libturbojpeg, "load", lambda simplejpeg: library)
        try:
            return decode_region(data, channels, lambda height, width: region)
        except Undecodable as error:
            return str(error)


def equal(left: Pixels | str, right: Pixels | str) -> bool:
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right


SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "grey", "rgb", "cmyk", "progressive")


def jpeg(height: int, width: int, kind: str, quality: int = 85, restarts: int = 0, seed: int = 0) -> bytes:
    picture = photo(height, width, seed)
    options: dict[str, Any] = {"quality": quality, **({"restart_marker_blocks": restarts} if restarts else {})}
    if kind in ("4:1:1", "4:4:0"):
        return simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality, colorsubsampling=kind.replace(":", ""))
    if kind in ("grey", "cmyk"):
        return encoded(picture.convert("L" if kind == "grey" else "CMYK"), **options)
    if kind in ("rgb", "progressive"):
        return encoded(picture, **options, **({"keep_rgb": True} if kind == "rgb" else {"progressive": True}))
    return encoded(picture, subsampling=kind, **options)


@st.composite
def regions(draw: st.DrawFn) -> tuple[int, int, Region]:
    """A picture's height and width, and a box in it, scaled to a size at which it is decoded smaller or not."""
    height, width = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    tall, wide = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return height, width, Region(top, left, tall, wide, rows, columns)


@needs_library
@settings(max_examples=150, deadline=None, derandomize=True)
@given(regions(), st.sampled_from(SUBSAMPLINGS), st.integers(20, 100), st.sampled_from((0, 0, 1, 3)), st.booleans())
@example((61, 83, Region(40, 60, 21, 23, 21, 23)), "4:2:0", 90, 2, False)  # to the last row and column, not resized
@example((61, 83, Region(0, 0, 61, 83, 8, 8)), "4:2:0", 90, 0, False)
@example((200, 200, Region(199, 199, 1, 1, 1, 1)), "4:2:2", 90, 0, True)
def test_not_a_bit_depends_on_the_library(
    drawn: tuple[int, int, Region], kind: str, quality: int, restarts: int, is_grey: bool
) -> None:
    height, width, region = drawn
    data, channels = jpeg(height, width, kind, quality, restarts, seed=height), 1 if is_grey else 3
    assert equal(outcome(data, channels, region, REAL), outcome(data, channels, region, None))


@needs_library
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    regions(),
    st.sampled_from(SUBSAMPLINGS[:3]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.sampled_from((0, 2)),
)
def test_damaged_files_come_out_as_without_the_library(
    drawn: tuple[int, int, Region], kind: str, damage: list[tuple[float, int]], kept: float, restarts: int
) -> None:
    """Bytes changed behind the file's header (which a changed size would make slow to decode), the file cut or not."""
    height, width, region = drawn
    data = bytearray(jpeg(height, width, kind, restarts=restarts))
    scan = data.index(b"\xff\xda")
    for place, byte in damage:
        data[scan + int(place * (len(data) - 2 - scan))] = byte
    for broken in (
        bytes(data),
        bytes(data[: int(kept * len(data))]),
        bytes(data[: int(kept * len(data))]) + b"\xff\xd9",
    ):
        assert equal(outcome(broken, 3, region, REAL), outcome(broken, 3, region, None))


@needs_library
def test_damaged_headers_come_out_as_without_the_library() -> None:
    random = np.random.default_rng(0)
    for kind in SUBSAMPLINGS[:3]:
        data = jpeg(61, 83, kind)
        for _ in range(150):
            broken = bytearray(data)
            broken[random.integers(2, data.index(b"\xff\xda") + 14)] = random.integers(0, 256)
            try:
                height, width = picture_size(bytes(broken))
            except Undecodable:
                continue
            if height * width > 10**6:
                continue  # decoding so much is allowed, but slow
            region = Region(height // 3, width // 3, (height + 2) // 3, (width + 2) // 3, 20, 20)
            assert equal(outcome(bytes(broken), 3, region, REAL), outcome(bytes(broken), 3, region, None))


@needs_library
def test_a_file_without_its_tables_finds_none_of_the_file_before() -> None:
    data, region = jpeg(61, 83, "4:2:0"), Region(20, 20, 30, 40, 30, 40)
    expected = outcome(data, 3, region, None)
    for marker in (b"\xff\xdb", b"\xff\xc4", b"\xff\xe0"):
        at = data.index(marker)
        without = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
        assert equal(outcome(data, 3, region, REAL), expected)
        assert equal(outcome(without, 3, region, REAL), outcome(without, 3, region, None))


@needs_library
def test_a_file_that_says_another_size_comes_out_as_without_the_library() -> None:
    data = jpeg(61, 83, "4:2:0")
    frame = data.index(b"\xff\xc0")
    for height, width in ((61, 99), (99, 83), (30, 83), (61, 16), (400, 400)):
        lying = data[: frame + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[frame + 9 :]
        region = Region(1, 2, min(height, 40), min(width, 50) - 2, 20, 20)
        assert equal(outcome(lying, 3, region, REAL), outcome(lying, 3, region, None))


@needs_library
def test_two_pixels_around_a_box_are_more_than_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libturbojpeg, "_MARGIN", 1)
    assert libturbojpeg._agrees(REAL, simplejpeg)
    monkeypatch.setattr(libturbojpeg, "_MARGIN", 0)
    assert not libturbojpeg._agrees(REAL, simplejpeg)  # so the comparison at the start does see an edge


@needs_library
def test_threads_decode_side_by_side() -> None:
    files = [jpeg(90, 120, kind) for kind in SUBSAMPLINGS[:3]]
    region = Region(20, 30, 50, 60, 50, 60)
    expected = [render(decode(data, 3), region) for data in files]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: outcome_of(files[at % 3], region), range(120)))
    assert all(np.array_equal(pixels, expected[at % 3]) for at, pixels in enumerate(found))


def outcome_of(data: bytes, region: Region) -> Pixels:
    return decode_region(data, 3, lambda height, width: region)


@needs_library
def test_a_picture_larger_than_the_scratch_memory_has_its_box_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torusgd.data.decode._LARGEST_SCRATCH", 10_000)
    data, region = jpeg(200, 150, "4:2:0"), Region(50, 40, 30, 35, 30, 35)
    assert equal(outcome(data, 3, region, REAL), outcome(data, 3, region, None))


@pytest.mark.parametrize(("kind", "block"), [("4:4:4", 8), ("4:2:2", 16), ("4:2:0", 16), ("grey", 8), ("rgb", 8)])
def test_common_files_are_asked_of_the_library(stand_in: StandIn, kind: str, block: int) -> None:
    data = jpeg(160, 200, kind)
    for region in (Region(31, 47, 50, 60, 50, 60), Region(3, 5, 150, 190, 40, 40), Region(100, 101, 60, 99, 20, 20)):
        assert equal(outcome_of(data, region), outcome(data, 3, region, None))
    assert stand_in.asked == [
        (160, 200, block, 1, 31, 47, 50, 60, 3),
        (160, 200, block, 2, 1, 2, 76, 96, 3),
        (160, 200, block, 2, 50, 50, 30, 50, 3),
    ]


@pytest.mark.parametrize("kind", ["4:1:1", "4:4:0", "cmyk", "progressive", "png", "cut", "two scans", "12 bits"])
def test_all_other_files_are_not(stand_in: StandIn, kind: str) -> None:
    data = jpeg(60, 80, kind if kind in SUBSAMPLINGS else "4:2:0")
    if kind == "png":
        data = encoded(photo(60, 80), "PNG")
    if kind == "cut":
        data = data[:-2]
    if kind == "two scans":
        data = data[:-2] + data[data.index(b"\xff\xda") :]
    if kind == "12 bits":
        data = data.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c")
    region = Region(10, 10, 20, 20, 20, 20)
    assert equal(outcome(data, 3, region, stand_in), outcome(data, 3, region, None))
    assert stand_in.asked == []


def test_what_the_library_leaves_is_decoded_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(box=lambda *arguments: None)
    data, region = jpeg(60, 80, "4:2:0"), Region(10, 10, 20, 20, 20, 20)
    assert equal(outcome(data, 3, region, nothing), render(decode(data, 3), region))


@pytest.fixture
def fresh() -> Iterator[None]:
    libturbojpeg._load.cache_clear()
    yield
    libturbojpeg._load.cache_clear()


def test_a_library_with_other_pixels_is_left_unused(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(StandIn):
        def box(self, *arguments: Any) -> Pixels:
            pixels = super().box(*arguments).copy()
            pixels[-1, -1, 0] ^= arguments[3] == 2 and pixels.shape[0] > 10  # one bit, at one size
            return pixels

    monkeypatch.setattr(libturbojpeg, "_candidates", lambda: ["one", "two"])
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(libturbojpeg, "LibTurboJpeg", {"one": Wrong(), "two": StandIn()}.__getitem__)
    with caplog.at_level(logging.WARNING):
        found = libturbojpeg.load(simplejpeg)
    assert type(found) is StandIn
    assert libturbojpeg.load(simplejpeg) is found
    assert caplog.messages == ["one gives other pixels than simplejpeg, and is left unused"]


def test_without_a_library_nothing_is_said(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where there is none, nor where it is older than version 3 (the C library stands for that)."""
    monkeypatch.setattr(libturbojpeg, "_candidates", lambda: ["/nowhere/libturbojpeg.so.0", None])
    assert libturbojpeg.load(simplejpeg) is None
    assert caplog.messages == []
    with pytest.raises(AttributeError):
        LibTurboJpeg(ctypes.CDLL(None))


def test_the_library_of_a_wheel_is_found_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel called turbojpeg; PyTurboJPEG installs a module of the same name, without a library."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "turbojpeg.py").touch()
    assert all("turbojpeg.libs" not in path for path in libturbojpeg._candidates())
    (tmp_path / "turbojpeg.libs").mkdir()
    library = tmp_path / "turbojpeg.libs" / "libturbojpeg-dd00d054.so.0.3.0"
    library.touch()
    assert list(libturbojpeg._candidates())[-1] == str(library)


class Function:
    """A function of a library in C, of which ctypes has been told the types."""

    def __init__(self, does: Callable[..., Any]) -> None:
        self.does = does

    def __call__(self, *arguments: Any) -> Any:
        return self.does(*arguments)


@pytest.mark.parametrize("failing", ["", "DecompressHeader", "SetScalingFactor", "SetCroppingRegion", "Decompress8"])
def test_each_picture_has_a_handle_which_ends_with_it(failing: str) -> None:
    ended: list[int] = []
    steps = ("Set", "DecompressHeader", "SetScalingFactor", "SetCroppingRegion", "Decompress8")
    functions = {f"tj3{step}": Function(lambda *given, fails=step == failing: -int(fails)) for step in steps}
    functions["tj3Get"] = Function(lambda handle, key: {5: 80, 6: 60}[key])
    library = SimpleNamespace(tj3Init=Function(lambda kind: 7), tj3Destroy=Function(ended.append), **functions)
    for times in (1, 2):
        data, memory = jpeg(60, 80, "4:2:0"), libturbojpeg._new_memory
        found = LibTurboJpeg(library).box(data, (60, 80), 16, 1, (1, 1, 9, 9), 3, memory)
        assert (found is None) == bool(failing)
        assert ended == [7] * times


def test_a_size_in_the_last_bytes_is_cut_short() -> None:
    """A width of 0xFFD9 looks like an end marker, and no colours follow."""
    data = jpeg(60, 80, "4:2:0")
    frame = data.index(b"\xff\xc0")
    with pytest.raises(Undecodable, match="cut short"):
        decode_region(data[: frame + 7] + b"\xff\xd9", 3, lambda height, width: Region(0, 0, 1, 1, 1, 1))


def test_stand_in_pictures_are_what_they_say() -> None:
    kinds = {kind: Image.open(io.BytesIO(jpeg(60, 80, kind))) for kind in SUBSAMPLINGS}
    assert [kinds[kind].mode for kind in ("grey", "cmyk", "rgb")] == ["L", "CMYK", "RGB"]
    assert "progressive" in kinds["progressive"].info

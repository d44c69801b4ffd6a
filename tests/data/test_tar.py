"""Images in tar files, read by an index. Both files are a stranger's."""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import picture
from tests.data.tars import samples, tar_bytes, write_shards, write_tar
from tests.messages import LIBRARY, refused
from torusgd.data.decode import decode
from torusgd.data.registry import data_sha256, describe
from torusgd.data.tar import Shards, open_shards
from torusgd.data.tar_index import FILE, make_index, write_index


def indexed(root: Path) -> tuple[Shards, Shards]:
    write_index(root / FILE, make_index(root))
    return open_shards(root, 3)


@pytest.mark.parametrize("label", ["cls", "json"])
def test_samples_of_webdataset_what_is_said_of_them_and_their_identity(tmp_path: Path, label: str) -> None:
    pair = train, held_out = indexed(write_shards(tmp_path, label=label))
    assert train.classes == held_out.classes == ("0", "1")
    assert train.labels.tolist() == [number % 2 for number in range(12)]
    assert [train.encoded(index) for index in range(12)] == [picture(number) for number in range(12)]
    assert held_out.encoded(5) == picture(105)
    assert np.array_equal(train.read(7), decode(picture(7), 3))
    assert train.where(7) == f"{tmp_path}/train-0001.tar: 00007.jpg"
    head, images, *_ = describe(tmp_path)
    assert head.endswith("data.source tar, 3 channels")
    assert images == "images    12 for training, 6 held out"
    before = data_sha256(*pair)
    assert data_sha256(*open_shards(tmp_path, 3)) == before
    write_tar(tmp_path / "val-0000.tar", samples([100, 101, 102, 103, 104, 205]))
    assert data_sha256(*indexed(tmp_path)) != before


def test_classes_by_folders_long_names_dots_and_what_is_no_image(tmp_path: Path) -> None:
    long = "x" * 150
    for kind, number in ((tarfile.GNU_FORMAT, 0), (tarfile.PAX_FORMAT, 1)):
        members = [
            (f"./set/tulip/{long}{number}.jpg", picture(number)),
            (f"./set/daisy/a.b.{number}.JPEG", picture(10 + number)),
            ("./set/daisy/notes.txt", b"no picture"),
            ("__meta__.json", b"{}"),
            (f"pairs/{number}.seg.png", b"a mask"),
            (f"pairs/{number}.png", picture(20)),
            (f"pairs/{number}.cls", b"tulip"),
        ]
        write_tar(tmp_path / "train" / f"{number}.tar", members, kind)
        write_tar(tmp_path / "validation" / f"{number}.tar", members[:1], kind)
    train, held_out = indexed(tmp_path)
    assert (train.classes, train.labels.tolist(), len(held_out)) == (("daisy", "tulip"), [1, 0, 1] * 2, 2)
    assert [train.encoded(index) for index in (0, 1, 3)] == [picture(0), picture(10), picture(1)]
    assert train.names[0].endswith(f"tulip/{long}0.jpg")


def test_a_tar_file_in_a_tar_file_is_read_where_it_lies(tmp_path: Path) -> None:
    inner = {f"n0{k}.tar": tar_bytes({f"n0{k}_{i}.JPEG": picture(k + i) for i in range(3)}) for k in (1, 2)}
    write_tar(tmp_path / "train.tar", inner.items())
    write_tar(tmp_path / "val.tar", [("n02/1.JPEG", picture(9))])
    train, held_out = indexed(tmp_path)
    assert train.classes == ("n01", "n02")
    assert [train.encoded(index) for index in range(6)] == [picture(k + i) for k in (1, 2) for i in range(3)]
    assert held_out.labels.tolist() == [1]


WRONG: dict[str, dict[str, Any]] = {
    "another version": {"format": np.array([1])},
    "float offsets": {"train offset": np.zeros(12)},
    "fewer labels": {"eval labels": np.zeros(5, np.int64)},
    "beyond the end": {"train offset": np.full(12, 1 << 40)},
    "before the beginning": {"train offset": np.full(12, -512)},
    "no such tar file": {"train shard": np.full(12, 2, np.int32)},
    "names that overlap": {"train names ends": np.full(12, 5)},
    "a path out": {
        "eval shards text": np.array(bytearray(b"../v.tar")), "eval shards ends": np.array([8]),
        "eval shard sizes": np.array([1 << 40]),
    },
}  # fmt: skip


def test_a_missing_or_damaged_index_and_one_that_lies_name_the_command(tmp_path: Path) -> None:
    right = make_index(write_shards(tmp_path))
    with refused("tar files without an index", TMP=tmp_path):
        open_shards(tmp_path, 3)
    write_index(tmp_path / FILE, right)
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2], whole.replace(b"00000.jpg", b"00000.jpx")):
        (tmp_path / FILE).write_bytes(damaged)
        with refused("a damaged index", TMP=tmp_path, REASON=LIBRARY):
            open_shards(tmp_path, 3)
    for name, changes in WRONG.items():
        write_index(tmp_path / FILE, right | changes)
        with refused(f"an index with {name}", TMP=tmp_path):
            open_shards(tmp_path, 3)


def test_a_tar_file_that_changed_is_refused(tmp_path: Path) -> None:
    train, _ = indexed(write_shards(tmp_path))
    file = tmp_path / "train-0000.tar"
    whole = bytearray(file.read_bytes())
    at = whole.index(picture(3)) - 512
    whole[at + 136 : at + 147] = b"00000000001"  # the time of the member: another file of the same size
    file.write_bytes(whole)
    with refused("a tar file that was changed", TMP=tmp_path):
        train.read(3)
    file.write_bytes(whole[:-512])
    with refused("a tar file that was changed", TMP=tmp_path):
        open_shards(tmp_path, 3)
    file.unlink()
    with refused("a tar file that is gone", TMP=tmp_path):
        open_shards(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        train.read(0)


def test_damaged_tar_files_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    whole = tar_bytes(samples(range(3)))
    second = whole.index(b"00001.jpg")
    sizes = bytearray(whole)
    sizes[124:136] = b"77777777777\0"
    damaged = {
        "empty": b"",
        "text": b"<html>" * 200,
        "cut in an image": whole[: second - 700],
        "cut in a header": whole[: second + 100],
        "a damaged header": whole[:second] + b"garbage" + whole[second + 7 :],
        "a size that lies": bytes(sizes),
        "gzip": gzip.compress(whole),
        "no label": tar_bytes({"1.jpg": picture(1)}),
        "a label of nothing": tar_bytes({"1.jpg": picture(1), "1.json": b'{"x": 1}'}),
        "a long label": tar_bytes({"1.jpg": b"", "1.cls": bytes(1 << 17)}),
    }
    for name, content in damaged.items():
        (tmp_path / "train-0001.tar").write_bytes(content)
        with refused(f"a tar file: {name}", f"{tmp_path}/train-0001.tar: ", TMP=tmp_path):
            make_index(tmp_path)


def test_headers_that_ask_for_much_or_lead_back_are_refused_and_links_passed_over(tmp_path: Path) -> None:
    write_shards(tmp_path)
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40  # a name of a terabyte
    with open(tmp_path / "train-0001.tar", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(1 << 41)  # sparse: it takes no room
    with refused("a tar file with a name of a terabyte", TMP=tmp_path):
        make_index(tmp_path)
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1,024 bytes
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "train-0001.tar").write_bytes(bytes(header) * 4)
    with refused("a tar file that leads back", TMP=tmp_path):
        make_index(tmp_path)
    with tarfile.open(tmp_path / "train-0001.tar", "w") as archive:
        for name, kind in (("link", tarfile.LNKTYPE), ("soft", tarfile.SYMTYPE), ("fifo", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"cat/{name}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("0/one.jpg")
        info.size = len(picture(1))
        archive.addfile(info, io.BytesIO(picture(1)))
    train, _ = indexed(tmp_path)
    assert list(train.names)[6:] == ["0/one.jpg"]


def test_which_tar_files_are_of_which_split(tmp_path: Path) -> None:
    with refused("a folder without tar files", TMP=tmp_path):
        make_index(tmp_path)
    for file, what in {
        "train-0.tar.gz": "a folder of compressed tar files",
        "trainers-0.tar": "tar files without one for training",
        "my_train_0.tar": "tar files without one held out",
    }.items():
        write_tar(tmp_path / file, samples(range(2)))
        with refused(what, TMP=tmp_path):
            make_index(tmp_path)
    write_tar(tmp_path / "test" / "0.tar", samples(range(3)))
    assert len(make_index(tmp_path)["eval labels"]) == 3
    write_tar(tmp_path / "valid" / "0.tar", samples(range(4)))
    assert len(make_index(tmp_path)["eval labels"]) == 4
    with refused("a file in place of a folder of tar files", TMP=tmp_path):
        make_index(tmp_path / "my_train_0.tar")


def test_the_command(tmp_path: Path, run_cli: Any, mistake: Any) -> None:
    root = write_shards(tmp_path / "my set")
    (root / "classes.txt").write_text("cat\ndog\n")
    code, out, _ = run_cli("data", "index", root)
    assert (code, out.splitlines()[-1]) == (0, f"{tmp_path}/my set/index.safetensors: 12 training images, 6 held out")
    assert open_shards(root, 3)[0].classes == ("cat", "dog")
    code, out, _ = run_cli("data", "info", root, "--check")
    assert (code, "undecodable images: 0" in out) == (0, True)
    (root / "classes.txt").write_text("cat\n")
    mistake("data", "index", root, TMP=tmp_path)
    mistake("data", "index", root, "--classes", tmp_path / "none", TMP=tmp_path)
    if os.getuid():  # root may write anywhere
        root.chmod(0o500)
        assert run_cli("data", "index", root)[0] == 2

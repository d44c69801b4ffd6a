"""Images in tar files, read by an index, copies in such, and ImageNet out of its two. Files are a stranger's."""

import errno
import gzip
import io
import os
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import encoded, photo, picture, psnr, write_folder
from tests.data.tars import samples, tar_bytes, write_shards, write_tar
from tests.data.test_files import arrays, write_arrays
from tests.messages import LIBRARY, refused, refuses
from torusgd.data import pack as module
from torusgd.data import tar_index
from torusgd.data.decode import decode, picture_size
from torusgd.data.fetch import DEVKIT, TRAIN, VAL, prepare_imagenet
from torusgd.data.geometry import resample, scaled
from torusgd.data.pack import Packing, pack
from torusgd.data.pictures import open_folder
from torusgd.data.registry import data_sha256, describe, open_any
from torusgd.data.tar import Shards, open_shards
from torusgd.data.tar_index import FILE, make_index, write_index
from torusgd.errors import RunError
from torusgd.locks import held


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
            (f"./set/tulip/{long}{number}.jpg", picture(number)), ("./set/daisy/notes.txt", b"no picture"),
            ("./set/daisy/._a.b.JPEG", b"of macOS"), (f"./set/daisy/a.b.{number}.JPEG", picture(10 + number)),
            ("__meta__.json", b'{"label": 3}'),
            (f"pairs/{number}.seg.png", b"a mask"), (f"pairs/{number}.png", picture(20)),
            (f"pairs/{number}.cls", b"tulip"),
        ]  # fmt: skip
        write_tar(tmp_path / "train" / f"{number}.tar", members, kind)
        write_tar(tmp_path / "validation" / f"{number}.tar", members[:1], kind)
    train, held_out = indexed(tmp_path)
    assert (train.classes, train.labels.tolist(), len(held_out)) == (("daisy", "tulip"), [1, 0, 1] * 2, 2)
    assert [train.encoded(index) for index in (0, 1, 3)] == [picture(0), picture(10), picture(1)]
    assert train.names[0].endswith(f"tulip/{long}0.jpg")


def test_no_picture_of_a_folder_is_left_out(tmp_path: Path) -> None:
    names = ["IMG.1.jpg", "IMG.2.jpg", "0.jpg", "0.jpeg", "1.JPG", "1.jpg", "1.png", "__2__.jpg"]
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", [(f"cat/{name}", picture(at)) for at, name in enumerate(names)])
    train, _ = indexed(tmp_path)
    assert list(train.names) == [f"cat/{name}" for name in names]
    assert [train.encoded(at) for at in range(len(names))] == [picture(at) for at in range(len(names))]


def test_folders_named_by_digits_are_names_and_labels_beside_pictures_numbers(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", [(f"{name}/{name}.jpg", picture(1)) for name in ("1", "01", "7")])
    assert indexed(tmp_path)[0].classes == ("01", "1", "7")
    for split in ("train", "val"):
        write_tar(tmp_path / "beside" / split / "0.tar", [("7/a.jpg", picture(1)), ("7/a.cls", b"2")])
    assert indexed(tmp_path / "beside")[0].classes == ("0", "1", "2")


def test_a_tar_file_in_a_tar_file_is_read_where_it_lies(tmp_path: Path) -> None:
    inner = {f"n0{k}.tar": tar_bytes({f"n0{k}_{i}.JPEG": picture(k + i) for i in range(3)}) for k in (1, 2)}
    write_tar(tmp_path / "train.tar", inner.items())
    write_tar(tmp_path / "val.tar", [("n02/1.JPEG", picture(9))])
    train, held_out = indexed(tmp_path)
    assert train.classes == ("n01", "n02")
    assert [train.encoded(index) for index in range(6)] == [picture(k + i) for k in (1, 2) for i in range(3)]
    assert held_out.labels.tolist() == [1]


WRONG: dict[str, dict[str, Any]] = {
    "another version": {"format": np.array([1])}, "float offsets": {"train offset": np.zeros(12)},
    "fewer labels": {"eval labels": np.zeros(5, np.int64)}, "beyond the end": {"train offset": np.full(12, 1 << 40)},
    "before the beginning": {"train offset": np.full(12, -512)},
    "names that overlap": {"train names ends": np.full(12, 5)},
    "no such tar file": {"train shard": np.full(12, 2, np.int32)},
    "a path out": {
        "eval shards text": np.array(bytearray(b"../v.tar")), "eval shards ends": np.array([8]),
        "eval shard sizes": np.array([1 << 40]),
    },
}  # fmt: skip


def test_a_missing_or_damaged_index_and_one_that_lies_name_the_command(tmp_path: Path) -> None:
    right = make_index(write_shards(tmp_path))
    refuses("tar files without an index", open_shards, tmp_path, 3, TMP=tmp_path)
    write_index(tmp_path / FILE, right)
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2], whole.replace(b"00000.jpg", b"00000.jpx")):
        (tmp_path / FILE).write_bytes(damaged)
        refuses("a damaged index", open_shards, tmp_path, 3, TMP=tmp_path, REASON=LIBRARY)
    for name, changes in WRONG.items():
        write_index(tmp_path / FILE, right | changes)
        refuses(f"an index with {name}", open_shards, tmp_path, 3, TMP=tmp_path)


def test_a_tar_file_that_changed_is_refused(tmp_path: Path) -> None:
    train, _ = indexed(write_shards(tmp_path))
    file = tmp_path / "train-0000.tar"
    whole = bytearray(file.read_bytes())
    at = whole.index(picture(3)) - 512
    whole[at + 136 : at + 147] = b"00000000001"  # the time of the member: another file of the same size
    file.write_bytes(whole)
    refuses("a tar file that was changed", train.read, 3, TMP=tmp_path)
    file.write_bytes(whole[:-512])
    refuses("a tar file that was changed", open_shards, tmp_path, 3, TMP=tmp_path)
    file.unlink()
    refuses("a tar file that is gone", open_shards, tmp_path, 3, TMP=tmp_path)
    with pytest.raises(FileNotFoundError):
        train.read(0)


def test_damaged_files_and_headers_that_ask_for_much_or_lead_back_are_refused_and_links_passed_over(tmp_path: Path):
    write_shards(tmp_path)
    whole = tar_bytes(samples(range(3)))
    second = whole.index(b"00001.jpg")
    sizes = bytearray(whole)
    sizes[124:136] = b"77777777777\0"
    damaged = {
        "empty": b"", "text": b"<html>" * 200, "a size that lies": bytes(sizes), "gzip": gzip.compress(whole),
        "cut in an image": whole[: second - 700], "cut in a header": whole[: second + 100],
        "a damaged header": whole[:second] + b"garbage" + whole[second + 7 :],
        "two in one": whole + bytes(1 << 20) + whole, "no label": tar_bytes({"1.jpg": picture(1)}),
        "a label of nothing": tar_bytes({"1.jpg": picture(1), "1.json": b'{"x": 1}'}),
        "a label apart": tar_bytes({"1.cls": b"2", "2.jpg": picture(2), "1.jpg": picture(1), "2.cls": b"1"}),
        "a label apart, in JSON": tar_bytes({"1.json": b'{"label": 2}', "2.jpg": picture(2), "2.cls": b"1"}),
        "two pictures of a label": tar_bytes({"1.cls": b"2", "1.jpg": picture(1), "1.png": picture(2)}),
        "two labels of a picture": tar_bytes({"1.cls": b"2", "1.CLS": b"1", "1.jpg": picture(1)}),
        "a label of a name with dots": tar_bytes({"a/1.5.jpg": picture(1), "a/1.5.cls": b"2"}),
        "a label of pictures with dots": tar_bytes({"a/1.5.jpg": picture(1), "a/1.json": b"{}"}),
        "a long label": tar_bytes({"1.jpg": b"", "1.cls": bytes(1 << 17)}),
    }  # fmt: skip
    for name, content in damaged.items():
        (tmp_path / "train-0001.tar").write_bytes(content)
        refuses(f"a tar file: {name}", make_index, tmp_path, about=f"{tmp_path}/train-0001.tar: ", TMP=tmp_path)
    write_shards(tmp_path)
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40  # a name of a terabyte
    with open(tmp_path / "train-0001.tar", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(1 << 41)  # sparse: it takes no room
    refuses("a tar file with a name of a terabyte", make_index, tmp_path, TMP=tmp_path)
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1,024 bytes
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "train-0001.tar").write_bytes(bytes(header) * 4)
    # Newer versions of `tarfile` refuse it themselves.
    refuses("a tar file that leads back", make_index, tmp_path, TMP=tmp_path, REASON=LIBRARY)
    links = ("link.JPG", tarfile.LNKTYPE), ("soft.jpg", tarfile.SYMTYPE)
    for others in (*([each] for each in links), [("latest", tarfile.SYMTYPE), ("fifo.jpg", tarfile.FIFOTYPE)]):
        with tarfile.open(tmp_path / "train-0001.tar", "w") as archive:
            for name, kind in others:
                info = tarfile.TarInfo(f"cat/{name}")
                info.type, info.linkname = kind, "/etc/passwd"
                archive.addfile(info)
            info = tarfile.TarInfo("0/one.jpg")
            info.size = len(picture(1))
            archive.addfile(info, io.BytesIO(picture(1)))
        if others[0] in links:
            refuses(f"a tar file with a picture that is a link ({others[0][0]})", make_index, tmp_path, TMP=tmp_path)
    train, _ = indexed(tmp_path)
    assert list(train.names)[6:] == ["0/one.jpg"]


def test_which_tar_files_are_of_which_split(tmp_path: Path) -> None:
    refuses("a folder without tar files", make_index, tmp_path, TMP=tmp_path)
    for file, what in {
        "train-0.tar.gz": "a folder of compressed tar files",
        "trainers-0.tar": "tar files without one for training",
        "my_train_0.tar": "tar files without one held out",
    }.items():
        write_tar(tmp_path / file, samples(range(2)))
        refuses(what, make_index, tmp_path, TMP=tmp_path)
        if file.endswith("gz"):
            (tmp_path / file).rename(tmp_path / "devkit.tar.gz")  # of no split
    write_tar(tmp_path / "test" / "0.tar", samples(range(3)))
    (tmp_path / "train-1.tgz").touch()
    refuses("compressed tar files beside plain ones", make_index, tmp_path, TMP=tmp_path)
    (tmp_path / "train-1.tgz").unlink()
    assert len(make_index(tmp_path)["eval labels"]) == 3
    write_tar(tmp_path / "valid" / "0.tar", samples(range(4)))
    assert len(make_index(tmp_path)["eval labels"]) == 4
    refuses("a file in place of a folder of tar files", make_index, tmp_path / "my_train_0.tar", TMP=tmp_path)


def test_the_command(tmp_path: Path, run_cli: Any, mistake: Any) -> None:
    root = write_shards(tmp_path / "my set")
    (root / "classes.txt").write_text("cat\tcat\x1b[2J\ndog\n")
    code, out, _ = run_cli("data", "index", root)
    assert (code, out.splitlines()[-1]) == (0, f"{tmp_path}/my set/index.safetensors: 12 training images, 6 held out")
    assert open_shards(root, 3)[0].classes == ("cat\x1b[2J", "dog")
    code, out, _ = run_cli("data", "info", root, "--check")
    assert (code, "undecodable images: 0" in out, "\x1b" in out) == (0, True, False)
    (root / "classes.txt").write_text("cat\n")
    mistake("data", "index", root, TMP=tmp_path)
    mistake("data", "index", root, "--classes", tmp_path / "none", TMP=tmp_path)
    if os.getuid():  # root may write anywhere
        root.chmod(0o500)
        assert run_cli("data", "index", root)[0] == 2


HOLDER = re.compile(f"process {os.getpid()} on .* since [^;]*")


def without_index(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != FILE}


def shards_of(source: Path, out: Path, size: int | None = None, per_shard: int = 5) -> tuple[dict[str, int], list[str]]:
    _, train, held_out = open_any(source)
    lines: list[str] = []
    return pack(train, held_out, out, Packing(size, 90, per_shard), lines.append), lines


def test_a_folder_is_scaled_once_and_arrays_become_pictures(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", train=6, val=2)
    (root / "train" / "dog" / "large.png").write_bytes(encoded(photo(90, 60), "PNG"))
    (root / "train" / "dog" / "torn.jpg").write_bytes(b"torn")
    (root / "train" / "dog" / "zcut.jpg").write_bytes(picture(3)[:-200])  # small enough to be copied as it is
    counts, lines = shards_of(root, tmp_path / "out", size=45)
    reasons = {"torn": "neither JPEG nor PNG", "zcut": "a JPEG that is cut short"}
    assert (counts, lines) == (
        {"train": 13, "eval": 4}, [f"{root}/train/dog/{name}.jpg: {why}" for name, why in reasons.items()]
    )  # fmt: skip
    shards = [f"train-0000{number}.tar" for number in range(3)]
    made = ["classes.txt", "index.safetensors", "pack.json", *shards, "val-00000.tar"]
    assert sorted(os.listdir(tmp_path / "out")) == made
    (before, _), (after, held_out) = open_folder(root, 3), open_shards(tmp_path / "out", 3)
    assert after.classes == held_out.classes == ("cat", "dog")
    assert after.labels.tolist() == before.labels.tolist()[:-2]
    for index in range(13):
        if min(picture_size(before.encoded(index))) <= 45 and index < 12:
            assert after.encoded(index) == before.encoded(index)
        else:
            assert min(picture_size(after.encoded(index))) == 45
    assert psnr(decode(after.encoded(12), 3), photo(90, 60).resize((45, 67), 2)) > 30
    counts, _ = shards_of(write_arrays(tmp_path, "npz", arrays()), tmp_path / "of arrays")
    assert counts == {"train": 9, "eval": 4}
    train, _ = open_shards(tmp_path / "of arrays", 1)
    assert (train.read(3).shape, train.classes) == ((6, 5, 1), ("0", "1", "2"))


def test_it_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out, whole = write_folder(tmp_path / "set"), tmp_path / "out", tmp_path / "whole"
    shards_of(root, whole)
    copy, copied, room = module._copy, list[int](), [7]

    def noted(source: Any, packing: Packing, index: int) -> Any:
        copied.append(index)
        if len(copied) > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(source, packing, index)

    monkeypatch.setattr(module, "_copy", noted)
    refuses("copies on a full disk", shards_of, root, out, kind=RunError, TMP=tmp_path)
    assert [file.name for file in out.glob("train-*")] == ["train-00000.tar"]
    (out / ".train-00001.tar.1234").write_bytes(b"half of one")
    copied.clear()
    room[0] = 1000
    shards_of(root, out)
    assert sorted(copied) == sorted([*range(8), *range(5, 12)])  # all but the first shard
    assert without_index(out) == without_index(whole)


def test_other_copies_and_other_folders_are_refused(tmp_path: Path, run_cli: Any, mistake: Any) -> None:
    root = write_folder(tmp_path / "set")
    shards_of(root, tmp_path / "out")
    for change in ({"size": 30}, {"per_shard": 9}):
        refuses(f"copies with other {' '.join(change)}", shards_of, root, tmp_path / "out", **change, TMP=tmp_path)
    (root / "val" / "cat" / "000.jpg").rename(root / "val" / "cat" / "zzz.jpg")
    mistake("data", "pack", root, tmp_path / "out", "--images-per-shard", 5, TMP=tmp_path)
    for out in (root, root / "val" / "cat" / "001.jpg"):
        mistake("data", "pack", root, out, TMP=tmp_path)
    code, out, _ = run_cli("data", "pack", root, tmp_path / "new one", "--size", 40)
    assert code == 0
    assert "12 training images, 8 held out; 0 can't be decoded" in out


CLASSES = {"n02": 3, "n01": 2, "n05": 1}
TRUTH = [2, 1, 1, 3]


def inner(classes: dict[str, int]) -> list[tuple[str, bytes]]:
    """A tar file a class, of so many pictures."""
    made = {name: {f"{name}_{at}.JPEG": picture(at) for at in range(count)} for name, count in classes.items()}
    return [(f"{name}.tar", tar_bytes(pictures)) for name, pictures in made.items()]


def write_imagenet(root: Path) -> Path:
    """The three files as they are downloaded, with three classes; one of the table's rows is no class."""
    savemat = pytest.importorskip("scipy.io").savemat
    root.mkdir(exist_ok=True)
    write_tar(root / TRAIN, inner(CLASSES))
    write_tar(root / VAL, [(f"ILSVRC2012_val_{at:08d}.JPEG", picture(50 + at)) for at in range(1, 5)])
    columns = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height",
               "num_train_images")  # fmt: skip
    rows: list[Any] = [(at, name, f"a {name}", "", 0, [], 0, n) for at, (name, n) in enumerate(CLASSES.items(), 1)]
    rows.append((4, "n00", "a thing", "", 3, [1, 2, 3], 1, 0))
    savemat(table := io.BytesIO(), {"synsets": np.array(rows, dtype=[(column, "O") for column in columns])})
    kit = {"meta.mat": table.getvalue(), "ILSVRC2012_validation_ground_truth.txt": "\n".join(map(str, TRUTH)).encode()}
    members = {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in kit.items()}
    (root / DEVKIT).write_bytes(gzip.compress(tar_bytes(members)))
    return root


def test_imagenet_is_read_out_of_its_tar_files_and_prepared_again_after_a_kill(tmp_path, run_cli, monkeypatch) -> None:
    root = write_imagenet(tmp_path / "image net")
    write_tar(root / "ILSVRC2012_img_train_t3.tar", [("dog/1.JPEG", picture(1))])  # of another task
    code, out, said = run_cli("data", "prepare", "imagenet", root)
    assert (code, said) == (0, "")
    assert "6 training images and 4 held out" in out
    train, held_out = open_shards(root, 3)
    assert train.classes == ("n01", "n02", "n05")
    assert (train.labels.tolist(), held_out.labels.tolist()) == ([1, 1, 1, 0, 0, 2], [0, 1, 1, 2])
    assert (train.names[5], train.encoded(2)) == ("n05/n05_0.JPEG", picture(2))
    assert shards_of(root, tmp_path / "small", size=30)[0] == {"train": 6, "eval": 4}
    undisturbed, root = write_imagenet(tmp_path / "whole"), write_imagenet(tmp_path / "killed")
    prepare_imagenet(undisturbed)
    assert sorted(os.listdir(undisturbed)) == sorted([TRAIN, VAL, DEVKIT, FILE])
    monkeypatch.setattr(tar_index, "_EVERY", 1)

    def killed(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_imagenet(root, killed)
    assert not (root / FILE).exists()
    prepare_imagenet(root)
    assert (root / FILE).read_bytes() == (undisturbed / FILE).read_bytes()
    assert sorted(os.listdir(root)) == sorted(os.listdir(undisturbed))


def test_one_command_at_a_time_writes_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "set", classes=("a\nb", "gr\u00fcn", os.fsdecode(b"caf\xe9")))
    imagenet, out = write_imagenet(tmp_path / "imagenet"), tmp_path / "out"
    monkeypatch.setattr("torusgd.locks.LOCK_SECONDS", 0.1)
    for folder, write in ((out, lambda: shards_of(root, out)), (imagenet, lambda: prepare_imagenet(imagenet))):
        folder.mkdir(exist_ok=True)
        with held(folder, "here"), refused("a folder in use", OUT=folder, HOLDER=HOLDER):
            write()
    shards_of(root, out)
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert open_shards(out, 3)[0].classes == ("a b", "caf\\udce9", "gr\u00fcn"), "names stay one a line"


def test_an_imagenet_that_is_not_whole_is_refused(tmp_path: Path, mistake: Any) -> None:
    root = write_imagenet(tmp_path)
    whole = {name: (root / name).read_bytes() for name in (TRAIN, VAL, DEVKIT)}
    wrong = {
        "without a class": (TRAIN, tar_bytes(inner({"n02": 2}))),
        "cut short": (TRAIN, whole[TRAIN][:-15000]),
        "with one validation picture": (VAL, tar_bytes({"ILSVRC2012_val_00000001.JPEG": picture(1)})),
        "with an unknown validation picture": (VAL, tar_bytes({"ILSVRC2012_val_00000009.JPEG": picture(1)})),
    }
    for name, (file, content) in wrong.items():
        (root / file).write_bytes(content)
        refuses(f"ImageNet {name}", prepare_imagenet, root, TMP=tmp_path)
        (root / file).write_bytes(whole[file])
    for damaged in (b"", b"text", whole[DEVKIT][:100], gzip.compress(b"text"), gzip.compress(tar_bytes({"x": b""}))):
        (root / DEVKIT).write_bytes(damaged)
        with refused("ImageNet with a damaged kit", f"{root / DEVKIT}: ", TMP=tmp_path, REASON=LIBRARY):
            prepare_imagenet(root)
    (root / DEVKIT).unlink()
    for name in ("imagenet", "cifar"):
        mistake("data", "prepare", name, root, TMP=tmp_path)


def test_copies_as_png_have_all_pixels_and_are_scaled_exactly(tmp_path: Path) -> None:
    before, held_out = open_folder(write_folder(tmp_path / "set", train=2, val=1), 3)
    pack(before, held_out, tmp_path / "out", Packing(45, None, 5), print)
    after, _ = open_shards(tmp_path / "out", 3)
    for index in range(len(before)):
        assert after.encoded(index).startswith(b"\x89PNG")
        image = before.read(index)
        height, width = image.shape[:2]
        region = scaled(height, width, min(45, height, width))
        assert np.array_equal(after.read(index), resample(image, replace(region, exact=True)))

"""Short texts that stand for much: each is refused in one line before it takes time or memory."""

import zipfile
from pathlib import Path

import pytest
import torch
from tests.messages import refused

from torusgd.recipe.load import load_recipe, parse_yaml
from torusgd.recipe.schedule import Schedule
from torusgd.recipe.section import Duration
from torusgd.untrusted import MOST_YAML, check_archive, check_swelling, parse_json, read_text
from torusgd.weights import load_weights

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 3000, "inside one another"),
        ("{a: " * 3000, "inside one another"),
        ("- " * 3000, "inside one another"),
        (ALIASES, "more than 100000 values"),
        ("&a [*a]", "an alias inside of what it stands for"),
        ("9" * 5000, "digits"),
        ("1" + "0" * 30, "beyond 64 bits"),
        ("a" * (MOST_YAML + 1), "longer than"),
        ("!!bool word", "word"),
        ("!!timestamp word", "not valid YAML"),
        ("? [1]\n: 2", "a key must be a word or a number"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
    ids=lambda value: value[:12],
)
def test_yaml_that_stands_for_much_is_refused(text: str, reason: str) -> None:
    with refused(f"YAML: {reason}", "file:") as error:
        parse_yaml(text, "file")
    assert len(str(error.value)) < 300


def test_yaml_within_the_bounds_is_read_with_its_aliases() -> None:
    assert parse_yaml("[" * 19 + "]" * 19, "file") is not None
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "file") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert parse_yaml(str(2**63 - 1), "file") == 2**63 - 1


NO_NUMBERS = (
    "stages.0.until=1e999ep", "stages.0.until=1e16ep", "data.mean=[.nan]", "data.mean=[.inf]", "data.std=[.nan]",
    "data.options={noise: .inf}", "data.augment.area=[.nan, 1.0]", "label_smoothing=.nan", "rate.lr=.inf",
    "virtual_workers=1048577", "runtime.buckets=.inf", "runtime.timeout=.nan",
)  # fmt: skip


def test_a_recipe_holds_no_number_that_nothing_can_be_made_of() -> None:
    for item in NO_NUMBERS:
        key = item.partition("=")[0]
        about = "runtime: " * key.startswith("runtime.") + key.removeprefix("runtime.")
        with refused(f"no number: {item}", f"recipe digits: {about}"):
            load_recipe("digits", [item])


def test_a_tiny_interval_is_refused_and_not_counted_out_and_written_as_it_can_be_read() -> None:
    schedule, tiny = Schedule(load_recipe("digits").recipe, 1437), Duration.parse("0.0000001ep")
    with refused("an interval that is too short", "an interval of 0.0000001ep"):
        schedule.boundaries(tiny)
    assert Duration.parse(str(tiny)) == tiny


def test_texts_have_an_end(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 11)
    with refused("a text of 11 bytes", kind=ValueError):
        read_text(tmp_path / "long", 10)
    with refused("an endless text", kind=ValueError):
        read_text(Path("/dev/zero"))
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with refused("an endless recipe", f"recipe {tmp_path}/zero.yaml:", TMP=tmp_path):
        load_recipe(str(tmp_path / "zero.yaml"))
    with refused("lists in lists", kind=ValueError):
        parse_json("[" * 100_000)


def test_archives_of_weights_and_compressed_data_may_not_swell(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"fc.weight": torch.ones(1000), "fc.bias": torch.ones(3)}, path)
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (storage,) = (name for name, data in members.items() if len(data) == 4000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(1 << 22) if name == storage else data)
    with refused("weights that swell", f"{path}:", TMP=tmp_path, STORED=path.stat().st_size):
        load_weights(path)
    # Compressed images neither.
    check_swelling(size=1 << 28, stored=1000)
    check_swelling(size=1 << 33, stored=1 << 30)
    with refused("data that swell", kind=ValueError):
        check_swelling(size=(1 << 28) + 1, stored=1000)

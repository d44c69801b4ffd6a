"""Weights and data sets of the Hugging Face hub, by huggingface_hub itself from a server on loopback."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("huggingface_hub")

from tests.data.pictures import folder_data, picture
from tests.data.tables import table, write_parquet
from tests.data.tars import write_indexed
from tests.hub_server import COMMITS, Hub
from tests.messages import LIBRARY, refused, refuses
from tests.run.runs import sets, train
from torusgd import hub as hub_module
from torusgd.data import open_sources
from torusgd.data.parquet import TableImages
from torusgd.data.registry import describe
from torusgd.data.tar import open_shards
from torusgd.hub import commit_of, hub_name, pinned
from torusgd.recipe.load import load_recipe
from torusgd.run.trained_weights import check_initial, read_initial
from torusgd.weights import save_weights

FLOWERS = "datasets/garden/flowers"


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets huggingface_hub ask a server, with a cache of its own."""

    def to(hub: Hub, cache: str = "hub") -> None:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / cache))

    monkeypatch.setattr(hub_module, "PAUSES", (0.0,) * 6)
    # It pauses for seconds between attempts of its own.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    return to


@pytest.fixture
def hub(use: Any) -> Iterator[Hub]:
    with Hub({}).at_work() as server:
        use(server)
        yield server


def files_of(root: Path) -> dict[str, bytes]:
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def push_flowers(hub: Hub, folder: Path) -> str:
    pytest.importorskip("pyarrow")
    if not folder.exists():
        write_parquet(folder)
    return hub.push(FLOWERS, {"README.md": b"# flowers", "flowers.py": b"print(1)", **files_of(folder)})


def test_names() -> None:
    assert str(hub_name(Path("hf:mnist@refs/convert/parquet"))) == "hf:mnist@refs/convert/parquet"
    assert [hub_name(each) for each in (None, "hf:", "hf:a/b/c", "hf:/a", Path("hf://datasets/a/b"))] == [None] * 5
    assert commit_of(Path(f"hf:a/b@{COMMITS[0]}")) == COMMITS[0]
    assert [commit_of(each) for each in (None, Path("x"), Path("hf:a/b@main"))] == [""] * 3


def test_a_data_set_is_read_and_pinned(hub: Hub, tmp_path: Path) -> None:
    first = push_flowers(hub, tmp_path / "set")
    name = Path("hf:garden/flowers")
    train, held_out = open_sources(folder_data(source="parquet"), name, 0)
    assert train.classes == ("cat", "dog"), "of the features' ClassLabel"
    assert isinstance(train, TableImages)
    assert [train.encoded(index) for index in (11, 0)] == [picture(11), picture(0)]
    assert (len(held_out), describe(name)[0]) == (6, "hf:garden/flowers: data.source parquet, 3 channels")
    assert str(pinned(name)) == f"hf:garden/flowers@{first}"
    assert not list(tmp_path.rglob("flowers.py")), "no code is fetched"
    second = push_flowers(hub, tmp_path / "set")
    assert str(pinned(name)) == f"hf:garden/flowers@{second}"
    assert str(pinned(name, first)) == f"hf:garden/flowers@{first}", "a run that goes on stays where it began"
    assert str(pinned(Path(f"{name}@{second}"), first)).endswith(second)
    before = hub.requests
    open_sources(folder_data(source="parquet"), pinned(name, first), 0)
    assert hub.requests == before, "a rank asks for nothing that its launcher has fetched"


def test_a_hub_that_is_slow_fails_and_breaks_off(use: Any, tmp_path: Path) -> None:
    with Hub({"http_500": 5, "cut": 3, "slow": 4}).at_work() as hub:
        use(hub)
        push_flowers(hub, tmp_path / "set")
        for number in range(2):
            use(hub, f"cache {number}")
            train, _ = open_sources(folder_data(source="parquet"), Path("hf:garden/flowers"), 0)
            assert isinstance(train, TableImages)
            assert [train.encoded(i) for i in range(12)] == [picture(i) for i in range(12)]
        assert min(hub.faults[kind] for kind in ("http_500", "cut", "slow")) > 0


def test_a_cache_serves_without_a_net(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = push_flowers(hub, tmp_path / "set")
    name = Path("hf:garden/flowers")
    pinned(name)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert str(pinned(name)).endswith(first)
    with refused("a data set of the hub without a net", REASON=re.compile("(?<=trees: ).*(?=; )")):
        pinned(Path("hf:garden/trees"))
    next(file for file in (tmp_path / "hub").rglob("snapshots/*/data/test*")).unlink()
    refuses("a data set of the hub of which a file is gone", pinned, name, REASON=re.compile("(?<=flowers: ).*(?=; )"))


def test_mistakes_are_one_line(hub: Hub, tmp_path: Path) -> None:
    push_flowers(hub, tmp_path / "set")
    hub.push("datasets/garden/by-hand", {"by-hand.py": b"raise SystemExit", "README.md": b""})
    hub.push("datasets/garden/gated", {})
    hub.gated.add("datasets/garden/gated")
    for name in ("nothing", "gated", "flowers@v9", "by-hand"):
        refuses(f"data info of hf:garden/{name}", describe, Path(f"hf:garden/{name}"), REASON=LIBRARY)
    with refused("a data set of the hub with another source", "--data hf:garden/flowers: "):
        open_sources(folder_data(), Path("hf:garden/flowers"), 0)


def test_a_data_set_without_images_or_with_several_sets(hub: Hub, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    text = table(range(2)).drop_columns("image")
    sets = tmp_path / "sets"
    for name, made in (("large", table(range(4))), ("small", table(range(2))), ("text", text)):
        for split in ("train", "test"):
            (sets / name / split).mkdir(parents=True)
            pq.write_table(made, sets / name / split / "0000.parquet")
    hub.push("datasets/garden/text", files_of(sets / "text"))
    refuses("a data set of the hub without images", describe, Path("hf:garden/text"), TMP=tmp_path)
    hub.push("datasets/garden/sets", files_of(sets))
    data = folder_data(source="parquet")
    refuses("a data set of the hub with several sets", open_sources, data, Path("hf:garden/sets"), 0, TMP=tmp_path)
    chosen = data.model_copy(update={"options": {"subset": "small"}})
    assert len(open_sources(chosen, Path("hf:garden/sets"), 0)[0]) == 2
    wrong = data.model_copy(update={"options": {"subset": "smal"}})
    refuses("a data set of the hub without that set", open_sources, wrong, Path("hf:garden/sets"), 0, TMP=tmp_path)


def test_tar_shards_by_url(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torusgd.storage.PAUSES", (0.0,) * 4)
    write_indexed(tmp_path / "set")
    with Hub({"http_500": 9, "cut": 10, "slow": 11}).at_work() as hub:
        use(hub)
        hub.push("datasets/garden/shards", files_of(tmp_path / "set"))
        train, held_out = open_shards(Path("hf://datasets/garden/shards"), 3)
        assert [train.encoded(index) for index in range(12)] == [picture(number) for number in range(12)]
        assert held_out.encoded(2) == picture(102)


def test_weights_to_begin_with(use: Any, tmp_path: Path) -> None:
    recipe = load_recipe("digits").recipe
    weights = {"w": torch.arange(5000.0)}
    save_weights(tmp_path / "w.safetensors", weights, {})
    with Hub({"http_500": 4, "cut": 3, "slow": 5}).at_work() as hub:
        use(hub)
        commit = hub.push("models/garden/net", {"model.safetensors": (tmp_path / "w.safetensors").read_bytes()})
        hub.push("models/garden/empty", {"pytorch_model.bin": b"pickled"})
        found = read_initial("hf:garden/net", recipe)
        assert found.source == f"hf:garden/net@{commit}"
        assert found.tensors["w"].equal(weights["w"])
        assert read_initial(f"hf:garden/net@{commit}", recipe).source == found.source
        hub.every = {}
        with refused("weights of the hub without a file", "--init hf:garden/empty: "):
            read_initial("hf:garden/empty", recipe)
    refuses("weights of the hub without a name", check_initial, "hf:a b", recipe, about="--init ")


@pytest.mark.slow
def test_a_run_from_the_hub_has_the_hash_of_one_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = sets(
        "virtual_workers=3", "stages=[{until: 4st, images_per_worker: 4}]", "polish={images_per_batch: 5}",
        "data={source: parquet, image_size: 8, resize: 10, channels: 1, mean: [0.5], std: [0.25]}",
    )  # fmt: skip
    with Hub({"http_500": 11, "cut": 7, "slow": 6}).at_work() as server:
        first = push_flowers(server, tmp_path / "set")
        folder = train(tmp_path / "folder", "--data", tmp_path / "set", "--workers", "1", *settings)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for ranks in (1, 3):
            monkeypatch.setenv("HF_HOME", str(tmp_path / f"home {ranks}"))
            out = tmp_path / f"hub {ranks}"
            words = "--data", "hf:garden/flowers", "--workers", str(ranks), *settings
            summary = train(out, *words, "--max-steps", "2")
            assert summary["data_revision"] == first
            push_flowers(server, tmp_path / "set")
            summary = train(out, *words)
            assert (summary["weights_sha256"], summary["data_revision"]) == (folder["weights_sha256"], first)
            del server.repositories[FLOWERS][1:]

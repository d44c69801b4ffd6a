"""What is in a data set is found by one rank of a machine, and mapped by the others."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.comm.gloo_world import on_ranks
from tests.data.pictures import write_folder
from torusgd.comm.base import Liveness
from torusgd.comm.groups import group_of
from torusgd.data.file_lists import Arrays, Progress
from torusgd.data.pictures import PictureFiles, open_folder
from torusgd.data.registry import data_sha256
from torusgd.errors import UserError
from torusgd.run import open_data
from torusgd.run.open_data import HostShare, LauncherArrays, MappedArrays


def shared(hosts: tuple[int, ...], keys: str = "aaa", keeps: bool = False) -> HostShare:
    """Of these ranks, which lie on these hosts and want what these letters stand for."""
    patch.object(open_data, "hosts_of", lambda group: hosts).start()  # in a process that ends with the test
    world = group_of()
    return HostShare(world, Liveness(), "here", keys[world.rank], keeps)


def seen(source: PictureFiles, other: PictureFiles) -> tuple[Any, ...]:
    """All that is known of a folder."""
    files = [source.where(n) for n in range(len(source))]
    return list(source.names), files, source.labels.tolist(), source.classes, data_sha256(source, other)


@on_ranks(3)
def test_one_rank_of_a_host_makes_what_the_others_map(tmp_path: Path) -> None:
    world, made = group_of(), list[str]()
    if world.rank == 0:
        write_folder(tmp_path)
    world.barrier()

    def make(progress: Progress) -> Arrays:
        made.append("made")
        progress(1)
        return {"numbers": np.arange(10), "none": np.empty((0, 3), np.uint8)}

    def refuse(progress: Progress) -> Arrays:
        raise UserError(f"rank {group_of().rank} refuses")

    def fail_once(progress: Progress) -> Arrays:
        made.append("tried")
        if len(made) == 1 and group_of().rank == 0:
            raise OSError("a disk fails for a moment")
        return {"numbers": np.arange(10)}

    before = len(os.listdir("/proc/self/fd"))
    for hosts, keys, makers, mappers in (
        ((0, 0, 0), "aaa", (1, 0, 0), (True, True, True)),
        ((0, 1, 1), "aaa", (1, 1, 0), (False, True, True)),
        ((0, 0, 0), "abb", (1, 1, 0), (False, True, True)),
    ):
        arrays = shared(hosts, keys)(make)
        assert (arrays["numbers"].tolist(), arrays["none"].shape) == ([*range(10)], (0, 3))
        assert (len(made), arrays["numbers"].base is not None) == (makers[world.rank], mappers[world.rank])
        del arrays
        made.clear()
    assert len(os.listdir("/proc/self/fd")) == before, "no file is left open"
    kept = shared((0, 1, 1), keeps=True)
    assert kept(make)["numbers"].tolist() == MappedArrays(kept.paths)(refuse)["numbers"].tolist()
    made.clear()
    with pytest.raises(UserError, match=str(group_of().rank)):
        shared((0, 0, 0))(refuse)
    shared((0, 0, 0))(fail_once)
    assert len(made) == (2, 1, 1)[world.rank]
    assert seen(*open_folder(tmp_path, 3, once=shared((0, 0, 0)))) == seen(*open_folder(tmp_path, 3))


def test_a_rank_maps_what_its_launcher_keeps_and_finds_it_itself_once_that_is_gone(tmp_path: Path) -> None:
    folder, kept, made = write_folder(tmp_path), LauncherArrays(), list[str]()
    alone = seen(*open_folder(folder, 3, once=kept))

    def make(progress: Progress) -> Arrays:
        made.append("made")
        return {"numbers": np.arange(10)}

    assert seen(*open_folder(folder, 3, once=MappedArrays(kept.paths))) == alone
    assert "numbers" not in MappedArrays(kept.paths)(make)
    assert made == []
    for path in kept.paths:
        os.close(int(path.rpartition("/")[2]))
    assert MappedArrays(kept.paths)(make)["numbers"].tolist() == [*range(10)]
    assert [*MappedArrays([])(make)] == ["numbers"]
    assert len(made) == 2

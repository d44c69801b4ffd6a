import gzip
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import put_command
from tests.faulty_server import FaultyHandler, FaultyServer, file_server
from tests.messages import refuses
from torusgd.data.fetch import DATA_SETS, DataSet, fetch, wrong_files
from torusgd.errors import RunError

FILES = {"a.gz": gzip.compress(b"first"), "b.gz": gzip.compress(b"second")}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataSet]:
    """A data set that no Debian package ships, on a web server at work."""
    write_files(tmp_path / "site")
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    put_command(tmp_path / "bin" / "apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    with file_server(tmp_path / "site") as site:
        toy = DataSet("torusgd-no-such-package", tmp_path / "installed", site, digests)
        monkeypatch.setitem(DATA_SETS, "toy", toy)
        yield toy


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def test_the_site_is_the_last_way_and_encrypted(toy: DataSet, caplog: pytest.LogCaptureFixture) -> None:
    assert all(wanted.site.startswith("https://") for wanted in DATA_SETS.values() if wanted is not toy)
    with caplog.at_level(logging.INFO):
        assert fetch("toy") == fetch("toy") == Path("data/toy")
    done = f"toy: downloaded from {toy.site}, SHA-256 as expected"
    assert caplog.messages == [done, "toy: already complete in data/toy"]
    Path("data/toy/a.gz").write_bytes(b"damaged")
    assert not wrong_files(fetch("toy"), toy)
    assert sorted(os.listdir("data/toy")) == ["a.gz", "b.gz"]


def test_installed_files_are_used_where_they_are_or_copied(toy: DataSet, tmp_path: Path) -> None:
    write_files(toy.installed)
    assert fetch("toy") == toy.installed
    assert fetch("toy", tmp_path / "copy") == tmp_path / "copy"
    assert not wrong_files(tmp_path / "copy", toy)


def test_mistakes_are_one_line_and_no_wrong_file_is_taken_or_left(toy: DataSet, tmp_path: Path) -> None:
    (tmp_path / "site" / "b.gz").write_bytes(b"something else")
    refuses("data fetch of a wrong file", fetch, "toy", kind=RunError, TMP=tmp_path, SITE=toy.site)
    assert os.listdir("data/toy") == []
    (tmp_path / "site" / "a.gz").unlink()
    refuses("data fetch of what is nowhere", fetch, "toy", kind=RunError, TMP=tmp_path, SITE=toy.site)
    refuses("data fetch of another set", fetch, "mnist")
    (tmp_path / "file").write_text("")
    refuses("data fetch into a file", fetch, "toy", tmp_path / "file" / "below", TMP=tmp_path)


def test_a_site_that_speaks_no_http_is_one_line(toy: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(FaultyHandler):
        def do_GET(self) -> None:
            self.close_connection = True
            self.wfile.write(b"hello\r\n\r\n")

    with FaultyServer(Strange, {}).at_work() as server:
        monkeypatch.setitem(DATA_SETS, "toy", toy._replace(site=server.url))
        refuses("data fetch from no web server", fetch, "toy", kind=RunError, TMP=tmp_path, SITE=server.url)


def test_the_package_is_unpacked_without_root(toy: DataSet, tmp_path: Path) -> None:
    """With apt-get replaced by a script that lays down a real package; dpkg-deb is the real one."""
    if not Path("/usr/bin/dpkg-deb").exists():
        pytest.skip("no dpkg-deb on this machine")
    tree = tmp_path / "tree"
    write_files(tree / toy.installed.relative_to("/"))
    (tree / "DEBIAN").mkdir()
    about = f"Package: {toy.package}\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: toy\n"
    (tree / "DEBIAN" / "control").write_text(about)
    put_command(tmp_path / "bin" / "apt-get", f'exec dpkg-deb -b {tree} "$PWD/{toy.package}_1_all.deb"')
    (tmp_path / "site" / "a.gz").unlink()  # so that no other way leads to it
    assert not wrong_files(fetch("toy", tmp_path / "out"), toy)

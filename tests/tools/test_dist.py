"""Wheel and sdist: what is in them, and that the wheel works where there is no checkout."""

import json
import os
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.commands import ran

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, code: int = 0, timeout: float = 240) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ran(words, code=code, cwd=cwd, timeout=timeout, env=clean).stdout


def new_environment(folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    return folder / "env" / "bin"


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    wheel, sdist = build(tmp_path)
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "src/torusgd/report/templates/run.html"} <= set(names)
    assert not [name for name in names if name.startswith(("runs/", "data/", ".venv", "build/"))]

    # A new environment with torusgd alone; torch and the rest are those of this one, which holds no torusgd for it:
    # of a folder named in a .pth the .pth files, by which a checkout is installed, are not read.
    bin = new_environment(tmp_path)
    python, torusgd = bin / "python", bin / "torusgd"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    home = run(python, "-c", "import torusgd; print(torusgd.__file__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(tmp_path / "env")

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(torusgd, "--version", cwd=tmp_path) == f"torusgd {version}\n"
    assert version in (ROOT / "CHANGELOG.md").read_text()
    run(torusgd, "train", "digits", "--workers", "1", "--max-steps", "3", cwd=tmp_path)
    assert json.loads((tmp_path / "runs" / "digits" / "summary.json").read_text())["steps"] == 3
    run(torusgd, "report", "runs/digits", cwd=tmp_path)
    run(torusgd, "plan", "resnet50", "--cluster", "hgx-h100", "--devices", "8", "--report", "plan.html", cwd=tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    run(torusgd, "report", "nowhere", cwd=tmp_path, code=2)


def test_the_versions_with_hashes_are_those_that_pip_is_given() -> None:
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    found = {(each["name"], each.get("version")) for each in locked}  # several of one name, each for its Pythons
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pinned) > 100
    for line in pinned:
        assert tuple(line.split("==")) in found, line
    files = [file for each in locked for file in each.get("wheels", [])]
    assert all(file["hash"].startswith("sha256:") for file in files)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_address_of_the_repository_makes_the_links_of_the_index(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("twine")
    monkeypatch.setenv("TORUSGD_URL", "https://example.org/torusgd/")
    wheel, sdist = build(tmp_path)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("torusgd-0.1.0.dist-info/METADATA").decode()
    assert "Project-URL: Issues, https://example.org/torusgd/issues" in metadata


EXTRAS = "digits,images,s3,parquet,huggingface,tensorboard"  # those that any index has and that take no GB


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_brings_all_that_it_needs(tmp_path: Path) -> None:
    wheel, _ = build(tmp_path)
    bin = new_environment(tmp_path)
    torusgd, pip = bin / "torusgd", [str(bin / "python"), "-m", "pip"]
    install = [*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{wheel}[{EXTRAS}]"]
    asked = ran([*install, "--dry-run", "--report", "-"], code=None, timeout=600)
    if asked.returncode:
        pytest.skip(f"no index is in reach: {asked.stderr[-300:]}")
    packages = [each["metadata"] for each in json.loads(asked.stdout)["install"]]
    if not next(each["version"] for each in packages if each["name"].lower() == "torch").endswith("+cpu"):
        pytest.skip("the index at hand has no build of torch for CPUs alone, and the other one takes GBs")
    run(*install, cwd=tmp_path, timeout=900)
    run(*pip, "check", cwd=tmp_path)
    run(torusgd, "train", "digits", "--workers", "2", "--max-steps", "3", "--track", "tensorboard", cwd=tmp_path)
    run(torusgd, "report", "runs/digits", "--mistakes", cwd=tmp_path)
    run(torusgd, "export", "runs/digits", cwd=tmp_path, code=2)  # whose extra was not asked for

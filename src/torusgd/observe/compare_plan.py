"""A plan of `torusgd plan --json` beside the run that it predicted."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import UserError
from ..untrusted import parse_json, read_text


@dataclass(frozen=True)
class PlanComparison:
    """What a plan says of a run's steps."""

    path: Path
    recipe: str
    devices: int
    seconds: Mapping[int, float]
    """of a step, by its batch"""

    @classmethod
    def load(cls, path: Path) -> "PlanComparison":
        """Reads a plan; UserError if it is none."""
        try:
            tree = parse_json(read_text(path))
            seconds = {int(stage["batch"]): float(stage["seconds"]) for stage in tree["stages"]}
            return cls(path, str(tree["recipe"]), int(tree["devices"]), seconds)
        except OSError as error:
            raise UserError(f"--plan {path}: {error.strerror}; make one with torusgd plan ... --json {path}") from None
        except (ValueError, KeyError, TypeError, OverflowError):
            raise UserError(f"--plan {path}: is no plan; make one with torusgd plan ... --json {path}") from None

    def check(self, recipe: str, batches: Iterable[int], ranks: int) -> None:
        """UserError unless it is a plan of this recipe and these batches, on so many ranks."""
        missing = sorted(set(batches) - set(self.seconds))
        if recipe != self.recipe or missing:
            what = f"its batch of {missing[0]}" if recipe == self.recipe else recipe
            raise UserError(f"--plan {self.path}: is of {self.recipe} and not of {what}; plan it with the same --set")
        if ranks != self.devices:
            raise UserError(f"--plan {self.path}: is of {self.devices} devices, the run has {ranks} ranks")

    def beside(self, events: Path) -> dict[str, float]:
        """Predicted and measured step time and throughput of the steps in `events.jsonl`, and relative errors.

        A measured step is the median of its batch, without the run's first step, so that evaluations, checkpoints and
        warming up are left out as in the plan. Empty without two steps.
        """
        steps: dict[int, list[float]] = {}
        for line in events.read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            if event.get("step", 0) > 1 and event.get("batch") in self.seconds and "step_seconds" in event:
                steps.setdefault(event["batch"], []).append(event["step_seconds"])
        if not steps:
            return {}
        counts = {batch: len(times) for batch, times in steps.items()}
        number, images = sum(counts.values()), sum(batch * count for batch, count in counts.items())
        predicted = sum(self.seconds[batch] * count for batch, count in counts.items())
        measured = sum(median(times) * counts[batch] for batch, times in steps.items())
        return {
            "step_seconds": predicted / number,
            "measured_step_seconds": measured / number,
            "step_seconds_error": predicted / measured - 1,
            "images_per_second": images / predicted,
            "measured_images_per_second": images / measured,
            "images_per_second_error": measured / predicted - 1,
        }

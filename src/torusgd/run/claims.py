"""What a run's folder says of itself, read once to be checked: recipe, records, journal, summary, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, as_user_error
from ..recipe.load import apply_overrides, parse_mapping, read_file, validate
from ..recipe.schema import Recipe
from ..rundir.run_dir import RunDir
from ..rundir.run_view import HEAD, local_run
from ..step import records
from ..step.journal import Journaled, parse_journal
from ..storage import place
from ..untrusted import is_there, read_text
from ..weights import load_weights, weights_sha256
from .saving import weights_metadata
from .trained_weights import check_names


@dataclass(frozen=True)
class Claims:
    """What a run says of itself; it may go on meanwhile."""

    run: Path
    folder: Path  # the run's, or a copy of what is in its bucket
    recipe: Recipe
    lines: tuple[records.Line, ...]
    head: str
    problem: str  # why the records behind `lines` can't be those of a run; empty: they can
    summary: Mapping[str, Any]  # empty unless the run is finished
    journal: Journaled | None = None
    journal_text: str = ""

    @property
    def name(self) -> str:
        return place(self.run)

    @cached_property
    def states(self) -> dict[int, records.StateLine]:
        return records.states_of(self.lines)

    @property
    def begin(self) -> records.BeginLine:
        assert isinstance(self.lines[0], records.BeginLine), "`read_claims` has looked"
        return self.lines[0]

    @cached_property
    def evaluations(self) -> dict[int, records.EvaluationLine]:
        return {line.step: line for line in self.lines if isinstance(line, records.EvaluationLine)}

    @property
    def result(self) -> records.ResultLine | None:
        return next((line for line in self.lines if isinstance(line, records.ResultLine)), None)

    @cached_property
    def conditions(self) -> dict[int, records.ConditionsLine]:
        """By step, those under which its last figures were computed: of its state, an evaluation, or the result."""
        # A run that was stopped in an evaluation may have gone on with it on another machine.
        found, now = dict[int, records.ConditionsLine](), None
        for line in self.lines:
            if isinstance(line, records.ConditionsLine):
                now = line
            elif now is not None:
                found[line.step] = now
        return found

    def contradictions(self) -> list[str]:
        """Where what the folder says does not fit together, so that nothing need be computed to know it is wrong."""
        found = [f"records.jsonl: {self.problem}"] if self.problem else []
        if self.recipe.sha256() != self.begin.recipe_sha256:
            found.append(f"recipe.yaml: is {self.recipe.sha256()}, the records are of {self.begin.recipe_sha256}")
        found += self._repeated()
        if self.result is not None and self._model is not None and self._model[0] != self.result.weights_sha256:
            both = f"{self._model[0]}, in the records {self.result.weights_sha256}"
            found.append(f"model.safetensors: weights_sha256 is {both}")
        if not self.summary:
            return found
        last = (self.summary.get("records") or {}).get("sha256")
        if last != self.head:
            found.append(f"records.jsonl: the last record is {self.head}, of summary.json it is {last}")
        if self.result is None:
            return [*found, "records.jsonl: the run is finished, and they have no result"]
        figures = self.result.figures
        begin = self.begin.model_dump(include={"recipe_sha256", "train_images", "data_sha256", "init_sha256"})
        known = {**begin, "steps": self.result.step, "weights_sha256": self.result.weights_sha256, **figures}
        differing = [key for key in known if key in self.summary and self.summary[key] != known[key]]
        return found + [f"summary.json: {key} is {self.summary[key]}, in the records {known[key]}" for key in differing]

    def _repeated(self) -> list[str]:
        """Records that say two things of one step: the last alone would be compared."""
        found: dict[tuple[str, int], records.Line] = {}
        for line in self.lines:
            if isinstance(line, records.StateLine | records.EvaluationLine | records.ResultLine):
                first = found.setdefault((line.record, line.step), line)
                if first.model_copy(update={"before": line.before}) != line:
                    return [f"records.jsonl: two {line.record} records of step {line.step} differ"]
        return []

    @cached_property
    def _model(self) -> tuple[str, dict[str, str]] | None:
        """The hash of the weights and what their file says of itself; None if they are not those of a result."""
        path = RunDir(self.folder).model
        if self.result is None or not is_there(path):
            return None
        tensors, metadata = load_weights(path)
        return weights_sha256(tensors), metadata

    def other_metadata(self, classes: Sequence[str]) -> list[str]:
        """What the weights' file says of itself that is not so, of a run on images of these classes."""
        if self._model is None:
            return []
        found, own = self._model[1], weights_metadata(self.recipe, classes)
        own |= {"records_sha256": self.head} if self.summary else {}  # else the run has gone on since
        return [f"its metadata has another {key} than the run" for key in own if found.get(key) != own[key]]


def read_claims(run: Path, overrides: list[str]) -> Claims:
    """What there is of a run; UserError if it is none, or has no records. Code of the keys `overrides` may be run."""
    folder = RunDir(local_run(run))
    if not is_there(folder.recipe):
        raise UserError(f"{place(run)}: holds no run; give the folder that torusgd train wrote")
    text = read_file(folder.recipe, str(folder.recipe))
    if not text.startswith(HEAD):
        raise UserError(f"{folder.recipe}: is not what a run writes")
    tree = parse_mapping(text, str(folder.recipe))
    recipe = validate(Recipe, tree, str(folder.recipe))
    apply_overrides(tree, overrides)
    if validate(Recipe, tree, "--set") != recipe:
        raise UserError("--set: changes the recipe; a run is checked by its own")
    check_names(folder.recipe, recipe, {item.partition("=")[0] for item in overrides})
    # The summary first: whatever is in the records then, a finished run adds nothing.
    summary = folder.known_summary()
    if not is_there(folder.records):
        why = "it was trained without records, so there is nothing to compare"
        raise UserError(f"{place(run)}: has no records.jsonl; {why}")
    with as_user_error(f"{folder.records}: can't be read", of=(OSError, ValueError)):
        lines, head, problem = records.parse_records(read_text(folder.records, records.MOST_BYTES))
    if not lines:
        raise UserError(f"{folder.records}: {problem or 'holds no record yet'}")
    journal, text = None, ""
    if recipe.synchrony.keeps_journal:
        with as_user_error(f"{folder.journal}: the journal can't be read", of=(OSError, ValueError)):
            text = read_text(folder.journal, records.MOST_BYTES)
        text = text[: text.rfind("\n") + 1]  # the last line of a run at work may be under way
        try:
            end = summary.get("journal")
            journal = parse_journal(text, "journal.txt", recipe.sha256(), recipe.virtual_workers, end)
        except UserError as error:
            problem = str(error)
    return Claims(run, folder.path, recipe, tuple(lines), head, problem, summary, journal, text)

"""What does not go with what: one table, from which come the errors of the commands and a table in docs/recipe-keys.md.

`check` refuses a run, and names the first rule that it breaks. `obstacle` looks for what would forbid a part that may
yet be added, such as more ranks. The rules of `RECIPE_RULES` are checked when a recipe is read.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..errors import UserError
from ..text import listed
from .runtime_options import RuntimeOptions

if TYPE_CHECKING:
    from .schema import Recipe

_DEFAULTS = RuntimeOptions()
_SOURCES_OF_PIXELS = ("digits", "synthetic", "frames", "mnist", "numpy")  # bytes as in files, or made of integers


@dataclass(frozen=True)
class Setup:
    """A recipe with the means to compute it, as far as one part of it may forbid another."""

    recipe: "Recipe"
    options: RuntimeOptions = _DEFAULTS
    device: str = "cpu"  # cpu or cuda; empty: not known, as in a plan
    ranks: int | None = None  # number of ranks; None: not known yet
    delays: str = ""  # model of the delays that ranks sleep, of --delays
    is_replay: bool = False  # true if a journal decides which work is left out
    listens: bool = False  # true if other machines may join
    launcher: str = ""  # torchrun, or other; empty: torusgd starts its ranks itself
    deletes: str = ""  # URL of a run that --fresh deletes

    @property
    def allowed(self) -> str:
        """Numbers of model-parallel ranks to choose from."""
        return listed(allowed_parallel(self.ranks or 1, self.recipe.column_blocks))

    def value(self, key: str) -> str:
        """An option, or a value of the recipe by its dotted key, as YAML writes it."""
        # Ranks are counted by whoever starts them, and not by the option.
        if key == "workers" or key.startswith("--"):
            found: Any = {"workers": self.ranks, "--delays": self.delays}.get(key)
        else:
            found = attrgetter(key)(self.options if key in RuntimeOptions.model_fields else self.recipe)
        if found is None or isinstance(found, BaseModel):
            return ""
        if isinstance(found, bool):
            return str(found).lower()
        if isinstance(found, tuple):
            return listed(found)
        return f"{found:g}" if isinstance(found, float) else str(found)


@dataclass(frozen=True)
class Part:
    """A value of a recipe, an option, a flag or a circumstance."""

    key: str  # key of the recipe or of the options, or a flag, with which errors begin; empty: a circumstance
    words: str  # words of the table in the docs
    is_in: Callable[[Setup], bool]


@dataclass(frozen=True)
class Rule:
    """Two parts that do not go together; of several rules that are broken the first is reported."""

    part: Part
    other: Part
    why: str
    remedy: str  # way out; `{0.NAME}` in it, and in `why`, stands for what the setup has under that name

    def is_broken(self, setup: Setup) -> bool:
        return self.part.is_in(setup) and self.other.is_in(setup)

    def line(self, setup: Setup) -> str:
        value = f" = {value}" if (value := setup.value(self.part.key)) else ""
        return f"{self.part.key}{value}: {self.why.format(setup)}; {self.remedy.format(setup)}"


def check(setup: Setup, parts: Collection[Part] = ()) -> None:
    """UserError for the first rule of these parts that a setup breaks; without parts: for the first of all rules."""
    for rule in RUN_RULES:
        # Not all of a setup is known at once: a launcher's flags are checked where it is known.
        if (not parts or rule.part in parts) and rule.is_broken(setup):
            raise UserError(rule.line(setup))


def refusals(setup: Setup) -> list[str]:
    return [rule.line(setup) for rule in RUN_RULES if rule.is_broken(setup)]


def check_recipe(recipe: "Recipe") -> None:
    """ValueError of one line if the values of a recipe don't go together."""
    setup = Setup(recipe)
    for rule in RECIPE_RULES:
        if rule.is_broken(setup):
            raise ValueError(rule.line(setup))


def obstacle(part: Part, setup: Setup) -> str:
    """The reason why a part can't be added to a setup, which may have it already; empty if it can."""
    return next((rule.why.format(setup) for rule in RUN_RULES if rule.part is part and rule.other.is_in(setup)), "")


def allowed_parallel(ranks: int, blocks: int) -> list[int]:
    """The numbers of model-parallel ranks that give the same bits: divisors of both, a power of two of blocks each.

    >>> allowed_parallel(8, 8), allowed_parallel(6, 12), allowed_parallel(4, 1)
    ([1, 2, 4, 8], [1, 3, 6], [1])
    """
    # One rank of a group holds blocks / m neighbours. `sum_in_tree` adds pairs of neighbours, so that only a power of
    # two of them is a branch of the tree of sums; all of them, on one rank, are the whole tree.
    fitting = [m for m in range(1, blocks + 1) if ranks % m == 0 and blocks % m == 0]
    return [m for m in fitting if m == 1 or (blocks // m).bit_count() == 1]


def _by_clocks(setup: Setup) -> bool:
    form = setup.recipe.synchrony
    return form.leaves_out and form.delays is None and not setup.is_replay


def _resamples(setup: Setup) -> bool:
    recipe = setup.recipe
    if recipe.data.pixels == "portable":
        return False
    resized = (recipe.data.resize, recipe.evaluate.resize, *(stage.resize for stage in recipe.stages))
    is_resampled = any(size is not None for size in resized) or recipe.data.augment.crop == "resized"
    return is_resampled or recipe.data.source not in _SOURCES_OF_PIXELS


# Values of a recipe.
INEXACT = Part("reduction", "`reduction` other than exact", lambda s: s.recipe.reduction != "exact")
IN_BLOCKS = Part("column_blocks", "`column_blocks` above 1", lambda s: s.recipe.column_blocks > 1)
WHOLE = Part("column_blocks", "`column_blocks: 1`", lambda s: s.recipe.column_blocks == 1)
RELAXED = Part("synchrony.form", "`synchrony.form` other than synchronous",
               lambda s: s.recipe.synchrony.form != "synchronous")  # fmt: skip
SIMULATED = Part("synchrony.form", "`synchrony.form` that is only simulated", lambda s: s.recipe.synchrony.is_simulated)
LEAVES_OUT = Part("synchrony.form", "`synchrony.form: backup` or `cutoff`", lambda s: s.recipe.synchrony.leaves_out)
BY_CLOCKS = Part("synchrony.form", "`synchrony.form: backup` or `cutoff` by clocks", _by_clocks)
NO_CLOCKS = Part("", "a run without late work that clocks leave out", lambda s: not _by_clocks(s))
LOCAL = Part("synchrony.form", "`synchrony.form: local`", lambda s: s.recipe.synchrony.form == "local")
FLOAT16 = Part("precision", "`precision: float16`", lambda s: s.recipe.precision == "float16")
NO_FLOAT16 = Part("precision", "`precision` other than float16", lambda s: s.recipe.precision != "float16")
SCALED_LOSS = Part("loss_scale", "`loss_scale`", lambda s: s.recipe.loss_scale != type(s.recipe.loss_scale)())
PORTABLE = Part("precision", "`precision: portable`", lambda s: s.recipe.precision == "portable")
COMPILED = Part("compile", "`compile: true`", lambda s: s.recipe.compile)
BINARY = Part("loss", "`loss: binary-cross-entropy`", lambda s: s.recipe.loss != "cross-entropy")
FROZEN = Part("model.freeze", "`model.freeze`", lambda s: bool(s.recipe.model.freeze))
MIXED_IMAGES = Part("data.augment", "`data.augment.mixup` or `cutmix`",
                    lambda s: bool(s.recipe.data.augment.mixup or s.recipe.data.augment.cutmix))  # fmt: skip
CLIPPED = Part("clip_grad_norm", "`clip_grad_norm`", lambda s: s.recipe.clip_grad_norm is not None)
OTHER_RULE = Part("optimizer.name", "`optimizer.name` other than sgd or lars",
                  lambda s: s.recipe.optimizer.name not in ("sgd", "lars"))  # fmt: skip
OTHER_UPDATE = Part("optimizer", "`optimizer` other than sgd or lars, or with rates by layer",
                    lambda s: s.recipe.optimizer.needs_head or OTHER_RULE.is_in(s))  # fmt: skip
EACH_NORM = Part("model.batch_norm_workers", "`model.batch_norm_workers: each`",
                 lambda s: s.recipe.model.batch_norm_workers == "each")  # fmt: skip
EXTRA_PASS = Part("", "`stages.N.extra_pass`", lambda s: s.recipe.has_extra_passes)
NVJPEG = Part("data.decoder", "`data.decoder: nvjpeg`", lambda s: s.recipe.data.decoder == "nvjpeg")

DELAYED = Part("synchrony.delays", "`synchrony.delays`", lambda s: s.recipe.synchrony.delays is not None)
RESAMPLED = Part("data", "images that are decoded or resampled, with `data.pixels: fast`", _resamples)
PORTABLE_PIXELS = Part("data.pixels", "`data.pixels: portable`", lambda s: s.recipe.data.pixels == "portable")

# Options of the runtime, flags, and circumstances of a run.
WORKERS = Part("workers", "`workers`", lambda s: s.ranks is not None)
TOO_MANY = Part("", "fewer `virtual_workers`", lambda s: (s.ranks or 0) > s.recipe.virtual_workers)
ONE_RANK = Part("", "one rank", lambda s: s.ranks == 1)
UNEVEN = Part("", "a number of ranks that does not divide `virtual_workers`",
              lambda s: s.ranks is not None and s.recipe.virtual_workers % s.ranks > 0)  # fmt: skip
ON_CPU = Part("device", "`device: cpu`", lambda s: s.device == "cpu")
ON_GPU = Part("device", "`device: cuda`", lambda s: s.device == "cuda")
GRID = Part("grid", "`grid`", lambda s: s.options.grid is not None)
NO_GRID = Part("", "`allreduce` other than torus or hierarchical",
               lambda s: s.options.allreduce.partition(":")[0] not in ("torus", "hierarchical"))  # fmt: skip
STREAMS = Part("streams", "`streams` above 1", lambda s: s.options.streams > 1)
NATIVE = Part("", "`allreduce: native`", lambda s: s.options.allreduce == "native")
SHARDED = Part("update", "`update: sharded`", lambda s: s.options.update == "sharded")
MODEL_PARALLEL = Part("model_parallel", "`model_parallel` above 1",
                      lambda s: s.options.model_parallel not in (1, "auto"))  # fmt: skip
DISALLOWED = Part("", "ranks or `column_blocks` that it does not divide",
                  lambda s: s.ranks is not None and s.options.model_parallel not in allowed_parallel(
                      s.ranks, s.recipe.column_blocks))  # fmt: skip
WEIGHTS_FIRST = Part("weights_first", "`weights_first: true`", lambda s: s.options.weights_first)
CUDA_GRAPHS = Part("cuda_graphs", "`cuda_graphs: true`",
                   lambda s: bool(s.options.cuda_graphs) and not PORTABLE.is_in(s))  # fmt: skip
PORTABLE_GRAPHS = Part("cuda_graphs", "`cuda_graphs: true` in portable arithmetic",
                       lambda s: bool(s.options.cuda_graphs) and PORTABLE.is_in(s))  # fmt: skip
NO_GRAPHS = Part("", "`cuda_graphs: false`",
                 lambda s: not s.options.cuda_graphs and (s.options.cuda_graphs is False or s.ranks != 1))  # fmt: skip
CUDA_STREAMS = Part("cuda_streams", "`cuda_streams` above 1", lambda s: s.options.cuda_streams > 1)
AUDITED = Part("audit", "`audit`", lambda s: s.options.audit > 0)
BY_SPEED = Part("shares", "`shares: speed`",
                lambda s: s.options.shares == "speed" and "shares" in s.options.model_fields_set)  # fmt: skip
STEALING = Part("work_stealing", "`work_stealing: true`", lambda s: s.options.work_stealing)
LOADER_PROCESSES = Part("loader_processes", "`loader_processes`", lambda s: s.options.loader_processes > 0)
MIXED_RANKS = Part("mixed", "`mixed: true`", lambda s: s.options.mixed)
RANGE = Part("--workers MIN:MAX", "`--workers MIN:MAX`", lambda s: s.options.workers_range is not None)
LISTENS = Part("--listen", "`--listen`", lambda s: s.listens)
DELAYS = Part("--delays", "`--delays`", lambda s: bool(s.delays))
DELETES = Part("--fresh", "`--fresh` of a run in a bucket", lambda s: bool(s.deletes))
JOINED = Part("", "ranks that another launcher has started", lambda s: bool(s.launcher))
TORCHRUN = Part("", "torchrun", lambda s: s.launcher == "torchrun")
TRAINED = Part("", "`torusgd train`", lambda s: True)

# The order decides which of several broken rules is reported.
RECIPE_RULES = (
    Rule(SCALED_LOSS, NO_FLOAT16, "has a meaning with precision: float16 only", "leave it out"),
    Rule(COMPILED, IN_BLOCKS, "takes whole networks", "set it to false"),
    Rule(COMPILED, RELAXED, "takes synchronous steps", "set it to false"),
    Rule(BINARY, IN_BLOCKS, "is computed by a whole network only", "set column_blocks: 1"),
    Rule(IN_BLOCKS, INEXACT, "above 1 it needs exact sums", "set reduction: exact"),
    Rule(FROZEN, IN_BLOCKS, "frozen parameters are not cut", "set column_blocks: 1"),
    Rule(MIXED_IMAGES, IN_BLOCKS, "mixup and cutmix need whole targets", "set column_blocks: 1"),
    Rule(CLIPPED, LOCAL, "the virtual workers' copies don't clip", "leave it out"),
    Rule(OTHER_UPDATE, LOCAL, "copies take sgd or lars, with one rate for all layers", "choose another form or rule"),
    Rule(RELAXED, INEXACT, "needs exact sums, so that a replay has the same bits", "set reduction: exact"),
    Rule(RELAXED, IN_BLOCKS, "ranks that share layers wait for one another", "set column_blocks: 1"),
    Rule(EACH_NORM, RELAXED, "the first virtual worker's statistics of a step may be missing, or of several weights",
         "set it to all"),
    Rule(RELAXED, EXTRA_PASS, "only synchronous steps take them", "leave out extra_pass"),
    Rule(IN_BLOCKS, EXTRA_PASS, "ranks that share layers take their passes in step", "set column_blocks: 1"),
    Rule(COMPILED, PORTABLE, "a compiler joins products and sums as the machine has them", "set it to false"),
    Rule(INEXACT, PORTABLE, "a sum of floats depends on the order of its addends", "set reduction: exact"),
    Rule(NVJPEG, PORTABLE, "each version of a GPU's decoder has bits of its own", "set it to libjpeg"),
    Rule(DELAYED, PORTABLE, "they are drawn by a library's logarithm", "leave it out"),
    Rule(NVJPEG, PORTABLE_PIXELS, "each version of a GPU's decoder has bits of its own", "set it to libjpeg"),
    Rule(PORTABLE, RESAMPLED, "decoders and resampling have other bits on other machines",
         "set data.pixels: portable, or precision: float32"),
)  # fmt: skip
_TOO_MANY = "the recipe has {0.recipe.virtual_workers} virtual workers to share"
_UNEVEN_SHARES = (
    (INEXACT, "sums that are not exact depend on who computes what"),
    (IN_BLOCKS, "ranks that share layers in column blocks take as many virtual workers each"),
    (RELAXED, "time decides other things than shares"),
)
_FIXED_RANKS = (
    (SHARDED, "a lost rank takes its shards of the momentum along"),
    (IN_BLOCKS, "a lost rank takes its column blocks along"),
    (INEXACT, "sums that are not exact depend on the number of ranks"),
    (CUDA_GRAPHS, "steps that were launched in advance would use sums that a lost rank has left half done"),
)
RUN_RULES = (
    Rule(WORKERS, TOO_MANY, _TOO_MANY, "use at most {0.recipe.virtual_workers}"),
    Rule(GRID, NO_GRID, "has a meaning for torus and hierarchical, not for {0.options.allreduce}", "leave it out"),
    Rule(STREAMS, NATIVE, "the backend's own all-reduce has one", "choose another, such as auto"),
    Rule(SIMULATED, TRAINED, "is simulated only", "give the recipe to torusgd simulate, or choose another form"),
    Rule(BY_CLOCKS, ON_GPU, "clocks close steps on CPUs only", "use --device cpu, or synchrony.delays without clocks"),
    Rule(LOCAL, FLOAT16, "copies have no loss scale", "use precision: bfloat16 or float32"),
    Rule(DELAYS, NO_CLOCKS, "only clocks of a run that leaves out late work notice it", "leave it out"),
    Rule(AUDITED, ONE_RANK, "one rank has no other to check it", "use at least 2 workers, better 3"),
    Rule(AUDITED, INEXACT, "only integers can be compared", "set reduction: exact"),
    Rule(AUDITED, IN_BLOCKS, "layers in column blocks can't be audited", "set column_blocks: 1"),
    Rule(AUDITED, MIXED_RANKS, "ranks under mixed conditions round differently", "leave out audit or mixed"),
    Rule(AUDITED, LEAVES_OUT, "not all of a step's work is done twice", "leave out one"),
    Rule(DELAYED, MIXED_RANKS, "another machine's logarithm draws other delays", "leave out delays or mixed"),
    *(Rule(BY_SPEED, other, why, "leave it out, and the shares are even") for other, why in _UNEVEN_SHARES),
    Rule(STEALING, AUDITED, "an audit must know beforehand who computes what", "leave one of them out"),
    Rule(STEALING, SHARDED, "new weights arrive while the passes of a fixed share run", "leave one of them out"),
    *(Rule(STEALING, other, why, "leave one of them out") for other, why in _UNEVEN_SHARES),
    Rule(WEIGHTS_FIRST, ON_GPU, "a GPU is given both gradients in advance", "use --device cpu"),
    Rule(WEIGHTS_FIRST, COMPILED, "a compiled block makes its gradients all at once", "leave one of them out"),
    Rule(WEIGHTS_FIRST, RELAXED, "nothing is sent during backward", "leave one of them out"),
    Rule(MODEL_PARALLEL, WHOLE, "the recipe computes its linear layers whole",
         "set its column_blocks to {0.options.model_parallel} or a multiple by a power of two (this changes the "
         "weights that it trains)"),
    Rule(MODEL_PARALLEL, DISALLOWED,
         "must divide {0.ranks} ranks and {0.recipe.column_blocks} column blocks, with a power of two of blocks on "
         "each rank", "use one of {0.allowed}, or auto"),
    Rule(MODEL_PARALLEL, UNEVEN,
         "{0.ranks} ranks can't share {0.recipe.virtual_workers} virtual workers evenly, and the ranks of a group work "
         "in step", "use a number of workers that divides {0.recipe.virtual_workers}"),
    Rule(CUDA_STREAMS, ON_CPU, "a CPU has no CUDA streams", "set it to 1"),
    Rule(CUDA_STREAMS, NO_GRAPHS, "passes at the same time are those of graphs",
         "set this to 1, or cuda_graphs: true where nothing forbids it"),
    *(Rule(CUDA_GRAPHS, other, why, "leave one of them out") for other, why in (
        (INEXACT, "only exact sums are found right or wrong on the GPU itself"),
        (RELAXED, "clocks on the host decide what a step takes"),
        (IN_BLOCKS, "column blocks are summed one by one"),
        (CLIPPED, "a clipped update reads the gradient's norm on the host"),
        (OTHER_RULE, "only sgd and lars update on the GPU without the host"),
        (SHARDED, "a sharded update gathers weights during the passes"),
        (AUDITED, "an audit looks at each pass"),
        (STEALING, "stolen work is settled during the step"),
        (EACH_NORM, "captured passes add the statistics of all virtual workers"),
        (EXTRA_PASS, "captured passes are those of training"),
    )),
    *(Rule(PORTABLE_GRAPHS, other, why, "leave one of them out") for other, why in (
        (IN_BLOCKS, "only passes of a whole network are captured"),
        (RELAXED, "only passes of a whole network are captured, which every step waits for"),
    )),
    Rule(CUDA_STREAMS, PORTABLE, "its passes are captured on one stream", "set it to 1"),
    Rule(NVJPEG, ON_CPU, "needs a GPU", "use --device cuda, or set it to libjpeg"),
    Rule(LOADER_PROCESSES, NVJPEG, "nvjpeg decodes in the rank itself", "set it to 0"),
    Rule(LISTENS, JOINED, "another launcher has started these ranks, and brings others", "leave it out"),
    Rule(DELETES, TORCHRUN, "torchrun may start the ranks again, and each time {0.deletes} would be deleted",
         "choose another --out, or delete that run yourself"),
    *(Rule(part, other, f"its ranks can't change: {why}", "leave it out")
      for part in (RANGE, LISTENS) for other, why in _FIXED_RANKS),
)  # fmt: skip


def fixed_ranks(setup: Setup) -> str:
    """The reason why the ranks of a run can't change; empty if they can."""
    return next((why for other, why in _FIXED_RANKS if other.is_in(setup)), "")


def table() -> list[tuple[str, str, str, str]]:
    """The rows of the docs' table: what does not go with what, why, and how to mend it."""
    plain, rules = re.compile(r"\{0\.(?:recipe\.|options\.)?(\w+)\}").sub, (*RECIPE_RULES, *RUN_RULES)
    return [(r.part.words, r.other.words, plain(r"`\1`", r.why), plain(r"`\1`", r.remedy)) for r in rules]

"""Everything in torusgd that reads what somebody else may have written, with the kind of inputs that it is tried on."""

import ast
from collections.abc import Iterator
from pathlib import Path

NAMES = {"read_text", "parse_json", "parse_yaml", "read_file", "load_file", "parse_records"}
CALLS = {"np.load", "torch.load", "safetensors.torch.load", "safetensors.safe_open", "csv.reader", "csv.DictReader",
         "np.memmap", "json.loads", "zipfile.ZipFile", "yaml.load"}  # fmt: skip
METHODS = {"parse_records", "read_bytes", "validate_json", "model_validate_json", "ParquetFile", "open_stream"}

_RANKS = "- what ranks of one run, or processes of one command, send each other"
_OWN = "- a file of the package"
READERS = {
    "cli/options.py:RuntimeFlags": "overrides",
    "comm/groups.py:Group": _RANKS,
    "comm/tuning/profile.py:Profile": "network profiles",
    "comm/tuning/tune.py:_of_rank_0": _RANKS,
    "data/arrays.py:_read_numpy": "arrays",
    "data/decode.py:other_decoders": _OWN,
    "data/file_lists.py:read_arrays": "tar shards and lists",
    "data/file_lists.py:read_classes": "- the file of --classes, as texts: tests/cli/test_mistakes.py",
    "data/pack.py:_refuse_others": "- a pack's own settings: tests/data/test_tar.py",
    "data/parquet.py:_names": "Parquet",
    "data/parquet.py:_open": "Parquet",
    "data/pictures.py:_read_csv": "tar shards and lists",
    "data/tar.py:RangeCache": "- bytes of a bucket, as bytes",
    "data/tar_index.py:_Walk": "tar shards and lists",
    "launch/torchrun.py:agree_on_prefix": _RANKS,
    "launch/verification.py:Verifier": "records",
    "launch/verification.py:_losses": "- of a run that this process has begun itself",
    "launch/verification.py:_watched": "- of a run that this process has begun itself",
    "observe/events.py:PlanComparison": "plans",
    "observe/events.py:Telemetry": "- of a run that goes on: tests/launch/test_elastic.py",
    "observe/events.py:_stays": "- of a run that goes on: tests/launch/test_elastic.py",
    "observe/trace.py:StepTrace": "- what torch's profiler has written for this process",
    "observe/trackers.py:Trackers": "- of a run that goes on: tests/observe/test_trackers.py",
    "plan/cluster.py:_load": "clusters and software",
    "plan/cluster.py:load_calibrated": _OWN,
    "plan/forecast.py:_cost": "- a recipe of this process, as text",
    "plan/measured_run.py:measured_steps": "runs",
    "plan/published.py:_row": "published results",
    "plan/published.py:read_rows": "published results",
    "ranks/failures.py:Failure": _RANKS,
    "ranks/generations.py:_Record": _RANKS,
    "ranks/join.py:_parsed": "messages",
    "ranks/liveness.py:Follower": _RANKS,
    "ranks/liveness.py:Watch": _RANKS,
    "ranks/supervisor.py:Supervisor": _RANKS,
    "recipe/load.py:_pick_batch": "overrides",
    "recipe/load.py:apply_overrides": "overrides",
    "recipe/load.py:load_recipe": "recipes",
    "recipe/load.py:parse_mapping": "recipes",
    "recipe/load.py:parse_yaml": "recipes",
    "recipe/load.py:read_file": "recipes",
    "recipe/load.py:read_run_recipe": "statuses and requests",
    "recipe/load.py:validate": "recipes",
    "recipe/schema.py:Recipe": "recipes",
    "rehearse/lab.py:_Helper": _RANKS,
    "rehearse/lab.py:main": _RANKS,
    "rehearse/player.py:main": _RANKS,
    "rehearse/rehearsal.py:rehearse": _RANKS,
    "rehearse/rehearsal.py:measure_ceiling": _RANKS,
    "rehearse/wire.py:main": _RANKS,
    "report/read_run.py:_chain": "runs",
    "report/read_run.py:_number": "logs",
    "report/read_run.py:_read_events": "runs",
    "report/read_run.py:_read_tree": "runs",
    "report/read_run.py:_rows": "logs",
    "report/read_run.py:read_log": "logs",
    "report/read_run.py:read_verified": "logs",
    "run/claims.py:read_claims": "records",
    "run/fingerprint.py:check_ranks_agree": _RANKS,
    "run/fingerprint.py:check_stored": _OWN,
    "run/saving.py:RunState": "checkpoints",
    "run/state_feed.py:StateFollower": _RANKS,
    "run/survival.py:TrainRank": _RANKS,
    "run/trained_weights.py:_class_names": "checkpoints",
    "run/trained_weights.py:_recipe": "checkpoints",
    "rundir/checkpoint.py:read_checkpoint": "checkpoints",
    "rundir/lease.py:Lease": "- objects of a bucket that the run writes itself: tests/rundir/test_lease.py",
    "rundir/mirror.py:Mirror": "- names in a bucket that the run writes itself: tests/rundir/test_mirror.py",
    "rundir/run_dir.py:RunDir": "statuses and requests",
    "rundir/run_view.py:RunRequests": "statuses and requests",
    "rundir/run_view.py:_reported": "statuses and requests",
    "step/journal.py:Journal": "journals",
    "step/journal.py:read_journal": "journals",
    "step/records.py:RecordFile": "records",
    "step/records.py:parse_line": "records",
    "untrusted.py:check_archive": "checkpoints",
    "untrusted.py:parse_json": "recipes",
    "weights.py:load_weights": "checkpoints",
}
"""by function or class: a kind of inputs, or after a dash why there is none"""


def found(package: Path) -> Iterator[str]:
    """The functions and classes of a package that call something that reads: `file:name`."""
    for path in sorted(package.rglob("*.py")):
        for top in ast.parse(path.read_text()).body:
            if any(_reads(node) for node in ast.walk(top)):
                yield f"{path.relative_to(package)}:{getattr(top, 'name', '')}"


def _reads(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in NAMES
    return isinstance(node.func, ast.Attribute) and (ast.unparse(node.func) in CALLS or node.func.attr in METHODS)

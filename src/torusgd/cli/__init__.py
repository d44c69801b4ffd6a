"""The command line: sub-commands only, no logic."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from ..errors import RunError, UserError
from ..signals import EXIT_BASE, Stopped, raise_on_stop

ABOUT = "Train image classifiers with large mini-batches on many machines, without losing accuracy."

app = typer.Typer(help=ABOUT, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name, or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of the recipe; repeatable.")
]
DataPath = Annotated[Path | None, typer.Option("--data", help="Folder or file of the data set.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu or cuda. Default: cuda where there is a GPU.")]
AllReduceName = Annotated[
    str | None, typer.Option("--allreduce", help="auto, native, ring, torus, hierarchical, halving-doubling, doubling.")
]
GridSize = Annotated[str | None, typer.Option("--grid", metavar="YxX", help="Ranks vertically by horizontally.")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="A file of torusgd tune, for --allreduce auto.")]
CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A run's folder, a checkpoint's folder or a weight file.")
]
ModelName = Annotated[str | None, typer.Option("--model", help="The network, for weights trained elsewhere.")]
ClassesFile = Annotated[
    str | None, typer.Option("--classes", help="File in the data folder: the class folders in the weights' order.")
]


@app.command()
def train(
    recipe: RecipeName,
    data: DataPath = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/RECIPE.")] = None,
    workers: Annotated[int | None, typer.Option(help="Ranks to start here. Default: GPUs, else cores.")] = None,
    device: DeviceName = None,
    overrides: Overrides = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps in all.")] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="Such as 50st, 1ep, 1e6sa. Default: 1ep.")] = None,
    init: Annotated[Path | None, typer.Option(help="Weights to start from, .safetensors or .pth.")] = None,
    allreduce: AllReduceName = None,
    grid: GridSize = None,
    profile: ProfileFile = None,
    update: Annotated[
        str | None, typer.Option(help="replicated (default), or sharded: each rank a shard of the weights.")
    ] = None,
    model_parallel: Annotated[
        str | None, typer.Option(metavar="M|auto", help="Ranks that share the last, linear layers. Default: 1.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of it (torusgd plan --json) to compare with.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in --out and begin anew.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
) -> None:
    """Train a classifier from a recipe; the same command again resumes."""
    from ..launch.forkserver import start_forkserver

    if "RANK" not in os.environ:  # not a rank of torchrun: `launch` needs it; asked here, before torch is imported
        start_forkserver()
    from .train import train as run

    flags = {
        "device": device, "allreduce": allreduce, "grid": grid, "profile": str(profile) if profile else None,
        "update": update, "workers": workers, "checkpoint_every": checkpoint_every, "tensorboard": tensorboard or None,
        "model_parallel": model_parallel,
    }  # fmt: skip
    raise typer.Exit(run(recipe, overrides or [], flags, data, out, max_steps, init, fresh, plan))


@app.command("eval")
def evaluate(
    checkpoint: CheckpointPath,
    data: DataPath = None,
    model: ModelName = None,
    classes: ClassesFile = None,
    device: DeviceName = None,
    overrides: Overrides = None,
) -> None:
    """Tell the accuracy of trained weights on held-out images."""
    from .eval import eval_command

    eval_command(checkpoint, data, model, classes, device, overrides or [])


@app.command()
def polish(
    checkpoint: CheckpointPath,
    data: DataPath = None,
    model: ModelName = None,
    classes: ClassesFile = None,
    device: DeviceName = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Weight file to write. Default: NAME-polished.safetensors.")] = None,
) -> None:
    """Give trained weights exact batch-norm statistics, from un-augmented training images (Final Polishing)."""
    from .eval import polish_command

    polish_command(checkpoint, data, model, classes, device, overrides or [], out)


@app.command()
def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A built-in name, or a YAML file.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster's name, a YAML file of your own, or local.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    software: Annotated[str | None, typer.Option(help="Software profile. Default: the cluster's own.")] = None,
    grid: GridSize = None,
    allreduce: Annotated[str | None, typer.Option(help="Algorithm. Default: the software's own.")] = None,
    overrides: Overrides = None,
    over: Annotated[bool, typer.Option("--sweep", help="Also for 1 to N devices, with the knee of the curve.")] = False,
    search: Annotated[bool, typer.Option("--best", help="Also look for better settings.")] = False,
    cost: Annotated[float | None, typer.Option(metavar="PRICE", help="Price of a device and hour.")] = None,
    data: DataPath = None,
    profile: ProfileFile = None,
    measured: Annotated[Path | None, typer.Option(help="A finished run with one worker, for its compute.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the sweep, .svg or .png.")] = None,
    published: Annotated[Path | None, typer.Option(help="Predict every row of a table of published results.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all of it here.")] = None,
) -> None:
    """Predict a run on a cluster: its time, where it goes, what to change."""
    from . import plan as command

    if published is not None:
        raise typer.Exit(command.published(published, json_file))
    if recipe is None or cluster is None or devices is None:
        raise UserError("plan: needs RECIPE, --cluster and --devices (or --published FILE alone)")
    raise typer.Exit(
        command.plan(
            recipe,
            overrides or [],
            cluster=cluster,
            devices=devices,
            software=software,
            grid=grid,
            allreduce=allreduce,
            over=over,
            search=search,
            price=cost,
            data=data,
            profile=profile,
            measured=measured,
            plot=plot,
            json_file=json_file,
        )
    )


@app.command()
def rehearse(
    recipe: RecipeName,
    cluster: Annotated[str, typer.Option(help="A cluster's name, or a YAML file of your own.")],
    devices: Annotated[int, typer.Option(min=2, help="How many.")],
    software: Annotated[str | None, typer.Option(help="Profile of the compute. Default: the cluster's own.")] = None,
    allreduce: Annotated[str, typer.Option(help="As in train, such as auto, native, torus:halving/ring.")] = "ring",
    grid: GridSize = None,
    update: Annotated[
        Literal["replicated", "sharded"], typer.Option(help="sharded: gathers hide behind the next forward pass.")
    ] = "replicated",
    model_parallel: Annotated[
        str | None, typer.Option(metavar="M|auto", help="Ranks that share each linear layer. Default: none do.")
    ] = None,
    buckets: Annotated[float, typer.Option(metavar="MIB", min=0.001, help="Size of a bucket.")] = 4.0,
    overlap: Annotated[bool, typer.Option(help="Buckets leave during backward.")] = True,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to rehearse, after one that warms up.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long a step may take in the lab.")] = 10.0,
    data: DataPath = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all of it here.")] = None,
) -> None:
    """Play a planned step with real messages: the cluster's network in small, timed waits for compute. Needs root."""
    from .rehearse import command

    raise typer.Exit(
        command(
            recipe,
            overrides or [],
            cluster=cluster,
            devices=devices,
            software=software,
            allreduce=allreduce,
            grid=grid,
            update=update,
            model_parallel=model_parallel,
            bucket_mib=buckets,
            overlap=overlap,
            steps=steps,
            seconds=seconds,
            data=data,
            json_file=json_file,
        )
    )


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one with its source.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Tell every key of a recipe, as Markdown.")] = False,
) -> None:
    """List the built-in recipes, show one with its source, or tell every key."""
    from ..recipe.load import load_recipe, recipe_names, recipe_source

    if keys:
        from ..recipe.reference import reference

        typer.echo(reference(), nl=False)
        return
    if name is not None:
        typer.echo(recipe_source(name), nl=False)
        return
    width = max(map(len, recipe_names()))
    for each in recipe_names():
        typer.echo(f"{each:{width}}  {load_recipe(each).recipe.description}")


bench_app = typer.Typer(help="Measure the parts of a run on these ranks.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command("allreduce")
def bench_allreduce(
    sizes: Annotated[str | None, typer.Option(help="Such as 4KiB,1MiB. Default: 4 KiB to 16 MiB.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Such as native,ring,torus,auto.")] = None,
    grid: GridSize = None,
    profile: ProfileFile = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ranks to start here. Default: GPUs, else cores.")] = None,
    device: DeviceName = None,
    repetitions: Annotated[int, typer.Option("-n", min=1, help="Timed runs of each.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the records here.")] = None,
) -> None:
    """Time all-reduce algorithms in turn, by the slowest rank."""
    from ..recipe.load import validate
    from ..recipe.runtime_options import RuntimeOptions
    from ..runtime import resolve_device
    from .bench import bench

    options = validate(RuntimeOptions, {"device": device, "grid": grid}, "flags")
    bench(sizes, algorithms, options.grid_size, profile, workers, resolve_device(options), repetitions, json_file)


# Not `bench`'s sub-command: it measures once for all later runs.
@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    workers: Annotated[int | None, typer.Option(min=1, help="Ranks to start here. Default: GPUs, else cores.")] = None,
    device: DeviceName = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="About how long to measure.")] = 40.0,
) -> None:
    """Measure this cluster's network once, for --allreduce auto and for plans."""
    from ..recipe.load import validate
    from ..recipe.runtime_options import RuntimeOptions
    from ..runtime import resolve_device
    from .bench import measure

    measure(out, workers, resolve_device(validate(RuntimeOptions, {"device": device}, "flags")), seconds)


data_app = typer.Typer(help="Get and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fashion-mnist")],
    out: Annotated[Path | None, typer.Option(help="Folder to put it in.")] = None,
) -> None:
    """Find or fetch a public data set, and check its files."""
    import logging

    from ..data.fetch import fetch

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = fetch(name, out)
    typer.echo(f"{name} is in {folder}; train with --data {folder}")


@data_app.command("info")
def data_info(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A data set's folder or file, or a recipe's name.")],
    check: Annotated[bool, typer.Option("--check", help="Decode every image, and name those that can't be.")] = False,
) -> None:
    """Tell what a data set holds."""
    from ..data.info import describe, undecodable

    for line in describe(path).lines():
        typer.echo(line)
    if check:
        bad = 0
        for bad, reason in enumerate(undecodable(path), 1):  # noqa: B007 - counted
            typer.echo(f"undecodable: {reason}")
        typer.echo(f"undecodable images: {bad}")


def main() -> None:
    """Runs the command line. No traceback but a defect's: a mistake is one line and exit code 2, another end is 1."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong there comes back as an exception
    raise_on_stop()
    try:
        app()
    except UserError as error:
        _end(2, str(error))
    except RunError as error:
        _end(1, str(error))
    except Stopped as stop:
        _end(EXIT_BASE + stop.number, f"stopped by {signal.Signals(stop.number).name}")
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _end(1, str(error))


def _end(code: int, line: str) -> NoReturn:
    print(f"torusgd: {line}", file=sys.stderr)
    sys.exit(code)

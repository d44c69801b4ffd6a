"""What --help prints: an example, then options and commands in groups, in 80 columns."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

GROUPS = {  # commands in the order in which they are listed
    "Begin here": ("doctor", "recipes", "train", "eval", "report"),
    "A run that goes on": ("status", "stop", "resize", "join"),
    "Check a run": ("verify", "replay"),
    "Trained weights": ("polish", "export"),
    "Data": ("data",),
    "Clusters, before you rent them": ("plan", "rehearse", "simulate", "tune", "bench"),
}

EXAMPLES = {  # of each command, the words behind `torusgd`
    "doctor": "doctor", "recipes": "recipes digits", "train": "train digits --workers 2",
    "eval": "eval runs/folder --data PATH", "report": "report runs/digits", "status": "status runs/digits",
    "stop": "stop runs/digits", "resize": "resize runs/digits --workers 3",
    "join": "join HOST:29600 --token-file TOKEN --workers 8", "verify": "verify runs/digits --sample 3",
    "replay": "replay runs/fashion-cutoff --workers 3",
    "polish": "polish runs/folder --data PATH --out polished.safetensors", "export": "export runs/digits --format onnx",
    "data": "data info PATH", "data fetch": "data fetch fashion-mnist --out data/fashion-mnist",
    "data index": "data index SHARDS", "data pack": "data pack PATH PACKED --size 256",
    "data prepare": "data prepare imagenet PATH", "data info": "data info PATH",
    "plan": "plan resnet50 --cluster hgx-h100 --devices 32",
    "rehearse": "rehearse sony-224s --cluster abci --devices 2176", "simulate": "simulate fashion-cutoff --data PATH",
    "tune": "tune --out profile.json", "bench": "bench allreduce --workers 4",
    "bench allreduce": "bench allreduce --workers 4 --sizes 64KiB,4MiB", "bench scaling": "bench scaling digits",
}  # fmt: skip


class _Help:
    get_params: Any

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        words = ctx.command_path.removeprefix(ctx.find_root().info_name).strip()
        if example := EXAMPLES.get(words):  # none of an earlier name
            formatter.write(f"Example: torusgd {example}\n\n")
        super().format_usage(ctx, formatter)  # type: ignore[misc] # Typer's, of either class below

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                panels.setdefault(panel, []).append(record)
        others = panels.pop("Options", [])  # --help, last
        for title, rows in (*panels.items(), ("Options", others)):
            _write_section(formatter, title, rows)


class Command(_Help, TyperCommand):
    """A command whose --help begins with its example and has its options in panels."""


class Group(_Help, TyperGroup):
    """Commands that --help lists in groups, and so does no command at all, with exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = GROUPS if self.commands.keys() >= {"train"} else {"Commands": tuple(self.commands)}
        for title, names in groups.items():
            found = [(name, self.commands[name]) for name in names]
            _write_section(formatter, title, [(name, command.get_short_help_str(1000)) for name, command in found])
        super().format_options(ctx, formatter)


def _write_section(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=24)

"""`torusgd join`: bring this machine's ranks to a run on another machine.

A command of its own, and not a flag of `train`: recipe and options are those of the run, so that of train's flags
almost none would have a meaning here.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from .options import RUNTIME, DataPath, option


def join(
    address: Annotated[str, Argument(metavar="HOST:PORT", help="Where the run listens: its --listen.")],
    token_file: Annotated[
        Path, option("--token-file", "Show this copy of the run's token, for your eyes only (chmod 600).")
    ],
    data: DataPath = None,
    workers: Annotated[
        int | None,
        option("--workers", "Bring this many ranks. Default: as many as cores.", RUNTIME, metavar="N", min=1),
    ] = None,
) -> None:
    """Bring ranks of this machine to a run that torusgd train --listen has started.

    Recipe and options come from the run, weights from its ranks; the data set must be here. The run goes on when this
    command ends, and this command ends with the run. The token is the file .join-token in the run's folder, or its
    --token-file.
    """
    from ..ranks.forkserver import start_forkserver

    start_forkserver()  # before torch is imported here
    from ..launch.node_agent import join_run
    from ..ranks.join import parse_address, read_token

    where, token = parse_address(address, "torusgd join"), read_token(token_file)
    raise typer.Exit(join_run(where, token, data, workers))

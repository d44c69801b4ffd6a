"""Starts the ranks of a lab: imports torch once, then forks a process a rank, each in its host's namespace.

Reads one JSON line from standard input: the parent's process id, the command (a script or `-m module`, and arguments),
and the namespace, environment and output file of each rank. Prints the process ids, and when all ranks have ended a
JSON line of their exit codes; kills the ranks if its input ends before.
"""

import json
import os
import runpy
import select
import signal
import sys
import traceback

from .wire import die_with_parent, enter

_INPUT = 0


def _be_rank(command: list[str], space: str, environment: dict[str, str], output: str) -> None:
    """Runs the command in this process, as the interpreter itself would."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    enter(space)
    os.environ.update(environment)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _start(command: list[str], space: str, environment: dict[str, str], output: str) -> int:
    """Forks a rank; its process id."""
    spawner = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent(spawner)
        _be_rank(command, space, environment, output)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own end would run exit handlers of the parent that it was forked from.
        os._exit(code)


def main() -> None:
    parent, command, ranks = json.loads(sys.stdin.readline())
    die_with_parent(parent)
    import torch.distributed  # noqa: F401 - imported here once rather than in every rank

    processes = [_start(command, *rank) for rank in ranks]
    print(json.dumps(processes), flush=True)
    codes: dict[int, int] = {}
    # One select waits for the end of any rank and of the input, without a signal handler.
    watch = {os.pidfd_open(process): process for process in processes}
    while watch:
        ready = select.select([_INPUT, *watch], (), ())[0]
        if _INPUT in ready:
            for process in watch.values():
                os.kill(process, signal.SIGKILL)
            return
        for handle in ready:
            process = watch.pop(handle)
            os.close(handle)
            codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps([codes[process] for process in processes]), flush=True)


if __name__ == "__main__":
    main()

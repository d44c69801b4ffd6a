"""`torusgd tune`: measures a network once, for all later runs and plans."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..text import byte_size
from .options import OUTPUT, RuntimeFlags, option
from .output import check_writable, console, write_file

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..comm.tuning.profile import Profile


def tune(
    runtime: RuntimeFlags,
    out: Annotated[Path, option("--out", "Write the profile to this file.", OUTPUT)] = Path("profile.json"),
    seconds: Annotated[float, option("--seconds", "Measure for about so long.", min=1.0)] = 40.0,
) -> None:
    """Measure this cluster's network once, for --allreduce auto and for plans."""
    from ..comm.tuning.profile import Profile
    from .ranks import on_ranks

    check_writable("--out", out)
    options = runtime.over()
    text = on_ranks(options, tune_on_rank, seconds, options.streams)
    if text is None:
        return
    profile = Profile.parse(text)
    write_file("--out", out, profile.dump())
    show_profile(profile)
    console().print(f"in {out}; give it as --profile {out}", markup=False)


def tune_on_rank(seconds: float, streams: int, world: "Group") -> str:
    """A profile as JSON; `on_ranks` runs it on each rank."""
    from ..comm.tuning.tune import tune as measure
    from ..runtime import keep_freed_memory

    keep_freed_memory()  # as a run does, whose computation is timed
    return measure(seconds, group=world, streams=streams).model_dump_json()


def show_profile(profile: "Profile") -> None:
    """Links, the best algorithm of each size, and what ranks and messages cost the computation."""
    terminal = console()
    for name, link in (("inside a host", profile.inside), ("between hosts", profile.between)):
        if link is not None:
            rate = "a rate too high to measure"
            if link.per_byte:
                rate = f"{8e-9 / link.per_byte:.2f} Gb/s (+- {link.per_byte_error / link.per_byte:.0%})"
            terminal.print(f"{name}: {1e6 * link.latency:.1f} us (+- {1e6 * link.latency_error:.1f}), {rate}")
    for each in sorted({timing.size for timing in profile.timings}):
        best = min((timing for timing in profile.timings if timing.size == each), key=lambda timing: timing.median)
        algorithm = best.as_algorithm(len(profile.hosts)) or "native"
        terminal.print(f"{byte_size(each):>8}: {algorithm}, {1e3 * best.median:.3g} ms")
    if profile.crowding:
        most = profile.crowding[-1]
        terminal.print(f"{most.ranks} ranks at once compute {most.slowdown:.2f} times as long as one")
    for point in profile.in_steps:
        slows, waits = 1e3 * point.hidden, 1e3 * point.waited
        terminal.print(f"in a step {byte_size(point.size)}: {waits:.2g} ms if waited for, {slows:.2g} ms if hidden")

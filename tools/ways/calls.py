"""The calls that a process has made, read back from what `hook/sitecustomize.py` wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class Call:
    """One call of a function of the package."""

    file: str
    """within the package, such as `step/step.py`"""
    function: str
    """its qualified name"""
    begin: int
    """nanoseconds"""
    caller: "Call | None"
    """the innermost function of the package that was running; None: there was none"""
    end: int | None = None
    """None: it never returned"""
    gave_none: bool = False
    """it returned None, or an exception has ended it"""
    last: "Call | None" = None
    """the last call that this one made"""

    def stack(self) -> Iterator["Call"]:
        """This call, its caller, and so on."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.caller

    def is_one_of(self, names: str) -> bool:
        """Whether it is the function, or a method or an inner function of what is named."""
        return f"{self.function}.".startswith(f"{names}.")


def read_calls(path: Path) -> dict[int, list[Call]]:
    """The calls of each thread of a process, in the order in which they began; without what runs at an import."""
    found: dict[int, list[Call]] = {}
    running: dict[int, list[Call]] = {}
    for line in path.read_text().splitlines():
        time, thread, kind, file, function = line.split("\t")
        stack = running.setdefault(int(thread), [])
        if kind == ">":
            call = Call(file, function, int(time), stack[-1] if stack else None)
            stack.append(call)
            if not any(each.function == "<module>" and each.file != "__main__.py" for each in stack):
                found.setdefault(int(thread), []).append(call)
                if call.caller is not None:
                    call.caller.last = call
        elif stack:  # what the fork server ran when it forked returns in each of its children
            call = stack.pop()
            call.end, call.gave_none = int(time), kind == "!"
    return found

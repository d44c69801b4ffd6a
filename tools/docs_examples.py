"""Docstrings for the docs site: examples that begin with >>> become blocks of code, as mkdocstrings shows them.

mkdocs.yml names this file; griffe, which reads the docstrings for mkdocstrings, calls it for each object.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts a fence around each run of lines that begins with >>> and ends at an empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe once an object and its docstring are read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)

"""The sentences of errors, once each, in messages.yaml: tests assert an error's kind and what it is about.

    with refused("an area above the image", "data.augment.area"):
        load_recipe(...)

After a change of sentences, `TORUSGD_WRITE_MESSAGES=1 pytest -n 0 PATHS` writes those that PATHS trigger.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from torusgd.errors import UserError

FILE = Path(__file__).with_name("messages.yaml")
INDEX = re.compile(r" --extra-index-url \S+")  # where pip finds what fits a torch that is a build by name
LIBRARY = re.compile(r"\(.*\)")  # the reason that a library gives, in brackets: another version has another one


@cache
def sentences() -> dict[str, str]:
    return dict(yaml.safe_load(FILE.read_text()) or {}) if FILE.is_file() else {}


def assert_sentence(name: str, about: str, text: str, hidden: Mapping[str, object] | None = None) -> None:
    """Compares a sentence with that of its name.

    Args:
        name: Of the case, in messages.yaml.
        about: The key, flag or file that the sentence begins with.
        text: What was printed.
        hidden: Words for what differs from run to run or is not ours: a test's folder, a pattern of a library's reason.
    """
    for word, found in (hidden or {}).items():
        pattern = found if isinstance(found, re.Pattern) else re.compile(re.escape(str(found)))
        text, about = (pattern.sub(word, each) for each in (text, about))
    assert "\n" not in text
    assert text.isprintable()
    assert text.startswith(about), text
    if os.environ.get("TORUSGD_WRITE_MESSAGES"):
        sentences()[name] = text
        FILE.write_text(yaml.safe_dump(dict(sorted(sentences().items())), width=10_000, allow_unicode=True))
    assert sentences().get(name) == text


@contextmanager
def refused(name: str, about="", kind=UserError, **hidden: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error whose sentence is that of its name; `hidden` as in `assert_sentence`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_sentence(name, about, str(caught.value), hidden)


def refuses(name: str, call: Callable[..., object], /, *arguments: Any, about="", kind=UserError, **words: Any) -> None:
    """Expects `refused` of one call; words in capitals are its `hidden`, all others the call's."""
    hidden = {word: found for word, found in words.items() if word.isupper()}
    with refused(name, about, kind, **hidden):
        call(*arguments, **{word: value for word, value in words.items() if word not in hidden})

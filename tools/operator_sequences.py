"""Stores by which operators this torch computes the built-in networks, and families of torchvision and timm.

    python -m tools.operator_sequences [--write]

prints for each whether its operators are those that are stored; --write stores them. A network whose library is not
installed stays as it is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tools.model_families import FAMILIES

from torusgd.errors import UserError, in_one_line
from torusgd.models import MODELS
from torusgd.run import fingerprint as operators

FILE = Path(operators.__file__).with_name(operators.STORED)
SIZES = {"digits-net": (1, 8), "fashion-net": (1, 28), "cd-dnn": (1, [11, 39]), "overfeat-fast": (3, 231)}
"""channels and image size; of other networks of torusgd 3 and 224, of libraries 3 and 64"""
SMALL = {"overfeat-fast": {"width": 24}, "vgg-a": {"width": 16}, "cd-dnn": {"width": 128}}


def networks() -> dict[str, dict[str, Any]]:
    own = {name: (*SIZES.get(name, (3, 224)), SMALL.get(name, {})) for name in MODELS}
    others = {name: (3, 64, options) for name, options in FAMILIES.items()}
    return {
        name: {"channels": channels, "size": size, "options": options}
        for name, (channels, size, options) in (own | others).items()
    }


def main() -> None:
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, entry in networks().items():
        try:
            words = operators.words_of(name, entry)
        except (UserError, RuntimeError, TypeError, AssertionError, ValueError) as error:
            print(name, "none:", in_one_line(error), flush=True)
            continue
        code = operators.code_of(words)
        print(
            name, len(words), "as stored" if stored.get(name, {}).get("code") == code else "not as stored", flush=True
        )
        version = torch.__version__.partition("+")[0]
        stored[name] = {**entry, "library": operators.library_of(name), "torch": version, "code": code}
    if "--write" in sys.argv:
        FILE.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(e)}" for n, e in stored.items()) + "\n}\n")


if __name__ == "__main__":
    main()

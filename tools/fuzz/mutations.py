"""Real files damaged, values drawn by hypothesis, and bombs: much that is written in few bytes."""

import random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

WORDS = [
    *b"0 -1 1e999 .nan -.inf NaN Infinity null [] {} ~ true ' *b 1e-300 0.0000001ep 1e999ep 1:1:1".split(),
    b"", b'""', b"&a [*a]", b"<<: *a", b"? [a]", b"9" * 400, b"9223372036854775807", b"[" * 3000, b"{a: " * 1000,
    b'{"a":' * 500, b'"\\ud800"', b"!!python/name:os.system", b"!!binary x", b"!!timestamp x", b"torch.hub:load",
    b"../../etc/passwd", b"\x00", b"\xff\xfe", b"\r\n", b"\t", b"---\n", b"%YAML 9.9\n", "\u202e\U0001f600".encode(),
]  # fmt: skip
"""what replaces a word of a real file"""


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A real file with a few changes: bytes, runs cut out or doubled, words and numbers replaced."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 4, 16, 300)))
        match rng.randrange(6):
            case 0:
                data = data[:at] + rng.randbytes(end - at) + data[end:]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:end] + data[at:end] * rng.choice((1, 50)) + data[end:]
            case 3:
                data = data[:at]
            case _:
                data = other_word(rng, data, at)
    return data


def other_word(rng: random.Random, data: bytes, at: int) -> bytes:
    """The word or number at a place replaced by one of WORDS."""
    ends = b" \n\t,:[]{}()\"'="
    first, last = at, at
    while first > 0 and data[first - 1] not in ends:
        first -= 1
    while last < len(data) and data[last] not in ends:
        last += 1
    return data[:first] + rng.choice(WORDS) + data[last:]


def drawn(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """So many examples of a strategy, always the same ones."""
    found: list[Any] = []

    @hypothesis_seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def plain_values() -> st.SearchStrategy[Any]:
    """What YAML and JSON can hold."""
    leaf = (
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["5ep", "1st"])
    )
    return st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8)


def with_size(rng: random.Random, data: bytes) -> bytes:
    """A picture whose header says another size than 83 x 61."""
    width, height = rng.choice(
        ((65_535, 65_535), (8000, 8000), (7000, 1), (0, 61), (83, 60), (83, 62), (15_000, 15_000))
    )
    if data.startswith(b"\x89PNG"):
        return data[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + data[24:]
    return data.replace(b"\x00\x3d\x00\x53", height.to_bytes(2, "big") + width.to_bytes(2, "big"), 1)

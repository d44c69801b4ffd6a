"""Portable arithmetic: products and sums over integers, so that the same bits come from any hardware.

`portable` is a context in which torch's operators run by rules of this folder; it works in anyone's training loop.
"""

from .draws import Bits, beta
from .methods import METHODS, fastest_method
from .mode import VERSION, is_portable, operators_of, portable
from .scales import counting, is_counting

__all__ = [
    "METHODS",
    "VERSION",
    "Bits",
    "beta",
    "counting",
    "fastest_method",
    "is_counting",
    "is_portable",
    "operators_of",
    "portable",
]

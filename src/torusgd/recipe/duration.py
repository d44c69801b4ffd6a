"""Durations as a recipe writes them: `5ep` (epochs), `300st` (steps), `1e6sa` (samples)."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

UNITS = ("ep", "st", "sa")
_LONGEST = 1e15
"""longest duration in any unit: samples up to there are whole numbers of float64"""
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(ep|st|sa)")


@dataclass(frozen=True)
class Duration:
    """A span of training; `value` is in epochs (fractions allowed), whole steps, or whole samples.

    >>> Duration.parse("1e6sa")
    Duration(value=1000000.0, unit='sa')
    >>> str(Duration.parse("2.5ep"))
    '2.5ep'
    >>> str(Duration.parse("0.0000001ep"))
    '0.0000001ep'
    """

    value: float
    unit: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))

    @classmethod
    def parse(cls, text: object) -> "Duration":
        """Reads `5ep`, `300st` or `1e6sa`; ValueError says what is allowed."""
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError("write a duration as 5ep (epochs), 300st (steps) or 1e6sa (samples)")
        value, unit = float(match[1]), match[2]
        if value > _LONGEST:
            raise ValueError(f"a duration is at most {_LONGEST:g}")
        if unit != "ep" and not value.is_integer():
            raise ValueError("steps and samples are whole numbers, such as 300st or 1e6sa")
        return cls(value, unit)

    def __str__(self) -> str:
        # Decimal writes 0.0000001 so, and not as 1e-07, which `parse` doesn't take.
        number = int(self.value) if self.value.is_integer() else f"{Decimal(repr(self.value)):f}"
        return f"{number}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def validate(value: object) -> "Duration":
            return value if isinstance(value, cls) else cls.parse(value)

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

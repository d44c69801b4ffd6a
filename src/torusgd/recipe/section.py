"""What every section of a recipe has in common: strictness, and the types of its values."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, WrapValidator
from pydantic_core import core_schema


def _read_sides(value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        # A strict tuple refuses the list that JSON and YAML have.
        return check(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise ValueError(
            f"pixels a side, such as 224, or [height, width], such as [11, 39]; at most {MOST_PIXELS:,} each"
        ) from None


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
MOST_PIXELS = 65_535  # of a side: a JPEG has no more
Pixels = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
MOST_RANKS = 2**20
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Options = dict[str, bool | int | float | str]  # keyword arguments of a source or a network
# Pixels a side of a square, or (height, width)
Sides = Annotated[Pixels | tuple[Pixels, Pixels], WrapValidator(_read_sides)]


class Section(BaseModel):
    """A part of a recipe: immutable, no unknown keys, no silent conversions such as "8" to 8, no NaN or infinity."""

    # Strict, since "8" for 8 is a slip more often than a wish; attribute docstrings become docs/recipe-keys.md.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def check_meaning(self, chooser: str, meant_for: Mapping[str, Sequence[str]]) -> None:
        """ValueError for a key that was changed, while `chooser` has none of the values for which that key is meant."""
        # Refused, since its user expects something of it.
        for key, values in meant_for.items():
            is_changed = getattr(self, key) != type(self).model_fields[key].default
            if is_changed and getattr(self, chooser) not in values:
                raise ValueError(f"{key}: has a meaning with {chooser}: {' or '.join(values)} only")


def sides(size: Sides) -> tuple[int, int]:
    """Height and width of a size that is given as one number, for a square, or as both."""
    return (size, size) if isinstance(size, int) else size


class ImageSizes(NamedTuple):
    """The sizes of images, which are scaled until the shorter side is `resize`, then cut to `sides`."""

    sides: tuple[int, int]  # height and width that the network takes
    resize: int | None  # shorter side; None: not scaled; a random box is scaled to `sides` at once


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key's annotation has in it, as in `tuple[Stage, ...]` or `Polish | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)


_LONGEST = 1e15  # in any unit: samples up to there are whole numbers of float64
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(ep|st|sa)")


@dataclass(frozen=True)
class Duration:
    """A span of training; `value` is in epochs (fractions allowed), whole steps, or whole samples.

    >>> Duration.parse("1e6sa"), str(Duration.parse("2.5ep"))
    (Duration(value=1000000.0, unit='sa'), '2.5ep')
    """

    value: float
    unit: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # int has no `is_integer` before Python 3.12

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
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )

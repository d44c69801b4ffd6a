"""What every section of a recipe has in common: strictness, and the types of its values."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Options = dict[str, bool | int | float | str]
"""keyword arguments of a source or a network"""
Sides = Count | tuple[Count, Count]
"""pixels a side of a square, or (height, width)"""


class Section(BaseModel):
    """A part of a recipe: immutable, no unknown keys, no silent conversions such as "8" to 8, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def sides(size: Sides) -> tuple[int, int]:
    """Height and width of a size that is given as one number, for a square, or as both.

    >>> sides(224), sides((11, 39))
    ((224, 224), (11, 39))
    """
    return (size, size) if isinstance(size, int) else size


class ImageSizes(NamedTuple):
    """How large images are made: scaled until the shorter side is `resize`, then cut to `sides`."""

    sides: tuple[int, int]
    """height and width that the network takes"""
    resize: int | None
    """shorter side; None: not scaled; a random box is scaled to `sides` at once"""


def read_sides(value: Any, check: Callable[[Any], Any]) -> Any:
    """`Sides` as a recipe file gives them; ValueError says what is allowed."""
    try:
        return check(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise ValueError("pixels a side, such as 224, or [height, width], such as [11, 39]") from None

"""What the quantizing codecs share."""

from __future__ import annotations

from deltacompress.codecs.packed import PackedSpec
from deltacompress.codecs.settings import ObsSettings, RtnSettings
from deltacompress.errors import RecipeError


def spec_for(settings: ObsSettings | RtnSettings, *, rows: int, columns: int, name: str) -> PackedSpec:
    """The packed format that `settings` mean for one tensor.

    Raises:
        RecipeError: group_size does not divide the columns.
    """
    group = columns if settings.group_size == "row" else settings.group_size
    if columns % group:
        raise RecipeError(
            f"group_size {group} does not divide its {columns} columns",
            where=name,
            way_out="choose a divisor or group_size: row",
        )
    return PackedSpec(rows, columns, settings.bits, settings.pattern, group, settings.grid)

"""Which kind of variant a directory is: a packed delta, or a PEFT adapter."""

from __future__ import annotations

from pathlib import Path

from deltacompress.adapters.directory import is_adapter, need_adapter
from deltacompress.errors import InputError
from deltacompress.runtime.variants.adapter import AdapterVariant
from deltacompress.runtime.variants.delta import DeltaVariant
from deltacompress.runtime.variants.variant import BaseSide, Variant


def open_variant(path: Path, base: BaseSide, over: Variant | Path | None = None) -> Variant:
    """Open the artifact or adapter in directory `path`; over: what an adapter goes over, or its directory;
    None: the base.

    Raises:
        InputError: something is to go over another variant that cannot: an adapter over an adapter, say.
        IntegrityError, UnsupportedModelError, PairError, CheckpointError: as DeltaVariant.open and AdapterVariant.open.
    """
    if isinstance(over, Path):
        over = open_variant(over, base)
    if over is None and not is_adapter(path):
        return DeltaVariant.open(path, base)
    need_adapter(path, "leave out over")
    if over is not None and not isinstance(over, DeltaVariant):
        raise InputError(
            "an adapter goes over the base or a packed delta, and over names something else",
            where=path,
            way_out="merge the one into its base, compress the result, and load the other over that",
        )
    return AdapterVariant.open(path, base, over)

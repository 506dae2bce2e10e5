"""Every codec by name. A new one is a file in this folder that makes a codec.Codec, and its line here.

Recipes are read, and refused, before torch is imported: what such a file imports at its top must not need torch, so
`encode` imports the rest when it is called; or the file is imported when it is first called, as those here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deltacompress.codecs.codec import Codec
from deltacompress.codecs.settings import (
    BitDeltaSettings,
    CountedSettings,
    ExactSettings,
    LowRankSettings,
    ObsSettings,
    RtnSettings,
    SkipSettings,
)

if TYPE_CHECKING:
    from deltacompress.checkpoints.rows import Elements
    from deltacompress.codecs.encoded import Encoded


def _late(module: str, function: str) -> Callable[..., Any]:
    """A function of a file in this folder, which is imported at the first call."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"deltacompress.codecs.{module}"), function)(*arguments)

    return call


def _exact(finetuned: Elements, base: Elements | None, settings: ExactSettings, name: str) -> Encoded:
    from deltacompress.codecs.encoded import Encoded
    from deltacompress.codecs.formats import exact

    return Encoded("exact", *exact.encode(finetuned, base))


def _skip(finetuned: Elements, base: Elements | None, settings: SkipSettings, name: str) -> Encoded:
    from deltacompress.codecs.encoded import Encoded

    return Encoded("none", {}, {})


CODECS = {
    codec.name: codec
    for codec in (
        Codec(
            BitDeltaSettings,
            _late("bitdelta", "encode_elements"),
            fit=_late("bitdelta", "fit"),
            accepts=_late("bitdelta", "accepts"),
        ),
        Codec(CountedSettings, _late("counted", "encode_elements"), any_device=True, counts=True),
        Codec(LowRankSettings, _late("low_rank", "encode_elements")),
        Codec(ObsSettings, encode_group=_late("obs", "encode"), by_outputs=True),
        Codec(RtnSettings, _late("rtn", "encode_elements"), any_device=True),
        Codec(ExactSettings, _exact),
        Codec(SkipSettings, _skip),
    )
}
"""In the order in which schemas and messages list them."""

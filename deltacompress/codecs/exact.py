"""The exact codec: every bit comes back."""

from __future__ import annotations

from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.encoded import Encoded
from deltacompress.codecs.formats import exact
from deltacompress.codecs.settings import ExactSettings


def encode_elements(finetuned: Elements, base: Elements | None, settings: ExactSettings, name: str) -> Encoded:
    """As settings.Codec.encode."""
    return Encoded("exact", *exact.encode(finetuned, base))

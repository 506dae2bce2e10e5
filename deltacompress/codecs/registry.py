"""Every codec by name. A new one is a file in this folder that makes a settings.Codec, and its line here.

Recipes are read, and refused, before torch is imported: what such a file imports at its top must not need torch, so
`encode` imports the rest when it is called, as here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltacompress.codecs.settings import (
    BitDeltaSettings,
    Codec,
    ExactSettings,
    Fit,
    LowRankSettings,
    ObsSettings,
    RtnSettings,
    SkipSettings,
)

if TYPE_CHECKING:
    from deltacompress.checkpoints.rows import Elements
    from deltacompress.codecs.encoded import Encoded, LinearToEncode
    from deltacompress.numerics.hessian import HessianAccumulator


def _obs(jobs: list[LinearToEncode], statistics: HessianAccumulator, settings: ObsSettings) -> dict[str, Encoded]:
    from deltacompress.codecs import obs

    return obs.encode(jobs, statistics, settings)


def _rtn(finetuned: Elements, base: Elements | None, settings: RtnSettings, name: str) -> Encoded:
    from deltacompress.codecs import rtn

    return rtn.encode_elements(finetuned, base, settings, name)


def _fit_bitdelta(fit: Fit) -> dict[str, float]:
    from deltacompress.codecs import bitdelta

    return bitdelta.fit(fit)


def _bitdelta(
    finetuned: Elements, base: Elements | None, settings: BitDeltaSettings, name: str, scale: float
) -> Encoded:
    from deltacompress.codecs import bitdelta

    return bitdelta.encode_elements(finetuned, base, settings, name, scale)


def _low_rank(finetuned: Elements, base: Elements | None, settings: LowRankSettings, name: str) -> Encoded:
    from deltacompress.codecs import low_rank

    return low_rank.encode_elements(finetuned, base, settings, name)


def _exact(finetuned: Elements, base: Elements | None, settings: ExactSettings, name: str) -> Encoded:
    from deltacompress.codecs import exact
    from deltacompress.codecs.encoded import Encoded

    return Encoded("exact", *exact.encode(finetuned, base))


def _skip(finetuned: Elements, base: Elements | None, settings: SkipSettings, name: str) -> Encoded:
    from deltacompress.codecs.encoded import Encoded

    return Encoded("none", {}, {})


CODECS = {
    codec.name: codec
    for codec in (
        Codec(BitDeltaSettings, _bitdelta, fit=_fit_bitdelta),
        Codec(LowRankSettings, _low_rank),
        Codec(ObsSettings, encode_group=_obs),
        Codec(RtnSettings, _rtn),
        Codec(ExactSettings, _exact),
        Codec(SkipSettings, _skip),
    )
}
"""In the order in which schemas and messages list them."""

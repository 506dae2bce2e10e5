"""The lossless stage: bytes of a packed tensor to a framed, checksummed stream and back.

Four codecs behind one `Coder`. `none` stores, `zstd` is portable and the default, `gdeflate` and `ans` are nvCOMP's.
The frame (stream.py), the choice of what runs a codec (backends.py) and the codecs themselves know nothing of each
other's insides; coding.py is the order in which they are called. Nothing heavier than the standard library is
imported until a codec is used. Layout and measurements: docs/lossless.md; design: the paper's lossless step
(DeltaZip section 4.2).
"""

from __future__ import annotations

from deltacompress.lossless import stream as _stream
from deltacompress.lossless.backends import CODECS, DEVICES
from deltacompress.lossless.coding import BytesLike, Coder, coder, flat

__all__ = ["CODECS", "DEVICES", "BytesLike", "Coder", "coder", "decode", "encode"]


def encode(raw: BytesLike, codec: str, *, device: str = "auto") -> bytearray:
    """Code bytes as one framed stream; codec, device and errors as `coder`.

    `none`, `zstd` and GDeflate on a CPU give the same stream for the same bytes and library version; nvCOMP's encoders
    on a GPU do not promise that, only that the stream decodes to the same bytes.
    """
    return coder(codec, device=device).encode(raw)


def decode(
    data: BytesLike,
    *,
    raw_bytes: int,
    codec: str | None = None,
    device: str = "auto",
    name: str = "lossless stream",
) -> bytearray:
    """Decode one framed stream, bit-exactly; raises as `Coder.decode`, which says what is checked.

    codec: the one that was promised; None: whichever it is. device: as `coder`.
    """
    view = flat(data)
    if codec is None:
        head = view[: _stream.HEADER_BYTES]
        codec = _stream.parse_frame(head, view.nbytes, raw_bytes=raw_bytes, name=name).codec
    return coder(codec, device=device, encode=False).decode(view, raw_bytes=raw_bytes, name=name)

"""One tensor from plan to record: encode, restore at once as any reader will, hash, and run the lossless stage.

What goes back into the model before the next layer is calibrated is the *restored* tensor, in the fine-tuned dtype and
from the packed parts: what is served later, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from blake3 import blake3
from torch import Tensor

from deltacompress.artifact.records import PartRecord, Status, TensorRecord
from deltacompress.checkpoints.dtypes import DTYPE_NAMES, DTYPES
from deltacompress.checkpoints.reader import PINNED_AT_MOST, tensor_bytes
from deltacompress.checkpoints.rows import Elements, InMemory
from deltacompress.codecs.encoded import Encoded, restore_pieces, restore_tensor
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import Parts
from deltacompress.codecs.formats.pieces import PartInMemory
from deltacompress.codecs.formats.table import FORMATS
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.files.hashing import hash_chunks
from deltacompress.lossless import Coder
from deltacompress.reporter import part


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished tensor: its manifest record and the stored parts, u8 streams (or plain tensors when not coded)."""

    record: TensorRecord
    streams: dict[str, Tensor]


def encode_uncalibrated(plan: Plan, tensor: TensorPlan, device: torch.device | None = None) -> Encoded:
    """Encode a tensor whose codec needs no activations, piece by piece: what memory holds are its parts.

    device: where, if its codec computes anywhere; the parts are there then. The CPU by default.
    """
    if tensor.treatment == "identical":
        return Encoded("none", {}, {})
    base, finetuned = _as_coded(plan, tensor, device if tensor.codec.any_device else None)
    codec = tensor.codec
    assert codec.encode is not None
    fitted = (tensor.fitted,) if codec.fit is not None or codec.counts else ()
    return with_added_rows(plan, tensor, codec.encode(finetuned, base, tensor.settings, tensor.name, *fitted))


def with_added_rows(plan: Plan, tensor: TensorPlan, encoded: Encoded) -> Encoded:
    """Rows beyond the base's (added tokens) are stored as they are; that a linear was turned is told to readers."""
    if tensor.transposed:
        return replace(encoded, params=encoded.params | {"transposed": 1})
    base, finetuned = plan.rows(tensor)
    shared = finetuned.shape if base is None else base.shape
    if FORMATS[encoded.format].shared_rows and shared != finetuned.shape:
        added = finetuned.read(math.prod(shared), math.prod(finetuned.shape))
        encoded.parts["added_rows"] = added.view(finetuned.shape[0] - shared[0], *shared[1:])
    return encoded


def _as_coded(plan: Plan, tensor: TensorPlan, device: torch.device | None) -> tuple[Elements | None, Elements]:
    """As Plan.rows, in the order in which the codec takes them."""
    base, finetuned = plan.rows(tensor, device)
    if tensor.transposed:
        return None if base is None else _turned(base), _turned(finetuned)
    return base, finetuned


def _turned(tensor: Elements) -> InMemory:
    """The transpose of a matrix, held whole where it is read to."""
    return InMemory(tensor.read(0, math.prod(tensor.shape)).view(tensor.shape).t().contiguous())


@dataclass(frozen=True, slots=True)
class LaidOut:
    """An encoded tensor as it will be stored, and what it restores to, where the solver left it (a GPU, perhaps)."""

    encoded: Encoded
    parts: Parts
    restored: Tensor

    def to_host(self) -> tuple[LaidOut, Callable[[], None]]:
        """The same in host memory, and a function that waits until the copies have arrived; from a GPU."""
        host = {name: _on_host(array) for name, array in self.parts.items()}
        twin = LaidOut(self.encoded, host, _on_host(self.restored))
        copied = torch.cuda.Event()
        copied.record()
        return twin, copied.synchronize


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; in pinned memory, under way when this returns: the GPU goes on meanwhile."""
    if tensor.nbytes > PINNED_AT_MOST:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def lay_out(
    tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, coder: Coder, restored: Tensor | None = None
) -> LaidOut:
    """Restore an encoded tensor as any reader will, and rearrange its parts for the lossless stage.

    Both happen where the parts are: all of it is exact, so a GPU gives the bytes that a CPU gives. restored: what
    `restored_of` gives, where that is known.
    """
    parts = {name: part.to(encoded.place) for name, part in encoded.parts.items()}
    if restored is None:
        restored = restored_of(tensor, encoded, reference)
    return LaidOut(encoded, _stored(encoded, parts, coder, tensor.name), restored)


def restored_of(
    tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """What any reader restores from an encoded tensor, where its parts are. shape: of it, if these are some rows."""
    info, place = tensor.pair.info, encoded.place
    parts = {name: part.to(place) for name, part in encoded.parts.items()}
    like = torch.empty(shape or info.shape, dtype=DTYPES[info.dtype], device="meta")
    base = None if reference is None else reference.to(place)
    return restore_tensor(encoded.format, encoded.params, parts, base, like, tensor.name).contiguous()


def _stored(encoded: Encoded, parts: Parts, coder: Coder, name: str) -> Parts:
    """The parts in the layout that they are stored in."""
    if coder.codec == "none" or encoded.format != "packed":
        return parts
    return packed.to_storage(packed.PackedSpec.from_json(encoded.params, name), parts)


def finish(plan: Plan, tensor: TensorPlan, laid_out: LaidOut, coder: Coder) -> Outcome:
    """Hash a tensor that is in host memory and run the lossless stage: a CPU's work, but for codecs that need a GPU."""
    with part("hash", on_host=True):
        digest = hashlib.sha256(tensor_bytes(laid_out.restored)).hexdigest()
    return _coded(plan, tensor, laid_out.encoded, laid_out.parts, digest, coder)


def finish_on_disk(plan: Plan, tensor: TensorPlan, encoded: Encoded, coder: Coder) -> Outcome:
    """`lay_out` and `finish` of a tensor that no model in memory waits for: restored piece by piece, for its hash."""
    base, finetuned = plan.rows(tensor)
    sources = {name: PartInMemory(part) for name, part in encoded.parts.items()}
    like = torch.empty(finetuned.shape, dtype=finetuned.dtype, device="meta")
    pieces = restore_pieces(encoded.format, encoded.params, sources, base, like, tensor.name, storage=False)
    digest, _ = hash_chunks(map(tensor_bytes, pieces))
    parts = _stored(encoded, encoded.parts, coder, tensor.name)
    return _coded(plan, tensor, encoded, parts, digest, coder)


def _coded(plan: Plan, tensor: TensorPlan, encoded: Encoded, parts: Parts, digest: str, coder: Coder) -> Outcome:
    """Run the lossless stage over the stored parts. digest: of the restored tensor."""
    records, streams = [], {}
    for name, array in sorted(parts.items()):
        stored = array.contiguous()
        if coder.codec != "none":
            with part("code", on_host=True):
                stored = torch.frombuffer(coder.encode(tensor_bytes(stored)), dtype=torch.uint8)
        streams[name] = stored
        raw = tensor_bytes(stored)
        hashes = {"sha256": hashlib.sha256(raw).hexdigest()}
        if coder.codec == "none":
            hashes["blake3"] = blake3(raw).hexdigest()
        size = tuple(array.shape)
        records.append(PartRecord(name=name, dtype=DTYPE_NAMES[array.dtype], shape=size, bytes=raw.nbytes, **hashes))
    return Outcome(record_of(plan, tensor, encoded, digest, tuple(records)), streams)


def alias_record(plan: Plan, tensor: TensorPlan, twin: TensorRecord) -> TensorRecord:
    """The record of a tensor that is stored under another name."""
    return record_of(plan, tensor, Encoded("none", {}, {}), twin.sha256, ())


def record_of(
    plan: Plan, tensor: TensorPlan, encoded: Encoded, digest: str, parts: tuple[PartRecord, ...]
) -> TensorRecord:
    """What the manifest says of a tensor. digest: of what it is restored to."""
    status: Status = "coded" if tensor.treatment == "code" else tensor.treatment
    uses_base = tensor.pair.base_name if plan.recipe.scope == "delta" else None
    return TensorRecord(
        name=tensor.name,
        dtype=tensor.pair.info.dtype,
        shape=tensor.pair.info.shape,
        kind=tensor.kind,
        status=status,
        codec=tensor.settings.codec,
        format=encoded.format,
        params=encoded.params,
        base_name=uses_base,
        base_rows=tensor.pair.base_rows if uses_base else None,
        base_sha256=plan.base.sha256(uses_base) if uses_base else None,
        alias_of=tensor.pair.alias_of,
        sha256=digest,
        parts=parts,
        loss=encoded.loss,
        damp_fraction=encoded.damp_fraction,
        kept=encoded.kept,
        tokens=encoded.tokens,
    )

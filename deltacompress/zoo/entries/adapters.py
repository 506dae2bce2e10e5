"""PEFT adapters as entries: registered as they are, byte for byte, after a check against their base.

An adapter says little about the model it belongs to: a name. So it is held against the tensors of a base-ref of the
zoo, or of the fine-tuned model that a delta of the zoo is: every module it changes must be there, with the sizes that
its matrices need. Only adapter_model.safetensors is read; pickled weights (adapter_model.bin) are refused, and a
trainer's pickles beside it are left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deltacompress.adapters.adapter import digest_of, open_adapter
from deltacompress.adapters.directory import own_files, read_config
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deltacompress.errors import CheckpointError
from deltacompress.files.hashing import blake3_hex, hash_chunks, new_blake3, read_chunks, sha256_hex
from deltacompress.files.regular import open_regular
from deltacompress.zoo.entries.artifact import Described
from deltacompress.zoo.entries.beneath import OVER, Beneath
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import ADAPTER, FILE, Descriptor, EntryManifest
from deltacompress.zoo.store.durable import because

if TYPE_CHECKING:
    from blake3 import blake3

IDENTITY = "adapter_digest"
"""Key of an entry's summary: `Adapter.digest`, by which reports name it."""


def describe_adapter(directory: Path, beneath: Beneath) -> Described:
    """Check the adapter directory against the model that it goes over, and hash its files; stores nothing.

    Raises:
        CheckpointError: not an adapter of a known kind, damaged, or pickled.
        BaseMismatchError: it does not fit the base.
    """
    from deltacompress.adapters.values import check_values  # numpy, which `zoo list` need not wait for

    _, raw = read_config(directory)
    adapter = open_adapter(directory, beneath.shapes, base_name=beneath.name)
    check_values(adapter)
    layers, blobs, weights = [], [], new_blake3()
    for path in own_files(directory):
        name = path.name
        if name == ADAPTER_CONFIG:
            digest, size = sha256_hex(raw), len(raw)
        else:
            digest, size = hash_chunks(_chunks(path, *([weights] if name == ADAPTER_WEIGHTS else [])))
        layers.append(Descriptor(media_type=FILE, digest=digest, size=size, annotations={"file": name}))
        blobs.append(Blob(digest, size, lambda path=path: _chunks(path), str(path)))  # type: ignore[misc]
    if digest_of(blake3_hex(raw), weights.hexdigest()) != adapter.digest:
        raise CheckpointError("changed while it was read", where=directory, way_out="run it again")
    entry = EntryManifest(
        kind="adapter",
        config=Descriptor(media_type=ADAPTER, digest=sha256_hex(raw), size=len(raw)),
        layers=tuple(layers),
        lineage=beneath.lineage,
        summary={
            "adapter": adapter.kind,
            IDENTITY: adapter.digest,
            "adapter_bytes": sum(layer.size for layer in layers),
            "modules": adapter.modules,
            "parameters": sum(span.info.numel for span in adapter.tensors.values()),
            "rank": adapter.settings.rank,
            "ratio": round(beneath.nbytes / max(1, sum(layer.size for layer in layers)), 6),
            "recipe": adapter.title,
            **({} if beneath.over is None else {OVER: beneath.over}),
        },
    )
    return Described(entry, blobs, tuple(adapter.notes))


def _chunks(path: Path, *beside: blake3) -> Iterator[bytes]:
    """The bytes of a file, which hashes `beside` take, too."""
    try:
        with open_regular(path, links=link_homes(path.parent)) as file:
            for chunk in read_chunks(file):
                for one in beside:
                    one.update(chunk)
                yield chunk
    except OSError as error:
        raise because(CheckpointError, path, error) from error

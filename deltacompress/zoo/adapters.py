"""PEFT adapters (LoRA, BOFT) as entries: registered as they are, byte for byte, after a check against their base.

An adapter says little about the base it belongs to: a name. So it is held against the tensors of a base-ref of the zoo:
every module it changes must be there, with the sizes that its matrices need. Only adapter_model.safetensors is read;
pickled weights (adapter_model.bin) are refused, and a trainer's pickles beside it are left behind.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltacompress.errors import BaseMismatchError, CheckpointError
from deltacompress.safetensors_header import TensorSpan, load_json_object, read_header
from deltacompress.zoo import names, osfs
from deltacompress.zoo.adapter_shapes import Settings, check_tensors
from deltacompress.zoo.artifact import Described
from deltacompress.zoo.bases import BaseIdentity
from deltacompress.zoo.blobs import Blob
from deltacompress.zoo.canonical import sha256
from deltacompress.zoo.entry import ADAPTER, FILE, Descriptor, EntryManifest, Lineage
from deltacompress.zoo.local import again, close, reason
from deltacompress.zoo.store import CHUNK

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_KEPT = (CONFIG, WEIGHTS, "README.md", *_TOKENIZER, "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja")
_NO_PLAIN_ADAPTER = (
    "use_dora",
    "use_qalora",
    "lora_ga_config",
    "eva_config",
    "trainable_token_indices",
    "layer_replication",
)


def is_adapter(directory: Path) -> bool:
    """Whether a directory looks like a PEFT adapter."""
    return (directory / CONFIG).is_file()


def claimed_base(directory: Path) -> tuple[str | None, str | None]:
    """(name, revision) of the base that the adapter's config gives.

    Raises:
        CheckpointError: no config, or one that cannot be read.
    """
    config, _ = _config(directory)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return name if isinstance(name, str) else None, revision if isinstance(revision, str) else None


def describe_adapter(directory: Path, *, base: BaseIdentity, base_digest: str, base_name: str) -> Described:
    """Check the adapter directory against its base and hash its files; stores nothing.

    base, base_digest, base_name: the base-ref's identity, its entry's digest and its name, for messages.

    Raises:
        CheckpointError: not an adapter of a known kind, damaged, or pickled.
        BaseMismatchError: it does not fit the base.
    """
    config, raw = _config(directory)
    settings = parse_settings(config, str(directory / CONFIG))
    weights = directory / WEIGHTS
    if not weights.is_file():
        pickled = sorted(
            file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for file in directory.glob(pattern)
        )
        if pickled:
            raise CheckpointError(
                f"{directory}: only pickled weights ({pickled[0]}), which are never loaded; save it again with "
                "safe_serialization=True"
            )
        raise CheckpointError(f"{directory}: no {WEIGHTS}; give a directory that PEFT's save_pretrained wrote")
    tensors = read_header(weights).tensors
    names.check_tensors(tensors, str(weights))
    modules = _check(tensors, settings, base, str(weights), base_name)
    layers, blobs = [], []
    for name in sorted(_KEPT):
        path = directory / name
        if not path.is_file():
            continue
        digest, size = (sha256(raw), len(raw)) if name == CONFIG else _hash(path)
        layers.append(Descriptor(media_type=FILE, digest=digest, size=size, annotations={"file": name}))
        blobs.append(Blob(digest, size, lambda path=path: _chunks(path), str(path)))  # type: ignore[misc]
    entry = EntryManifest(
        kind="adapter",
        config=Descriptor(media_type=ADAPTER, digest=sha256(raw), size=len(raw)),
        layers=tuple(layers),
        lineage=Lineage(
            base=base.content_hash, base_name=base.hub_id or base_name, parents=(base_digest,), relation="adapter"
        ),
        summary={
            "adapter": settings.kind,
            "adapter_bytes": sum(layer.size for layer in layers),
            "modules": modules,
            "parameters": sum(span.info.numel for span in tensors.values()),
            "rank": settings.rank,
            "ratio": round(base.bytes / max(1, sum(layer.size for layer in layers)), 6),
            "recipe": f"{settings.kind}-r{settings.rank}" if settings.kind == "lora" else settings.kind,
        },
    )
    return Described(entry, blobs)


def left_out(directory: Path) -> list[str]:
    """Files beside the adapter that are not registered (a trainer's state, its pickles)."""
    return sorted(file.name for file in directory.iterdir() if file.name not in _KEPT)


def _check(tensors: dict[str, TensorSpan], settings: Settings, base: BaseIdentity, where: str, base_name: str) -> int:
    shapes = {name: span.info.shape for name, span in tensors.items()}
    try:
        return check_tensors(shapes, settings, {one.name: one.shape for one in base.tensors})
    except ValueError as error:
        raise BaseMismatchError(f"{where}: {error} (base {base_name}); give the base it was trained on") from None


def _config(directory: Path) -> tuple[dict[str, Any], bytes]:
    path = directory / CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path}: over {MAX_CONFIG_BYTES} bytes; not an adapter's config")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error
    return load_json_object(raw, str(path)), raw


def parse_settings(config: dict[str, Any], path: str) -> Settings:
    """What of an adapter's config decides shapes; `path` names it.

    Raises:
        CheckpointError: not an adapter of a known kind, or a field that is not what it should be.
    """
    kind = str(config.get("peft_type", "")).lower()
    if kind not in ("lora", "boft"):
        raise CheckpointError(f"{path}: peft_type {str(config.get('peft_type'))[:40]!a}; a zoo holds LORA and BOFT")
    for option in _NO_PLAIN_ADAPTER:
        if config.get(option):
            raise CheckpointError(
                f"{path}: {option} is set, which makes it no plain {kind}; merge it, then compress it"
            )
    targets = config.get("target_modules")
    if not isinstance(targets, str) and not (_texts(targets) and targets):
        raise CheckpointError(f"{path}: target_modules must be text or a list of module names")
    saved = config.get("modules_to_save")
    if saved is not None and not _texts(saved):
        raise CheckpointError(f"{path}: modules_to_save must be a list of module names")

    def number(key: str, default: int) -> int:
        value = config.get(key, default)
        if type(value) is not int or not 0 <= value <= 1 << 20:
            raise CheckpointError(f"{path}: {key} must be a whole number, found {str(value)[:40]!a}")
        return value

    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not all(type(one) is int and one > 0 for one in ranks.values()):
        raise CheckpointError(f"{path}: rank_pattern must map module names to ranks")
    if kind == "lora" and number("r", 8) < 1:
        raise CheckpointError(f"{path}: r must be at least 1")
    return Settings(
        kind=kind,
        rank=number("r", 8) if kind == "lora" else 0,
        ranks=ranks,
        targets=targets if isinstance(targets, str) else tuple(targets),
        saved=tuple(saved or ()),
        transposed=bool(config.get("fan_in_fan_out", False)),
        factors=number("boft_n_butterfly_factor", 1) if kind == "boft" else 0,
        block=number("boft_block_size", 4) if kind == "boft" else 0,
        blocks=number("boft_block_num", 0) if kind == "boft" else 0,
    )


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _hash(path: Path) -> tuple[str, int]:
    seen = hashlib.sha256()
    size = 0
    for chunk in _chunks(path):
        seen.update(chunk)
        size += len(chunk)
    return seen.hexdigest(), size


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        fd = again(osfs.open_, str(path), os.O_RDONLY)
        try:
            while chunk := again(osfs.read, fd, CHUNK):
                yield chunk
        finally:
            close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: {reason(error)}") from error

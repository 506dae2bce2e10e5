"""The weight files of a checkpoint directory: one file, or the shards that an index names, which must agree with it.
And what the weights in them hash to. No torch.

No pickle is read, and nothing is guessed: where two files could each be the model, neither is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from deltacompress.checkpoints.header import (
    MAX_HEADER_BYTES,
    TensorSpan,
    brief,
    load_json_object,
    read_header,
)
from deltacompress.errors import CheckpointError
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.places import MANIFEST
from deltacompress.files.regular import ANYWHERE, read_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A_PEFT_ADAPTER = "a PEFT adapter (LoRA and the like), not a whole model"
USE_THE_ADAPTER = (
    "merge it into its base (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(DIR)) and give that, "
    "or serve it beside its base (`generate`, `chat`, `eval`)"
)
_PICKLES = ("*.bin", "*.pt", "*.pth")
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")


def find_weights(root: Path) -> tuple[dict[str, tuple[Path, TensorSpan]], list[Path]]:
    """Name -> (file, span) of every tensor of the checkpoint directory `root`, and its weight files with the index.

    Raises:
        CheckpointError: no safetensors, only pickles, an index that disagrees with its shards, or a damaged shard.
        OSError: the directory or the index cannot be read.
    """
    if (root / INDEX).is_file():
        return _read_shards(root, root / INDEX)
    single = root / SINGLE
    if single.is_file():
        spans = {name: (single, span) for name, span in read_header(single, links=ANYWHERE).tensors.items()}
        if not spans:
            raise CheckpointError("holds no tensors", where=single, way_out="get it again")
        return spans, [single]
    others = sorted(file.name for file in root.glob("*.safetensors"))
    if others:
        if SINGLE in others:
            raise CheckpointError("no regular file, maybe a broken link", where=single, way_out="put the weights there")
        if ADAPTER_WEIGHTS in others:
            raise CheckpointError(A_PEFT_ADAPTER, where=root, way_out=USE_THE_ADAPTER)
        hint = f"found {others[0]}"
        if (root / MANIFEST).is_file() and others[0].startswith("delta-"):
            raise CheckpointError(
                "an artifact of deltacompress, not a model", where=root, way_out="`restore` makes a model of it"
            )
        if len(others) == 1:
            hint += f"; if that is the whole model, rename it to {SINGLE}"
        raise CheckpointError(
            f"neither {SINGLE} nor {INDEX} ({hint})", where=root, way_out="give the directory of a whole model"
        )
    if (root / ADAPTER_CONFIG).exists():
        raise CheckpointError(A_PEFT_ADAPTER, where=root, way_out=USE_THE_ADAPTER)
    pickles = sorted(file.name for pattern in _PICKLES for file in root.glob(pattern))
    if pickles:
        what = f"only pickled weights ({pickles[0]}), which are never loaded"
        raise CheckpointError(what, where=root, way_out="convert them to safetensors with save_pretrained")
    raise CheckpointError(f"no weights; expected {SINGLE}, or {INDEX} and its shards", where=root)


def content_hash(entries: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """What identifies weights, in whatever files they lie: hex SHA-256 over the canonical JSON (RFC 8785) of the sorted
    list of [name, dtype, shape, sha256 of the bytes].
    """
    rows = sorted([name, dtype, list(shape), digest] for name, dtype, shape, digest in entries)
    return sha256_hex(json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode())


def _read_shards(root: Path, index: Path) -> tuple[dict[str, tuple[Path, TensorSpan]], list[Path]]:
    raw = read_bytes(index, at_most=MAX_HEADER_BYTES, links=ANYWHERE)
    weight_map = load_json_object(raw, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map from tensor names to files", where=index, way_out="get it again")
    for name, file in weight_map.items():
        # One path component, no separator: no entry can lead out of the directory.
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.+-]*\.safetensors", file, re.ASCII):
            raise CheckpointError(
                f"tensor {brief(name)} is in {brief(file)}, not a plain *.safetensors name",
                where=index,
                way_out="get it again",
            )
    files = sorted(set(weight_map.values()))
    present = {file.name for file in root.glob("*.safetensors")}
    if missing := sorted(set(files) - present):
        raise CheckpointError(
            f"{len(missing)} of {len(files)} shards missing, first {missing[0]}", where=index, way_out="get it again"
        )
    # A shard of the same series, or a single file, that the index does not name: which of the two is the model?
    series = {match.groups() for file in files if (match := _SHARD.fullmatch(file))}
    for file in sorted(present - set(files)):
        if file == SINGLE or ((match := _SHARD.fullmatch(file)) and match.groups() in series):
            raise CheckpointError(
                f"does not name {file}, which lies beside it", where=index, way_out="remove whichever is stale"
            )
    spans: dict[str, tuple[Path, TensorSpan]] = {}
    for file in files:
        for name, span in read_header(root / file, links=ANYWHERE).tensors.items():
            if name in spans:
                raise CheckpointError(
                    f"tensor {name} is also in {spans[name][0].name}", where=root / file, way_out="remove one of them"
                )
            if name not in weight_map:
                raise CheckpointError(
                    f"tensor {name} is in this shard but not in {INDEX}", where=root / file, way_out="get both again"
                )
            spans[name] = (root / file, span)
    for name, file in weight_map.items():
        if name not in spans or spans[name][0].name != file:
            raise CheckpointError(
                f"tensor {brief(name)} is not in it, but {INDEX} says so", where=root / file, way_out="get both again"
            )
    return spans, [index, *(root / file for file in files)]

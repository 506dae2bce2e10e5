"""What a directory with an adapter says of itself, without its base: its config, and the tensors of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deltacompress.adapters.adapter import SAVE_AGAIN, ReadAdapter, kind_of
from deltacompress.adapters.checks.base import Shape
from deltacompress.adapters.directory import bytes_of, claimed_base, left_out
from deltacompress.adapters.tensors import Brought, by_module
from deltacompress.checkpoints.header import TensorSpan
from deltacompress.errors import CheckpointError

_REPLACES = {"weight": "weight", "bias": "bias", "weight beside": "weight", "bias beside": "bias"}
Spans = Mapping[str, TensorSpan]


def summarize(read: ReadAdapter) -> dict[str, Any]:
    """Plain data, a row per tensor too (what `inspect --json` prints); no value is read.

    bytes: of all files of the adapter; left_out: files beside them; changes: a row for each part of each module: what
    it is, its size (rank, blocks, entries, shape), and its bytes.

    Raises:
        CheckpointError: as adapters.open_adapter, of what can be told without a base.
    """
    directory = read.path
    settings, tensors = read.settings, read.tensors
    brought = _modules(read.weights, tensors, settings.kind)
    return {
        "adapter": str(directory),
        "kind": kind_of(settings),
        "base": claimed_base(directory)[0],
        "rank": settings.rank or None,
        "butterfly_factors": settings.factors or None,
        "target_modules": settings.targets if isinstance(settings.targets, str) else ", ".join(settings.targets),
        "modules": sum(bool(one.matrices) for one in brought.values()),
        "digest": read.digest,
        "bytes": bytes_of(directory),
        "parameters": sum(span.info.numel for span in tensors.values()),
        "left_out": left_out(directory),
        "changes": [row for one in brought.values() for row in _parts(one, tensors)],
        "tensors": [
            {"tensor": name, "dtype": span.info.dtype, "shape": list(span.info.shape), "bytes": span.info.nbytes}
            for name, span in tensors.items()
        ],
    }


def _modules(weights: Path, tensors: Spans, kind: str) -> dict[str, Brought]:
    try:
        return by_module(tensors, kind)
    except ValueError as error:
        raise CheckpointError(str(error), where=weights, way_out=SAVE_AGAIN) from None


def _parts(brought: Brought, tensors: Spans) -> Iterator[dict[str, object]]:
    """What there is for one module, in the order of docs/adapters.md."""
    roles = brought.roles

    def row(what: str, size: str, *used: str) -> dict[str, object]:
        count = sum(tensors[roles[role]].info.nbytes for role in used if role in roles)
        return {"module": brought.module, "what": what, "size": size, "bytes": count}

    def shape(role: str) -> Shape:
        return tensors[roles[role]].info.shape

    of = "DoRA" if "magnitude" in roles else "low rank"
    if "A" in roles:
        yield row(of, f"rank {_first(shape('A'))}", "A", "B", "B bias", "magnitude")
    if "embedding A" in roles:
        size = f"rank {_first(shape('embedding A'))}"
        yield row(f"{of} of an embedding", size, "embedding A", "embedding B", "magnitude")
    if "R" in roles:
        yield row("rotation", _blocks(shape("R")), "R", "s")
    if "values" in roles:
        size = f"{_first(shape('values'))} entries"
        yield row("sparse", size, "values", "indices", "row offsets", "columns")
    if "rows" in roles:
        yield row("replaces rows of tokens", _sizes(shape("rows")), "rows")
    for role, tensor in _REPLACES.items():
        if role in roles:
            yield row(f"replaces {tensor}", _sizes(shape(role)), role)


def _first(shape: Shape) -> int:
    return shape[0] if shape else 1


def _blocks(shape: Shape) -> str:
    """Of R [factors, blocks, block, block]; of anything else, its sizes."""
    if len(shape) != 4:
        return _sizes(shape)
    factors = f"{shape[0]} factor{'s' if shape[0] != 1 else ''}"
    return f"{factors} of {shape[1]} blocks of {shape[2]} x {shape[3]}"


def _sizes(shape: Shape) -> str:
    return " x ".join(map(str, shape))

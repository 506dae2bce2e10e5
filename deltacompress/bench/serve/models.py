"""The models of `bench serve`: a random base and its variants in one runtime, packed deltas or whole models."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from deltacompress.bench.serve.calls import CONTEXT, prompt
from deltacompress.bench.serve.whole import Shared, WholeModel
from deltacompress.bench.synthetic import SHAPES, ModelShape, write_base, write_delta
from deltacompress.checkpoints.writer import write_file
from deltacompress.devices import free_bytes, resolve_device
from deltacompress.errors import InputError, option
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.live.call import Call

System = Literal["decoupled", "swap"]
"""Packed deltas beside one base, or whole models in turn."""
SLOTS = 16
"""Packed variants on the device at once, by default."""
_FIRST = 64
"""Tokens of a call, and of its answer, that comes before what is measured."""
_OF_FREE = 0.7
"""Of the memory that a GPU has left, what whole models may take; the rest is for keys, values and activations."""


@dataclass(frozen=True, slots=True)
class Models:
    """names: of the variants; slots: of them that are on the device at once; variant_bytes: of one, there."""

    runtime: Runtime
    shape: ModelShape
    names: tuple[str, ...]
    slots: int
    variant_bytes: int

    @property
    def kv_token_bytes(self) -> int:
        """Of the keys and values of a token, on the device."""
        return self.shape.kv_width_of_all * self.runtime.dtype.itemsize


def shape_of(name: str | None, device: str) -> ModelShape:
    """Of this name, by default a 7B on a GPU and a tiny one elsewhere, with a context of CONTEXT.

    Raises:
        InputError: there is none.
    """
    chosen = name or ("llama-7b" if resolve_device(device).type == "cuda" else "tiny")
    if chosen not in SHAPES or SHAPES[chosen].experts:
        known = ", ".join(name for name, one in SHAPES.items() if not one.experts)
        raise InputError(f"no shape {chosen!r:.40}", where=option("shape"), way_out=f"give one of {known}")
    return replace(SHAPES[chosen], context=CONTEXT)


def made(
    root: Path,
    shape: ModelShape,
    device: str,
    backend: str,
    *,
    variants: int,
    system: System,
    slots: int | None,
    tp: int = 1,
) -> Models:
    """Write them into the empty directory `root`, and load them.

    slots: by default SLOTS packed ones, and of whole models as many as fit a GPU (one on a CPU); tp: devices.

    Raises:
        BackendError: the backend cannot run on the device, or it does not fit.
    """
    runtime = base_runtime(root, shape, device, backend, tp=tp)
    on_gpu = runtime.device.type == "cuda"
    names = tuple(f"v{number}" for number in range(variants))
    if system == "swap":
        own = runtime.model.base.checkpoint.nbytes
        fits = max(1, int(free_bytes(runtime.device) * _OF_FREE) // own) if on_gpu else 1
        chosen, shared = min(slots or fits, variants), Shared()
        runtime.cache.residents.slots = chosen
        for number, name in enumerate(names):
            runtime.add(WholeModel(runtime.model.base, number, shared, pinned=on_gpu), name)
    else:
        chosen = min(slots or SLOTS, variants)
        runtime.cache.residents.slots = chosen
        delta = root / "delta"
        delta.mkdir()
        write_delta(delta, shape, runtime.model.base.checkpoint, runtime.device)
        for name in names:
            runtime.load(delta, name)
    nbytes = runtime.variants[names[0]].nbytes
    runtime.cache.residents.budget_bytes = chosen * nbytes  # the rest is for keys and values, as in a server
    return Models(runtime, shape, names, chosen, nbytes)


def base_runtime(root: Path, shape: ModelShape, device: str, backend: str, *, tp: int = 1) -> Runtime:
    """Of a base that is written into the empty directory `root`; raises as made."""
    where, base = resolve_device(device), root / "base"
    base.mkdir()
    write_base(base, shape, where)
    write_tokenizer(base, shape.vocabulary)
    on_gpu = where.type == "cuda"
    return Runtime.from_base(
        base,
        device=where,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        backend=backend,
        merge_rounding=False,
        cuda_graphs=on_gpu,
        tp=tp,
    )


def with_slots(models: Models, slots: int) -> Models:
    """The same with so many variants on the device at once, none of them there."""
    start(models)
    residents = models.runtime.cache.residents
    residents.slots, residents.budget_bytes = slots, slots * models.variant_bytes
    return replace(models, slots=slots)


def start(models: Models) -> None:
    """As a server that was just started: what is compiled or opened once is there, and no variant is on the device."""
    engine = models.runtime.engine(lambda _event: None)
    for name in (None, models.names[0]):
        engine.submit(Call(f"first of {name}", name, prompt(_FIRST, models.shape.vocabulary, "first"), _FIRST))
    while engine.step():
        pass
    engine.close()
    evict_all(models)


def evict_all(models: Models) -> None:
    """No variant is on the device."""
    cache = models.runtime.cache
    for one in list(cache.residents.by_slot.values()):
        cache.settle(one.name)
        cache.evict(one.name)


def write_tokenizer(base: Path, vocabulary: int) -> None:
    """tokenizer.json of so many words: the engine makes text of tokens, as it would for a user."""
    words = {f"w{number}": number for number in range(vocabulary)}
    told = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    write_file(base / "tokenizer.json", [json.dumps(told).encode()])

"""`bench serve --capacity`: how many tokens of keys and values fit beside so many variants, by formula and measured."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.serve.models import base_runtime, shape_of
from deltacompress.bench.serve.run import Setup
from deltacompress.bench.synthetic import ModelShape, delta_bytes, write_delta
from deltacompress.devices import device_name, free_bytes, resolve_device
from deltacompress.errors import BackendError
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime import Runtime

RECIPES = {"int2-24": 2, "int4-24": 4}
"""Names and bits."""
CARDS_GIB = (24, 40, 80)
COUNTS = (0, 8, 16, 32, 64)
OVERHEAD_BYTES = 1 << 30
"""Of a card, what driver, kernels and the tensors of a step take, about."""
_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes of the base, and of the keys and values of a token; both in 16 bits."""

    base_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, shape: ModelShape) -> Fixed:
        """By its config alone."""
        weights = sum(prod(size) for _, size in shape.tensors().values())
        return cls(weights * _NUMBER_BYTES, shape.kv_width_of_all * _NUMBER_BYTES)

    def left(self, card_bytes: int, variants: int, variant_bytes: int) -> int | None:
        """Tokens that fit a card of so many bytes beside base and variants; None where these do not fit."""
        return self.fit(card_bytes, OVERHEAD_BYTES + self.base_bytes + variants * variant_bytes)

    def fit(self, card_bytes: int, used_bytes: int) -> int | None:
        """Tokens that fit a card of which so much is used; None where more is."""
        return None if used_bytes > card_bytes else (card_bytes - used_bytes) // self.token_bytes


def run_capacity(setup: Setup, reporter: Reporter | None = None) -> dict[str, Any]:
    """A row for each recipe and number of variants, a column for each size of a card.

    Measured, on a GPU: what base and variants have taken of it once they are there, held against each size of a card.

    Raises:
        InputError: there is no such shape. BackendError: the base does not fit.
    """
    shape, where = shape_of(setup.shape, setup.device), resolve_device(setup.device)
    fixed, used, ends = Fixed.of(shape), dict[tuple[str, int], int](), dict[str, str]()
    if where.type == "cuda":
        used, ends = _measured(setup, shape, reporter or SILENT)
    rows = []
    for recipe, bits in RECIPES.items():
        own = delta_bytes(shape, bits)
        for count in COUNTS:
            row: dict[str, Any] = {"recipe": recipe, "variants": count}
            for card in CARDS_GIB:
                row[f"{card} GB"] = fixed.left(card << 30, count, own)
            if (taken := used.get((recipe, count))) is not None:
                row |= {f"{card} GB measured": fixed.fit(card << 30, taken) for card in CARDS_GIB}
                row["used_bytes"] = taken
            rows.append(row)
    return {
        "rows": rows,
        "device": device_name(where),
        "shape": str(shape),
        "measured": "yes" if used else "no: by formula alone, there is no GPU here",
        "base_bytes": fixed.base_bytes,
        "kv_token_bytes": fixed.token_bytes,
        "overhead_bytes": OVERHEAD_BYTES,
        **ends,
        **{f"{recipe} variant_bytes": delta_bytes(shape, bits) for recipe, bits in RECIPES.items()},
    }


def _measured(setup: Setup, shape: ModelShape, reporter: Reporter) -> tuple[dict[tuple[str, int], int], dict[str, str]]:
    """Bytes of the GPU that are used, by recipe and count, as far as they fit; and why no more do."""
    found, ends = dict[tuple[str, int], int](), dict[str, str]()
    reporter.phase("capacity", len(RECIPES) + 1)
    with tempfile.TemporaryDirectory(prefix="deltacompress-bench-", dir=setup.scratch) as root:
        runtime = base_runtime(Path(root), shape, setup.device, setup.backend)
        reporter.step("base written and loaded")
        for recipe, bits in RECIPES.items():
            delta = Path(root) / recipe
            delta.mkdir()
            write_delta(delta, shape, runtime.model.base.checkpoint, runtime.device, bits=bits)
            used, error = _loaded(runtime, delta, COUNTS)
            found |= {(recipe, count): taken for count, taken in used.items()}
            if error is not None:
                ends[f"{recipe} ended"] = str(error)
            reporter.step(recipe)
    return found, ends


def _loaded(runtime: Runtime, delta: Path, counts: Sequence[int]) -> tuple[dict[int, int], BackendError | None]:
    """Bytes used by number of variants, as far as there is room, and what said that there is no more. None stays."""
    found, names, ended = dict[int, int](), list[str](), None
    try:
        for count in counts:
            while len(names) < count:
                name = f"v{len(names)}"
                runtime.load(delta, name)
                names.append(name)
            runtime.logits([(name, [1, 2, 3]) for name in names[-1:] or (None,)])  # what is made once is made now
            found[count] = torch.cuda.mem_get_info(runtime.device)[1] - free_bytes(runtime.device)
    except BackendError as error:
        ended = error
    for name in names:
        runtime.unload(name)
    return found, ended

"""Signs by a drawn pattern as kernels read them: dense codes of two bits, the same values, no pattern to draw."""

from __future__ import annotations

from dataclasses import replace

import torch

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec, Parts
from deltacompress.numerics.bits import packing
from deltacompress.numerics.sparsity import Sparsity


def dense_spec(spec: PackedSpec) -> PackedSpec:
    """What `dense_signs` makes parts of; of any other pattern the same."""
    if spec.sparsity.kind != "drawn":
        return spec
    return replace(spec, bits=2, sparsity=Sparsity.parse("dense"), grid="minmax", seed=0, first=(0, 0))


def dense_signs(spec: PackedSpec, parts: Parts) -> Parts | None:
    """Parts of `dense_spec`: -1, 0 or 1 times half of the scale. None where that is too small for bfloat16."""
    if spec.sparsity.kind != "drawn":
        return parts
    half = parts["scales"] / 2
    if not torch.equal(half * 2, parts["scales"]):
        return None
    codes, mask, _ = packed.unpack_levels(spec, parts)
    dense = packing.pack_codes(torch.where(mask, 2 * codes, 1), 2)
    return parts | {"codes": dense, "scales": half, "zeros": torch.ones_like(half, dtype=torch.uint8)}

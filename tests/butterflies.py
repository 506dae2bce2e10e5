"""BOFT written out as matrices, in float64 and without anything of the package: what rotations are held against."""

from __future__ import annotations

import torch
from torch import Tensor


def order_of(features: int, block: int, factor: int) -> list[int]:
    """Which feature stands in each place before factor `factor` turns blocks of neighbours: of all chunks of half a
    block in a span, those of even number first."""
    half, span = block // 2, block << factor
    found: list[int] = []
    for start in range(0, features, span):
        chunks = [list(range(at, at + half)) for at in range(start, start + span, half)]
        for chunk in chunks[::2] + chunks[1::2]:
            found += chunk
    return found


def dense(parameters: Tensor) -> Tensor:
    """R [in, in], float64, of boft_R [m, D, b, b]: F_(m-1) ... F_0, each P diag(Q) P^T."""
    factors, number, block, _ = parameters.shape
    features = number * block
    whole = torch.eye(features, dtype=torch.float64)
    for i in range(factors):
        turned = []
        for one in parameters[i].double():
            skew = (one - one.T) / 2
            eye = torch.eye(block, dtype=torch.float64)
            turned.append((eye - skew) @ torch.linalg.inv(eye + skew))
        places = list(range(features)) if factors == 1 else order_of(features, block, i)
        p = torch.zeros(features, features, dtype=torch.float64)
        p[range(features), places] = 1
        whole = p @ torch.block_diag(*turned) @ p.T @ whole
    return whole

"""Low rank: the best approximation of a delta by a product of two thin matrices.

What LoRA-like compression keeps of a full fine-tune. By Eckart and Young the truncated SVD has the least squared error
that its rank allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltacompress.checkpoints.rows import Elements
from deltacompress.codecs.encoded import Encoded, delta_rows
from deltacompress.codecs.formats.low_rank import DTYPE, add_product
from deltacompress.codecs.settings import LowRankSettings
from deltacompress.errors import CheckpointError, option


def factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """fp16 (left [out, rank], right [rank, in]) of the truncated SVD of a matrix [out, in], singular values halved
    between the two so that neither leaves fp16's range.
    """  # fmt: skip
    left, values, right = torch.linalg.svd(delta.float(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).to(DTYPE), (root[:, None] * right[:rank]).to(DTYPE)


def encode_elements(finetuned: Elements, base: Elements | None, settings: LowRankSettings, name: str) -> Encoded:
    """As codec.Codec.encode; the delta is in memory as a whole.

    Raises:
        CheckpointError: the delta is beyond what fp16 holds; else as encoded.delta_of.
    """
    read, rows, _ = delta_rows(finetuned, base, name)
    delta = read(0, rows)
    left, right = factors(delta, settings.rank)
    if not bool(torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise CheckpointError(
            "its difference from the base's is beyond fp16, which low-rank factors are kept in",
            where=f"tensor {name}",
            way_out=f"get the checkpoints again, or use a {option('recipe')} with another codec for it",
        )
    error = add_product(-delta, left, right)
    energy = float(delta.double().square().sum())
    loss = float(error.double().square().sum()) / energy if energy else 0.0
    return Encoded("low_rank", {"rank": settings.rank}, {"left": left, "right": right}, loss=loss)

"""What is said when a GPU's memory is full: what fills it, and what to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltacompress.errors import BackendError, to_free_memory
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.modules.model import DecoupledModel


@contextmanager
def explained(model: DecoupledModel, cache: VariantCache, doing: str) -> Iterator[None]:
    """Turn running out of memory in this block into a BackendError; doing: what was being computed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        base = sum(one.nbytes for one in model.model.parameters())
        raise BackendError(
            f"{model.device} is out of memory ({doing}; base {base} bytes, {cache.describe()})",
            way_out=to_free_memory(),
        ) from error

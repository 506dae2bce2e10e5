"""SBMM, the grouped decoupled product: y[rows of segment g] += x[rows of segment g] @ delta(slot_g)^T, all at once.

Three backends behind one interface, chosen by name and never silently: `reference` (PyTorch, any device, the
specification), `triton` (portable GPU code) and `cuda` (sparse tensor cores). Importing this imports torch, nothing
else: Triton and NVIDIA's packages are looked for only when their backend is asked for.
"""

from __future__ import annotations

from deltacompress.kernels.backend import Backend
from deltacompress.kernels.parts import expand_rows
from deltacompress.kernels.segments import Segments
from deltacompress.kernels.select import available, get_backend
from deltacompress.kernels.table import Table

__all__ = ["Backend", "Segments", "Table", "available", "expand_rows", "get_backend"]

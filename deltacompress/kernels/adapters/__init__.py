"""Adapters of many variants in one launch: low rank, rotations, sparse rows, scales of outputs.

`AdapterKernels` is the interface; `get_adapter_kernels` chooses, once, what runs on a device: `reference` (PyTorch, any
device, the specification) or `triton`. Each operation has a table, which kernels read from device memory, so that a
captured CUDA graph stays valid while adapters come and go.
"""

from __future__ import annotations

from deltacompress.kernels.adapters.interface import AdapterKernels
from deltacompress.kernels.adapters.lowrank import LowRankTable
from deltacompress.kernels.adapters.rotate import RotationTable
from deltacompress.kernels.adapters.scale import ScaleTable
from deltacompress.kernels.adapters.select import get_adapter_kernels
from deltacompress.kernels.adapters.sparse_rows import SparseRowsTable

__all__ = ["AdapterKernels", "LowRankTable", "RotationTable", "ScaleTable", "SparseRowsTable", "get_adapter_kernels"]

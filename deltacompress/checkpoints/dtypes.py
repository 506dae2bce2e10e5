"""What torch calls the dtypes of safetensors, which `header` lists; a checkpoint is opened without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

# fmt: off
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
})
# fmt: on
"""safetensors dtype name -> torch dtype."""
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
"""The other way round."""

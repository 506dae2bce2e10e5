"""Checkpoint formats of other tools, for those who serve with another engine or start from a quantized model."""

from deltacompress.interop.gptq.dense import dequantize
from deltacompress.interop.gptq.export import export_gptq

__all__ = ["dequantize", "export_gptq"]

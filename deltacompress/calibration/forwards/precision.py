"""In which precision calibration multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from deltacompress.models.relay import LayerCall

_HALF_OF_FP16 = torch.finfo(torch.float16).max / 2


@dataclass(frozen=True, slots=True)
class Precision:
    """Products of forwards with rounded inputs and fp32 sums; hidden states between layers stay fp32.

    inputs: what the inputs of products are rounded to. wider: what is left where those overflow, if anything.
    """

    inputs: Literal["fp32", "bf16", "fp16", "tf32"]
    wider: Precision | None = None

    def rounded(self, inputs: Tensor) -> Tensor:
        """Inputs as products take them, where those would round them: once for all linears that share them."""
        return inputs.half() if self.inputs == "fp16" else inputs

    def rounded_positions(self, call: LayerCall) -> LayerCall:
        """A layer's call with rotary tables as a model of 16 bits has them: queries and keys then stay in 16 bits."""
        tables = call.kwargs.get("position_embeddings")
        if self.inputs != "fp16" or not isinstance(tables, tuple):
            return call
        return replace(call, kwargs=call.kwargs | {"position_embeddings": tuple(table.half() for table in tables)})

    def overflows(self, low: float, high: float) -> bool:
        """Whether values of that range are not all held by these products, nor the differences of two of fp16."""
        most = _HALF_OF_FP16 if self.inputs == "fp16" else torch.finfo(torch.float32).max
        return not -most <= low <= high <= most  # false of NaN, too

    @contextmanager
    def products(self) -> Iterator[None]:
        """Multiply so in this block."""
        if self.inputs == "fp16":
            with _fp32_sums(), torch.autocast("cuda", dtype=torch.float16):
                yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision({"fp32": "highest", "tf32": "high", "bf16": "medium"}[self.inputs])
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def calibration_precision(device: torch.device, *, bf16_weights: bool) -> Precision:
    """What forwards on this device multiply in, where the linears are all bfloat16 (`bf16_weights`) or not.

    The noise of rounded activations averages out over the calibration tokens, that of rounded weights does not. A GPU
    takes fp16, by autocast: results and attention too. It keeps 10 bits, as TF32 does, at twice the speed, and holds
    weights of 16 bits but for the smallest bfloat16s; what it lacks is range, so a batch that overflows runs again in
    TF32. bfloat16 keeps 7 bits, too few for asymmetric targets: those are made of the difference of two forwards, and
    the noise of both can be as large as what a small delta leaves between them. A CPU has no fp16 products: it takes
    bfloat16 where the weights are, else fp32.
    """
    if device.type == "cuda":
        return Precision("fp16", wider=Precision("tf32"))
    return Precision("bf16" if bf16_weights else "fp32")


@contextmanager
def _fp32_sums() -> Iterator[None]:
    """No partial sums in 16 bits, which cuBLAS may take where it splits a long product."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before

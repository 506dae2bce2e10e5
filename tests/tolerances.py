"""How much every inexact comparison of the tests may be off, and why. What is not listed here is compared exactly:
packing, formats, lossless coding, manifests and restored tensors have no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    value: float
    reason: str


FLOAT32_CHAIN = Tolerance(
    1e-4, "relative; sums of up to a few hundred float32 terms, then a triangular solve at a condition number below 1e3"
)
LEAST_SQUARES = Tolerance(
    2e-3, "relative; the oracle solves the normal equations in float64, we solve them damped (1e-6) in float32"
)
OPTIMUM = Tolerance(1e-4, "relative; a float32 solution compared with, and never better than, the float64 optimum")
OBS_EXCESS_WHITE = Tolerance(
    0.02,
    "mean over the brute-force optimum, 4 x 8, white inputs: columns are fixed in order; observed 0.006 (100 seeds)",
)
OBS_EXCESS_CORRELATED = Tolerance(
    0.10, "the same with inputs mixed by 0.3; observed 0.048, and 0.091 with the published column-by-column rule"
)
OBS_SAME_ROWS = Tolerance(
    0.1,
    "share of rows that may differ from a float64 reference: one near-tie rounds the other way and moves what follows",
)
OBS_SAME_LOSS = Tolerance(5e-3, "relative; two solutions that differ by near-ties only have nearly the same loss")
GPU_LOSS = Tolerance(
    0.02, "relative, all tensors together; bf16 products and attention of a GPU against those of a CPU: other Hessians"
)
SWEEP = Tolerance(1e-5, "relative; a sweep compares float32 costs, so it may accept a step that is worse by rounding")
MONOTONE = Tolerance(0.0, "aggregated over rows, one more bit halves the step: no margin is needed")
SBMM = {
    "torch.float32": Tolerance(1e-6, "relative norm; fp32 sums of up to a few thousand products, in another order"),
    "torch.float16": Tolerance(6e-4, "relative norm; one rounding to 11 bits, at most twice: in the delta and in y"),
    "torch.bfloat16": Tolerance(5e-3, "relative norm; one rounding to 8 bits, at most twice: in the delta and in y"),
}
MERGED = Tolerance(
    2e-5, "absolute and relative; PEFT merges in float32, sums of at most some hundred terms of size 1; ours in float64"
)
UNMERGED = Tolerance(
    1e-5,
    "of the largest logit; PEFT's own forward with one adapter alone: the same float32 products in another order",
)
REORDERED = Tolerance(
    2e-6, "of the largest logit; the same float32 products of a tiny model in batches of other sizes, or side by side"
)
SPLIT = Tolerance(
    1e-5, "absolute, of logits of size 2; the same float32 sums of a tiny model, in parts of which each is added last"
)
ROUNDED_ONCE = {
    "torch.float32": Tolerance(1e-6, "relative norm; fp32 sums of up to a few thousand products, in another order"),
    "torch.float16": Tolerance(2.5e-4, "relative norm; one rounding to 11 bits, where the sum is written"),
    "torch.bfloat16": Tolerance(2e-3, "relative norm; one rounding to 8 bits, where the sum is written"),
}

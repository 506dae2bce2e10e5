"""What a recipe can set for each codec, checked when the recipe is read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deltacompress.numerics.sparsity import Sparsity

Bits = Literal[1, 2, 3, 4, 8, 16]
GroupSize = Literal["row", 16, 32, 64, 128, 256, 512, 1024]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Quantizing(_Strict):
    """Shared by the codecs that write the packed format.

    bits: per kept weight; 16 keeps weights as bfloat16 (prune only), 1 is sign times scale (grid midrise).
    sparsity: "dense", "n:m" or "unstructured:F". group_size: columns that share a scale; "row" = all of them.
    grid: "minmax", "symmetric" or "midrise" (numerics/grid.py). range_factor: < 1 clips the grid, > 1 widens its steps.
    """

    bits: Bits
    sparsity: str = "dense"
    group_size: GroupSize = "row"
    grid: Literal["minmax", "symmetric", "midrise"] = "minmax"
    range_factor: Annotated[float, Field(gt=0, le=4)] = 1.0

    @field_validator("sparsity")
    @classmethod
    def _known_pattern(cls, text: str) -> str:
        return str(Sparsity.parse(text))

    @model_validator(mode="after")
    def _one_bit_is_a_sign(self) -> _Quantizing:
        if self.bits == 1 and self.grid != "midrise":
            raise ValueError("bits: 1 needs grid: midrise (a sign times a scale)")
        return self

    @property
    def pattern(self) -> Sparsity:
        """The parsed sparsity."""
        return Sparsity.parse(self.sparsity)


class ObsSettings(_Quantizing):
    """Optimal Brain Surgeon on calibration activations (DeltaZip section 4.2; SparseGPT; GPTQ).

    block_size: columns per lazy batch. damp_fraction: added to the Hessian's diagonal, a fraction of its mean.
    selection: how n:m chooses what to prune, "joint" cost of the pruned pair or the published "diagonal" rule.
    activation_order: solve the columns with the largest activations first.
    asymmetric: 0..1, how far targets move to make up for the error of the layers before (0 = the published method).
    range_search: range factors to try instead of range_factor; each row keeps the one with the least loss after OBS.
    refine_sweeps: sweeps of coordinate descent after OBS. refit_scales: closed-form scales once the codes are fixed.
    """

    codec: Literal["obs"] = "obs"
    block_size: Annotated[int, Field(ge=16, le=4096)] = 128
    damp_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    selection: Literal["joint", "diagonal"] = "joint"
    activation_order: bool = True
    asymmetric: Annotated[float, Field(ge=0, le=1)] = 1.0
    range_search: Annotated[tuple[Annotated[float, Field(gt=0, le=4)], ...], Field(max_length=8)] = ()
    refine_sweeps: Annotated[int, Field(ge=0, le=20)] = 2
    refit_scales: bool = False

    @model_validator(mode="after")
    def _scales_to_refit(self) -> ObsSettings:
        if self.bits == 16 and (self.refit_scales or self.refine_sweeps or self.range_search):
            raise ValueError("bits: 16 has no grid: set refine_sweeps: 0, refit_scales: false and no range_search")
        if self.range_search and self.pattern.kind == "unstructured":
            raise ValueError(
                "range_search needs rows that are solved apart; an unstructured pattern ties them together"
            )
        return self


class RtnSettings(_Quantizing):
    """Round to nearest, no calibration; sparse patterns keep the largest magnitudes. All-zero rows cost nothing."""

    codec: Literal["rtn"] = "rtn"


class ExactSettings(_Strict):
    """Lossless: restored bit for bit, NaN payloads included."""

    codec: Literal["exact"] = "exact"


class SkipSettings(_Strict):
    """Zero bits: the tensor is restored as the base's."""

    codec: Literal["skip"] = "skip"


Settings = ObsSettings | RtnSettings | ExactSettings | SkipSettings

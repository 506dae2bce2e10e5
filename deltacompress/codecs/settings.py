"""What a recipe can set for each codec, checked when the recipe is read: before torch is imported."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import override

from deltacompress.codecs.formats.spec import PackedSpec, Shapes, largest_shapes
from deltacompress.errors import RecipeError
from deltacompress.numerics.sparsity import Sparsity


def _as_listed(value: object) -> object:
    if isinstance(value, bool | float):  # equal to one of the list, perhaps
        raise ValueError(f"Input should be a whole number, not {value}")  # noqa: TRY004 # pydantic tells these
    return value


Bits = Annotated[Literal[1, 2, 3, 4, 8, 16], BeforeValidator(_as_listed)]
GroupSize = Annotated[Literal["row", 16, 32, 64, 128, 256, 512, 1024], BeforeValidator(_as_listed)]


class Settings(BaseModel):
    """Of any codec. codec: its name, a Literal with itself as default."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    if TYPE_CHECKING:
        codec: str

    @property
    def needs_teacher(self) -> bool:
        """Of a codec that calibrates: whether it asks for what the fine-tuned model gives a linear, too."""
        return False

    @property
    def needs_fisher(self) -> bool:
        """Of a codec that calibrates: whether it asks for the Fisher information of a linear's outputs."""
        return False

    @property
    def rows_apart(self) -> bool:
        """Of a codec that calibrates: whether each row is coded from the sums and itself, to a row of each part."""
        return False

    def check_shape(self, rows: int, columns: int, name: str) -> None:
        """Make sure that a matrix of this shape can be coded so; `name` of the tensor is for messages.

        Raises:
            RecipeError: it cannot.
        """

    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes | None:
        """dtype and shape of each part that a matrix of this shape is stored as, before the lossless stage.

        Sizes are the most that they can be where they depend on the data. None: nobody knows before it is encoded.
        storage: whether an entropy coder follows, for which codes are rearranged.
        """
        return None


class Quantizing(Settings):
    """Shared by the codecs that write the packed format.

    bits: per kept weight; 16 keeps weights as bfloat16 (prune only), 1 is sign times scale (grid midrise).
    sparsity: "dense", "n:m", "drawn:n:m" or "unstructured:F". group_size: columns that share a scale, or "row", all.
    grid: "minmax", "symmetric" or "midrise" (numerics/grid.py). range_factor: < 1 clips the grid, > 1 widens its steps.
    step: of a symmetric grid, its steps in root mean squares of the weights that share a scale, whatever their range.
    """

    bits: Bits
    sparsity: str = "dense"
    group_size: GroupSize = "row"
    grid: Literal["minmax", "symmetric", "midrise"] = "minmax"
    range_factor: Annotated[float, Field(gt=0, le=4)] = 1.0
    step: Annotated[float | None, Field(gt=0, le=8, exclude_if=lambda value: value is None)] = None

    @field_validator("sparsity")
    @classmethod
    def _known_pattern(cls, text: str) -> str:
        return str(Sparsity.parse(text))

    @model_validator(mode="after")
    def _a_grid_of_one_kind(self) -> Quantizing:
        if self.bits == 1 and self.grid != "midrise":
            raise ValueError("bits: 1 needs grid: midrise (a sign times a scale)")
        if self.step is not None and (self.grid != "symmetric" or self.bits == 16 or self.range_factor != 1):
            raise ValueError("step needs grid: symmetric, bits other than 16, and no range_factor")
        if self.pattern.kind == "drawn" and (self.bits != 1 or self.group_size != "row" or self.codec != "obs"):
            raise ValueError(f"sparsity: {self.sparsity} needs codec: obs, bits: 1 and group_size: row")
        return self

    @property
    def pattern(self) -> Sparsity:
        """The parsed sparsity."""
        return Sparsity.parse(self.sparsity)

    @override
    def check_shape(self, rows: int, columns: int, name: str) -> None:
        spec_for(self, rows=rows, columns=columns, name=name)

    @override
    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes:
        return largest_shapes(spec_for(self, rows=rows, columns=columns, name=""), storage=storage)


class ObsSettings(Quantizing):
    """Optimal Brain Surgeon on calibration activations (DeltaZip section 4.2; SparseGPT; GPTQ).

    block_size: columns per lazy batch. damp_fraction: added to the Hessian's diagonal, a fraction of its mean.
    selection: how n:m chooses what to prune, "joint" cost of the pruned pair or the published "diagonal" rule.
    activation_order: largest activations first. gain: scales of "least" loss, or "unbiased", nothing lost on average.
    asymmetric: 0..1, how far targets move to make up for the error of the layers before (0 = the published method).
    range_search: range factors to try instead of range_factor; each row keeps the one with the least loss after OBS.
    refine_sweeps: sweeps of coordinate descent after OBS. refit_scales: closed-form scales once the codes are fixed.
    fisher: weigh errors of the output by its Fisher information, so that rows make up for each other's (YAQA).
    """

    codec: Literal["obs"] = "obs"
    block_size: Annotated[int, Field(strict=True, ge=16, le=4096)] = 128
    damp_fraction: Annotated[float, Field(gt=0, le=10)] = 0.01
    selection: Literal["joint", "diagonal"] = "joint"
    activation_order: bool = True
    asymmetric: Annotated[float, Field(ge=0, le=1)] = 1.0
    range_search: Annotated[tuple[Annotated[float, Field(gt=0, le=4)], ...], Field(max_length=8)] = ()
    refine_sweeps: Annotated[int, Field(strict=True, ge=0, le=20)] = 2
    refit_scales: bool = False
    fisher: bool = False
    gain: Literal["least", "unbiased"] = "unbiased"

    @property
    @override
    def needs_teacher(self) -> bool:
        return self.asymmetric > 0 or self.fisher

    @property
    @override
    def needs_fisher(self) -> bool:
        return self.fisher

    @property
    @override
    def rows_apart(self) -> bool:
        return self.pattern.kind not in ("unstructured", "drawn")  # a row's number tells what was drawn for it

    @model_validator(mode="after")
    def _scales_to_refit(self) -> ObsSettings:
        if self.bits == 16 and (self.refit_scales or self.refine_sweeps or self.range_search):
            raise ValueError("bits: 16 has no grid: set refine_sweeps: 0, refit_scales: false and no range_search")
        if self.fisher and (self.bits == 16 or self.pattern.kind == "unstructured"):
            told = "fisher needs a grid, and rows that are solved apart: no bits: 16, no unstructured sparsity"
            raise ValueError(told)
        if self.pattern.kind == "drawn" and (self.range_search or self.refit_scales):
            told = "takes no range_search and no refit_scales, which shorten what is kept"
            raise ValueError(f"sparsity: {self.sparsity} {told}")
        if self.step is not None and self.range_search:
            raise ValueError("step needs no range_search: it says how wide steps are")
        if self.range_search and self.pattern.kind == "unstructured":
            raise ValueError("range_search needs rows that are solved apart; unstructured sparsity ties them together")
        return self


class RtnSettings(Quantizing):
    """Round to nearest, no calibration; sparse patterns keep the largest magnitudes. All-zero rows cost nothing."""

    codec: Literal["rtn"] = "rtn"


class CountedSettings(Settings):
    """Embeddings, rounded in smaller steps for tokens that calibration data has more of; rows that come to 0 are free.

    bits: of a code. step: of a row of mean weight (codecs/counted.py), in root mean squares of the whole delta; a row's
    own range is reached in any case.
    """

    codec: Literal["counted"] = "counted"
    bits: Annotated[Literal[2, 3, 4, 8], BeforeValidator(_as_listed)]
    step: Annotated[float, Field(gt=0, le=16)]

    @override
    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes:
        return largest_shapes(counted_spec(self, rows, columns), storage=storage)


class BitDeltaSettings(Settings):
    """BitDelta: the sign of each weight of the delta, and one scale for the matrix, distilled on calibration data."""

    codec: Literal["bitdelta"] = "bitdelta"

    @override
    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes:
        spec = PackedSpec(rows, columns, 1, Sparsity.parse("dense"), columns, "midrise")
        return largest_shapes(spec, storage=storage)


class LowRankSettings(Settings):
    """The best approximation by a product of two thin matrices, without calibration. rank: columns of the left one."""

    codec: Literal["low-rank"] = "low-rank"
    rank: Annotated[int, Field(strict=True, ge=1)]

    @override
    def check_shape(self, rows: int, columns: int, name: str) -> None:
        if self.rank > (most := min(rows, columns)):
            raise RecipeError(
                f"rank {self.rank} of a matrix of {rows} x {columns}", where=name, way_out=f"choose at most {most}"
            )

    @override
    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes:
        return {"left": ("F16", (rows, self.rank)), "right": ("F16", (self.rank, columns))}


class ExactSettings(Settings):
    """Lossless: restored bit for bit, NaN payloads included."""

    codec: Literal["exact"] = "exact"


class SkipSettings(Settings):
    """Zero bits: the tensor is restored as the base's."""

    codec: Literal["skip"] = "skip"

    @override
    def stored_shapes(self, rows: int, columns: int, *, storage: bool) -> Shapes:
        return {}


def counted_spec(settings: CountedSettings, rows: int, columns: int) -> PackedSpec:
    """The packed format of one tensor: most codes are zero."""
    return PackedSpec(rows, columns, settings.bits, Sparsity.parse("dense"), columns, "symmetric", masked=True)


def spec_for(settings: Quantizing, *, rows: int, columns: int, name: str) -> PackedSpec:
    """The packed format that `settings` mean for one tensor.

    Raises:
        RecipeError: group_size does not divide the columns.
    """
    group = columns if settings.group_size == "row" else settings.group_size
    if columns % group:
        raise RecipeError(
            f"group_size {group} does not divide its {columns} columns",
            where=name,
            way_out="choose a divisor or group_size: row",
        )
    masked = settings.step is not None and settings.bits == 2 and settings.pattern.kind == "dense"  # mostly zeros
    seed = zlib.crc32(name.encode()) if settings.pattern.kind == "drawn" else 0
    return PackedSpec(rows, columns, settings.bits, settings.pattern, group, settings.grid, masked=masked, seed=seed)

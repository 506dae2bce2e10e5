"""What a codec is, and what a recipe can set for each, checked when the recipe is read: before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import override

from deltacompress.codecs.formats.spec import PackedSpec, Shapes, largest_shapes
from deltacompress.errors import RecipeError
from deltacompress.numerics.sparsity import Sparsity

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from deltacompress.codecs.encoded import Encoded, LinearToEncode
    from deltacompress.numerics.hessian import HessianAccumulator
    from deltacompress.reporter import Reporter


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
    sparsity: "dense", "n:m" or "unstructured:F". group_size: columns that share a scale; "row" = all of them.
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
    damp_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
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
        return self.pattern.kind != "unstructured"

    @model_validator(mode="after")
    def _scales_to_refit(self) -> ObsSettings:
        if self.bits == 16 and (self.refit_scales or self.refine_sweeps or self.range_search):
            raise ValueError("bits: 16 has no grid: set refine_sweeps: 0, refit_scales: false and no range_search")
        if self.fisher and (self.bits == 16 or self.pattern.kind == "unstructured"):
            told = "fisher needs a grid, and rows that are solved apart: no bits: 16, no unstructured pattern"
            raise ValueError(told)
        if self.step is not None and self.range_search:
            raise ValueError("step needs no range_search: it says how wide steps are")
        if self.range_search and self.pattern.kind == "unstructured":
            raise ValueError(
                "range_search needs rows that are solved apart; an unstructured pattern ties them together"
            )
        return self


class RtnSettings(Quantizing):
    """Round to nearest, no calibration; sparse patterns keep the largest magnitudes. All-zero rows cost nothing."""

    codec: Literal["rtn"] = "rtn"


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


@dataclass(frozen=True, slots=True)
class Fit:
    """What a codec may look at before it encodes a tensor: the whole model.

    path: of the fine-tuned checkpoint, for messages. model: the fine-tuned one, of transformers, in fp32; to be left as
    it is. modules: name of each tensor that this codec is to encode -> path of the module in the model whose weight it
    is. bases: by the same names, what it is encoded against, f32. settings: what its rule says.
    ids: int64 [samples, tokens], the calibration tokens. seed: of whatever is drawn.
    """

    path: Path
    model: nn.Module
    modules: Mapping[str, str]
    bases: Mapping[str, Tensor]
    settings: Mapping[str, Settings]
    ids: Tensor
    seed: int
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to choose the values of a tensor; registry.CODECS lists them all.

    It has one of two functions. Rows beyond the base's (added tokens) are neither's business: the caller stores them.

    encode: (fine-tuned tensor, its base or None, settings, tensor name for messages) -> Encoded, for a codec that codes
        a tensor by itself. Both are read piece by piece. The base has the leading rows of the tensor, and is as
        Plan.rows gives it.
    encode_group: (linears, statistics, settings) -> Encoded by name, for a codec that calibrates: linears that share
        one input and the same settings are solved together, from the sums over their inputs, which it may use up.
    fit: (what Fit holds) -> a value for each tensor, which `encode` gets as a fifth argument. Called once, before any
        tensor is coded; for a codec that looks at the whole model first. Values are plain data, as JSON knows it, so
        that a run that is resumed has the very same.
    accepts: value -> whether it is one of `fit`'s, asked of what a resumed run reads back; any is, without it.
    """

    settings: type[Settings]
    encode: Callable[..., Encoded] | None = None
    encode_group: Callable[[list[LinearToEncode], HessianAccumulator, Any], dict[str, Encoded]] | None = None
    fit: Callable[[Fit], Mapping[str, Any]] | None = None
    accepts: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if (self.encode is None) == (self.encode_group is None) or (self.fit and not self.encode):
            raise TypeError(f"codec {self.name} needs encode or encode_group, one of them; fit goes with encode")

    @property
    def name(self) -> str:
        """What recipes and manifests call it."""
        return str(self.settings.model_fields["codec"].default)

    @property
    def calibrates(self) -> bool:
        """Whether it chooses by what a tensor receives, layer after layer."""
        return self.encode_group is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether it runs the model on calibration tokens, in which only linears and the head take part for certain."""
        return self.calibrates or self.fit is not None


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
    return PackedSpec(rows, columns, settings.bits, settings.pattern, group, settings.grid, masked=masked)

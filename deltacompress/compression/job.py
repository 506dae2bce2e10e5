"""What a compression is asked to do, as one value that can be kept, compared and sent; and what it achieved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, SkipValidation

from deltacompress.arguments import size_in_bytes
from deltacompress.codecs.recipe import CalibrationSpec, Recipe
from deltacompress.devices import device_numbers
from deltacompress.errors import option


class CompressionJob(BaseModel):
    """Every choice of a compression; `compress` says what each means. `model_dump_json` and `model_validate_json`.

    base, finetuned: directories or ids of the hub. calibration: a file or data set id, or the records themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    finetuned: str
    recipe: Recipe
    out: Path
    calibration: str | tuple[Annotated[Any, SkipValidation], ...] | None = None
    samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None
    lossless: str = "zstd"
    device: str = "auto"
    devices: tuple[int, ...] | None = None
    device_memory: int | None = None
    resume: bool = False
    force: bool = False

    @classmethod
    def of(
        cls,
        base: str | Path,
        finetuned: str | Path,
        *,
        recipe: Recipe | str | Path,
        out: str | Path,
        calibration: str | Path | Sequence[str | Mapping[str, Any]] | None,
        **choices: Any,
    ) -> CompressionJob:
        """The job that the arguments of `compress` and `plan` describe; a recipe's name or file is read."""
        return cls(
            base=str(base),
            finetuned=str(finetuned),
            recipe=recipe if isinstance(recipe, Recipe) else Recipe.load(recipe),
            out=Path(out),
            calibration=_source(calibration),
            devices=device_numbers(choices.pop("devices", None)),
            device_memory=device_memory(choices.pop("device_memory", None)),
            **choices,
        )

    @property
    def calibration_spec(self) -> CalibrationSpec:
        """How much calibration data: the recipe's wish, and what overrides it."""
        return self.recipe.calibration.overridden(samples=self.samples, seq_len=self.seq_len, seed=self.seed)


_LEAST = 2**26  # of bytes: a number without a unit is a slip of the hand


def device_memory(size: str | int | None) -> int | None:
    """Bytes of a size such as "26GB", or of one that is a number already.

    Raises:
        InputError: it is none, or too little.
    """
    if size is None:
        return None
    return size_in_bytes(size, f"{option('device_memory')} {size}", such_as="26GB", least=_LEAST)


def _source(calibration: str | Path | Sequence[str | Mapping[str, Any]] | None) -> str | tuple[Any, ...] | None:
    """What a job holds of the `calibration` that `compress` is given."""
    if isinstance(calibration, str | Path):
        return str(calibration)
    return None if calibration is None else tuple(calibration)


@dataclass(frozen=True, slots=True, repr=False)
class CompressResult:
    """What a compression achieved.

    summary: Delta.summary() of the artifact. kl_on_calibration: KL(fine-tuned || compressed) in nats/token over
    calibration tokens (in-sample: an indication, no evaluation), None where the recipe has no teacher. seconds: wall
    time. peak_memory_bytes: resident memory of the process; peak_device_bytes: of the GPU, None on a CPU. used_again:
    the artifact of an earlier run was verified; the figures are of that.
    """

    out: Path
    summary: dict[str, Any]
    kl_on_calibration: float | None
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None
    backend: str
    used_again: bool = False

    def __repr__(self) -> str:
        """Short: a notebook shows it, and the summary has a row for each tensor."""
        size, ratio = self.summary["artifact_bytes"], self.summary["ratio"]
        return f"<CompressResult {self.out}: {size:,} bytes, ratio {ratio:.2f}, {self.seconds:.0f} s>"

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `compress --json` prints it."""
        shown = {key: value for key, value in self.summary.items() if key != "tensors"}
        return shown | {
            "kl_on_calibration": self.kl_on_calibration,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "backend": self.backend,
        }

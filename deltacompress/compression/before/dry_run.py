"""`compress --dry-run`: everything that `compress` does before its work, and what the work will come to. No byte is
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltacompress.arguments import checked
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.estimates import least_seconds, memory
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import Opened, Prepared, open_job, prepare
from deltacompress.compression.before.sizes import Share, expected_bytes, shares, total
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.made_from import standing
from deltacompress.compression.run_identity import check_same, identity_file, identity_of
from deltacompress.compression.side_files import side_file_bytes
from deltacompress.devices import limited_memory
from deltacompress.reporter import SILENT, Reporter

BASIS = (
    "by rounding 2^18 weights of up to four tensors of each kind onto the same grid and pattern, and coding them; "
    "a solver chooses other codes"
)
MEMORY_BASIS = "a model of the large tensors that are there at once, not measured"
TIME_BASIS = "the products of calibration alone, at the speed of one large product here and now; a run takes longer"


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """What a compression would do. shares: of the tensors; stored_bytes: all of them before the lossless stage, exact
    unless at_most; expected_bytes: of the whole artifact after it, an estimate; memory and time: estimates.

    used_again: `out` holds the artifact already, verified: nothing would be done.
    """

    job: CompressionJob
    shares: tuple[Share, ...]
    finetuned_bytes: int
    side_file_bytes: int
    stored_bytes: int | None
    at_most: bool
    expected_bytes: int | None
    calibration_tokens: int
    device: str
    memory: dict[str, int]
    time: dict[str, float] | None
    used_again: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `compress --dry-run --json` prints it."""
        expected = self.expected_bytes
        return {
            "base": self.job.base,
            "finetuned": self.job.finetuned,
            "out": str(self.job.out),
            "recipe": self.job.recipe.name,
            "scope": self.job.recipe.scope,
            "lossless": self.job.lossless,
            "device": self.device,
            "calibration_tokens": self.calibration_tokens,
            "used_again": self.used_again,
            "finetuned_bytes": self.finetuned_bytes,
            "side_file_bytes": self.side_file_bytes,
            "stored_bytes": self.stored_bytes,
            "stored_bytes_are_at_most": self.at_most,
            "expected_bytes": expected,
            "expected_ratio": None if not expected else self.finetuned_bytes / expected,
            "expected_basis": None if expected is None or self.job.lossless == "none" else BASIS,
            "memory": self.memory | {"basis": MEMORY_BASIS},
            "time": None if self.time is None else self.time | {"basis": TIME_BASIS},
            "tensors": [_row(one) for one in self.shares],
        }


@checked
def plan(
    base: str | Path,
    finetuned: str | Path,
    *,
    recipe: Recipe | str | Path,
    out: str | Path,
    calibration: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    lossless: str = "zstd",
    device: str = "auto",
    devices: str | Sequence[int] | None = None,
    device_memory: str | int | None = None,
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> CompressionPlan:
    """What `compress` would do with the same arguments, without doing it: all of its checks, and its size and needs.

    Raises:
        InputError, IntegrityError: what `compress` would refuse, before any of its work.
    """
    job = CompressionJob.of(
        base,
        finetuned,
        recipe=recipe,
        out=out,
        calibration=calibration,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        lossless=lossless,
        device=device,
        devices=devices,
        device_memory=device_memory,
        resume=resume,
        force=force,
    )
    return plan_job(job, reporter or SILENT)


def plan_job(job: CompressionJob, reporter: Reporter = SILENT, inputs: Inputs | None = None) -> CompressionPlan:
    """`plan` of a job; inputs: as run_job takes them."""
    inputs = inputs or Inputs()
    opened = open_job(job, inputs, reporter)
    base, finetuned = opened.base, opened.finetuned
    if used_again := opened.there and not job.force:
        standing(job, base, finetuned, inputs, reporter)
    prepared = prepare(job, base, finetuned, opened.where, inputs, reporter)
    with closing(prepared.scan) as scan:
        scan.wait()
    known = identity_file(job.out)
    if job.resume and known.is_file():
        check_same(known, identity_of(prepared.plan, prepared.tokens, opened.devices, opened.coder, hashed=True))
    with limited_memory(opened.where, job.device_memory):
        return _measured(job, prepared, opened, used_again=used_again)


def _measured(job: CompressionJob, prepared: Prepared, opened: Opened, *, used_again: bool) -> CompressionPlan:
    finetuned, processes = prepared.plan.finetuned, len(opened.devices)
    found = tuple(shares(prepared.plan, opened.coder))
    side_files = side_file_bytes(finetuned, lossless=opened.coder.codec)
    return CompressionPlan(
        job=job,
        shares=found,
        finetuned_bytes=finetuned.nbytes,
        side_file_bytes=side_files,
        stored_bytes=total(one.stored_bytes for one in found),
        at_most=any(one.at_most for one in found),
        expected_bytes=expected_bytes(found, side_files, len(finetuned.tensors)),
        calibration_tokens=0 if prepared.tokens is None else prepared.tokens.tokens,
        device=", ".join(map(str, opened.devices)),
        memory=memory(prepared, processes),
        time=least_seconds(prepared, processes),
        used_again=used_again,
    )


def _row(one: Share) -> dict[str, Any]:
    bits = None if one.stored_bytes is None or not one.weights else 8 * one.stored_bytes / one.weights
    return asdict(one) | {"bits_per_weight": bits}

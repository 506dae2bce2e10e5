"""Methods of the field that an artifact cannot hold: BitDelta with distilled scales, and low rank at equal bytes.

Both change the linear weights of the decoder layers alone. All the rest, and what the rest costs, is taken from an
artifact of the same pair, the donor. The result is a plain checkpoint with an account of the bytes the method stores.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.outputs import check_free, holds_checkpoint, publish_directory
from deltacompress.artifact.restoration import copy_side_files
from deltacompress.calibration.data import CalibrationTokens, calibration_tokens
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.writer import write_checkpoint, write_file
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.errors import InputError
from deltacompress.evaluation.methods import bitdelta, low_rank
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.files.output import output_errors
from deltacompress.files.regular import read_bytes
from deltacompress.reporter import SILENT, Reporter

ACCOUNT = "account.json"
_MAX_ACCOUNT_BYTES = 16 << 20
Read = Callable[[str], Tensor]


class Account(BaseModel):
    """What a baseline is, of what it was made, and what it would store; account.json beside its weights.

    donor_digest: of the donor's manifest. calibration_sha256: over the token ids, None where the method sees none.
    bytes: of everything, as for an artifact; seconds: of the method itself, without its donor. note: how it went.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: str
    donor: str
    donor_digest: str
    base_sha256: str
    finetuned_sha256: str
    calibration: str | None
    calibration_sha256: str | None
    seed: int
    bytes: Annotated[int, Field(ge=1)]
    ratio: float
    linear_bits_per_weight: float
    seconds: float
    note: str


@dataclass(frozen=True, slots=True)
class _Pair:
    """base, fine-tuned, and the donor, whose `linears` are to be replaced (name -> name in the base)."""

    base: Checkpoint
    finetuned: Checkpoint
    donor: Delta
    linears: Mapping[str, str]

    def read_base(self, name: str) -> Tensor:
        """The base's weight of a linear of the fine-tuned model, f32."""
        return self.base.read(self.linears[name]).float()

    def read_delta(self, name: str) -> Tensor:
        """What fine-tuning changed, f32."""
        return self.finetuned.read(name).float() - self.read_base(name)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A method's result: the weight of each linear (f32), the bytes that each costs, a note, and what it saw."""

    weight: Read
    bytes: Mapping[str, int]
    note: str
    tokens: CalibrationTokens | None = None


def build(
    method: str,
    *,
    base: Path,
    finetuned: Path,
    donor: Path,
    out: Path,
    calibration: str | Path,
    spec: CalibrationSpec,
    device: str = "cpu",
    force: bool = False,
    reporter: Reporter = SILENT,
) -> Account:
    """Compress `finetuned` with a baseline into the directory `out`: a checkpoint and its account.

    donor: artifact of the same pair by the recipe DONORS[method]. calibration, spec: as compress. force: replace
    another baseline that `out` holds.

    Raises:
        InputError: the donor codes no linear weight; CalibrationError, UnsupportedModelError, OutputError: as compress.
    """
    replaces = holds_checkpoint if force else None
    check_free(out, replaces=replaces)
    opened = load_delta(donor)
    checkpoints = Checkpoint.open(base), Checkpoint.open(finetuned)
    opened.check_base(checkpoints[0])
    linears = {
        record.name: record.base_name
        for record in opened.manifest.tensors
        if record.kind == "linear" and record.status == "coded" and record.base_name and len(record.shape) == 2
    }
    if not linears:
        raise InputError(f"codes no linear weight, so {method} has nothing to do", where=donor)
    began = time.monotonic()
    pair = _Pair(*checkpoints, opened, linears)
    encoded = _bitdelta(pair, calibration, spec, device, reporter) if method == "bitdelta" else _low_rank(pair)
    with output_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(pair, encoded.weight, scratch)
        account = _account(method, pair, encoded, spec.seed, time.monotonic() - began)
        write_file(scratch / ACCOUNT, [account.model_dump_json(indent=1).encode() + b"\n"])
        publish_directory(scratch, out, replaces=replaces)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return account


def read_account(path: Path) -> Account:
    """The account in the directory of a baseline.

    Raises:
        InputError: there is none that can be read.
    """
    try:
        return Account.model_validate_json(read_bytes(path / ACCOUNT, at_most=_MAX_ACCOUNT_BYTES))
    except (OSError, ValidationError) as error:
        raise InputError(
            "no account of a baseline in it", where=path, way_out="remove it, and compare makes it again"
        ) from error


def _bitdelta(pair: _Pair, calibration: str | Path, spec: CalibrationSpec, device: str, reporter: Reporter) -> _Encoded:
    tokens = calibration_tokens(pair.finetuned, calibration, spec)
    teacher = load_model(pair.finetuned.path, device=device)
    bases = {name: pair.read_base(name) for name in pair.linears}
    found = bitdelta.distil(teacher, bases, tokens.ids, seed=spec.seed, reporter=reporter)

    def weight(name: str) -> Tensor:
        return pair.read_base(name) + found.scales[name] * bitdelta.sign(pair.read_delta(name))

    sizes = {name: -(-pair.read_base(name).numel() // 8) + 4 for name in pair.linears}  # a bit each, and an fp32 scale
    told = f"error of the logits {found.before:.4g} before and {found.after:.4g} after"
    return _Encoded(weight, sizes, told, tokens)


def _low_rank(pair: _Pair) -> _Encoded:
    shapes = {name: _matrix(pair.donor.tensors[name].shape) for name in pair.linears}
    ranks = {name: low_rank.rank_for(shape, pair.donor.tensors[name].bytes) for name, shape in shapes.items()}

    def weight(name: str) -> Tensor:
        left, right = low_rank.factors(pair.read_delta(name), ranks[name])
        return pair.read_base(name) + left.float() @ right.float()

    sizes = {name: low_rank.factor_bytes(shapes[name], rank) for name, rank in ranks.items()}
    return _Encoded(weight, sizes, f"ranks {min(ranks.values())} to {max(ranks.values())}")


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def _write(pair: _Pair, weight: Read, out: Path) -> None:
    """The whole checkpoint, one tensor at a time."""

    def make(name: str) -> Tensor:
        if name in pair.linears:
            return weight(name).to(DTYPES[pair.finetuned.tensors[name].dtype])
        return pair.donor.restored(name, pair.donor.read_base(name, pair.base))

    write_checkpoint(out, ((pair.finetuned.tensors[name], partial(make, name)) for name in pair.donor.tensors))
    copy_side_files(pair.donor, out)


def _account(method: str, pair: _Pair, encoded: _Encoded, seed: int, seconds: float) -> Account:
    """The donor's size, with the method's bytes in the place of the donor's for every replaced weight."""
    replaced = sum(pair.donor.tensors[name].bytes for name in pair.linears)
    total = pair.donor.artifact_bytes - replaced + sum(encoded.bytes.values())
    weights = sum(
        _matrix(pair.donor.tensors[name].shape)[0] * pair.donor.tensors[name].shape[1] for name in pair.linears
    )
    manifest, tokens = pair.donor.manifest, encoded.tokens
    return Account(
        method=method,
        donor=str(manifest.recipe.get("name", "")),
        donor_digest=manifest.digest,
        base_sha256=manifest.base.content_hash,
        finetuned_sha256=manifest.finetuned.content_hash,
        calibration=None if tokens is None else f"{tokens.source}, {tokens.tokens} tokens, seed {tokens.seed}",
        calibration_sha256=None if tokens is None else tokens.sha256,
        seed=seed,
        bytes=total,
        ratio=manifest.finetuned.bytes / total,
        linear_bits_per_weight=8 * sum(encoded.bytes.values()) / weights,
        seconds=seconds,
        note=encoded.note,
    )

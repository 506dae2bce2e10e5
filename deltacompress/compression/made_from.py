"""Was the artifact that lies there made of what is given now? Then hours of work are used again.

The manifest tells: it holds the recipe, the content hashes of the pair, those of config and tokenizer, and that of the
calibration tokens, which are made again here.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from deltacompress.artifact.delta import Delta, load_delta, verify
from deltacompress.artifact.outputs import holds_artifact
from deltacompress.artifact.records import Manifest
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.run_identity import MAX_IDENTITY_BYTES, identity_file, lossless_of
from deltacompress.compression.workspace import Workspace
from deltacompress.errors import IntegrityError, OutputError, option, switch
from deltacompress.files.regular import read_text
from deltacompress.lossless import Coder
from deltacompress.reporter import Reporter


def difference(
    manifest: Manifest, job: CompressionJob, base: Checkpoint, finetuned: Checkpoint, inputs: Inputs
) -> str | None:
    """What would be another one if the artifact were made again ("recipe", say), None if nothing; else as compress.

    Raises:
        CalibrationError: the calibration data cannot be read.
    """
    if manifest.recipe != job.recipe.model_dump(mode="json"):
        return "recipe"
    if manifest.lossless != job.lossless:
        return "lossless stage"
    for name, record, given in (("base", manifest.base, base), ("fine-tuned model", manifest.finetuned, finetuned)):
        if record.content_hash != given.fingerprint():
            return name
    if {record.file: record.sha256 for record in manifest.files} != finetuned.side_file_hashes():
        return "config or tokenizer"
    if manifest.calibration is None:
        return None
    if job.calibration is None:
        return "calibration data"
    tokens = inputs.tokens(finetuned, job)
    return (
        None if tokens.sha256 == manifest.calibration.sha256 else "calibration data, samples, sequence length or seed"
    )


def standing(job: CompressionJob, base: Checkpoint, finetuned: Checkpoint, inputs: Inputs, reporter: Reporter) -> Delta:
    """The artifact that stands at the job's `out`, every byte checked; it is what would be made now.

    Raises:
        OutputError: it is not, or it is damaged.
    """
    out = job.out
    way_out = f"choose another {option('out')}, or replace it with {switch('force')}"
    try:
        other = difference(load_delta(out).manifest, job, base, finetuned, inputs)
        if other is not None:
            raise OutputError(f"holds an artifact that was made with another {other}", where=out, way_out=way_out)
        delta = verify(out, reporter=reporter)
    except IntegrityError as error:
        raise OutputError(f"holds a damaged artifact ({error})", where=out, way_out=way_out) from error
    reporter.note(f"{out}: holds the artifact of the same input; verified, and used again")
    return delta


def clear_leftover(out: Path, manifest: Manifest, coder: Coder) -> None:
    """Remove the work of the run that published `out`, which was killed before it could do that itself.

    Unfinished work of another run (one that would replace the artifact) stays, and so does what is no run's.
    """
    known = identity_file(out)
    try:
        identity = json.loads(read_text(known, at_most=MAX_IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError):
        return
    sha256 = None if manifest.calibration is None else manifest.calibration.sha256
    made = {"base": manifest.base.content_hash, "fine-tuned": manifest.finetuned.content_hash,
            "recipe": manifest.recipe, "calibration": sha256, "lossless": lossless_of(coder)}  # fmt: skip
    if isinstance(identity, dict) and {name: identity.get(name) for name in made} == made:
        with suppress(OutputError):  # locked by a run that is at work, or with files of somebody else's
            Workspace.open(out, identity, resume=True, replaces=holds_artifact).discard()

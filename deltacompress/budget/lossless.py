"""A size that is enough for every bit: then nothing need be measured, and nothing is lost."""

from __future__ import annotations

from deltacompress.budget.recipe import recipe_of
from deltacompress.budget.request import Request
from deltacompress.checkpoints.pairing import pair
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.before.prepare import kind_of, open_job
from deltacompress.compression.before.sizes import expected_bytes, shares
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.planning import make_plan
from deltacompress.compression.side_files import side_file_bytes
from deltacompress.reporter import SILENT

_LEAST = 0.8
"""Of what is estimated, the size from which on it is tried: a small model's manifest is estimated too high."""


def lossless_job(job: CompressionJob, request: Request, inputs: Inputs) -> tuple[CompressionJob, int] | None:
    """The job with every tensor exact, and its bytes, estimated by samples; None where that is more than was asked, or
    a quality is asked, of which it is never the smallest.

    Raises:
        InputError: as compress.
    """
    if request.kl is not None:
        return None
    told = "Every bit is restored: the size that was asked is enough for that."
    recipe = recipe_of("budget without loss", told, [], CalibrationSpec())  # whatever the size: a run may be resumed
    unused = {"calibration": None, "samples": None, "seq_len": None, "seed": None}
    exact = job.model_copy(update={"recipe": recipe, "devices": job.devices and job.devices[:1], **unused})
    opened = open_job(exact, inputs, SILENT)
    plan = make_plan(pair(opened.base, opened.finetuned), recipe, kind_of(None))
    side_files = side_file_bytes(opened.finetuned, lossless=opened.coder.codec)
    nbytes = expected_bytes(shares(plan, opened.coder), side_files, len(plan.tensors))
    assert nbytes is not None  # exact tensors can be sampled
    asked = request.bytes(opened.finetuned.nbytes)
    return (exact, nbytes) if asked is not None and asked >= _LEAST * nbytes else None

"""Was the artifact that lies there made of what is given now? Then hours of work are used again.

The manifest tells: it holds the recipe, the content hashes of the pair, and the hash of the calibration tokens, which
are made again here.
"""

from __future__ import annotations

from pathlib import Path

from deltacompress.calibrate.data import calibration_tokens
from deltacompress.checkpoint import Checkpoint
from deltacompress.manifest import Manifest
from deltacompress.recipe import Recipe


def difference(
    manifest: Manifest,
    *,
    base: Checkpoint,
    finetuned: Checkpoint,
    recipe: Recipe,
    calibration: str | Path | None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    lossless: str = "zstd",
) -> str | None:
    """What would be another one if the artifact were made again ("recipe", say), None if nothing; else as compress.

    Raises:
        CalibrationError: the calibration data cannot be read.
    """
    if manifest.recipe != recipe.model_dump(mode="json"):
        return "recipe"
    if manifest.lossless != lossless:
        return "lossless stage"
    for name, record, given in (("base", manifest.base, base), ("fine-tuned model", manifest.finetuned, finetuned)):
        if record.content_hash != given.fingerprint():
            return name
    if manifest.calibration is None:
        return None
    if calibration is None:
        return "calibration data"
    spec = recipe.calibration.overridden(samples=samples, seq_len=seq_len, seed=seed)
    tokens = calibration_tokens(finetuned, calibration, spec)
    return (
        None if tokens.sha256 == manifest.calibration.sha256 else "calibration data, samples, sequence length or seed"
    )

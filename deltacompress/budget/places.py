"""The names beside OUT that a budget writes to, looked at and locked before any work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltacompress.artifact.outputs import check_free, holds_artifact
from deltacompress.budget.measuring.kept import check_kept, kept_path
from deltacompress.budget.measuring.progress import check_progress, progress_path
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.partial import check_partial, lock_place
from deltacompress.compression.run_identity import identity_file
from deltacompress.errors import OutputError, option, switch
from deltacompress.files.output import make_directory, output_errors, remove_empty
from deltacompress.files.regular import stat_regular


def attempt_path(out: Path) -> Path:
    """Where an artifact lies until it is known to be what was asked."""
    return out.with_name(f"{out.name}.attempt")


def recipe_path(out: Path) -> Path:
    """Where the recipe of a budget lies."""
    return out.with_name(f"{out.name}.recipe.yaml")


def check_places(job: CompressionJob) -> None:
    """Nothing is replaced that was not made by a budget, or, unasked, that may have been edited.

    Raises:
        OutputError: as check_free; a recipe is there.
    """
    if not job.force and holds_artifact(job.out):
        way_out = f"choose another {option('out')}, or make it anew with {switch('force')}"
        raise OutputError("holds a finished artifact, which is not used again", where=job.out, way_out=way_out)
    check_free(job.out, replaces=holds_artifact if job.force else None)
    check_free(attempt_path(job.out), replaces=holds_artifact)
    check_partial(identity_file(attempt_path(job.out)).parent)
    check_progress(progress_path(job.out))
    kept = kept_path(job.out)
    if not job.resume:
        check_kept(kept)
    elif os.path.lexists(kept):  # it is read, and damage told
        with output_errors(kept, "name"):
            stat_regular(kept)
    recipe = recipe_path(job.out)
    with output_errors(recipe, "name"):
        if os.path.lexists(recipe):
            stat_regular(recipe)
            if not (job.force or job.resume):  # a resumed run may have written it
                raise OutputError(
                    "exists already", where=recipe, way_out=f"{switch('force')} replaces it, or choose another name"
                )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """OUT to this run alone, by the lock of any compression into it: that of OUT.partial, where it writes nothing.

    Raises:
        OutputError: another run has it; nothing can be made there.
    """
    place = identity_file(out).parent
    made = make_directory(place)
    try:
        lock = lock_place(place)
    except OutputError as error:
        if error.__cause__ is not None:  # else another run has it, and what leads to it
            remove_empty(made)
        raise
    try:
        yield
    finally:
        remove_empty([*made, place])  # a killed run's too; what an interrupted compression has left stays
        os.close(lock)

"""The artifacts that `bench pairs` measures, one for each task and recipe: looked at before any work, then made.

Each compression is a `deltacompress compress` of its own process, so that its peak memory is its own, not that of a
scorer or of the recipe before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.outputs import check_free, check_outside, holds_artifact
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.inputs import Inputs
from deltacompress.compression.job import CompressionJob
from deltacompress.compression.made_from import standing
from deltacompress.errors import InputError, OutputError, option
from deltacompress.files.places import MANIFEST
from deltacompress.reporter import Reporter


@dataclass(frozen=True, slots=True)
class PairJob:
    """One compression: where its pair and its calibration data are, and where the artifact goes."""

    base: Path
    finetuned: Path
    recipe: str
    calibration: Path
    out: Path
    anew: bool = False
    """Whether an artifact of other input is to be replaced."""

    @property
    def method(self) -> str:
        """The recipe's short name."""
        return Path(self.recipe).stem

    @property
    def partial(self) -> Path:
        """Where an unfinished compression waits."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def finished(self) -> bool:
        """Whether the artifact is there."""
        return not self.anew and (self.out / MANIFEST).is_file()


def plan(
    models: Path,
    data: Path,
    tasks: list[str],
    recipes: list[str],
    out: Path,
    *,
    seed: int | None,
    force: bool,
    reporter: Reporter,
) -> list[PairJob]:
    """The jobs of all tasks, in their order; an artifact that is there already is checked to the last byte.

    force: an artifact of other input is to be replaced.

    Raises:
        InputError: a task or recipe is given twice, no such recipe; or as Checkpoint.open, of the models.
        OutputError: an artifact of other input, a damaged one, or something else lies where one would go, or that would
            be in what is read.
    """
    if not recipes:
        raise InputError("names none", where=option("recipes"), way_out="give one or more")
    for given, names in (("tasks", tasks), ("recipes", [Path(recipe).stem for recipe in recipes])):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise InputError(f"{twice[0]} is given twice, but its artifact can be there only once", where=option(given))
    loaded = {recipe: Recipe.load(recipe) for recipe in recipes}
    if out.exists() and not out.is_dir():
        raise OutputError("is no directory", where=out, way_out=f"choose another {option('out')}")
    base, inputs = Checkpoint.open(models / "base"), Inputs()
    jobs = []
    for task in tasks:
        finetuned = Checkpoint.open(models / task)
        for recipe in recipes:
            job = PairJob(
                models / "base", models / task, recipe, data / task / "train.jsonl", out / f"{task}.{Path(recipe).stem}"
            )
            check_outside(job.out, models, data)
            if check_free(job.out, replaces=holds_artifact):
                try:
                    standing(_compression(job, loaded[recipe], seed), base, finetuned, inputs, reporter)
                except OutputError:
                    if not force:
                        raise
                    job = replace(job, anew=True)
            jobs.append(job)
    return jobs


def _compression(job: PairJob, recipe: Recipe, seed: int | None) -> CompressionJob:
    return CompressionJob(
        base=str(job.base),
        finetuned=str(job.finetuned),
        recipe=recipe,
        out=job.out,
        calibration=str(job.calibration),
        seed=seed,
    )


def costs(job: PairJob, *, device: str, seed: int | None, resume: bool) -> dict[str, Any]:
    """Make the artifact, unless it is there, and say what it took: None if an earlier run did any of it.

    Raises:
        InputError: compressing failed.
    """
    begun = resume and any(job.partial.glob("step-*"))
    told = None if job.finished else _compress(job, device=device, seed=seed, resume=resume)
    whole = None if begun else told
    delta = load_delta(job.out)
    size, calibration = delta.summary(), delta.manifest.calibration
    return {
        "ratio": size["ratio"],
        "linear_bits_per_weight": size["linear_bits_per_weight"],
        "seconds": whole and whole["seconds"],
        "peak_memory_gb": whole and whole["peak_memory_bytes"] / 1e9,
        "seed": calibration and calibration.seed,
        "backend": told and told["backend"],  # seed and machine move the figures of coarse recipes
    }


def _compress(job: PairJob, *, device: str, seed: int | None, resume: bool) -> dict[str, Any]:
    """What `deltacompress compress --json` prints.

    Raises:
        InputError: it failed; the message is its own.
    """
    command = [
        *(sys.executable, "-m", "deltacompress", "--json", "--quiet", "compress", str(job.base), str(job.finetuned)),
        *("--recipe", job.recipe, "--calibration", str(job.calibration), "--out", str(job.out), "--device", device),
        *(("--seed", str(seed)) if seed is not None else ()),
        *(("--resume",) if resume else ()),
        *(("--force",) if job.anew else ()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed(done).retold(InputError, within=f"compressing {job.finetuned} with {job.recipe}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _failed(done: subprocess.CompletedProcess[str]) -> InputError:
    """The error that --json gave last; without one, the process was ended from outside."""
    *_, last = done.stderr.strip().splitlines() or [""]
    try:
        told = json.loads(last)["error"]
    except (ValueError, TypeError, LookupError):
        return InputError(last or f"it ended with code {done.returncode}")
    return InputError(told["what"], where=told["where"], way_out=told["way_out"])

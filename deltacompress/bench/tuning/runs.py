"""The models of one task: trained, chosen by what is held out, kept in a folder, and made once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.tuning.adapters import Trained
from deltacompress.bench.tuning.methods import FAMILIES, FULL, Method
from deltacompress.bench.tuning.sharing import Kept
from deltacompress.bench.tuning.training import Examples, Plan, mean_loss, train
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.errors import NumericsError
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.files.output import output_errors
from deltacompress.models.quiet import quiet
from deltacompress.reporter import Reporter


@dataclass(frozen=True, slots=True)
class Made:
    """A model, or what stands for one. rate: the learning rate; held_out: loss there, nats/token; parameters: that were
    trained; steps: how they ran. None: not trained.
    """

    path: Path
    rate: float | None = None
    held_out: float | None = None
    parameters: int | None = None
    steps: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A training."""

    method: Method
    seed: int
    rate: float

    @property
    def key(self) -> str:
        """What it is kept as."""
        return f"{self.method.label}.{self.seed}.{self.rate:g}"


class Runs:
    """The models of one task from one base; what was trained before, of the same input, is not trained again.

    The rate of a method is chosen with the first seed, and taken for the others.
    """

    def __init__(
        self, base: Checkpoint, examples: Examples, plan: Plan, folder: Path, device: str, identity: Mapping[str, Any]
    ) -> None:
        """folder: of models and losses of this task; identity: everything that decides on them but method and seed."""
        self._base, self._examples, self._plan, self._device = base, examples, plan, device
        self._trained = Kept(folder, identity)
        self._models = self._trained.path.with_suffix("")
        self._rates: dict[str, float] = {}

    def missing(self, methods: Sequence[Method], seeds: Sequence[int]) -> list[Job]:
        """What is to be trained, as far as is known: a method's other seeds wait for its rate.

        Raises:
            NumericsError: a method diverges at every rate.
        """
        found = list[Job]()
        for method in (one for one in methods if one.kind != "delta"):
            untried = self._untried(method, seeds[0])
            rate = None if untried else self._rate(method, seeds[0])
            known = [] if rate is None else [Job(method, seed, rate) for seed in seeds]
            found += [*untried, *(one for one in known if not self._there(one))]
        return found

    def train(self, job: Job, reporter: Reporter) -> Path:
        """The model of a job, trained now or before."""
        out = self._models / job.key
        if self._there(job):
            return out
        reporter.step(f"training {job.key}")
        method = job.method
        with _whole(self._partial(job.key), out) as partial, torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(job.seed)
            model: Any = load_model(self._base, device=self._device)
            model.requires_grad_(True)
            dtype = DTYPES[next(iter(self._base.tensors.values())).dtype]
            rows = self._examples.train
            adapter = None if method.label == FULL else Trained(model, method, rows)
            trained = model if adapter is None else adapter.model
            steps = train(trained, rows, self._plan, job.rate, job.seed)
            held_out = mean_loss(trained, self._examples.held_out)
            parameters = sum(one.numel() for one in trained.parameters() if one.requires_grad)
            if adapter is None:
                with quiet():
                    model.to("cpu", dtype).save_pretrained(partial)
                for file in self._base.side_files():
                    if not (partial / file.name).exists():
                        shutil.copyfile(file, partial / file.name)
            else:
                adapter.save(partial, dtype)
        self._trained.add(job.key, [held_out if math.isfinite(held_out) else None, parameters, steps])
        return out

    def made(self, method: Method, seed: int, first: int, calibration: Path, reporter: Reporter) -> Made:
        """A method's model of a seed; first: the seed that rates are chosen with; calibration: data of deltas.

        Raises:
            NumericsError: it diverges at every rate. OutputError: the folder cannot be written.
        """
        if method.kind == "delta":
            return Made(self._delta(method, seed, first, calibration, reporter))
        for one in self._untried(method, first):
            self.train(one, reporter)
        job = Job(method, seed, self._rate(method, first))
        return Made(self.train(job, reporter), job.rate, *self._trained[job.key])

    def uncompressed(self, methods: Sequence[Method], seeds: Sequence[int]) -> list[tuple[Method, int]]:
        """Deltas that are not made yet, by method and seed; the full fine-tunes are all there."""
        deltas = [one for one in methods if one.kind == "delta"]
        return [(one, seed) for one in deltas for seed in seeds if not self._packed(one, seed, seeds[0]).is_dir()]

    def unfinished(self) -> dict[str, Path]:
        """Folders of models that are not whole, by the key of the job: somebody is at it, or was killed."""
        begin = self._partial("")
        return {one.name.removeprefix(begin.name): one for one in begin.parent.glob(f"{begin.name}*")}

    def _partial(self, key: str) -> Path:
        return self._models / f".training.{key}"

    def _there(self, job: Job) -> bool:
        return job.key in self._trained and (self._models / job.key).is_dir()

    def _untried(self, method: Method, first: int) -> list[Job]:
        if method.label in self._rates:
            return []
        return [one for rate in method.rates if (one := Job(method, first, rate)).key not in self._trained]

    def _rate(self, method: Method, first: int) -> float:
        """The rate with the least loss on what is held out, all being tried; the models of the others are removed."""
        if method.label not in self._rates:
            found = {}
            for rate in method.rates:
                held_out = self._trained[Job(method, first, rate).key][0]
                found[rate] = math.inf if held_out is None else held_out
            best = min(found, key=lambda one: found[one])
            if found[best] == math.inf:
                raise NumericsError(f"{method.label} diverges at every learning rate", where=self._base.path)
            for rate in set(found) - {best}:
                shutil.rmtree(self._models / Job(method, first, rate).key, ignore_errors=True)
            self._rates[method.label] = best
        return self._rates[method.label]

    def _delta(self, method: Method, seed: int, first: int, calibration: Path, reporter: Reporter) -> Path:
        """The full fine-tune of that seed, compressed; calibrated on the training data."""
        assert method.recipe is not None
        path = self.made(FAMILIES[FULL][0], seed, first, calibration, reporter).path
        out = self._packed(method, seed, first)
        if not out.is_dir():
            reporter.step(f"compressing {out.name}")
            options: dict[str, Any] = {"calibration": calibration, "device": self._device, "resume": True}
            recipe = Recipe.load(method.recipe)
            there = self._examples.tokens // recipe.calibration.seq_len
            options["samples"] = max(1, min(recipe.calibration.samples, there))
            compress(self._base.path, path, recipe=recipe, out=out, **options)
        return out

    def _packed(self, method: Method, seed: int, first: int) -> Path:
        full = FAMILIES[FULL][0]
        return self._models / f"{method.label}.{Job(full, seed, self._rate(full, first)).key}"


@contextmanager
def _whole(partial: Path, out: Path) -> Iterator[Path]:
    """A new folder, `partial`, that takes the name `out` once it is whole."""
    with output_errors(out.parent):
        for one in (partial, out):
            shutil.rmtree(one, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

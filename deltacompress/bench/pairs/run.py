"""What recipes keep and cost on real pairs: compress, restore, and score on held-out samples of the same task.

Expects MODELS/base, MODELS/<task> (checkpoints) and DATA/<task>/{train,validation}.jsonl: calibration comes from train,
scores from validation, never the other way round. Every row is measured against the fine-tuned model on the same
samples: exact McNemar test on the answers, KL on the completions.

Scores are taken in fp32, on which machines agree, or under bf16 autocast. To compare with figures taken elsewhere, use
the arithmetic that gives the fine-tuned model, which no codec touched, the figures it has there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from deltacompress.artifact.restoration import restore
from deltacompress.bench.figures import accuracy, flips
from deltacompress.bench.pairs.artifacts import PairJob, costs, plan
from deltacompress.bench.pairs.tasks import tasks_of
from deltacompress.demo.score import Answers, divergence, encode, read_task, score_model
from deltacompress.devices import NAMES, gpu_name, has_gpu
from deltacompress.errors import InputError, Interrupted, option, switch
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.evaluation.scoring.statistics import mcnemar
from deltacompress.evaluation.tasks.records import Sample
from deltacompress.models.tokenizers import load_tokenizer
from deltacompress.reporter import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Precision = Literal["fp32", "bf16-autocast"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""In what a forward runs; under autocast the weights stay fp32, and products are taken in bf16."""


@dataclass(frozen=True, slots=True)
class PairsBench:
    """One row per task, method and precision; `scored_on` names the device of the scores."""

    scored_on: str
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"threads": torch.get_num_threads(), "scored_on": self.scored_on, "rows": list(self.rows)}


def run(
    *,
    models: Path,
    data: Path,
    recipes: list[str],
    out: Path,
    tasks: list[str] | None = None,
    limit: int = 1000,
    seed: int | None = None,
    device: str = "auto",
    score_device: str = "cpu",
    precisions: Sequence[str] = ("fp32",),
    resume: bool = False,
    force: bool = False,
    reporter: Reporter | None = None,
) -> PairsBench:
    """Measure `recipes` on every task that has a checkpoint and data; artifacts stay in `out`.

    Args:
        models, data, tasks: see the module; without tasks, all that have a checkpoint and data.
        limit: the first validation samples.
        seed: of the calibration samples; by default the recipe's, normally 0.
        device: where models are compressed: "auto", "cpu" or "cuda". score_device: where they are scored, "cpu" or
            "cuda". precisions: of PRECISIONS; each artifact is scored in each.
        resume: go on with compressions that were interrupted in `out`. force: replace artifacts of other input there;
            those of the same are measured again, and the time they took is not known.

    Raises:
        InputError: no task has both a checkpoint and data, no such precision or device, a compression failed, or as
            artifacts.plan and score.read_task; all but what compressing finds is found before the work.
        Interrupted: stopped by Ctrl-C; resume goes on.
    """
    reporter = reporter or SILENT
    found = tasks_of(models, data, tasks or [])
    _check_options(precisions, device, score_device)
    jobs = plan(models, data, found, recipes, out, seed=seed, force=force, reporter=reporter)
    tests = {task: _Test.read(models / task, data / task / "validation.jsonl", limit) for task in found}
    rows: list[dict[str, Any]] = []
    try:
        spent = []
        for job in jobs:  # all of them before the scores: what is wrong with the last shall show soon
            reporter.phase(f"{job.out.name}: {'reading what is there' if job.finished else 'compressing'}", 1)
            spent.append(costs(job, device=device, seed=seed, resume=resume))
            reporter.step(job.method)
        for task, test in tests.items():
            made = [(job, cost) for job, cost in zip(jobs, spent, strict=True) if job.finetuned == test.finetuned]
            rows += _rows(task, test, made, score_device, precisions, reporter)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            "interrupted", way_out=f"what is finished stays in {out}: run again with {switch('resume')}"
        ) from stop
    # the fine-tuned rows come first in each task, so the table's columns are those of a measured row
    columns = {key: None for row in rows for key in row}
    scored_on = gpu_name(torch.device(score_device)) or "CPU"
    return PairsBench(scored_on, tuple({key: row.get(key) for key in columns} for row in rows))


@dataclass(frozen=True, slots=True)
class _Test:
    """What one task asks, in the words of its fine-tuned model's tokenizer."""

    finetuned: Path
    tokenizer: PreTrainedTokenizerBase
    samples: tuple[Sample, ...]

    @classmethod
    def read(cls, finetuned: Path, file: Path, limit: int) -> _Test:
        """Raises InputError as read_task, or if a sample does not fit into the model."""
        tokenizer, samples = load_tokenizer(finetuned), read_task(file, limit)
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise InputError(
                "its tokenizer has no bos or no eos token, which every sample is given here", where=finetuned
            )
        for sample in samples:
            for answer in sample.choices or (sample.completion,):
                try:
                    encode(tokenizer, sample.prompt, answer)
                except InputError as error:
                    raise error.retold(InputError, within=file) from error
        return cls(finetuned, tokenizer, samples)


def _rows(
    task: str,
    test: _Test,
    jobs: list[tuple[PairJob, dict[str, Any]]],
    device: str,
    precisions: Sequence[str],
    reporter: Reporter,
) -> Iterator[dict[str, Any]]:
    """The rows of one task: the fine-tuned model's, then those of what each job's artifact restores."""
    tokenizer, samples = test.tokenizer, test.samples
    finetuned = load_model(test.finetuned, device=device)
    references: dict[str, Answers] = {}
    for precision in precisions:
        reporter.phase(f"{task}: scoring the fine-tuned model, {precision}", 1)
        with arithmetic(precision, device):
            references[precision] = score_model(finetuned, tokenizer, samples)
        reporter.step(precision)
        figures = _figures(references[precision], references[precision])
        yield {"task": task, "method": "fine-tuned", "precision": precision, **figures}
    for job, spent in jobs:
        with TemporaryDirectory(prefix=f".{job.out.name}.", dir=job.out.parent) as folder:
            model = load_model(restore(job.out, base=job.base, out=Path(folder) / "restored"), device=device)
        for precision, reference in references.items():
            reporter.phase(f"{task}: scoring {job.method}, {precision}", 1)
            with arithmetic(precision, device):
                answers = score_model(model, tokenizer, samples)
            # bf16 logits would add their own rounding to it, which is as large as a good delta's divergence
            kl = divergence(finetuned, model, tokenizer, samples) if precision == "fp32" else None
            reporter.step(precision)
            row = {"task": task, "method": job.method, "precision": precision, **_figures(answers, reference)}
            reporter.note(f"{task} {job.method}, {precision}: {row['accuracy']:.1f} % ({row['difference']:+.1f})")
            yield row | {"excess_loss": answers.score.loss - reference.score.loss, "kl": kl} | spent


def arithmetic(precision: str, device: str) -> torch.autocast:
    """What forwards on `device` are to run in, one of PRECISIONS: nothing changes in fp32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16-autocast")


def _check_options(precisions: Sequence[str], device: str, score_device: str) -> None:
    if not precisions or len(set(precisions)) < len(precisions) or not set(precisions) <= set(PRECISIONS):
        told = ",".join(precisions) or "names none"
        raise InputError(
            told, where=option("precisions"), way_out=f"give one or more of {', '.join(PRECISIONS)}, each once"
        )
    for name, given, known in (("device", device, NAMES), ("score_device", score_device, NAMES[1:])):
        if given not in known:
            raise InputError(f"give one of {', '.join(known)}", where=f"{option(name)} {given}")
        if given == "cuda" and not has_gpu():
            raise InputError(
                "PyTorch sees no GPU here", where=f"{option(name)} cuda", way_out=f"use {option(name)} cpu"
            )


def _figures(answers: Answers, reference: Answers) -> dict[str, Any]:
    """What the table says of a model's answers, against the fine-tuned model's to the same samples.

    Accuracy in percent with its standard error, the difference in points, the p-value of that difference, and the loss.
    """
    own = accuracy(sum(answers.right), len(answers.right))
    before = accuracy(sum(reference.right), len(reference.right))
    return own | {
        "difference": own["accuracy"] - before["accuracy"],
        "mcnemar_p": mcnemar(*flips(answers.right, reference.right)),
        "loss": answers.score.loss,
    }

"""The main job of this room, top to bottom: subjects answer tasks, are compared, and a report is written.

    tasks and subjects -> overlap check -> lm-eval over panels (the fine-tuned model; base and deltas, decoupled, in
    shared batches; other checkpoints one by one) -> fidelity -> paired statistics -> verdicts -> report

Answers are kept in OUT/answers while it runs: run it again after an interruption and it goes on there. A finished
report of the same input is used again, one of other input stays unless it is to be replaced (files/finished.py).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deltacompress import __version__
from deltacompress.arguments import Amount, Count, Share, Whole, checked
from deltacompress.errors import InputError, option, spelled, switch
from deltacompress.evaluation import assemble, fidelity, overlap
from deltacompress.evaluation.checkpoints import CheckpointScorer
from deltacompress.evaluation.decoupled import DecoupledScorer
from deltacompress.evaluation.encoding import Encoder
from deltacompress.evaluation.fidelity import FidelityResult
from deltacompress.evaluation.gate import Gate
from deltacompress.evaluation.harness import TaskRun, run_tasks
from deltacompress.evaluation.html import write_html
from deltacompress.evaluation.inputs import inputs_of
from deltacompress.evaluation.lm_eval_version import require_lm_eval
from deltacompress.evaluation.markdown import write_markdown
from deltacompress.evaluation.panel import Panel
from deltacompress.evaluation.report import REPORT, OverlapRecord, Report, Settings, read_report
from deltacompress.evaluation.scorer import Scorer
from deltacompress.evaluation.store import AnswerStore, AnswerStores
from deltacompress.evaluation.subjects import Subject, open_subjects
from deltacompress.evaluation.tasks import LocalTask, Task, load_tasks
from deltacompress.files.finished import new_output
from deltacompress.models.config import notes, other_way_out
from deltacompress.models.load import WAY_OUT
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.numerics import settle

ANSWERS = "answers"
FILES = (REPORT, "report.md", "report.html", "samples/*.jsonl")
"""Names of all files of an evaluation, the one that says that it is finished first."""


@checked
def evaluate(
    artifacts: str | Path | Mapping[str, str | Path],
    *,
    base: str | Path,
    tasks: Sequence[str],
    out: str | Path,
    finetuned: str | Path | None = None,
    others: Mapping[str, str | Path] | None = None,
    stored_as: Mapping[str, str | Path] | None = None,
    with_base: bool = False,
    task_dir: str | Path | None = None,
    few_shot: Whole | None = None,
    limit: Count | None = None,
    seed: Whole = 0,
    batch_size: Count = 64,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str = "auto",
    calibration: str | Path | None = None,
    allow_overlap: bool = False,
    policy: str | Path | None = "default",
    margin: Amount = 0.02,
    confidence: Share = 0.95,
    compress_seconds: Mapping[str, float] | None = None,
    force: bool = False,
    reporter: Reporter | None = None,
) -> Report:
    """Measure artifacts (and whatever they are compared with) on tasks; writes out/report.json, .md and .html.

    Args:
        artifacts: one artifact directory, or label -> directory for several.
        base: checkpoint directory of their base.
        tasks: names; see tasks.load_tasks. task_dir, few_shot, limit: as there.
        out: directory of the report; OUT/samples/ gets what each model answered, a JSON line per sample.
        finetuned: the reference of all comparisons; the model that the artifacts were made from.
        others: label -> other checkpoints, run as plain transformers models. stored_as: label of one of them -> the
            artifact that it was restored from, or the baseline that it is: its size is reported. with_base: also
            measure the base.
        seed: of few-shot examples and bootstraps. batch_size: most rows of a forward.
        device, dtype, backend: as Runtime.from_base.
        calibration: the file that the artifacts were calibrated on, to compare its texts with the samples.
        allow_overlap: evaluate even if samples were seen in calibration; it is recorded.
        policy: the gate whose verdict the report begins with; None for none.
        margin: of non-inferiority, in units of the metric. confidence: of every interval.
        force: measure anew what `out` holds already, and replace it once that is done; without it a finished report of
            the same input is read and returned.

    Raises:
        InputError, IntegrityError, PairError: as load_tasks, open_subjects, overlap.refuse, Gate.check_tasks and
            run_tasks; lm-eval is not installed.
        InputError: a dtype that the runtime does not serve in. BackendError: no such device here.
        OutputError: `out` cannot be written, or holds a finished report of other input.
    """
    reporter = reporter or SILENT
    lm_eval_version = require_lm_eval()
    where, kind = settle(device, dtype)
    device, dtype = str(where), str(kind).removeprefix("torch.")
    gate = None if policy is None else Gate.load(policy)
    target = Path(out)
    chosen = load_tasks(
        list(tasks), task_dir=None if task_dir is None else Path(task_dir), few_shot=few_shot, limit=limit
    )
    opened, subjects, encoder = open_subjects(
        _labelled(artifacts),
        base=Path(base),
        finetuned=None if finetuned is None else Path(finetuned),
        others={label: Path(path) for label, path in (others or {}).items()},
        stored_as={label: Path(path) for label, path in (stored_as or {}).items()},
        with_base=with_base,
    )
    with other_way_out(WAY_OUT):
        for subject in subjects:
            for note in () if subject.checkpoint is None else notes(subject.checkpoint.config, subject.checkpoint.path):
                reporter.note(note)
    overlaps = _overlaps(chosen, subjects, None if calibration is None else Path(calibration), encoder, allow_overlap)
    if gate is not None and (why := _no_verdict(gate, subjects)):
        reporter.note(f"gate {gate.policy.name} gives no verdict: {why}")
        gate = None
    if gate is not None:
        gate.check_tasks([task.name for task in chosen])
    options = {"device": device, "dtype": dtype, "batch_size": batch_size}
    tools = _tools(lm_eval_version)
    asked = options | {"limit": limit, "seed": seed, "confidence": confidence, "margin": margin, "backend": backend}
    inputs = inputs_of(opened, subjects, chosen, overlaps, gate, asked, tools)
    runs: dict[str, dict[str, TaskRun]] = {}
    found: dict[str, dict[str, FidelityResult]] = {}
    seconds: dict[str, float] = {}
    with new_output(target, FILES, inputs, force=force) as output, AnswerStores(target / ANSWERS) as stores:
        if output is None:
            again = f"used again ({switch('force')}: measure anew)"
            reporter.note(f"{target}: a finished report of the same input, {again}")
            return read_report(target)
        reference: Scorer | None = None
        drafts: AnswerStore | None = None
        described = "plain checkpoints"
        for group in _groups(subjects):
            scorer, told = _scorer(group, Path(base), options, backend)
            described = told or described
            panel = Panel(scorer, {}, {}, reporter, encoder.eos, drafts)
            for subject in group:
                plain = None if subject.role in ("delta", "base") else "plain"
                variant = panel.variants[subject.label] = subject.label if subject.role == "delta" else None
                ends = sorted({encoder.eos, *scorer.ends(variant)})
                identity = {"weights": subject.identity, "runs": plain or told, "ends": ends, **options, **tools}
                panel.stores[subject.label] = stores.open(identity)
            if resumed := sum(store.resumed for store in panel.stores.values()):
                reporter.note(f"{', '.join(panel.variants)}: {resumed} answers of an interrupted run are used again")
            for subject in group:
                mine = panel.answerable(subject.label, chosen, encoder)
                runs[subject.label] = run_tasks(panel, subject.label, encoder, mine, limit=limit, seed=seed)
            if group[0].role == "finetuned":
                reference, drafts = scorer, panel.stores[group[0].label]
            elif reference is not None:
                _fidelity(panel, reference, subjects[0], encoder, chosen, runs, found, confidence, seed, reporter)
            seconds |= dict.fromkeys(panel.variants, panel.seconds)
        settings = Settings(
            limit=limit,
            seed=seed,
            batch_size=batch_size,
            confidence=confidence,
            margin=margin,
            dtype=dtype,
            device=device,
            runtime=described,
            threads=torch.get_num_threads(),
        )
        report = Report(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            base=Path(base).name,
            base_sha256=opened.fingerprint(),
            reference=subjects[0].label if subjects[0].role == "finetuned" else None,
            settings=settings,
            subjects=tuple(one.record(seconds[one.label], (compress_seconds or {}).get(one.label)) for one in subjects),
            tasks=assemble.task_infos(chosen, runs),
            scores=assemble.scores(runs, found, subjects, settings),
            agreement=assemble.agreement(runs),
            overlap=overlaps,
            disagreements=assemble.disagreements(runs, subjects),
            tools=tools,
        )
        if gate is not None:
            report = report.model_copy(update={"verdicts": gate.check(report).verdicts})
        assemble.write_samples(output.ready / "samples", runs)
        report.write(output.ready / REPORT)
        write_markdown(report, output.ready / "report.md")
        write_html(report, output.ready / "report.html")
        output.finish()
        stores.remove()
    return report


def _no_verdict(gate: Gate, subjects: Sequence[Subject]) -> str | None:
    """Why a gate cannot judge these subjects, if it cannot."""
    if all(one.role != "delta" for one in subjects):
        return "no artifact is evaluated"
    if gate.compares and subjects[0].role != "finetuned":
        how = spelled("--against finetuned=PATH", "finetuned=PATH")
        return f"it compares with the fine-tuned model; evaluate with {how}"
    return None


def _labelled(artifacts: str | Path | Mapping[str, str | Path]) -> dict[str, Path]:
    if isinstance(artifacts, str | Path):
        return {Path(artifacts).resolve().name: Path(artifacts)}
    return {label: Path(path) for label, path in artifacts.items()}


def _groups(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Subjects that share a scorer: the base and all deltas; every other one is alone."""
    decoupled = [one for one in subjects if one.role in ("base", "delta")]
    alone = [[one] for one in subjects if one.role == "checkpoint"]
    return [[one] for one in subjects if one.role == "finetuned"] + ([decoupled] if decoupled else []) + alone


def _scorer(
    group: Sequence[Subject], base: Path, options: Mapping[str, Any], backend: str
) -> tuple[Scorer, str | None]:
    """A scorer for a group, and how it runs if it is the decoupled runtime."""
    if group[0].role in ("finetuned", "checkpoint"):
        checkpoint = group[0].checkpoint
        assert checkpoint is not None
        return CheckpointScorer.open(checkpoint, **options), None  # the very files that were hashed
    scorer = DecoupledScorer.open(base, backend=backend, **options)
    for subject in group:
        if subject.delta is not None:
            scorer.load(subject.path, subject.label)
    return scorer, scorer.describe()


def _fidelity(
    panel: Panel,
    reference: Scorer,
    finetuned: Subject,
    encoder: Encoder,
    tasks: Sequence[Task],
    runs: Mapping[str, Mapping[str, TaskRun]],
    found: dict[str, dict[str, FidelityResult]],
    confidence: float,
    seed: int,
    reporter: Reporter,
) -> None:
    """Compare a panel's subjects with the fine-tuned model on the right answers of every task."""
    for task in tasks:
        encode = encoder.pair if isinstance(task, LocalTask) else encoder.harness_pair
        pairs = []
        for row in runs[finetuned.label][task.name].rows:
            context, answer = encode(row.prompt, row.target)
            pairs.append((tuple(context), tuple(answer)))
        rows = [(*context, *answer) for context, answer in pairs]
        asked = panel.only([one for one in panel.variants if task.name in runs[one] and not panel.lacks(one, rows)])
        results = fidelity.measure(
            asked, reference, finetuned.identity, pairs, confidence=confidence, seed=seed, reporter=reporter
        )
        for label, result in results.items():
            found.setdefault(label, {})[task.name] = result
        panel.seconds += asked.seconds


def _overlaps(
    tasks: Sequence[Task], subjects: Sequence[Subject], given: Path | None, encoder: Encoder, force: bool
) -> tuple[OverlapRecord, ...]:
    records = []
    for subject in subjects:
        if subject.delta is None:
            continue
        checked = [
            (task.name, overlap.check(task, subject.delta.manifest.calibration, given, encoder)) for task in tasks
        ]
        overlap.refuse(checked, force=force)
        for task, one in checked:
            records.append(
                OverlapRecord(
                    task=task,
                    subject=subject.label,
                    verdict=one.verdict,
                    overlapping=one.overlapping,
                    told=one.told,
                    forced=one.verdict == "overlaps",
                )
            )
    if given is not None and not records:
        raise InputError(
            f"{option('calibration')} {given}: no artifact is evaluated that could have been calibrated on it"
        )
    return tuple(records)


def _tools(lm_eval_version: str) -> dict[str, str]:
    return {
        "deltacompress": __version__,
        "lm-eval": lm_eval_version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }

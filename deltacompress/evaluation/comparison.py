"""One table of methods: each compresses the same fine-tuned model on the same data, and all are measured together.

A method is a recipe (a shipped one, one of evals/baselines, or a path) or one of baselines.DONORS, what the field does
that no recipe says. Deltas are run decoupled; recipes of scope "full", which have no base to be decoupled from, are
restored and run as checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deltacompress.artifact import load_delta
from deltacompress.calibrate.data import calibration_tokens
from deltacompress.checkpoint import Checkpoint, content_hash
from deltacompress.checkpoint_writer import output_errors
from deltacompress.content import list_content
from deltacompress.driver import compress
from deltacompress.errors import InputError
from deltacompress.evaluation.baselines import DONORS, build, read_account
from deltacompress.evaluation.comparison_plot import plot, require_matplotlib
from deltacompress.evaluation.made_from import difference
from deltacompress.evaluation.report import Report
from deltacompress.evaluation.run import evaluate
from deltacompress.evaluation.tasks import load_tasks
from deltacompress.recipe import Recipe
from deltacompress.reporter import SILENT, Reporter
from deltacompress.restoration import restore

METHODS = (
    "sparsegpt-direct-4bit,gptq-direct-4bit,rtn-direct-4bit,rtn-4bit,sign-rtn,bitdelta,low-rank,int4-24,int2-24,sign-24"
)
_TIMES = "compress-seconds.json"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The report of all methods, and where it lies."""

    report: Report
    out: Path

    def to_json(self) -> dict[str, Any]:
        """Plain data: a row per task and model."""
        rows = []
        for score in self.report.scores:
            subject = self.report.subject(score.subject)
            paired, near = score.paired, score.fidelity
            rows.append(
                {
                    "task": score.task,
                    "method": score.subject,
                    "score": 100 * score.value,
                    "stderr": 100 * score.stderr,
                    "change": None if paired is None else -100 * paired.drop,
                    "p": None if paired is None else paired.p_value,
                    "kl": None if near is None else near.kl,
                    "top1": None if near is None else 100 * near.top1,
                    "ratio": subject.ratio,
                    "compress_seconds": subject.compress_seconds,
                }
            )
        return {"out": str(self.out), "rows": rows}


def compare(
    base: str | Path,
    finetuned: str | Path,
    *,
    tasks: Sequence[str],
    out: str | Path,
    calibration: str | Path,
    samples: int | None = None,
    seq_len: int | None = None,
    methods: Sequence[str] | None = None,
    task_dir: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int = 64,
    backend: str = "auto",
    reporter: Reporter | None = None,
) -> Comparison:
    """Compress with every method and measure all of them, the fine-tuned model and the base on the same samples.

    What was made stays in out/artifacts and is used again by the next run; out gets the report and comparison.png.
    samples, seq_len, seed: of the calibration, as `compress`; seed: of the evaluation, too.

    Raises:
        InputError: an unknown method (the nearest is told); no matplotlib; else as compress and evaluate.
    """
    reporter = reporter or SILENT
    require_matplotlib()
    chosen = list(methods) if methods else METHODS.split(",")
    recipes = {Path(name).stem: None if name in DONORS else load_method(name) for name in chosen}
    if len(recipes) != len(chosen):
        raise InputError(f"--methods {','.join(chosen)}: a method is named twice")
    load_tasks(list(tasks), task_dir=None if task_dir is None else Path(task_dir), few_shot=None, limit=limit)
    target = Path(out)
    pair = Checkpoint.open(base), Checkpoint.open(finetuned)
    work = _Work(*pair, target / "artifacts", calibration, samples, seq_len, seed, device, reporter)
    artifacts: dict[str, Path] = {}
    others: dict[str, Path] = {}
    seconds: dict[str, float] = {}
    for label, recipe in recipes.items():
        if recipe is None:
            others[label], seconds[label] = work.baseline(label)
            continue
        path, took = work.compressed(label, recipe)
        if took is not None:
            seconds[label] = took
        if recipe.scope == "full":
            others[label] = work.restored(path)
        else:
            artifacts[label] = path
    report = evaluate(
        artifacts,
        base=base,
        tasks=tasks,
        out=target,
        finetuned=finetuned,
        others=others,
        with_base=True,
        task_dir=task_dir,
        limit=limit,
        seed=seed,
        device=device,
        batch_size=batch_size,
        backend=backend,
        compress_seconds=seconds,
        stored_as={label: work.folder / label for label in others},
        policy=None,
        reporter=reporter,
    )
    plot(report, target / "comparison.png")
    return Comparison(report, target)


def load_method(name: str) -> Recipe:
    """The recipe of a method, by name or path.

    Raises:
        InputError: no such method.
    """
    baselines = {path.stem: path for path in list_content("evals/baselines", ".yaml")}
    shipped = {path.stem for path in list_content("calibration/recipes", ".yaml")}
    if name in baselines:
        return Recipe.load(baselines[name])
    if name in shipped or Path(name).suffix in (".yaml", ".yml"):
        return Recipe.load(name)
    known = sorted({*baselines, *shipped, *DONORS})
    close = get_close_matches(name, known, n=2)
    told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise InputError(f"--methods: unknown method {name!r}; {told} (or give the path of a recipe)")


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes what is to be measured, below `folder`; what an earlier run made of the same is used again.

    samples, seq_len, seed: of the calibration; None: the recipe's.
    """

    base: Checkpoint
    finetuned: Checkpoint
    folder: Path
    calibration: str | Path
    samples: int | None
    seq_len: int | None
    seed: int
    device: str
    reporter: Reporter

    def compressed(self, label: str, recipe: Recipe) -> tuple[Path, float | None]:
        """The artifact of a recipe, and the seconds that compressing took, None where nobody wrote them down.

        Raises:
            InputError: an artifact of that name is there, made otherwise.
        """
        path, times = self.folder / label, self.folder / _TIMES
        known: dict[str, float] = json.loads(times.read_text()) if times.is_file() else {}
        if path.is_dir():
            manifest = load_delta(path).manifest
            other = difference(
                manifest,
                base=self.base,
                finetuned=self.finetuned,
                recipe=recipe,
                calibration=self.calibration,
                samples=self.samples,
                seq_len=self.seq_len,
                seed=self.seed,
            )
            if other is not None:
                raise _made_otherwise(path, other)
            return path, known.get(manifest.digest)
        result = compress(
            self.base.path,
            self.finetuned.path,
            recipe=recipe,
            calibration=self.calibration if recipe.needs_calibration else None,
            out=path,
            samples=self.samples,
            seq_len=self.seq_len,
            seed=self.seed,
            device=self.device,
            resume=True,
            reporter=self.reporter,
        )
        with output_errors(times):
            known[load_delta(path).manifest.digest] = result.seconds
            times.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return path, result.seconds

    def restored(self, artifact: Path) -> Path:
        """The checkpoint that an artifact restores to; what another one left in its place is removed."""
        path = artifact.with_name(f"{artifact.name}.restored")
        if path.is_dir():
            tensors = load_delta(artifact).manifest.tensors
            wanted = content_hash((one.name, one.dtype, one.shape, one.sha256) for one in tensors)
            if Checkpoint.open(path).fingerprint() == wanted:
                return path
            self.reporter.note(f"{path}: not what {artifact} restores to; made again")
            with output_errors(path):
                shutil.rmtree(path)
        return restore(artifact, base=self.base.path, out=path, reporter=self.reporter)

    def baseline(self, method: str) -> tuple[Path, float]:
        """The checkpoint of a baseline with its account, and the seconds that the method took.

        Raises:
            InputError: one is there, made otherwise.
        """
        path, recipe = self.folder / method, load_method(DONORS[method])
        donor, _ = self.compressed(recipe.name, recipe)
        spec = recipe.calibration.overridden(samples=self.samples, seq_len=self.seq_len, seed=self.seed)
        if path.is_dir():
            account, digest = read_account(path), load_delta(donor).manifest.digest
            if (account.method, account.donor_digest, account.seed) != (method, digest, self.seed):
                raise _made_otherwise(path, "method, donor or seed")
            known = account.calibration_sha256
            if known is not None and known != calibration_tokens(self.finetuned, self.calibration, spec).sha256:
                raise _made_otherwise(path, "calibration data")
            return path, account.seconds
        account = build(
            method,
            base=self.base.path,
            finetuned=self.finetuned.path,
            donor=donor,
            out=path,
            calibration=self.calibration,
            spec=spec,
            device=self.device,
            reporter=self.reporter,
        )
        self.reporter.note(f"{method}: {account.note}")
        return path, account.seconds


def _made_otherwise(path: Path, other: str) -> InputError:
    return InputError(
        f"{path}: made by another recipe, model or seed, or on other data (another {other}); remove it, or give "
        "another --out"
    )

"""report.md: the same findings for a terminal, a pull request or a model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from deltacompress.evaluation.report import text
from deltacompress.evaluation.report.records import ReportData, ScoreRecord
from deltacompress.files.output import output_errors


def write_markdown(report: ReportData, path: Path) -> None:
    """Write report.md; raises OutputError."""
    with output_errors(path):
        path.write_text(markdown(report), encoding="utf-8")


def markdown(report: ReportData) -> str:
    """The whole text."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: ReportData) -> Iterator[str]:
    names = ", ".join(one.label for one in report.deltas) or ", ".join(one.label for one in report.subjects)
    yield f"# Evaluation of {escape(names)}"
    yield ""
    yield from _findings(report)
    sections = {
        "Scores": _scores(report),
        "Models": _models(report),
        "What was measured on what": _data(report),
        "Agreement of other pairs": _agreement(report),
    }
    for title, lines in sections.items():
        if listed := list(lines):
            yield from ("", f"## {title}", "", *listed)


def _findings(report: ReportData) -> Iterator[str]:
    for verdict in report.verdicts:
        yield f"- **{escape(verdict.subject)}** {'✅' if verdict.passed else '❌'} {escape(text.verdict(verdict))}"
        for check in verdict.checks:
            if not check.passed:
                yield f"  - {escape(check.told)}"
    for delta in report.deltas:
        yield f"- {escape(text.headline(report, delta))}"


def _scores(report: ReportData) -> Iterator[str]:
    confidence = f"{report.settings.confidence:.0%}"
    heads = ["task", "model", "score", f"change in points [{confidence}]", "p", "same answers", "KL, nats/token"]
    yield _row([*heads, "top-1", "perplexity"])
    yield "|---|---|---|---|---|---|---|---|---|"
    for task in report.tasks:
        yield from (_row(_score_cells(score)) for score in report.scores if score.task == task.name)
    yield ""
    yield (
        "Scores in percent with their standard error, over the same samples for every model; p: of no difference "
        "(exact McNemar test, or a paired bootstrap). KL, top-1 agreement and perplexity ratio: against the fine-tuned "
        "model, per token of the right answers."
    )


def _score_cells(score: ScoreRecord) -> list[str]:
    paired, near = score.paired, score.fidelity
    return [
        escape(score.task),
        escape(score.subject),
        f"{text.percent(score.value)} ± {text.percent(score.stderr)}",
        text.drop_cell(score),
        text.p_value(paired.p_value) if paired else "",
        f"{paired.same_answers} of {score.samples}" if paired else "",
        text.small(near.kl) if near else "",
        f"{text.percent(near.top1, 2)} %" if near else "",
        f"{text.TIMES} {near.perplexity_ratio:.4f}" if near else "",
    ]


def _models(report: ReportData) -> Iterator[str]:
    yield "| model | what | size | ratio | identity |"
    yield "|---|---|---|---|---|"
    for one in report.subjects:
        ratio = f"{one.ratio:.2f}x" if one.ratio else ""
        kind = "manifest" if one.manifest_digest else "files" if one.role == "adapter" else "weights"
        identity = f"{kind} `{one.identity[:16]}`"
        yield _row([escape(one.label), escape(text.role(one)), text.size(one.bytes), ratio, identity])


def _data(report: ReportData) -> Iterator[str]:
    for task in report.tasks:
        shots = f", {task.few_shot}-shot" if task.few_shot else ""
        data = f", data `{task.data_sha256[:16]}`" if task.data_sha256 else ""
        source = f"{task.samples} samples of {escape(task.source)}{shots}"
        yield f"- {escape(task.name)}: {source}, metric {task.metric}{data}"
    for overlap in report.overlap:
        forced = " **Evaluated all the same, as asked.**" if overlap.forced else ""
        yield f"- {escape(overlap.task)}, {escape(overlap.subject)}: {escape(overlap.told)}.{forced}"
    settings = report.settings
    yield f"- {escape(settings.runtime)}; seed {settings.seed}; {report.created}"
    yield "- " + ", ".join(f"{name} {version}" for name, version in report.tools.items())


def _agreement(report: ReportData) -> Iterator[str]:
    for pair in report.agreement:
        if report.reference not in (pair.first, pair.second):
            who = f"{escape(pair.first)} and {escape(pair.second)}"
            yield f"- {escape(pair.task)}: {who} answer {pair.same} of {pair.samples} alike"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escape(value: str) -> str:
    """Text that cannot change the layout of a Markdown table."""
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

"""report.html: one page that a person likes to read, and that needs nothing but itself.

No script, no font, no request: a policy in its head forbids them, so text of a data set or a model, escaped anyway,
could not do anything either. The verdict comes first, then figures, charts, samples, and what was measured on what.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from deltacompress.evaluation.report import html_charts, text
from deltacompress.evaluation.report.html_style import STYLE
from deltacompress.evaluation.report.records import Disagreement, ReportData, ScoreRecord, SubjectRecord, TaskInfo
from deltacompress.files.output import output_errors

_OPEN_TABLE = '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table>'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_html(report: ReportData, path: Path) -> None:
    """Write report.html; raises OutputError."""
    with output_errors(path):
        path.write_text(page(report), encoding="utf-8")


def page(report: ReportData) -> str:
    """The whole page."""
    names = [one.label for one in report.deltas] or [one.label for one in report.subjects]
    title = f"What {_listed(names)} keeps" if len(names) == 1 else "What compressed models keep"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        '<a class="skip" href="#scores">Skip to the scores</a>',
        f"<header><h1>{escape(title)}</h1><p class='soft'>{escape(_subtitle(report))}</p></header><main>",
        *_verdicts(report),
        *_scores(report),
        *html_charts.sections(report),
        *_samples(report),
        *_provenance(report),
        "</main>",
        "<footer>",
        f"Written by deltacompress {escape(report.tools.get('deltacompress', ''))}, {escape(report.created)}.",
        "This page makes no request. The same findings as data: report.json; every answer: samples/.",
        "</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subtitle(report: ReportData) -> str:
    total = sum(task.samples for task in report.tasks)
    against = " against the fine-tuned model" if report.reference else ""
    tasks = _listed([task.name for task in report.tasks])
    return f"Measured on {total} held-out samples of {tasks}{against}; base model: {report.base}."


def _verdicts(report: ReportData) -> Iterator[str]:
    judged = {verdict.subject: verdict for verdict in report.verdicts}
    yield '<section class="verdicts" aria-label="Verdict">'
    for delta in report.deltas:
        verdict = judged.get(delta.label)
        kind = "none" if verdict is None else "pass" if verdict.passed else "fail"
        told = "no gate was asked" if verdict is None else text.verdict(verdict)
        sign = {"pass": "✓ ", "fail": "✗ ", "none": ""}[kind]
        yield f'<article class="verdict {kind}"><span class="badge">{sign}{escape(told)}</span>'
        yield f"<h2>{escape(delta.label)}</h2><p>{escape(text.headline(report, delta))}</p>"
        yield from _facts(report, delta)
        if verdict is not None and not verdict.passed:
            yield "<ul>" + "".join(f"<li>{escape(one.told)}</li>" for one in verdict.checks if not one.passed) + "</ul>"
        yield "</article>"
    yield "</section>"


def _facts(report: ReportData, delta: SubjectRecord) -> Iterator[str]:
    scored = [one for one in report.scores if one.subject == delta.label]
    facts = [
        ("ratio", f"{delta.ratio:.2f}{text.TIMES}" if delta.ratio else text.DASH),
        ("size", text.size(delta.bytes)),
    ]
    if delta.linear_bits_per_weight is not None:
        facts.append(("bits per linear weight", f"{delta.linear_bits_per_weight:.2f}"))
    kls = [one.fidelity.kl for one in scored if one.fidelity]
    if kls:
        facts.append(("largest KL, nats/token", text.small(max(kls))))
    yield '<dl class="facts">'
    yield from (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    yield "</dl>"


def _scores(report: ReportData) -> Iterator[str]:
    confidence = f"{report.settings.confidence:.0%}"
    yield '<h2 id="scores">Scores</h2>'
    yield _OPEN_TABLE.format("Table of scores")
    yield "<caption>Scores of every model on every task</caption>"
    heads = [
        "score",
        f"change [{confidence}]",
        "p",
        "recovery",
        "same answers",
        "KL nats/token",
        "top-1 %",
        "perplexity",
    ]
    yield '<thead><tr><th scope="col" class="text">model</th>' + "".join(f'<th scope="col">{one}</th>' for one in heads)
    yield "</tr></thead>"
    roles = {one.label: one.role for one in report.subjects}
    for task in report.tasks:
        about = f"{task.metric}, {task.samples} samples. {task.description}"
        yield '<tbody><tr class="task"><th scope="rowgroup" colspan="9">'
        yield f'<span class="stay">{escape(task.name)} <span class="soft">{escape(about)}</span></span></th></tr>'
        for score in (one for one in report.scores if one.task == task.name):
            yield _score_row(score, roles[score.subject])
        yield "</tbody>"
    yield "</table></div>"
    yield (
        '<p class="soft">Score: percent ± its standard error. Change: in points against the fine-tuned model on the '
        f"same samples, with its {confidence} interval. p: of no difference (exact McNemar test for right or wrong "
        "answers, else a paired bootstrap). KL, top-1 agreement, perplexity: next-token distributions against the "
        "fine-tuned model's, per token of the right answers.</p>"
    )


def _score_row(score: ScoreRecord, role: str) -> str:
    paired, near = score.paired, score.fidelity
    cells = [f"{text.percent(score.value)} ± {text.percent(score.stderr)}"]
    if paired is None:
        cells += [text.DASH] * 4 if role != "finetuned" else ["reference", "", "", ""]
    else:
        cells += [
            text.drop_cell(score),
            text.p_value(paired.p_value),
            f"{text.percent(paired.recovery)} %" if paired.recovery is not None else text.DASH,
            f"{paired.same_answers} / {score.samples}",
        ]
    cells += (
        ["", "", ""]
        if near is None
        else [
            text.small(near.kl),
            text.percent(near.top1, 2),
            f"{text.TIMES} {near.perplexity_ratio:.4f}",
        ]
    )
    name = f'<span class="swatch {role}" aria-hidden="true"></span>{escape(score.subject)}'
    kind = ' class="reference"' if role == "finetuned" else ""
    return f'<tr{kind}><th scope="row">{name}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _samples(report: ReportData) -> Iterator[str]:
    if not report.disagreements:
        return
    yield "<h2>Where answers differ</h2>"
    yield "<p>Samples that a delta answers unlike the fine-tuned model: what it lost first, then what it won.</p>"
    groups: dict[tuple[str, str], list[Disagreement]] = {}
    for one in report.disagreements:
        groups.setdefault((one.subject, one.task), []).append(one)
    for number, ((subject, task), found) in enumerate(groups.items()):
        score = report.score(task, subject)
        total = "" if score is None or score.paired is None else f" of {score.samples - score.paired.same_answers}"
        is_open = "" if number else " open"
        yield f"<details{is_open}><summary>{escape(subject)}, {escape(task)}: {len(found)}{total} shown</summary>"
        for one in found:
            yield f"<article><h3>Sample {one.doc_id}</h3><pre>{escape(one.prompt)}</pre><div class='answers'>"
            yield _answer("Right answer", one.target)
            yield _answer("Fine-tuned model", one.reference_answer, right=one.reference_right)
            yield _answer(subject, one.answer, right=one.right)
            yield "</div></article>"
        yield "</details>"


def _answer(who: str, answer: str, *, right: bool | None = None) -> str:
    mark = ""
    if right is not None:
        mark = '<span class="mark-good">✓ right</span>' if right else '<span class="mark-bad">✗ wrong</span>'
    return f"<div><p>{escape(who)} {mark}</p><pre>{escape(answer)}</pre></div>"


def _provenance(report: ReportData) -> Iterator[str]:
    yield "<h2>What was measured on what</h2>"
    yield _OPEN_TABLE.format("Table of models")
    yield "<caption>The models that were measured</caption><thead><tr>"
    for head, kind in (("model", "text"), ("what it is", "text"), ("size", ""), ("ratio", ""), ("time", "")):
        yield f'<th scope="col" class="{kind}">{head}</th>'
    yield '<th scope="col" class="text">identity</th></tr></thead><tbody>'
    for one in report.subjects:
        ratio = f"{one.ratio:.2f}{text.TIMES}" if one.ratio else text.DASH
        calibration = f"; calibrated on {one.calibration}" if one.calibration else ""
        swatch = f'<span class="swatch {one.role}" aria-hidden="true"></span>'
        yield (
            f'<tr><th scope="row">{swatch}{escape(one.label)}</th>'
            f'<td class="text wrap">{escape(text.role(one) + calibration)}</td>'
            f"<td>{text.size(one.bytes)}</td><td>{ratio}</td><td>{one.seconds:.0f} s</td>"
            f'<td class="text"><code title="{one.identity}">{one.identity[:16]}</code></td></tr>'
        )
    yield "</tbody></table></div>"
    yield (
        '<p class="soft">Identity: manifest digest of a delta, content hash of the weights of a checkpoint, digest of '
        "the config and tensors of an adapter. Time: computing answers and fidelity; models of one batch share it."
        "</p><ul>"
    )
    yield from (f"<li>{escape(_task_line(task))}</li>" for task in report.tasks)
    for overlap in report.overlap:
        forced = " <strong>Evaluated all the same, as asked.</strong>" if overlap.forced else ""
        yield f"<li>Held out? {escape(overlap.task)}, {escape(overlap.subject)}: {escape(overlap.told)}.{forced}</li>"
    settings = report.settings
    threads = f"{settings.threads} thread{'s' if settings.threads != 1 else ''}"
    rows = f"{threads}, at most {settings.batch_size} rows a batch, seed {settings.seed}"
    yield f"<li>Run: {escape(settings.runtime)}; {rows}.</li>"
    yield f"<li>Base: {escape(report.base)} <code>{report.base_sha256}</code></li>"
    for delta in report.deltas:
        what = "Manifest" if delta.manifest_digest else "Digest"
        yield f"<li>{what} of {escape(delta.label)}: <code>{delta.manifest_digest or delta.identity}</code></li>"
    versions = ", ".join(f"{name} {version}" for name, version in report.tools.items())
    yield f"<li>{escape(versions)}</li></ul>"
    others = [one for one in report.agreement if report.reference not in (one.first, one.second)]
    if others:
        yield "<details><summary>How often other pairs of models answer alike</summary><ul>"
        yield from (
            f"<li>{escape(one.task)}: {escape(one.first)} and {escape(one.second)}, {one.same} of {one.samples}</li>"
            for one in others
        )
        yield "</ul></details>"


def _task_line(task: TaskInfo) -> str:
    shots = f", {task.few_shot}-shot" if task.few_shot else ""
    data = f", sha256 of the samples {task.data_sha256[:16]}" if task.data_sha256 else ""
    return f"{task.name}: the first {task.samples} samples of {task.source}{shots}, metric {task.metric}{data}"

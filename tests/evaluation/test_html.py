"""The pages people read: well formed, self-contained, every text escaped, the verdict first; and in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evaluation.reports import paired, report, score

from deltacompress.evaluation.gate.output import summary
from deltacompress.evaluation.gate.rules import Gate
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.report.html import page, write_html
from deltacompress.evaluation.report.markdown import markdown

VOID = {"meta", "br", "hr", "img", "input", "link"}  # SVG elements close themselves
ATTACK = "<script>alert(1)</script><img src=//evil.example/x onerror=1>&\"'|"


class Outline(HTMLParser):
    """Tags must close in order; collects elements and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(text: str) -> Outline:
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    return outline


def judged(policy: dict[str, Any] | None = None, **more: Any) -> Report:
    made = report(**more)
    verdicts = Gate.parse({"name": "default", "drop": {"max": 0.03}} | (policy or {})).check(made).verdicts
    return made.model_copy(update={"verdicts": verdicts})


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    text = page(judged())
    outline = parse(text)
    tags = [tag for tag, _ in outline.tags]
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(tags)
    for _, attributes in outline.tags:
        assert not {"src", "srcset", "data", "action"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text


def test_the_page_can_be_read_by_everybody() -> None:
    outline = parse(page(judged()))
    by_tag: dict[str, list[dict[str, str | None]]] = {}
    for tag, attributes in outline.tags:
        by_tag.setdefault(tag, []).append(attributes)
    assert by_tag["html"][0]["lang"] == "en"
    assert len(by_tag["h1"]) == 1
    assert len(by_tag["caption"]) == len(by_tag["table"])
    assert all("scope" in attributes for attributes in by_tag["th"])
    for chart in by_tag["svg"]:
        assert chart["role"] == "img"
    assert text_count(page(judged()), "<desc>") == len(by_tag["svg"])
    assert "scores" in {attributes.get("id") for attributes in by_tag["h2"]}


def text_count(text: str, part: str) -> int:
    return text.count(part)


def test_the_verdict_comes_first() -> None:
    good, bad = page(judged()), page(judged({"min_ratio": 99}))
    for text, told in ((good, "✓ passes gate default"), (bad, "✗ fails gate default")):
        assert text.index(told) < text.index("<table>")
    assert "ratio 10.00x, wanted at least 99x" in parse(bad).text
    assert "no gate was asked" in page(report())


@pytest.mark.parametrize("render", [page, markdown])
def test_what_was_measured_is_there(render: Any) -> None:
    text = render(judged())
    shown = parse(text).text if render is page else text
    for part in ("int2-24", "sql/validation.jsonl", "33.0 ± 1.0", "480", "0.00100", "10.00", "none seen", "sparse"):
        assert part in shown, part
    assert ("c" * 64 if render is page else "c" * 16) in shown
    assert "300 of 500" in shown


def test_text_of_data_and_models_stays_text() -> None:
    evil = {"prompt": ATTACK, "target": ATTACK, "reference_answer": ATTACK, "answer": ATTACK}
    shown = report().disagreements[0].model_dump() | evil
    scores = [score("sql", "finetuned", 0.3), score("sql", "int2", 0.3, paired=paired(0.0, 0.01))]
    task = report().tasks[0].model_dump() | {"description": ATTACK, "source": ATTACK}
    text = page(judged(disagreements=[shown], scores=scores, tasks=[task], base=ATTACK))
    outline = parse(text)
    assert not {"script", "img"} & {tag for tag, _ in outline.tags}
    assert outline.text.count(ATTACK) >= 6
    assert "<script>" not in markdown(judged(tasks=[task]))


def test_reports_without_a_reference_or_a_delta_can_be_read() -> None:
    alone = report(reference=None, scores=[score("sql", "int2", 0.3)], subjects=[report().subjects[1]], agreement=[],
                   disagreements=[])  # fmt: skip
    parse(page(alone))
    plain = report(subjects=[report().subjects[0]], scores=[score("sql", "finetuned", 0.3)], overlap=[],
                   disagreements=[], agreement=[])  # fmt: skip
    assert "finetuned" in parse(page(plain)).text
    for one in (alone, plain):
        assert "## Models" in markdown(one)
        assert "## Agreement" not in markdown(one)  # no other pairs, no heading


def test_a_notebook_shows_reports_and_verdicts() -> None:
    from IPython.core.formatters import DisplayFormatter

    shown = report()
    verdict = Gate.load("default").check(shown)
    for result, text in ((shown, markdown(shown)), (verdict, summary(verdict))):
        assert DisplayFormatter().format(result)[0]["text/markdown"] == text


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 360)])
def test_a_real_browser_shows_it(tmp_path: Path, scheme: str, width: int) -> None:
    """Rendered offline: elements are laid out, nothing sticks out, and the two schemes differ in what is painted."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    label = "team/a-name-that-is-longer.than-a-phone-is-wide@production-2026"
    made = judged().model_dump() | {"base": "b" * 80}
    renamed = json.loads(json.dumps(made).replace('"int2"', f'"{label}"'))
    write_html(Report.model_validate(renamed), tmp_path / "report.html")
    picture = tmp_path / "report.png"
    arguments = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
        *(
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={width},2400",
            f"--user-data-dir={tmp_path / 'profile'}",
        ),
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
        f"--screenshot={picture}",
    ]
    subprocess.run([*arguments, (tmp_path / "report.html").as_uri()], check=True, capture_output=True, timeout=120)
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    corner, spread = float(pixels[2, 2].mean()), float(pixels.std())
    assert spread > 0.02  # something was painted
    assert corner < 0.3 if scheme == "dark" else corner > 0.9
    assert pixels.shape[1] == width
    assert float(pixels[:, -8:].std(axis=(0, 1)).max()) < 0.01  # the page's margin is empty from top to bottom

"""Progress in words: time left however long steps take, lines now and then in a log, labels that fit."""

from __future__ import annotations

import time

import pytest

from deltacompress import LineReporter
from deltacompress.cli.shown.progress import RichReporter, fitted, shortened
from deltacompress.reporter import Pace, duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_time_left_however_long_steps_take() -> None:
    clock = Clock()
    pace = Pace(10, clock)
    assert pace.left is None  # nothing is known before the first step
    clock.now += 60
    pace.step()
    assert (pace.done, pace.gone, pace.left) == (1, 60, 9 * 60)
    clock.now += 20
    assert pace.left == 9 * 60 - 20
    clock.now += 10_000
    assert pace.left == 0  # never less


def test_time_left_goes_by_the_last_few_steps() -> None:
    """Steps that an earlier run had finished are recalled in no time."""
    clock = Clock()
    pace = Pace(100, clock)
    for _ in range(50):
        pace.step()
    for _ in range(8):
        clock.now += 7
        pace.step()
    assert pace.left == 42 * 7


def test_an_unknown_number_of_steps() -> None:
    pace = Pace(None)
    pace.step()
    assert pace.left is None


def test_a_log_gets_a_line_every_half_minute(clock: Clock) -> None:
    lines: list[str] = []
    reporter = LineReporter(lines.append)
    reporter.phase("layers", 40)
    for number in range(8):
        clock.now += 10
        reporter.step(f"layer {number}", loss=0.00123, memory_bytes=3 * 2**29)
    reporter.phase("one", 1)
    clock.now += 31
    reporter.step("it")
    reporter.note("a note")
    assert lines == [
        "layers (40 steps)",
        "layers: 3 of 40 (layer 2), 0:00:30 gone, about 0:06:10 left, loss 0.00123, peak 1.50 GiB",
        "layers: 6 of 40 (layer 5), 0:01:00 gone, about 0:05:40 left, loss 0.00123, peak 1.50 GiB",
        "one",
        "one: 1 of 1 (it), 0:00:31 gone, about 0:00:00 left",
        "a note",
    ]


def test_by_default_the_standard_error_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    LineReporter().note("a\x1b[2J")
    assert capsys.readouterr() == ("", "a\\x1b[2J\n")


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 36_061)] == ["0:00:00", "0:01:00", "0:59:59", "10:01:01"]


COUNTS = ["12/34", "0:01:10", "0:12:00 left"]
LABEL = "model.layers.12.self_attn.q_proj.weight"
MORE = ["loss 0.00123", "peak 1.50 GiB"]


@pytest.mark.parametrize("width", range(40, 140))
def test_labels_are_shortened_and_never_counts(width: int) -> None:
    line = fitted(width, "fidelity: palindrome, majority", COUNTS, LABEL, MORE)
    assert len(line) <= width
    assert "  ".join(COUNTS) in line


def test_what_goes_first() -> None:
    assert fitted(200, "phase", COUNTS, LABEL, MORE) == f"phase  {'  '.join(COUNTS)}  {LABEL}  {'  '.join(MORE)}"
    assert fitted(63, "phase", COUNTS, LABEL, MORE) == f"phase  {'  '.join(COUNTS)}  mod...weight  loss 0.00123"
    assert fitted(40, "phase", COUNTS, LABEL, []) == f"phase  {'  '.join(COUNTS)}"
    assert shortened(LABEL, 12) == "mod...weight"


def test_nothing_stale_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for variable, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(variable, value)
    with RichReporter() as reporter:
        reporter.note("a note")
    shown = capsys.readouterr().err
    assert "a note" in shown
    assert "0/?" not in shown
    assert "starting" not in shown.split("a note")[-1].split("\x1b[2K")[-1]

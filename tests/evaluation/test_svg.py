"""Charts: positions are those of the values, axes are round, and nothing lies on an axis or beyond the picture."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltacompress.evaluation.report import svg
from deltacompress.evaluation.report.svg_axis import signed, size, size_ticks, ticks
from deltacompress.evaluation.report.text import MINUS

values = st.floats(-1e6, 1e6, allow_nan=False, allow_infinity=False)


@given(values, values)
@example(0.0, 5e-324)
@example(-5e-324, 5e-324)
def test_ticks_are_few_cover_the_values_and_read_differently(one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    step = found[1] - found[0]
    assert found[0] <= low + 1e-5 * step
    assert found[-1] >= high - 1e-5 * step
    told = [f"{tick:g}" for tick in found]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, [0, 0.25, 0.5, 0.75, 1]), (33.0, [29, 30, 31, 32, 33]), (100.0, [90, 92.5, 95, 97.5, 100])],
)
def test_equal_values_have_an_axis_of_round_numbers(value: float, expected: list[float]) -> None:
    assert ticks(value, value) == expected
    assert ticks(value, value * (1 + 1e-9)) == expected


def test_round_steps() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(-2, 0.5) == [-2, -1.5, -1, -0.5, 0, 0.5]
    assert ticks(0, 3e-10) == pytest.approx([0, 1e-10, 2e-10, 3e-10])


@given(st.floats(1e3, 1e12), st.floats(1.02, 1e4))
def test_sizes_have_ticks_and_room_for_them(low: float, times: float) -> None:
    found = size_ticks(low, low * times)
    assert 2 <= len(found) <= 8
    assert all(low <= value <= low * times for value, _ in found)
    assert len({told for _, told in found}) == len(found)


def test_sizes_in_words() -> None:
    assert [size(value) for value in (5, 2e3, 5e6, 1e9, 2.5e6)] == ["5 B", "2 kB", "5 MB", "1 GB", "2.5 MB"]


def test_zero_has_no_sign() -> None:
    assert [signed(value) for value in (0.0, -0.0, -0.04, 0.04, -0.06, 1.0)] == [
        "0.0",
        "0.0",
        "0.0",
        "0.0",
        f"{MINUS}0.1",
        "+1.0",
    ]
    assert signed(-2.0, "g") == f"{MINUS}2"


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def of(picture: ElementTree.Element, tag: str, kind: str) -> list[ElementTree.Element]:
    return [one for one in picture.iter(tag) if kind in (one.get("class") or "").split()]


def at(one: ElementTree.Element, *keys: str) -> tuple[float, ...]:
    return tuple(float(one.get(key) or "nan") for key in keys)


def within(picture: ElementTree.Element) -> None:
    """No text reaches beyond the picture, as wide as its characters can be."""
    width, height = at(picture, "width", "height")
    for one in picture.iter("text"):
        x, y = at(one, "x", "y")
        assert 0 < y <= height
        if not one.get("transform"):
            long = svg._CHARACTER * len((one[0].tail if len(one) else one.text) or "")
            start = {"start": x, "middle": x - long / 2, "end": x - long}[one.get("text-anchor") or "start"]
            assert -1 <= start < start + long <= width + 1, ElementTree.tostring(one)


def test_a_change_stands_where_its_axis_says() -> None:
    rows = [
        svg.ForestRow("one", -1.0, -3.0, 1.0, "delta"),
        svg.ForestRow("a-very-long-name" * 8, 0.5, 0.25, 1.0, "checkpoint"),
    ]
    picture = parsed(svg.forest(rows, margin=2.0, span=(-3.0, 1.0), title="t", description="d"))
    within(picture)
    scale = {one.text: at(one, "x")[0] for one in of(picture, "text", "tick")}
    zero, minus = scale["0"], scale[f"{MINUS}2"]
    unit = (zero - minus) / 2
    (disc,), (square,) = of(picture, "circle", "delta"), of(picture, "rect", "checkpoint")
    assert at(disc, "cx")[0] == pytest.approx(zero - unit, abs=0.2)
    assert at(square, "x")[0] + 4.5 == pytest.approx(zero + unit / 2, abs=0.2)
    first, second = of(picture, "line", "whisker")
    assert at(first, "x1", "x2") == pytest.approx((zero - 3 * unit, zero + unit), abs=0.2)
    assert at(second, "x1", "x2") == pytest.approx((zero + unit / 4, zero + unit), abs=0.2)
    (margin,) = of(picture, "line", "margin")
    assert at(margin, "x1", "x2") == pytest.approx((minus, minus), abs=0.2)
    (line,) = of(picture, "line", "zero")
    assert at(line, "x1")[0] == pytest.approx(zero, abs=0.2)
    assert [one.text for one in of(picture, "text", "value")] == [f"{MINUS}1.0", "+0.5"]
    label = of(picture, "text", "label")[1]
    assert label[0].text == "a-very-long-name" * 8
    assert (label[0].tail or "").endswith("…")
    foot = at(line, "y2")[0]
    assert all(at(one, "y")[0] < foot for one in of(picture, "text", "label"))
    assert all(at(one, "y")[0] > foot for one in of(picture, "text", "tick"))


def test_charts_side_by_side_have_one_axis() -> None:
    row = svg.ForestRow("one", 0.0, -0.5, 0.5, "delta")
    pictures = [
        parsed(svg.forest([row], margin=2.0, span=(-12.0, 4.0), title="t", description="d")),
        parsed(
            svg.forest(
                [svg.ForestRow("one", -9.0, -12.0, 4.0, "delta")],
                margin=2.0,
                span=(-12.0, 4.0),
                title="t",
                description="d",
            )
        ),
    ]
    scales = [[(one.text, one.get("x")) for one in of(picture, "text", "tick")] for picture in pictures]
    assert scales[0] == scales[1]


def test_a_mark_stands_where_its_axes_say() -> None:
    marks = [
        svg.Mark(30e6, 33.0, 1, "finetuned", 32.0, 34.0),
        svg.Mark(3e6, 31.0, 2, "delta", 30.0, 32.0),
        svg.Mark(30e6, 33.0, 3, "checkpoint"),
    ]
    picture = parsed(svg.scatter(marks, title="t", description="d", x_label="bytes", y_label="percent"))
    within(picture)
    across = {one.text: at(one, "x")[0] for one in of(picture, "text", "tick") if "B" in (one.text or "")}
    down = {one.text: at(one, "y")[0] - 4 for one in of(picture, "text", "tick") if "B" not in (one.text or "")}
    (disc,), (square,) = of(picture, "circle", "delta"), of(picture, "rect", "checkpoint")
    assert down["30"] > down["34"]  # up is better
    unit = (down["30"] - down["34"]) / 4
    assert at(disc, "cy")[0] == pytest.approx(down["30"] - unit, abs=0.2)
    assert at(square, "y")[0] + 4.5 == pytest.approx(down["34"] + unit, abs=0.2)
    assert at(disc, "cx")[0] < at(square, "x")[0]
    ten, five = across["10 MB"], across["5 MB"]
    decade = (ten - five) / 0.30103
    assert ten - at(disc, "cx")[0] == pytest.approx(decade * 0.52288, abs=0.5)
    whiskers = of(picture, "line", "whisker")
    assert len(whiskers) == 2
    assert at(whiskers[1], "y1", "y2") == pytest.approx((down["30"], down["30"] - 2 * unit), abs=0.2)
    numbers = of(picture, "text", "number")
    assert [one.text for one in numbers] == ["1", "2", "3"]
    spots = [at(one, "x", "y") for one in numbers]
    assert all(abs(a[0] - b[0]) > 8 or abs(a[1] - b[1]) > 8 for i, a in enumerate(spots) for b in spots[:i])
    lines = [at(one, "y1")[0] for one in of(picture, "line", "grid")]
    assert all(y < max(lines) for _, y in spots)  # above the axis


@pytest.mark.parametrize("layers", [1, 5, 32, 126])
def test_a_bar_is_as_high_as_its_value(layers: int) -> None:
    found = [(f"layer {n}", 0.5 + n / layers) for n in range(layers)] + [("embedding", None), ("head", 0.25)]
    picture = parsed(svg.bars(found, title="t", description="d", unit="bits", kind="delta"))
    within(picture)
    drawn = of(picture, "rect", "bar")
    assert len(drawn) == layers + 1
    heights = [at(one, "height")[0] for one in drawn]
    known = [value for _, value in found if value is not None]
    for height, value in zip(heights, known, strict=True):
        assert height / heights[0] == pytest.approx(value / known[0], rel=0.02)
    axis = {one.text: at(one, "y")[0] - 4 for one in of(picture, "text", "tick") if one.get("text-anchor") == "end"}
    top = max(axis, key=lambda told: float(told or 0))
    assert heights[0] / (axis["0"] - axis[top]) == pytest.approx(known[0] / float(top or 1), rel=0.02)
    named = [at(one, "x")[0] for one in of(picture, "text", "tick") if one.get("text-anchor") == "middle"]
    assert all(second - first >= 15 for first, second in pairwise(named))
    assert at(drawn[-1], "x")[0] + at(drawn[-1], "width")[0] <= svg.WIDTH


def test_bars_of_nothing() -> None:
    picture = svg.bars([("layer 0", 0.0), ("layer 1", 0.0)], title="t", description="d", unit="", kind="delta")
    told = re.findall(r'text-anchor="end">([^<]+)<', picture)
    assert told == ["0", "0.25", "0.5", "0.75", "1"]
    assert "<rect" not in svg.bars([("layer 0", None)], title="t", description="d", unit="", kind="delta")

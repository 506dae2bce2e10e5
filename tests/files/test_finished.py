"""Outputs of several files: the same is used again, another is refused, and a kill at any moment mixes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deltacompress.errors import OutputError
from deltacompress.files import finished
from deltacompress.files.finished import RECORD, new_output

INPUTS = {"seed": 0, "models": ["a", {"b": 1}], "limit": None}
FIRST = "report.json"
FILES = (FIRST, "report.md", "samples/*")


def make(
    folder: Path,
    text: str,
    inputs: dict[str, Any] = INPUTS,
    samples: tuple[str, ...] = ("a", "b"),
    *,
    force: bool = False,
) -> None:
    """An output of a report, a page and some samples, all of which say `text`."""
    with new_output(folder, FILES, inputs, force=force) as output:
        assert output is not None
        (output.ready / "samples").mkdir()
        for path in (FIRST, "report.md", *(f"samples/{name}" for name in samples)):
            (output.ready / path).write_text(text)
        output.finish()


def used_again(folder: Path, first: str, inputs: dict[str, Any], *, force: bool) -> bool:
    with new_output(folder, (first, *FILES[1:]), inputs, force=force) as output:
        return output is None


def told(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_the_same_input_is_used_again_and_another_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not used_again(out, FIRST, INPUTS, force=False)
    make(out, "one")
    assert used_again(out, FIRST, dict(reversed(INPUTS.items())), force=False)
    assert not used_again(out, FIRST, INPUTS, force=True)
    for change, name in (({"seed": 1}, "seed"), ({"seed": 1, "models": []}, "models, seed"), ({"more": 1}, "more")):
        with pytest.raises(OutputError) as caught:
            used_again(out, FIRST, INPUTS | change, force=False)
        assert str(caught.value) == (
            f"{out}: holds a finished report.json of other input (another {name}); choose another out, or replace it "
            "with force=True"
        )
        assert not used_again(out, FIRST, INPUTS | change, force=True)
    with pytest.raises(OutputError, match="another limit"):
        used_again(out, FIRST, {"seed": 0, "models": ["a", {"b": 1}]} | {"limit": 5}, force=False)
    assert set(told(out).values()) == {"one"}


def test_what_nobody_wrote_down_or_what_changed_is_not_used_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "one")
    (out / "samples" / "a").write_text("two")
    with pytest.raises(OutputError, match=r"samples/a has changed since; choose another out, or replace it"):
        used_again(out, FIRST, INPUTS, force=False)
    (out / "samples" / "a").unlink()
    with pytest.raises(OutputError, match="samples/a has changed since"):
        used_again(out, FIRST, INPUTS, force=False)
    for text in ("", "{", "[]", "{}", '{"inputs": 1, "files": {}}', "[" * 100_000):
        (out / RECORD).write_text(text)
        with pytest.raises(OutputError, match=r"a finished report.json, and nothing says of what it was made"):
            used_again(out, FIRST, INPUTS, force=False)
    (out / RECORD).unlink()
    with pytest.raises(OutputError, match="nothing says of what it was made"):
        used_again(out, FIRST, INPUTS, force=False)
    assert not used_again(out, FIRST, INPUTS, force=True)
    (out / FIRST).unlink()
    with pytest.raises(OutputError, match=r"report\.md: would be replaced, and no earlier run left it there"):
        used_again(out, FIRST, INPUTS, force=False)
    assert not used_again(out, FIRST, INPUTS, force=True)


def test_nothing_of_the_old_one_is_left_and_nothing_else_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "one", samples=("a", "old"))
    (out / "artifacts").mkdir()
    (out / "artifacts" / "mine").write_text("mine")
    make(out, "two", INPUTS | {"seed": 1}, force=True)
    assert told(out) == {
        FIRST: "two",
        "report.md": "two",
        "samples/a": "two",
        "samples/b": "two",
        "artifacts/mine": "mine",
    }
    assert used_again(out, FIRST, INPUTS | {"seed": 1}, force=False)
    assert sorted(path.name for path in out.iterdir()) == ["artifacts", RECORD, FIRST, "report.md", "samples"]


def test_killed_at_any_moment_it_is_the_old_one_or_unfinished_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each step that changes a name: never a report beside files of another."""

    class Killed(BaseException):
        pass

    def run(stop_at: int) -> bool:
        out = tmp_path / str(stop_at)
        make(out, "one", samples=("a", "old"))
        steps = 0

        def counted(original: Any) -> Any:
            def step(*given: Any, **more: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == stop_at:
                    raise Killed
                return original(*given, **more)

            return step

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (Path, "replace"), (Path, "unlink"), (finished.shutil, "rmtree"),
                                (os, "link"), (os, "rename"), (Path, "rmdir")):  # fmt: skip
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                make(out, "two", INPUTS | {"seed": 1}, force=True)
            except Killed:
                pass
            else:
                return False
        whole = {path: text for path, text in told(out).items() if not path.startswith(".new")}
        if FIRST in whole:
            assert len(set(whole.values())) == 1
            seed = {"one": 0, "two": 1}[whole[FIRST]]
            assert used_again(out, FIRST, INPUTS | {"seed": seed}, force=False)
        make(out, "three", INPUTS | {"seed": 3}, force=FIRST in whole)
        assert set(told(out).items()) == {(name, "three") for name in (FIRST, "report.md", "samples/a", "samples/b")}
        return True

    assert run(1)
    assert not run(99)
    assert sum(run(step) for step in range(2, 20)) >= 5


def test_records_are_text_for_people(tmp_path: Path) -> None:
    make(tmp_path / "out", "one")
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["inputs"] == INPUTS
    assert record["files"].keys() == {FIRST, "report.md", "samples/a", "samples/b"}


@pytest.mark.parametrize("name", ["report.md", "samples/a", RECORD])
def test_what_no_earlier_run_left_is_not_replaced_unasked(tmp_path: Path, name: str) -> None:
    """Told before any work, also beside an unfinished output."""
    (tmp_path / "samples").mkdir()
    (tmp_path / name).write_text("mine")
    with (
        pytest.raises(OutputError, match=rf"{name}: would be replaced, .* another out, or replace it with force=True"),
        new_output(tmp_path, FILES, INPUTS, force=False),
    ):
        raise AssertionError("no work")
    assert (tmp_path / name).read_text() == "mine"
    make(tmp_path, "one", force=True)
    assert set(told(tmp_path).values()) == {"one"}


@pytest.mark.parametrize("force", [False, True])
def test_other_files_are_never_removed(tmp_path: Path, force: bool) -> None:
    mine = ("samples/mine", "results/x", ".new-mine/x", f".new-{16 * '0'}", "notes.md")
    make(tmp_path, "one", samples=("a", "old"))
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    if force:
        make(tmp_path, "two", force=True)
    else:
        (tmp_path / FIRST).unlink()
        with pytest.raises(OutputError, match="samples/mine: would be replaced"):
            make(tmp_path, "two")
        (tmp_path / "samples" / "mine").rename(tmp_path / "elsewhere")
        make(tmp_path, "two")
        (tmp_path / "elsewhere").rename(tmp_path / "samples" / "mine")
    assert {name for name, text in told(tmp_path).items() if text == "mine"} == set(mine)
    assert not (tmp_path / "samples" / "old").exists()


def test_a_record_removes_nothing_outside(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "one")
    for name in ("mine", "out/mine"):
        (tmp_path / name).write_text("mine")
    record = json.loads((out / RECORD).read_text())
    record["files"] |= {"../mine": "", "samples/../mine": "", "samples/../../mine": "", str(tmp_path / "mine"): ""}
    (out / RECORD).write_text(json.dumps(record))
    make(out, "two", force=True)
    assert (tmp_path / "mine").read_text() == (out / "mine").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_in_the_place_of_a_file_or_a_link_is_left_alone(tmp_path: Path, force: bool) -> None:
    (tmp_path / "mine").mkdir()
    for at, (name, link) in enumerate((("report.md", False), ("report.md", True), ("samples", True))):
        out = tmp_path / str(at)
        (out / "x").mkdir(parents=True)
        (out / name).symlink_to(tmp_path / "mine") if link else (out / name).mkdir()
        with pytest.raises(OutputError, match=rf"{name}: (would be replaced|is no)"):
            make(out, "one", force=force)
        assert sorted(path.name for path in out.iterdir()) == sorted([name, "x"])
    assert not list((tmp_path / "mine").iterdir())


def test_two_runs_at_once(tmp_path: Path) -> None:
    """The second is refused, and touches nothing of the first."""
    out = tmp_path / "out"
    with new_output(out, FILES, INPUTS, force=False) as output:
        assert output is not None
        (output.ready / FIRST).write_text("one")
        for force in (False, True):
            with pytest.raises(OutputError, match="out: another run is writing there; wait for it"):
                make(out, "two", force=force)
        output.finish()
    assert told(out) == {FIRST: "one"}
    make(out, "two", INPUTS | {"seed": 1}, force=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OutputError("full")], ids=["KeyboardInterrupt", "OutputError"])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with new_output(tmp_path / "new" / "out", FILES, INPUTS, force=False) as output:
            assert output is not None
            (output.ready / FIRST).write_text("one")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert not list(tmp_path.iterdir())


def test_what_came_to_be_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with new_output(tmp_path, FILES, INPUTS, force=False) as output:
        assert output is not None
        for name in (FIRST, "report.md"):
            (output.ready / name).write_text("one")
        (tmp_path / "report.md").write_text("mine")
        with pytest.raises(OutputError, match=r"report\.md: would be replaced"):
            output.finish()
    assert told(tmp_path) == {"report.md": "mine"}


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
@pytest.mark.parametrize("force", [False, True])
def test_nothing_goes_into_a_model_or_an_artifact(tmp_path: Path, name: str, force: bool) -> None:
    (tmp_path / name).write_text("{}")
    with (
        pytest.raises(OutputError, match=rf"holds {name}, so it is a model or an artifact; choose another out"),
        new_output(tmp_path, ["report.json"], {}, force=force),
    ):
        pass
    assert [one.name for one in tmp_path.iterdir()] == [name]

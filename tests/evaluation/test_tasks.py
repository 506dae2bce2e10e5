"""Tasks by name: folders, YAML, shipped ones; and one clear line for everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltacompress.errors import InputError
from deltacompress.evaluation.tasks.load import LocalTask, load_tasks, read_spec, task_names
from deltacompress.evaluation.tasks.records import Sample, Templates, data_hash, read_samples, text_hash
from deltacompress.files.content import list_content


def load(name: str, task_dir: Path | None, *, few_shot: int | None = None, limit: int | None = None) -> LocalTask:
    (task,) = load_tasks([name], task_dir=task_dir, few_shot=few_shot, limit=limit)
    assert isinstance(task, LocalTask)
    return task


def test_a_folder_is_a_task(task_dir: Path) -> None:
    colours, echo = load("colours", task_dir), load("echo", task_dir, limit=5)
    assert (colours.spec.kind, len(colours.samples), len(colours.samples[0].choices)) == ("choose", 24, 3)
    assert (echo.spec.kind, len(echo.samples), echo.examples) == ("generate", 5, ())
    assert len(load("echo", task_dir, few_shot=2).examples) == 30
    assert echo.source == "echo/validation.jsonl"
    assert {"colours", "echo", "boolq"} <= set(task_names(task_dir))


def test_yaml_maps_fields(tmp_path: Path) -> None:
    (tmp_path / "ni").mkdir()
    record = {"definition": "Turn it round.", "input": "a b", "output": ["b a"]}
    (tmp_path / "ni" / "validation.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "ni.yaml").write_text(
        'task: ni\nkind: generate\nprompt: "{{definition}}\\nInput: {{ input }}\\nOutput:"\ncompletion: " {{output}}"\n'
    )
    assert load("ni", tmp_path).samples == (Sample("Turn it round.\nInput: a b\nOutput:", " b a"),)


def test_every_shipped_task_is_well_formed() -> None:
    paths = list_content("evals/tasks", ".yaml")
    assert {"boolq", "truthfulqa_mc1", "truthfulqa_mc2", "logiqa", "gsm8k", "hellaswag"} <= {
        path.stem for path in paths
    }
    for path in paths:
        assert read_spec(path).description


@pytest.mark.parametrize("name", ["demo-palindrome", "demo-majority"])
def test_the_demo_tasks_bring_their_data(name: str) -> None:
    assert load(name, None, limit=3).samples[0].prompt


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "no task named"),
        (["echo", "echo"], "named twice"),
        (["ehco"], "unknown task 'ehco': did you mean echo"),
        (["bolq"], "did you mean boolq"),
        (["xxxxxxxx"], "there are amazon_category"),
        (["wikisql"], "its data is missing"),
    ],
)
def test_bad_names(task_dir: Path, names: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_tasks(names, task_dir=task_dir, few_shot=None, limit=None)


def test_data_that_is_not_shipped_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not shipped; give task_dir DIR with wikisql/"):
        load("wikisql", None)
    with pytest.raises(InputError, match="no such folder"):
        load("wikisql", tmp_path / "nowhere")


GOOD = {"prompt": "a", "completion": "b"}


def test_a_folder_that_no_task_can_be_named_after(tmp_path: Path) -> None:
    (tmp_path / "my task").mkdir()
    (tmp_path / "my task" / "validation.jsonl").write_text(json.dumps(GOOD) + "\n")
    with pytest.raises(InputError, match=r"my task: its name is none for a task: .*; rename the folder"):
        load("my task", tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "zero samples"),
        ("\n\n", "zero samples"),
        ("{", r"validation.jsonl:1: not JSON"),
        ("[]", "a list, not an object"),
        (json.dumps(GOOD) + '\n{"prompt": "a"}', r"validation.jsonl:2: no field `completion`"),
        ('{"prompt": 1, "completion": "b"}', "field `prompt` is a int"),
        ('{"prompt": "a", "completion": ""}', "completion is empty"),
        (json.dumps(GOOD | {"choices": ["b"]}), "at least two"),
        (json.dumps(GOOD | {"choices": ["b", "b"]}), "given twice"),
        (json.dumps(GOOD | {"choices": ["c", "d"]}), "not among the choices"),
    ],
)
def test_bad_samples(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "validation.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_samples(path, Templates(), choose=None)


def test_a_line_separator_in_a_text_ends_no_line(tmp_path: Path) -> None:
    record = {"prompt": "a\u2028b\x85", "completion": "c"}
    (tmp_path / "v.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_samples(tmp_path / "v.jsonl", Templates(), choose=None) == (Sample("a\u2028b\x85", "c"),)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such task file"):
        read_samples(tmp_path / "x.jsonl", Templates(), choose=None)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not UTF-8"):
        read_samples(tmp_path / "b.jsonl", Templates(), choose=None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task: t\nkind: generate\nshots: 3\n", "shots: no such field"),
        ("task: t\nkind: draw\n", "kind|draw"),
        ("task: other\nkind: generate\n", "name the file other.yaml"),
        ("task: t\ntask: t\nkind: generate\n", "given twice"),
        ("- 1\n", "task"),
    ],
)
def test_bad_task_files(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_spec(path)


def test_hashes_see_words_and_order() -> None:
    assert text_hash("A  b\nc") == text_hash("a b C")
    assert text_hash("a b") != text_hash("b a")
    one, two = Sample("a", "b"), Sample("c", "d")
    assert data_hash((one, two)) != data_hash((two, one))

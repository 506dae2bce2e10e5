"""What can be asked of a model, by name: a folder of JSON Lines, a YAML file, or a suite of lm-eval's library.

A name is looked up in the task folder first (`<name>.yaml`, or `<name>/validation.jsonl` without any YAML), then among
the shipped files of evals/tasks. A YAML file that lm-eval itself would read can hold code (`!function`), so these are
not lm-eval's: they are plain data with a fixed list of keys, and are turned into lm-eval tasks by harness.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deltacompress.errors import InputError, option
from deltacompress.evaluation.tasks.records import Sample, Templates, read_samples
from deltacompress.files.content import content_path, shipped_yaml
from deltacompress.files.strict_yaml import read_yaml

VALIDATION, TRAIN = "validation.jsonl", "train.jsonl"
_FOLDER = "evals/tasks"
_BELOW = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$"
"""A folder below another: plain names, none of which leads out."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    description: str = ""
    licence: str = ""
    few_shot: Annotated[int, Field(ge=0, le=64)] = 0


class LocalSpec(_Spec):
    """A task with data in local files.

    kind: "choose" (the choice with the highest summed log-likelihood, end of text included) or "generate" (the greedy
    continuation must be the completion, and then end). data: folder with validation.jsonl and, for few-shot,
    train.jsonl: relative to the task folder, or a shipped one (registry/...); absent: the folder named like the task.
    prompt, completion, choices: templates over the fields of a record. max_new_tokens: absent = as many as the longest
    right answer has, and one to end it. stop: texts that end an answer, beside the end-of-text
    token. match: "tokens" (the same ids, and then the end) or "text" (the same text, however it was spelled in tokens).
    """

    kind: Literal["choose", "generate"]
    data: Annotated[str, Field(pattern=_BELOW)] | None = None
    prompt: str = "{{prompt}}"
    completion: str = "{{completion}}"
    choices: str | tuple[str, ...] = "choices"
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    stop: tuple[str, ...] = ()
    match: Literal["tokens", "text"] = "tokens"


class SuiteSpec(_Spec):
    """A task of lm-eval's own library, whose data comes from the hub. metric: which of its metrics counts here.

    suite: its name there, never a file: lm-eval would run the functions that a YAML file names.
    """

    kind: Literal["suite"]
    suite: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}$")]
    metric: str = "acc"
    filter: str = "none"


Spec = Annotated[LocalSpec | SuiteSpec, Field(discriminator="kind")]
_SPEC: TypeAdapter[LocalSpec | SuiteSpec] = TypeAdapter(Spec)


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A local task, data and all. examples: for few-shot prompts; path: the file of the samples."""

    spec: LocalSpec
    samples: tuple[Sample, ...]
    examples: tuple[Sample, ...]
    path: Path

    @property
    def source(self) -> str:
        """Where the samples came from, without folders of this machine."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def name(self) -> str:
        return self.spec.task


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """A task that lm-eval loads itself."""

    spec: SuiteSpec

    @property
    def name(self) -> str:
        return self.spec.task


Task = LocalTask | SuiteTask


def load_tasks(names: list[str], *, task_dir: Path | None, few_shot: int | None, limit: int | None) -> list[Task]:
    """Find every task and read its data.

    few_shot overrides the tasks' own number; limit takes the first samples of each.

    Raises:
        InputError: no names, a name twice, an unknown task (the nearest is told), or data that is missing or wrong.
    """
    if not names:
        raise InputError(f"no task named; there are {', '.join(task_names(task_dir))}", where=option("tasks"))
    if len(set(names)) != len(names):
        raise InputError("a task is named twice", where=f"{option('tasks')} {','.join(names)}")
    check_task_dir(task_dir)
    return [_load(name, task_dir, few_shot, limit) for name in names]


def check_task_dir(task_dir: Path | None) -> None:
    """Make sure that the folder of the user's own tasks is there.

    Raises:
        InputError: it is not.
    """
    if task_dir is not None and not task_dir.is_dir():
        raise InputError(
            "no such folder",
            where=f"{option('task_dir')} {task_dir}",
            way_out="give one with <task>/validation.jsonl in it",
        )


def task_names(task_dir: Path | None) -> list[str]:
    """Every task that could be named."""
    names = set(shipped_yaml(_FOLDER))
    if task_dir is not None and task_dir.is_dir():
        names |= {path.parent.name for path in task_dir.glob(f"*/{VALIDATION}")}
        names |= {path.stem for path in task_dir.glob("*.yaml")}
    return sorted(names)


def _load(name: str, task_dir: Path | None, few_shot: int | None, limit: int | None) -> Task:
    spec = find_spec(name, task_dir)
    shots = spec.few_shot if few_shot is None else few_shot
    spec = spec.model_copy(update={"few_shot": shots})
    if isinstance(spec, SuiteSpec):
        return SuiteTask(spec)
    folder = _folder(spec, task_dir)
    templates = Templates(spec.prompt, spec.completion, spec.choices)
    choose = spec.kind == "choose"
    samples = read_samples(folder / VALIDATION, templates, choose=choose)[:limit]
    if not samples:
        raise InputError(
            f"zero samples left after {option('limit')} {limit}", where=f"task {name}", way_out="give a larger one"
        )
    examples = read_samples(folder / TRAIN, templates, choose=choose) if shots else ()
    return LocalTask(spec, samples, examples, folder / VALIDATION)


def find_spec(name: str, task_dir: Path | None) -> LocalSpec | SuiteSpec:
    """The description of a task; where there is none, its folder speaks for itself.

    Raises:
        InputError: no such task (the nearest is told), or as read_spec.
    """
    if task_dir is not None:
        own = task_dir / f"{name}.yaml"
        if own.is_file():
            return read_spec(own)
        data = task_dir / name / VALIDATION
        if data.is_file() and name not in shipped_yaml(_FOLDER):
            first = read_samples(data, Templates(), choose=None)
            try:
                return LocalSpec(task=name, kind="choose" if first[0].choices else "generate")
            except ValidationError as error:
                told = f"its name is none for a task: {error.errors()[0]['msg']}"
                raise InputError(told, where=data.parent, way_out="rename the folder") from error
    known = task_names(task_dir)
    shipped = shipped_yaml(_FOLDER)
    if name not in shipped:
        close = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        told = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise InputError(f"unknown task {name!r}: {told} (own ones: {option('task_dir')} DIR with {name}/{VALIDATION})")
    return read_spec(shipped[name])


def read_spec(path: Path) -> LocalSpec | SuiteSpec:
    """Read one task file.

    Raises:
        InputError: not YAML, or a key that is unknown, missing or wrong; names it.
    """
    data = read_yaml(path, what="task", docs="docs/evaluation.md", kind=InputError)
    try:
        spec = _SPEC.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"][1:] or first["loc"])
        told = "no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise InputError(f"{at or 'task'}: {told}", where=path, way_out="see docs/evaluation.md") from error
    if spec.task != path.stem:
        raise InputError(f"its task is named {spec.task!r}", where=path, way_out=f"name the file {spec.task}.yaml")
    return spec


def _folder(spec: LocalSpec, task_dir: Path | None) -> Path:
    """The folder with the data of a task.

    Raises:
        InputError: there is none.
    """
    if spec.data is not None and spec.data.startswith("registry/"):
        return content_path(*spec.data.split("/"))
    if task_dir is None:
        raise InputError(
            "its data is not shipped",
            where=f"task {spec.task}",
            way_out=f"give {option('task_dir')} DIR with {spec.data or spec.task}/{VALIDATION}",
        )
    folder = task_dir / (spec.data or spec.task)
    if not (folder / VALIDATION).is_file():
        raise InputError(
            f"its data is missing: no {folder / VALIDATION}", where=f"task {spec.task}", way_out="put it there"
        )
    return folder

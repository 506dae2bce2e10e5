"""The jobs file of a fleet: a base, what its jobs have in common, and a line or more for each fine-tuned model.

Read and checked without torch. Paths mean what they mean on the command line: relative to the working directory, or the
id of a model of the hub.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from deltacompress.codecs.recipe import MAX_SEED, Recipe
from deltacompress.compression.job import CompressionJob, device_memory
from deltacompress.devices import DeviceName
from deltacompress.errors import DeltaCompressError, InputError
from deltacompress.files.strict_yaml import Lines, read_yaml_with_lines

DOCS = "docs/cli.md"


_UNKNOWN = {"devices": "is for one model, not for a jobs file: each of its workers has one GPU"} | dict.fromkeys(
    ("target_ratio", "max_size", "max_kl", "judge"),
    "is for one model, not for a jobs file: compress one by it, and give its OUT.recipe.yaml as recipe",
)
"""What is said of keys that are options of `compress` and no keys of a jobs file."""


def _as_typed(text: str) -> str:
    """As a shell would hand it over."""
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return os.path.expanduser(text) if text.startswith("~/") else text


_Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_as_typed)]


def _a_size(text: str) -> str:
    try:
        device_memory(text)
    except InputError as error:
        raise ValueError(f"{error.what}; {error.way_out}") from error
    return text


class Choices(BaseModel):
    """What `defaults` and each fine-tuned model can say, as the options of `compress`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    recipe: _Text | None = None
    calibration: _Text | None = None
    samples: Annotated[int, Field(strict=True, ge=1)] | None = None
    seq_len: Annotated[int, Field(strict=True, ge=2)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    lossless: Literal["none", "zstd", "gdeflate", "ans"] | None = None
    device: DeviceName | None = None
    device_memory: Annotated[str, Field(strict=True), AfterValidator(_a_size)] | None = None


class Finetune(Choices):
    """One job; what it does not say, `defaults` do.

    model: directory or id. out: where its artifact goes. name: of the entry in the zoo that it also becomes.
    """

    model: _Text
    out: _Text | None = None
    name: _Text | None = None


class JobsFile(BaseModel):
    """All of it.

    base: of every job. out: the folder of artifacts that have a name only. zoo: where names are published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: _Text
    out: _Text | None = None
    zoo: _Text | None = None
    defaults: Choices = Choices()
    finetunes: Annotated[list[Finetune], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class FleetJob:
    """One fine-tuned model. name: of its entry in the zoo, if it gets one. place: where the jobs file speaks of it."""

    job: CompressionJob
    name: str | None
    place: str

    @property
    def label(self) -> str:
        """What people call it: its name, else its output directory."""
        return self.name or str(self.job.out)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Name the jobs file, the line and the job in whatever error this block raises."""
        try:
            yield
        except DeltaCompressError as error:
            raise error.retold(type(error), within=f"{self.place} ({self.label})") from error


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a jobs file says. path: of the file. zoo: where the jobs with a name are published."""

    path: Path
    zoo: str | None
    jobs: tuple[FleetJob, ...]

    @classmethod
    def load(cls, path: Path, *, zoo: str | None = None, resume: bool = False, force: bool = False) -> Fleet:
        """Read a jobs file. zoo: in the place of the file's; resume, force: of every job, as `compress` takes them.

        Raises:
            InputError: it cannot be read, a key is unknown or given twice, a value is wrong, a name or an output is
                there twice or lies inside another. RecipeError: no such recipe.
        """
        way_out = f"give a YAML file as {DOCS} shows one"
        data, lines = read_yaml_with_lines(path, what="jobs file", docs=DOCS, kind=InputError, way_out=way_out)
        file = _parsed(data, lines, path)
        jobs = []
        for i, one in enumerate(file.finetunes):
            place = f"{path}, line {lines.of('finetunes', i)}"
            jobs.append(FleetJob(_job(file, one, place, resume=resume, force=force), one.name, place))
        _check_apart(jobs)
        return cls(path, zoo or file.zoo, tuple(jobs))


def _parsed(data: Any, lines: Lines, path: Path) -> JobsFile:
    if not isinstance(data, dict):
        told = f"a jobs file is a mapping with base and finetunes, not {type(data).__name__}"
        raise InputError(told, where=path, way_out=f"see {DOCS}")
    try:
        return JobsFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at, given = first["loc"], reprlib.repr(first["input"])
        told = _UNKNOWN.get(str(at[-1]), "unknown key")
        if first["type"] != "extra_forbidden":
            told = f"{first['msg']} (got {given:.80})"
        if first["type"] == "missing":
            told, at = f"{at[-1]} is missing", at[:-1]
        where = f"{path}, line {lines.of(*at)}{_of_job(data, at)}"
        key = ".".join(str(part) for part in at if not isinstance(part, int))
        raise InputError(f"{key}: {told}" if key else told, where=where, way_out=f"see {DOCS}") from error


def _of_job(data: dict[Any, Any], at: tuple[int | str, ...]) -> str:
    """Which job a place in the file is of, if it is of one that says so."""
    if len(at) < 2 or at[0] != "finetunes" or not isinstance(at[1], int):
        return ""
    entry = data["finetunes"][at[1]]
    said = [entry.get(key) for key in ("name", "out", "model")] if isinstance(entry, dict) else []
    label = next((one for one in said if isinstance(one, str)), None)
    return "" if label is None else f" ({label:.200})"


def _job(file: JobsFile, one: Finetune, place: str, *, resume: bool, force: bool) -> CompressionJob:
    chosen = {**file.defaults.model_dump(exclude_none=True), **one.model_dump(exclude_none=True)}
    model, name = chosen.pop("model"), chosen.pop("name", None)
    out, where = chosen.pop("out", None), f"{place} ({name or model})"
    if out is None:
        if name is None or file.out is None:
            told = "neither out nor name" if name is None else "a name alone, and the file has no out to put it under"
            raise InputError(f"has {told}", where=where, way_out="say where its artifact goes, out: DIRECTORY")
        out = os.path.join(file.out, name)
    if "recipe" not in chosen:
        raise InputError("has no recipe", where=where, way_out="name one there, or under defaults")
    try:
        recipe = Recipe.load(chosen.pop("recipe"))
    except DeltaCompressError as error:
        raise error.retold(type(error), within=where) from error
    return CompressionJob(
        base=_model(file.base), finetuned=_model(model), recipe=recipe, out=Path(out), resume=resume, force=force,
        **chosen,
    )  # fmt: skip


def _model(given: str) -> str:
    """`./org/name` is a directory, never the id of a model of the hub."""
    return str(Path.cwd() / given) if given.startswith("./") else given


def _check_apart(jobs: list[FleetJob]) -> None:
    """No two jobs write to one place, under one name or inside each other."""
    names: dict[str, FleetJob] = {}
    places: dict[Path, FleetJob] = {}
    for one in jobs:
        if one.name is not None and (other := names.setdefault(one.name, one)) is not one:
            raise InputError(f"the name {one.name} is given twice, first on {_line(other)}", where=one.place,
                             way_out="give each its own")  # fmt: skip
        for place in _written(one.job.out):
            if (other := places.setdefault(place, one)) is not one:
                raise InputError(
                    f"writes to {place}, as the job on {_line(other)} does",
                    where=f"{one.place} ({one.label})",
                    way_out="give each its own out",
                )
    for one in jobs:
        for parent in _written(one.job.out)[0].parents:
            if (other := places.get(parent, one)) is not one:
                raise InputError(f"its output lies inside that of the job on {_line(other)}, {parent}",
                                 where=f"{one.place} ({one.label})", way_out="put them side by side")  # fmt: skip


def _written(out: Path) -> tuple[Path, ...]:
    """Everything that a job makes, beside each other."""
    whole = Path(os.path.realpath(out))
    return tuple(whole.with_name(whole.name + suffix) for suffix in ("", ".partial", ".job.json"))


def _line(one: FleetJob) -> str:
    return one.place.rpartition(", ")[2]

"""Samples of a local task, read from JSON Lines and checked to the last one, each error with its file and line.

A record has `prompt` and `completion`, and `choices` where the answer is one of several. Other field names are mapped
by a task's templates (natural-instructions data has `definition`, `input` and `output`, say).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacompress.errors import InputError
from deltacompress.files.regular import ANYWHERE, read_text, unreadable

_MAX_BYTES = 1 << 30
_FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One question: the prompt, the right answer, and the answers to choose from (empty: the model writes its own)."""

    prompt: str
    completion: str
    choices: tuple[str, ...] = ()

    @property
    def text_hash(self) -> str:
        """What makes two samples the same: their words, whatever the white space and the case."""
        return text_hash(self.prompt + self.completion)


def text_hash(text: str) -> str:
    """sha256 of a text's lower-case words."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Templates:
    """How a record becomes a sample; `{{field}}` stands for a field of the record."""

    prompt: str = "{{prompt}}"
    completion: str = "{{completion}}"
    choices: str | tuple[str, ...] = "choices"
    """A field that holds a list, or the list itself, the same for every record."""


def read_samples(path: Path, templates: Templates, *, choose: bool | None) -> tuple[Sample, ...]:
    """All samples of a file. choose: whether each must have choices (True), has none (False), or either (None).

    Raises:
        InputError: missing, told or empty; a line that is not JSON or lacks a field; an answer that is no choice.
    """
    try:
        text = read_text(path, at_most=_MAX_BYTES, links=ANYWHERE)
        lines = text.split("\n")  # splitlines would also cut at U+2028 in a text
    except FileNotFoundError as error:
        raise InputError(
            "no such task file; a task needs validation.jsonl (and train.jsonl for few-shot)", where=path
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=path, way_out="convert it to UTF-8") from error
    except OSError as error:
        raise unreadable(InputError, path, error) from error
    samples = [
        _sample(line, f"{path}:{number}", templates, choose)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not samples:
        raise InputError("zero samples in it", where=path, way_out="give a file with at least one line")
    return tuple(samples)


def _sample(line: str, where: str, templates: Templates, choose: bool | None) -> Sample:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error}); each line needs one JSON object", where=where) from error
    if not isinstance(record, dict):
        raise InputError(f"a {type(record).__name__}, not an object with prompt and completion", where=where)
    prompt = _fill(templates.prompt, record, where)
    completion = _fill(templates.completion, record, where)
    if not completion:
        raise InputError("the completion is empty", where=where, way_out="give the right answer")
    if choose is False:
        return Sample(prompt, completion)
    choices = record.get(templates.choices, ()) if isinstance(templates.choices, str) else templates.choices
    if not choices and choose is None:
        return Sample(prompt, completion)
    if not isinstance(choices, list | tuple) or len(choices) < 2 or not all(isinstance(x, str) and x for x in choices):
        raise InputError(f"choices must be a list of at least two texts; got {str(choices)[:60]!r}", where=where)
    if len(set(choices)) != len(choices):
        raise InputError("a choice is given twice; a sample needs choices that differ", where=where)
    if completion not in choices:
        raise InputError(
            f"the completion {completion[:60]!r} is not among the choices", where=where, way_out="add it to them"
        )
    return Sample(prompt, completion, tuple(choices))


def _fill(template: str, record: Mapping[str, Any], where: str) -> str:
    def field(match: re.Match[str]) -> str:
        if match[1] not in record:
            raise InputError(f"no field `{match[1]}`; it has {', '.join(sorted(record)) or 'none'}", where=where)
        value = record[match[1]]
        if isinstance(value, list) and len(value) == 1:  # natural-instructions: one reference answer in a list
            value = value[0]
        if not isinstance(value, str):
            raise InputError(f"field `{match[1]}` is a {type(value).__name__}, not a text", where=where)
        return value

    return _FIELD.sub(field, template)


def data_hash(samples: tuple[Sample, ...]) -> str:
    """sha256 over the samples, in order: what says that two reports measured on the same data."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.prompt, sample.completion, *sample.choices]).encode() + b"\n")
    return digest.hexdigest()

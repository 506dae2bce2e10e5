"""YAML without its traps: what PyYAML would quietly read as something else is refused, with the line.

Two traps meet recipes. A key given twice: PyYAML keeps the last one. And `2:4` without quotes: to YAML 1.1 that is the
number 124, in base 60.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deltacompress.errors import InputError
from deltacompress.files.regular import ANYWHERE, read_text

_MAX_BYTES = 1 << 20
"""Of a file; what is written by hand has a thousandth of it."""
_MAX_MERGED = 10_000


class _Strict(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, numbers in base 60, and merges (`<<`) that multiply without end."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what a mapping merges into it; merges of merges grow tenfold with each line of ten."""
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            problem = f"merges more than {_MAX_MERGED} entries"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class Lines:
    """Where in a file the values of a YAML document stand."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._root = root

    def of(self, *path: str | int) -> int:
        """The line of the value that keys and indices lead to (of its key, where it has one), as far as they lead."""
        node, line = self._root, 1 if self._root is None else self._root.start_mark.line + 1
        for step in path:
            mark, node = _below(node, step)
            if mark is None:
                break
            line = mark.line + 1
        return line


def _below(node: yaml.Node | None, step: str | int) -> tuple[yaml.Mark | None, yaml.Node | None]:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark, node.value[step]
    if isinstance(node, yaml.MappingNode):
        return next(((key.start_mark, value) for key, value in node.value if key.value == step), (None, None))
    return None, None


def read_yaml(path: Path, *, what: str, docs: str, kind: type[InputError]) -> Any:
    """The plain data of the one YAML document in a file. what: "recipe", say; docs: where such files are described.

    Raises:
        kind: it cannot be read, is not YAML, holds a key given twice or an unquoted `n:m`; names the line.
    """
    return read_yaml_with_lines(path, what=what, docs=docs, kind=kind)[0]


def read_yaml_with_lines(
    path: Path, *, what: str, docs: str, kind: type[InputError], way_out: str = ""
) -> tuple[Any, Lines]:
    """As `read_yaml`, and where in the file each value stands. way_out: of a file that cannot be read."""
    try:
        text = read_text(path, at_most=_MAX_BYTES, links=ANYWHERE)
    except UnicodeDecodeError as error:
        told = f"not YAML (byte {error.start} is not UTF-8)"
        raise kind(told, where=path, way_out="save it as UTF-8 text") from error
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        told = f"the {what} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise kind(told, where=path, way_out=way_out or f"give a YAML file or the name of a shipped {what}") from error
    try:
        return yaml.load(text, _Strict), Lines(yaml.compose(text, _Strict))  # noqa: S506 - a SafeLoader, made stricter
    except RecursionError as error:
        raise kind(f"nested too deeply to be a {what}", where=path, way_out=f"see {docs}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, a number beyond Python's limit
        raise kind(_told(error, docs), where=path) from error


def _told(error: Exception, docs: str) -> str:
    told = " ".join(str(error).split())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        told = f"line {error.problem_mark.line + 1}: {error.problem}"
        if isinstance(error, yaml.constructor.ConstructorError):  # YAML it is, but not plain data without traps
            return f"{told}; mend it there"
    return f"not YAML ({told}); mend it, see {docs}"


def _mapping(loader: _Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                problem = f"{key.value!r} is given twice in one mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Strict, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:
        problem = f"{node.value} would be a number in base 60: quote it, '{node.value}'"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)
_Strict.add_constructor("tag:yaml.org,2002:int", _number)
_Strict.add_constructor("tag:yaml.org,2002:float", _number)

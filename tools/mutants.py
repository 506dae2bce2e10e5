"""Plants small faults in one room and counts those that its tests catch: `make mutants ROOM=numerics`.

mutmut does the work: it changes one thing in one function (an operator, a number, an argument, a default) and runs the
tests that reach that function. It does so in a copy of the checkout, which stays below build/mutants/ROOM with the list
of survivors; nothing of the checkout is touched. docs/testing.md says how to read the result, and holds the figures.

    ROOM    a folder or file of the package: numerics, zoo/care/gc.py
    TESTS   the tests to hold it against, if they are not tests/ROOM or tests/test_ROOM.py
    SAMPLE  how many faults to plant, drawn with a fixed seed; 0: all that there are
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "deltacompress"
CAUGHT = {1: "caught", 3: "caught", 36: "timeout", 24: "timeout", -24: "timeout", 152: "timeout", 255: "timeout"}
SURVIVED, NO_TESTS = 0, (5, 33)
PROGRAMS = {"_gdeflate_child.py"}  # started by path with nothing but the standard library, and mutmut would be needed
TELLING = {"note", "warn", "phase", "step", "progress"}  # the methods of reporters and consoles that take a text
Function = tuple[ast.AST, list[str]]
"""Its syntax tree and its lines."""


def main() -> int:
    """Plant, test, print one row a file."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("room")
    parser.add_argument("--tests", default="")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    files = _sources(chosen.room)
    tests = chosen.tests.split() or _tests(chosen.room)
    copy = ROOT / "build" / "mutants" / chosen.room.removesuffix(".py").replace("/", ".")
    _copy_checkout(copy, files, tests)
    print(f"{len(files)} files of {chosen.room} against {' '.join(tests)}, in {copy}", flush=True)
    names: list[str] = []
    if chosen.sample:
        _mutmut(copy, "run", "none")  # makes the faults, and ends because none of them has that name
        made = sorted(name for codes in _results(copy).values() for name in codes)
        names = random.Random(0).sample(made, min(chosen.sample, len(made)))
    if code := _mutmut(copy, "run", "--max-children", str(chosen.processes), *names):
        sys.exit(f"mutmut ended with {code}: {_log(copy)} says why")
    _report(copy)
    return 0


def _sources(room: str) -> list[str]:
    """The Python files of a room, relative to the checkout."""
    place = ROOT / PACKAGE / room
    place = place if place.exists() else place.with_suffix(".py")
    inside = sorted(file for file in place.rglob("*.py") if file.name not in PROGRAMS)
    found = inside if place.is_dir() else [place] if place.is_file() else []
    if not found:
        sys.exit(f"no {room} in {PACKAGE}/; give a folder or a file of it, as in ROOM=numerics or ROOM=zoo/care/gc.py")
    return [str(file.relative_to(ROOT)) for file in found]


def _tests(room: str) -> list[str]:
    """Where the tests of a room are: beside each other in tests/ as the code is in the package."""
    place = Path(room.removesuffix(".py"))
    for guess in (place, place.with_name(f"test_{place.name}.py"), *place.parents):
        if guess.name and (ROOT / "tests" / guess).exists():
            return [str(Path("tests") / guess)]
    sys.exit(f"no tests/{place}; say which: TESTS='tests/test_a.py tests/test_b.py'")


def _copy_checkout(copy: Path, files: list[str], tests: list[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    shutil.rmtree(copy, ignore_errors=True)
    paths = [Path(name) for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    for path in paths:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    beside = sorted({path.parts[0] for path in paths} - {PACKAGE, "tests", "pyproject.toml"})
    settings = {
        "source_paths": [PACKAGE],
        "only_mutate": files,
        "pytest_add_cli_args_test_selection": tests,
        "also_copy": beside,
    }
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    with (copy / "pyproject.toml").open("a") as file:
        file.write(f"\n[tool.mutmut]\n{lines}\n")


def _mutmut(copy: Path, *arguments: str) -> int:
    shared = {"DELTACOMPRESS_SHARED": os.fspath(ROOT.parent / "shared")}  # the copy lies elsewhere than the checkout
    environment = shared | os.environ | {"OMP_NUM_THREADS": "1"}
    with _log(copy).open("ab") as output:
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, check=False, cwd=copy, env=environment, stdout=output, stderr=output).returncode


def _log(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.log")


def _results(copy: Path) -> dict[str, dict[str, int | None]]:
    """File -> name of a fault -> how its test run ended (None: not run)."""
    folder = copy / "mutants"
    metas = sorted(folder.rglob("*.meta"))
    return {str(meta.relative_to(folder))[:-5]: json.loads(meta.read_text())["exit_code_by_key"] for meta in metas}


def _report(copy: Path) -> None:
    survivors = copy.with_name(f"{copy.name}.survivors")
    row = "{:44} {:>7} {:>7} {:>9} {:>9} {:>9}".format
    print(row("file", "faults", "caught", "survived", "wording", "untested"))
    total = [0, 0, 0, 0, 0]
    with survivors.open("w") as file:
        for source, codes in _results(copy).items():
            run = {name: code for name, code in codes.items() if code is not None}
            functions = _functions(copy / "mutants" / source)
            lived = {name: _pair(functions, name) for name, code in run.items() if code == SURVIVED}
            worded = {name for name, ((before, _), (after, _)) in lived.items() if _is_wording(before, after)}
            for name in lived.keys() - worded:
                (_, before), (_, after) = lived[name]
                file.write("\n".join([name, *_changes(before, after), "", ""]))
            counts = [
                len(run),
                sum(code in CAUGHT for code in run.values()),
                len(lived) - len(worded),
                len(worded),
                sum(code in NO_TESTS for code in run.values()),
            ]
            total = [a + b for a, b in zip(total, counts, strict=True)]
            print(row(source, *counts))
    print(row("in all", *total))
    judged = total[1] + total[2] + total[4]
    print(f"caught: {total[1] / max(judged, 1):.1%} of {judged} faults that are not wording; survivors: {survivors}")


def _functions(path: Path) -> dict[str, Function]:
    """Name -> each function of a file that mutmut wrote, its own name taken out of it."""
    text = path.read_text()
    lines = text.splitlines()
    found: dict[str, Function] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name:
            name, node.name = node.name, ""
            found[name] = node, [line.replace(name, "") for line in lines[node.lineno - 1 : node.end_lineno]]
    return found


def _pair(functions: dict[str, Function], fault: str) -> list[Function]:
    """A function as it is, and with a fault."""
    name = fault.rpartition(".")[-1]
    return [functions[re.sub(r"\d+$", "orig", name)], functions[name]]


def _changes(before: list[str], after: list[str]) -> list[str]:
    return [line for line in difflib.ndiff(before, after) if line[0] in "-+"]


def _is_wording(before: ast.AST, after: ast.AST) -> bool:
    """Whether two functions are the same but for the words of their messages (which this takes out of them)."""
    for tree in (before, after):
        for node in ast.walk(tree):
            for text in _messages(node):
                text.value = ""
    return ast.dump(before) == ast.dump(after)


def _messages(node: ast.AST) -> Iterator[ast.Constant]:
    """What this node tells people: a docstring, what it raises or notes, the help of an option."""
    if isinstance(node, ast.Expr):
        yield from _words(node.value)
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from (word for given in node.exc.args for word in _words(given))
    elif isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called.endswith("Error") or called in TELLING:
            yield from (word for given in node.args for word in _words(given))
        yield from (word for given in node.keywords if given.arg == "help" for word in _words(given.value))


def _words(node: ast.expr) -> Iterator[ast.Constant]:
    """The strings that a text is put together from. Not those of a key, a comparison or a call in it: they do more."""
    match node:
        case ast.Constant(value=str()):
            yield node
        case ast.JoinedStr(values=parts) | ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            yield from (word for part in parts for word in _words(part))
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, op=ast.Add(), right=other):
            yield from (*_words(one), *_words(other))
        case ast.FormattedValue(value=part):
            yield from _words(part)
        case ast.Call(func=ast.Attribute(value=between, attr="join"), args=[parts]):
            yield from (*_words(between), *_words(parts))


if __name__ == "__main__":
    sys.exit(main())

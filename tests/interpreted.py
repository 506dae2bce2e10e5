"""Triton's interpreter, for the tests of kernels on machines without a GPU.

Triton decides when it is first imported whether it interprets, so such tests run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_its_own_process starts")


def run_inside(file: str, *more: str) -> None:
    """Run a file's tests there, and expect that some pass and none fails; skips where there is no Triton."""
    if INTERPRETED:
        pytest.skip("this is that process")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *more, file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def _spare_what_changes_nothing() -> None:
    """Half of the interpreter's time, with the same results to the bit.

    It works out every sum and product of integers a second time, in 64 bits, for an assertion that it makes only when
    debugging; and it patches Triton's language at every call of a jitted function by another, not once a launch.
    """
    from triton.runtime import interpreter

    builder, launch, patch = interpreter.interpreter_builder, interpreter.GridExecutor.__call__, interpreter._patch_lang
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patched: set[str] = set()  # the modules whose view of the language is, in this launch

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        if fn.__module__ in patched:
            return None  # a launch, which restores by what it gets here, is the first to ask
        patched.add(fn.__module__)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang = patch_once


if INTERPRETED:
    _spare_what_changes_nothing()

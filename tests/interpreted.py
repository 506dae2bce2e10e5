"""Triton's interpreter, for the tests of kernels on machines without a GPU.

Triton decides when it is first imported whether it interprets, so such tests run in processes of their own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""
inside = pytest.mark.interpreted
"""Of a test that runs in such a process alone: tests/test_interpreted.py starts some, which run all of these."""


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

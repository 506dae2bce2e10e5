"""Triton's interpreter, for the tests of kernels on machines without a GPU.

Triton decides when it is first imported whether it interprets, so such tests run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

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

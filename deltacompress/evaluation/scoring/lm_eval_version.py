"""Whether lm-eval is here, told without importing it, which takes seconds."""

from __future__ import annotations

from deltacompress.errors import InputError, install_hint

MINIMUM = (0, 4, 13)


def require_lm_eval() -> str:
    """The version of lm-eval.

    Raises:
        InputError: it is not installed, or too old.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("lm-eval")
    except PackageNotFoundError as error:
        raise InputError(f"evaluating needs lm-eval 0.4.13 or newer: {install_hint('eval')}") from error
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < MINIMUM:
        raise InputError(f"lm-eval {found} is too old, 0.4.13 or newer is needed: {install_hint('eval')}")
    return found

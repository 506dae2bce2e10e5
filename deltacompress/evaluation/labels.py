"""What the models of an evaluation may be called. No torch here."""

from __future__ import annotations

import re

from deltacompress.errors import InputError

FINETUNED_LABEL, BASE_LABEL = "finetuned", "base"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@/-]{0,99}")


def as_file_name(label: str) -> str:
    """A label in the name of a file; those of one run have names of their own."""
    return label.replace("/", "__")


def check_label(label: str) -> None:
    """Make sure that a model can be named so.

    Raises:
        InputError: it cannot.
    """
    if not _LABEL.fullmatch(label):
        raise InputError(
            "use letters, digits and . _ - @ /, at most 100 (LABEL=PATH gives another one)", where=f"label {label!r}"
        )
    if label in (FINETUNED_LABEL, BASE_LABEL):
        raise InputError(
            f"is taken by the {label} model", where=f"label {label}", way_out="give another one (LABEL=PATH)"
        )

"""Text out of data, as a terminal may see it: names of models, tensors and files are chosen by others."""

from __future__ import annotations


def escape(text: str, *, keep: str = "") -> str:
    r"""`text` in one line, with an escape (`\x1b`) for each character that moves the cursor, hides or turns text.

    What can be printed stays as it is, so a name without such characters can be copied. keep: characters to leave.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii") for one in text
    )

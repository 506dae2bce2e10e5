"""Which names a tensor may have: one rule for checkpoints, artifacts and zoos.

Whatever one of them takes, the others take too: what `compress` reads, `restore` writes and a zoo keeps. Letters and
digits of any script and the separators that frameworks use, in the one normal form of Unicode: nothing that two
programs could take for two things, that moves a terminal's cursor, or that ends a line of a log.
"""

from __future__ import annotations

import re
import unicodedata

MAX_NAME = 1024
"""Characters; of a part of an artifact, called `tensor.part`, too."""
RULE = f"letters and digits in NFC, and . _ - / : +, at most {MAX_NAME}"
_RESERVED = "__metadata__"  # what a safetensors header calls its free text
_NAME = re.compile(rf"[\w./:+-]{{1,{MAX_NAME}}}")


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may be called that."""
    fits = _NAME.fullmatch(name) is not None and name != _RESERVED
    return fits and (name.isascii() or unicodedata.is_normalized("NFC", name))


def shown(name: str) -> str:
    """A name that breaks the rule, for a message: one line of ASCII."""
    return ascii(name[:80])

"""What is asked in the place of a recipe: a size, as bytes or as a ratio, or a quality. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltacompress.arguments import size_in_bytes
from deltacompress.errors import InputError, option


@dataclass(frozen=True, slots=True)
class Request:
    """One of the three. ratio: of the fine-tuned checkpoint's bytes to the whole artifact's, at least.

    size: bytes of the whole artifact, at most. kl: KL(fine-tuned || compressed) in nats/token, at most.
    """

    ratio: float | None = None
    size: int | None = None
    kl: float | None = None

    @classmethod
    def of(cls, target_ratio: float | None, max_size: str | int | None, max_kl: float | None) -> Request:
        """What was asked, checked.

        Raises:
            InputError: nothing or more than one was, or no number that can be reached.
        """
        names = ("target_ratio", "max_size", "max_kl")
        given = [name for name, value in zip(names, (target_ratio, max_size, max_kl), strict=True) if value is not None]
        if len(given) != 1:
            told = "nothing is asked" if not given else f"{' and '.join(map(option, given))} ask for two things"
            raise InputError(told, way_out=f"give one of {', '.join(map(option, names))}")
        if target_ratio is not None and not (math.isfinite(target_ratio) and target_ratio > 1):
            raise InputError("is no ratio above 1", where=f"{option('target_ratio')} {target_ratio}")
        if max_kl is not None and not (math.isfinite(max_kl) and max_kl > 0):
            raise InputError("is no number above 0", where=f"{option('max_kl')} {max_kl}")
        size = None
        if max_size is not None:
            size = size_in_bytes(max_size, f"{option('max_size')} {max_size}", such_as="1.2GB")
        return cls(target_ratio, size, max_kl)

    def bytes(self, finetuned_bytes: int) -> int | None:
        """The most that the artifact may take; None where a quality is asked."""
        if self.ratio is not None:
            return int(finetuned_bytes / self.ratio)
        return self.size

    @property
    def told(self) -> str:
        """As whoever asked gave it, for messages."""
        if self.ratio is not None:
            return f"{option('target_ratio')} {self.ratio:g}"
        return f"{option('max_kl')} {self.kl:g}" if self.kl is not None else f"{option('max_size')} {self.size}"

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"{self.ratio:g}x"
        return f"{self.size:,} bytes" if self.size is not None else f"KL {self.kl:g}"

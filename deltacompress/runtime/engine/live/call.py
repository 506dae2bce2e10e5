"""What is asked of a long-lived engine: one request, checked where it is submitted. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltacompress.runtime.engine.generation_config import Latency, Sampling

Message = Mapping[str, str]
"""Of a conversation: its "role" and its "content"."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    id: of the caller's choosing, unlike that of any call that runs. variant: a loaded one, None for the base.
    prompt: text, token ids, or a conversation for the variant's own chat template. max_tokens: new ones at most; None:
    as many as the context takes. stop: strings at which a text ends. bos: as Runtime.generate.
    timeout_s: seconds from submission after which it is ended, running or not; None: never. latency: interactive calls
    pass batch ones that came up to half a minute earlier.
    """

    id: str
    variant: str | None
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    max_tokens: int | None = 32
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    bos: bool | None = None
    timeout_s: float | None = None
    latency: Latency = "interactive"

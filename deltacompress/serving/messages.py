"""What the two processes say to each other: MessagePack of these structs, never a pickle. No torch here.

To the engine: Submit, Cancel, Load, Unload, Stop. From it: Ready once (or Fatal), Accepted or Refused for each Submit,
Batch with what became of calls in one step, State now and then and after each change, Done or Failed for Load, Unload,
Beat all the time.
"""

from __future__ import annotations

from typing import cast

import msgspec

from deltacompress import errors
from deltacompress.errors import DeltaCompressError
from deltacompress.runtime.engine.generation_config import Finish, Latency, Sampling
from deltacompress.runtime.engine.live.call import Call, Message
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Scored, Started, TokenScore
from deltacompress.zoo import errors as zoo_errors


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Any of them; its tag is the name of its class."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as its fields: kind is the name of its class."""

    kind: str
    what: str
    where: str | None
    way_out: str | None

    @classmethod
    def of(cls, error: DeltaCompressError) -> Failure:
        """Its fields; what is no text in them (a path may hold any bytes) is escaped."""
        where = None if error.where is None else _escaped(error.where)
        way_out = None if error.way_out is None else _escaped(error.way_out)
        return cls(type(error).__name__, _escaped(error.what), where, way_out)

    def error(self) -> DeltaCompressError:
        """An error of the same class, where it is known; else of the class whose exit code it would have had."""
        found = vars(errors).get(self.kind) or vars(zoo_errors).get(self.kind)
        kind = found if isinstance(found, type) and issubclass(found, DeltaCompressError) else errors.InputError
        return kind(self.what, where=self.where, way_out=self.way_out)

    def __str__(self) -> str:
        return str(self.error())


class Submit(_Message, frozen=True):
    """A call, as live.Call has it."""

    id: str
    variant: str | None
    prompt: str | tuple[int | dict[str, str], ...]
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    timeout_s: float | None
    latency: Latency = "interactive"

    @property
    def is_conversation(self) -> bool:
        """Whether it goes through a chat template."""
        return any(isinstance(one, dict) for one in self.prompt[:1])

    def call(self) -> Call:
        """What the engine is given."""
        return Call(
            self.id,
            self.variant,
            cast(str | tuple[int, ...] | tuple[Message, ...], self.prompt),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            timeout_s=self.timeout_s,
            latency=self.latency,
        )


class Cancel(_Message, frozen=True):
    """Of a call that may have ended meanwhile."""

    id: str


class Load(_Message, frozen=True):
    """A variant, as Runtime.load has it; is_entry: source is a version of an entry, whatever lies at such a path."""

    id: str
    source: str
    name: str
    over: str | None = None
    pin: bool = False
    is_entry: bool = False


class Unload(_Message, frozen=True):
    """A variant that no call uses."""

    id: str
    name: str


class Stop(_Message, frozen=True):
    """End: every call that is left is cancelled."""


Order = Submit | Cancel | Load | Unload | Stop


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A token, its text, its log-probability in nats; and of the one that was taken, the likeliest in its place."""

    token: int
    text: str
    logprob: float | None
    top: tuple[Score, ...] = ()


class Began(_Message, frozen=True, tag="b", array_like=True):
    """Started of live.events."""

    id: str
    waited_s: float
    prompt: tuple[Score, ...] = ()


class Token(_Message, frozen=True, tag="t", array_like=True):
    """NewToken of live.events."""

    id: str
    token: int
    text: str
    score: Score | None = None


class Over(_Message, frozen=True, tag="e", array_like=True):
    """Ended of live.events."""

    id: str
    finish: Finish
    tokens: int
    error: Failure | None = None


Happening = Began | Token | Over


class Batch(_Message, frozen=True):
    """What one step brought, in order."""

    happenings: tuple[Began | Token | Over, ...]


class Accepted(_Message, frozen=True):
    """A call that waits or runs; its prompt has so many tokens."""

    id: str
    prompt_tokens: int


class Refused(_Message, frozen=True):
    """A call that is not taken; reason: why.

    "input": it makes no sense; "prompt": more than the context takes; "context": prompt and max_tokens are; "model": no
    such variant; "full": the queue is; "busy": its variant's chat template is; "failed".
    """

    id: str
    reason: str
    failure: Failure


class Origin(msgspec.Struct, frozen=True):
    """The version of a zoo's entry that a variant is, and what the reports attached to it measured.

    scores: as they were when it was loaded; None: they cannot be read.
    """

    entry: str
    version: int
    scores: dict[str, float] | None


class Variant(msgspec.Struct, frozen=True):
    """A variant; identity: of what is loaded; place: device, arriving, host, disk or zoo; nbytes: on the device."""

    name: str
    identity: str | None
    place: str
    nbytes: int
    pin: bool
    origin: Origin | None = None


class State(_Message, frozen=True):
    """What is queued and running, who is where, and what was counted since the start.

    Residency and the engine's Counts have the words.
    """

    queued: int
    running: int
    variants: tuple[Variant, ...]
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    kv_tokens: int = 0
    kv_room: int = 0
    preempted: int = 0
    swapped: int = 0


class Beat(_Message, frozen=True):
    """The process lives. step: the number of the one that it is at; an idle engine steps, too."""

    step: int


class Ready(_Message, frozen=True):
    """The engine takes calls; notes: what a user should know."""

    state: State
    notes: tuple[str, ...] = ()


class Fatal(_Message, frozen=True):
    """The engine's process ends, because of this."""

    failure: Failure
    exit_code: int


class Done(_Message, frozen=True):
    """A Load or an Unload."""

    id: str


class Failed(_Message, frozen=True):
    """A Load or an Unload that changed nothing."""

    id: str
    failure: Failure


Report = Ready | Fatal | Accepted | Refused | Batch | State | Beat | Done | Failed


class Start(msgspec.Struct, frozen=True):
    """What the engine's process is told on its standard input; entries: of variants that are such, their versions."""

    orders: str
    reports: str
    base: str
    variants: tuple[tuple[str, str], ...]
    zoo: str | None
    device: str
    dtype: str
    backend: str
    budget_bytes: int | None
    max_batch: int
    max_queue: int
    step_tokens: int
    prefix_bytes: int
    swap_bytes: int = 0
    profile: str | None = None
    entries: dict[str, str] = {}
    tp: int = 1


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def happening(event: Event) -> Happening:
    """An event of the engine, as it is sent."""
    match event:
        case NewToken(id=name, token=token, text=text, score=score):
            return Token(name, token, text, None if score is None else _score(score))
        case Started(id=name, prompt=prompt, waited_s=waited):
            return Began(name, waited, tuple(_score(one) for one in prompt))
        case Ended(id=name, finish=finish, tokens=tokens, error=error):
            return Over(name, finish, tokens, None if error is None else Failure.of(error))


def _score(score: TokenScore) -> Score:
    chosen = score.chosen
    return Score(chosen.token, chosen.text, chosen.logprob, tuple(_plain(one) for one in score.top))


def _plain(one: Scored) -> Score:
    return Score(one.token, one.text, one.logprob)

"""An engine's process without a model: `python stub.py`. A call's tokens are its prompt's, over and over.

Text is as its bytes; the answer to a prompt is that prompt again, a token for each character, until max_tokens. Words
in a prompt make it misbehave: SLOW (a token in 20 ms), FAIL (its variant cannot be had), CRASH (the process dies),
LATE (it times out), STUCK (a step does not end), HEAP (it answers how many objects no collection looks at, of eight
digits). A conversation with HANG takes until one with GO comes, and one with BUSY finds its template busy.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deltacompress.errors import (
    BaseMismatchError,
    ChecksumError,
    DeltaCompressError,
    InputError,
    PromptTooLongError,
    UnsupportedModelError,
)
from deltacompress.models.chat.places import TemplateBusyError
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Scored, Started, TokenScore
from deltacompress.serving.messages import Start
from deltacompress.serving.worker.loop import Served
from deltacompress.serving.worker.process import main

CONTEXT = 4096


class QueueFullError(DeltaCompressError):
    """As the engine's."""


@dataclass
class Running:
    call: Call
    prompt: list[int]
    since: float
    stop_at: int
    told: int = 0
    tokens: list[int] = field(default_factory=list)


def characters(call: Call) -> list[int]:
    prompt = call.prompt
    if isinstance(prompt, str):
        return [ord(one) for one in prompt]
    if isinstance(prompt[0], int):
        return list(prompt)  # type: ignore[arg-type]
    return [ord(one) for one in "".join(f"<{m['role']}>{m['content']}" for m in prompt)]  # type: ignore[index]


def text_of(token: int) -> str:
    return chr(token) if token < 0xD800 else "?"


def score(token: int, top: int) -> TokenScore:
    likeliest = tuple(Scored(token + i, text_of(token + i), -0.5 - i) for i in range(top))
    return TokenScore(Scored(token, text_of(token), -0.5), likeliest)


class StubEngine:
    def __init__(self, start: Start, emit: Callable[[Event], None]) -> None:
        self._emit, self._start = emit, start
        self._queue: deque[Running] = deque()
        self._running: list[Running] = []
        self._cancelled: set[str] = set()
        self._wake = threading.Event()
        self._go = threading.Event()

    @property
    def counts(self) -> Any:
        queued, running = len(self._queue), len(self._running)
        return SimpleNamespace(
            queued=queued,
            running=running,
            prompt_tokens=70,
            known_tokens=30,
            kv_tokens=48,
            kv_room=1024,
            preempted=5,
            swapped=4,
        )

    def submit(self, call: Call) -> int:
        prompt = characters(call)
        words = "".join(map(text_of, prompt))
        if "GO" in words:
            self._go.set()
        if "BUSY" in words:
            raise TemplateBusyError("busy")
        if "HANG" in words:
            assert self._go.wait(60)
        if "HEAP" in words:
            prompt = [ord(one) for one in f"{gc.get_freeze_count():08}"]
        if not prompt:
            raise InputError("the prompt is empty", way_out="write some text")
        if any(token >= 0x110000 for token in prompt):
            raise InputError("tokens out of the vocabulary", where="prompt")
        wanted = CONTEXT if call.max_tokens is None else call.max_tokens
        if len(prompt) >= CONTEXT:
            raise PromptTooLongError(
                f"{len(prompt)} tokens, and the context takes {CONTEXT}", way_out="shorten the prompt"
            )
        if len(self._queue) >= self._start.max_queue:
            raise QueueFullError("too many wait")
        self._queue.append(Running(call, prompt, time.monotonic(), wanted))
        self._wake.set()
        return len(prompt)

    def cancel(self, call_id: str) -> None:
        self._cancelled.add(call_id)
        self._wake.set()

    def wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def step(self) -> bool:
        while self._queue and len(self._running) < self._start.max_batch:
            one = self._queue.popleft()
            if "FAIL" in "".join(map(text_of, one.prompt)):
                self._ended(one, "failed", ChecksumError("differs", where="/secret/path"))
                continue
            self._running.append(one)
            told = one.call.sampling.prompt_logprobs
            prompt = () if told is None else tuple(score(token, told) for token in one.prompt)
            self._emit(Started(one.call.id, prompt, time.monotonic() - one.since))
        if not self._running:  # what was told is sent first
            return bool(self._queue)
        if any("STUCK" in "".join(map(text_of, one.prompt)) and one.tokens for one in self._running):
            time.sleep(3600)
        if any("SLOW" in "".join(map(text_of, one.prompt)) for one in self._running):
            time.sleep(0.02)
        self._running = [one for one in self._running if not self._advanced(one)]
        return True

    def _advanced(self, one: Running) -> bool:
        """One token more; whether it ended."""
        call, words = one.call, "".join(map(text_of, one.prompt))
        if "CRASH" in words and len(one.tokens) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.id in self._cancelled:
            return self._ended(one, "cancelled")
        if "LATE" in words and len(one.tokens) == 3:
            return self._ended(one, "timeout")
        token = one.prompt[len(one.tokens) % len(one.prompt)]
        one.tokens.append(token)
        text = "".join(text_of(t) for t in one.tokens)
        for stop in call.stop:
            if (at := text.find(stop)) >= 0:
                self._tell(one, token, text[one.told : at])
                return self._ended(one, "stop")
        is_last = len(one.tokens) == one.stop_at
        held = 0 if is_last else max((len(stop) - 1 for stop in call.stop), default=0)
        until = max(one.told, len(text) - held)
        self._tell(one, token, text[one.told : until])
        one.told = until
        return is_last and self._ended(one, "length")

    def _tell(self, one: Running, token: int, text: str) -> None:
        top = one.call.sampling.logprobs
        self._emit(NewToken(one.call.id, token, text, None if top is None else score(token, top)))

    def _ended(self, one: Running, finish: Any, error: DeltaCompressError | None = None) -> bool:
        self._emit(Ended(one.call.id, finish, len(one.tokens), error))
        return True

    def close(self) -> None:
        for one in (*self._running, *self._queue):
            self._ended(one, "cancelled")
        self._running, self._queue = [], deque()


class StubModels:
    def __init__(self) -> None:
        self.notes = ["stub: echoes"]
        self.variants: Mapping[str, Any] = {}

    def load(self, artifact: str, name: str, *, over: str | Path | None, zoo: str | None, pin: bool) -> str:
        if "missing" in artifact:
            raise InputError("is no artifact", where=artifact, way_out="give another")
        if name in self.variants:
            raise InputError(f"a variant named {name} is loaded already")
        if name.startswith("team/slow"):
            time.sleep(1)
        if name.startswith("team/other-base"):
            raise BaseMismatchError(f"not the base of {artifact}")
        if name.startswith("team/odd"):
            raise UnsupportedModelError(f"not served: {artifact}")
        self.variants = {
            **self.variants,
            name: SimpleNamespace(variant=SimpleNamespace(identity=f"{artifact} over {over} from {zoo}"), pin=pin),
        }
        return name

    def unload(self, name: str) -> None:
        if name == "sql" or name.startswith("team/held"):
            raise InputError("requests use it", where=name)
        if name.startswith("team/slow"):
            time.sleep(0.5)
        self.variants = {key: one for key, one in self.variants.items() if key != name}

    def residency(self) -> Any:
        found = [
            SimpleNamespace(name=name, place="device", nbytes=100, pin=one.pin) for name, one in self.variants.items()
        ]
        return SimpleNamespace(
            variants=found, hits=3, misses=2, loads=2, evictions=1, device_bytes=100 * len(found), host_bytes=0
        )


def build(start: Start, emit: Callable[[Event], None]) -> Served:
    if "broken" in start.base:
        raise ChecksumError("differs", where="model.safetensors", way_out="fetch it again")
    if "loads" in start.base:
        time.sleep(60)

    def close() -> None:
        if os.path.isdir(start.base):
            Path(start.base, "closed").touch()

    return Served(StubEngine(start, emit), StubModels(), QueueFullError, lambda _: CONTEXT, close=close)


if __name__ == "__main__":
    code = main(build)
    sys.stderr.flush()
    os._exit(code)

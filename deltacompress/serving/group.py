"""The calls of one request, and what becomes of them: from the engine's client to whoever writes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from deltacompress.serving.messages import Happening, Over, Refused


class RefusedError(Exception):
    """The engine did not take a call."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


class Group:
    """The calls of one request, and what becomes of them, in the order in which it comes.

    prompt_tokens: of each call; is_slow: whoever reads was too far behind, and the calls were cancelled.
    most_waiting: events that may wait; None: of an answer that is told at once, all of it waits anyway.
    """

    def __init__(
        self, cancel: Callable[[str], None], model: str, calls: Sequence[str], most_waiting: int | None
    ) -> None:
        self._cancel, self._calls, self._most = cancel, {name: i for i, name in enumerate(calls)}, most_waiting
        self._queue = asyncio.Queue[tuple[int, Happening] | None]()
        self._left = set(calls)
        self.model = model
        self.prompt_tokens: list[int] = []
        self.is_slow = self.is_left = False

    async def happenings(self) -> AsyncIterator[list[tuple[int, Happening]]]:
        """(which call, what happened), all that came meanwhile at once, until each has ended or `leave` was called."""
        while self._left or not self._queue.empty():
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            if None in waiting:
                return
            yield [one for one in waiting if one is not None]

    def put(self, told: Happening) -> None:
        """From the client."""
        if isinstance(told, Over):
            self._left.discard(told.id)
        elif self._most is not None and self._queue.qsize() >= self._most:
            if not self.is_slow:
                self.is_slow = True
                self.leave()
            return
        self._queue.put_nowait((self._calls[told.id], told))

    def leave(self) -> None:
        """Nobody reads any more: cancel what is left."""
        if not self.is_left:
            self.is_left = True
            self._queue.put_nowait(None)
            for name in tuple(self._left):
                self._cancel(name)


@dataclass(slots=True)
class OpenCall:
    """A call that has not ended. begun, last: when it was submitted and brought its last token, in seconds.

    answer: whether it was taken, told by another thread than `early`, which waits for it.
    """

    group: Group
    answer: asyncio.Future[int]
    begun: float
    last: float = 0.0
    early: list[Happening] = field(default_factory=list)

"""Conversations through chat templates, in processes (`_child.py` says why, and how they are talked to).

One process, started when the first conversation comes, forks a worker for each template that is in use; a worker has
its template compiled, so a conversation costs what a message there and back does. Any thread may ask.

AT_ONCE compute at a time, OF_ONE of them for one template, and who comes then waits for WAITS at most (places.py): a
slow template holds up its own conversations first, and nobody's without an end.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress.errors import BackendError, CheckpointError
from deltacompress.models.chat import _child as child
from deltacompress.models.chat.places import Places

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 2.0
"""Of computing, that one conversation may take."""
AT_ONCE, OF_ONE = 4, 2
"""Workers that compute; and of one template, however many ask for it: who comes then waits (places.py)."""
WAITS = 10.0
"""Seconds that a conversation waits for one of them."""
IDLE = 8
"""Workers that wait for another conversation of their template; the least recently used one ends first."""
_ANSWERS_WITHIN = 30.0
"""Seconds, whatever a worker is kept from computing by; long for one that starts, too."""


class _RaisedError(Exception):
    """What a template raised."""


class Renderer:
    """Has the processes. seconds: of computing, that one conversation may take."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock, self._places = threading.Lock(), Places(AT_ONCE, OF_ONE, WAITS)
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._idle: OrderedDict[str, socket.socket] = OrderedDict()  # by template

    def render(
        self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, goes_on: bool
    ) -> str:
        """A conversation in the tokenizer's chat template; goes_on: with the beginning of the model's next message.

        Raises:
            CheckpointError: the template takes more time or memory than it may.
            TemplateBusyError: others computed for too long.
            BackendError: there is no process to run it in.
            Exception: whatever else is wrong with it, or what it raises itself.
        """
        template = tokenizer.get_chat_template()
        known = [{name: value for name, value in one.items() if value is not None} for one in messages]
        tokens = dict(tokenizer.special_tokens_map)
        request = {"template": template, "messages": known, "tokens": tokens, "generate": goes_on}
        with self._places.one(template):
            answer = self._ask(template, json.dumps(request).encode())
        if answer is None:
            raise CheckpointError(
                f"the chat template takes more than it may for this conversation: {self._seconds:g} seconds of "
                f"computing, {child.MEMORY_BYTES >> 20} MiB of memory, {child.TEXT_BYTES >> 20} MiB of text",
                where=tokenizer.name_or_path,
                way_out="save the one that the model was trained with there, or shorten the conversation",
            )
        if "text" not in answer:
            raise _RaisedError(answer["error"])
        return answer["text"]

    def _ask(self, template: str, request: bytes) -> dict[str, str] | None:
        """None: the worker ended, or is kept from answering."""
        with self._lock:
            worker = self._idle.pop(template, None) or self._worker()
        try:
            worker.sendall(len(request).to_bytes(8, "little") + request)
            with worker.makefile("rb") as file:
                head = file.read(8)
                answer: dict[str, str] = json.loads(file.read(int.from_bytes(head, "little"))) if head else {}
        except OSError:
            answer = {}
        except BaseException:
            worker.close()
            raise
        if not answer:
            worker.close()
            return None
        with self._lock:
            self._idle.setdefault(template, worker)
            if self._idle[template] is not worker:
                worker.close()
            self._idle.move_to_end(template)
            if len(self._idle) > IDLE:
                self._idle.popitem(last=False)[1].close()
        return answer

    def _worker(self) -> socket.socket:
        """A new one."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._orders is not None
        ours, its = socket.socketpair()
        ours.settimeout(_ANSWERS_WITHIN)
        with its:
            try:
                socket.send_fds(self._orders, [b"+"], [its.fileno()])
            except OSError as error:
                ours.close()
                raise BackendError("the process that runs chat templates ended", way_out="ask again") from error
        return ours

    def _start(self) -> None:
        self._end()
        self._orders, its = socket.socketpair()
        program = str(Path(child.__file__).resolve())
        argv = [sys.executable, "-P", program, str(its.fileno()), str(self._seconds)]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads take address space
        with its:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True, env=env,
            )  # fmt: skip
        atexit.register(self._end)

    def _end(self) -> None:
        """No process is left: each ends when its socket does."""
        atexit.unregister(self._end)
        while self._idle:
            self._idle.popitem()[1].close()
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._orders = None


_RENDERER = Renderer()


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, goes_on: bool) -> str:
    """By the renderer that a process has; as Renderer.render."""
    return _RENDERER.render(tokenizer, messages, goes_on=goes_on)

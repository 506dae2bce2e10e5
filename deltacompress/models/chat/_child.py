"""The process that chat templates run in, because nothing within a process can stop one.

A template is a program of whoever made the model. Jinja's sandbox keeps it from files and objects, and bounds neither
loops in loops nor `"a" * 10**10` or `2 ** 10**9`, which no other thread can interrupt. So a template runs where the
system ends what takes too long, and refuses memory beyond a limit.

A program, not a module to import: the parent starts it by path, with the number of a socket and the seconds of
computing that a conversation may take. It loads what renders templates, once (a second), and then forks for each worker
that is asked for (milliseconds): a message on the socket carries one end of a pair, over which the worker takes
requests until the other end is closed. Requests and answers are JSON, after 8 bytes that say how many more there are.
A request that goes over the limits ends its worker, without an answer.

    request   {"template", "messages", "tokens": special tokens by role, "generate": whether the model goes on}
    answer    {"text"}, or {"error"}: what the template raised
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

MEMORY_BYTES = 512 << 20
"""Of address space, of which a process that has done nothing takes 140 MiB."""
TEXT_BYTES = 16 << 20
"""Of a text that a template writes; a request over HTTP has 4 MiB."""


def main(orders: socket.socket, seconds: float) -> None:
    """Fork for each that is asked for, until nobody is left to ask."""
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        _, given, _, _ = socket.recv_fds(orders, 1, 1)
        if not given:
            return
        with socket.socket(fileno=given[0]) as taken, suppress(OSError):  # no process to be had: nobody answers
            if os.fork() == 0:
                orders.close()
                _limit_memory()
                try:
                    _work(taken, render_jinja_template, seconds)
                finally:
                    os._exit(1)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _work(taken: socket.socket, render: Any, seconds: float) -> None:
    with taken.makefile("rwb") as file:
        while head := file.read(8):
            request = json.loads(file.read(int.from_bytes(head, "little")))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # the system ends the process then, whatever it is at
            answer = json.dumps(_rendered(request, render)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            file.write(len(answer).to_bytes(8, "little"))
            file.write(answer)
            file.flush()


def _rendered(request: dict[str, Any], render: Any) -> dict[str, str]:
    try:
        (text,), _ = render(
            [request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=request["generate"],
            **request["tokens"],
        )
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        own = type(error).__module__.startswith("jinja2")  # these say what is wrong by themselves
        return {"error": str(error)[:1000] if own else f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > TEXT_BYTES:
        os._exit(1)
    return {"text": text}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))

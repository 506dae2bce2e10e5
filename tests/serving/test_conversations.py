"""Conversations are made into tokens beside everything else: a slow template is its own model's affair."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from serving.harness import Live, eventually, served

from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.serving.messages import Submit
from deltacompress.serving.worker import conversations
from deltacompress.serving.worker.conversations import Conversations


def submit(name: str, variant: str | None) -> Submit:
    return Submit(name, variant, ({"role": "user", "content": name},), 3, Sampling(), (), None)


class Heard:
    """What becomes of orders; `gate` holds up those of variant "slow", which say so in `entered`."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.refused: list[str] = []
        self.cancelled: list[str] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.made = Conversations(self.submit, lambda one: self.refused.append(one.id), self.cancelled.append)

    def submit(self, order: Submit) -> None:
        if order.variant == "slow":
            self.entered.set()
            assert self.gate.wait(20)
        self.submitted.append(order.id)

    def idle(self) -> bool:
        return not self.made._waiting and not self.made._open and not self.made._cancelled


def test_a_variants_own_stand_in_line_and_others_pass() -> None:
    heard = Heard()
    for number in range(5):
        heard.made.add(submit(f"slow {number}", "slow"))
    assert heard.entered.wait(20)
    for variant in ("quick", None):
        heard.made.add(submit(f"of {variant}", variant))
    eventually(lambda: set(heard.submitted) == {"of quick", "of None"})
    heard.gate.set()
    eventually(heard.idle)
    assert heard.submitted[2:] == [f"slow {number}" for number in range(5)]
    assert heard.refused == heard.cancelled == []


def test_one_that_is_cancelled_while_it_stands_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose tokens are being made is cancelled once the engine knows it."""
    heard = Heard()
    for name in ("runs", "stands", "stays"):
        heard.made.add(submit(name, "slow"))
    assert heard.entered.wait(20)
    heard.made.cancel("runs")
    heard.made.cancel("stands")
    heard.made.cancel("of the engine")
    assert heard.cancelled == ["runs", "stands", "of the engine"]
    heard.gate.set()
    eventually(heard.idle)
    assert (heard.submitted, heard.refused) == (["runs", "stays"], ["stands"])
    assert heard.cancelled[3:] == ["runs", "stands"]


def test_one_that_stood_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    heard.made.add(submit("runs", "slow"))
    heard.made.add(submit("stands", "slow"))
    assert heard.entered.wait(20)
    monkeypatch.setattr(conversations, "WAITS", -1.0)
    heard.gate.set()
    eventually(heard.idle)
    assert (heard.submitted, heard.refused) == (["runs"], ["stands"])


def test_texts_have_a_line_of_their_own_and_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    heard.made.add(submit("conversation", "slow"))
    for name in ("runs", "stands"):
        heard.made.add(msgspec.structs.replace(submit(name, "slow"), prompt="text"))
    eventually(lambda: set(heard.made._waiting) == {("slow", True), ("slow", False)})
    monkeypatch.setattr(conversations, "WAITS", -1.0)
    heard.gate.set()
    eventually(heard.idle)
    assert {*heard.submitted} == {"conversation", "runs", "stands"}
    assert heard.submitted.index("runs") < heard.submitted.index("stands")
    assert not heard.refused


def test_over_http_others_are_served_meanwhile(live: Live) -> None:
    """The engine's process takes orders while a template computes, which the last of these makes an end of."""

    def chat(model: str, content: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 12}
        return live.post("/v1/chat/completions", **body)

    with ThreadPoolExecutor(2) as pool:
        hangs = [pool.submit(chat, "bot", "HANG") for _ in range(2)]
        text = live.post("/v1/completions", model="bot", prompt="abc", max_tokens=3).json()
        assert text["choices"][0]["text"] == "abc"
        assert not any(one.done() for one in hangs)
        assert chat("sql", "GO").json()["choices"][0]["message"]["content"] == "<user>GO<use"
        assert [one.result().json()["choices"][0]["message"]["content"] for one in hangs] == ["<user>HANG<u"] * 2


def test_over_http_a_long_text_is_made_into_tokens_beside_everything_else() -> None:
    with served() as live, ThreadPoolExecutor(1) as pool:

        def complete(prompt: str) -> Any:
            return live.post("/v1/completions", model="bot", prompt=prompt, max_tokens=3)

        hangs = pool.submit(complete, "HANG" * 2500)
        assert complete("abc").json()["choices"][0]["text"] == "abc"
        assert not hangs.done()
        assert complete("GO").status_code == 200
        assert "10000 tokens, and the context takes 4096" in hangs.result().json()["error"]["message"]


def test_over_http_a_template_that_has_no_place_is_a_503(live: Live) -> None:
    body = {"model": "bot", "messages": [{"role": "user", "content": "BUSY"}]}
    answer = live.post("/v1/chat/completions", **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "template_busy")
    assert "retry-after" in answer.headers

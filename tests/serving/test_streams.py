"""Streams that do not end as they began: clients that leave or do not read, queues that are full, limits, metrics."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from serving.harness import Live, eventually, served

from deltacompress.serving.settings import Limits

SLOW: dict[str, Any] = {"model": "bot", "prompt": "SLOW", "max_tokens": 2000}


def connect(live: Live, **options: Any) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10, **options)


def request(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    return f"{head}\r\n\r\n".encode() + raw


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows(live: Live, stream: bool) -> None:
    before = live.metrics().get(("deltacompress_requests_total", "bot", "cancelled"), 0)
    with connect(live) as made:
        made.sendall(request(SLOW | {"stream": stream, "n": 3}))
        eventually(lambda: live.client.state.running == 3)
    eventually(lambda: not live.client.busy)
    eventually(lambda: live.client.state.running == 0)
    assert live.metrics()["deltacompress_requests_total", "bot", "cancelled"] == before + 3


def test_a_full_queue_is_told_and_nothing_of_the_request_stays() -> None:
    with served(max_batch=1, max_queue=3) as found:
        with connect(found) as made:
            made.sendall(request(SLOW))
            eventually(lambda: found.client.state.running == 1)
            answer = found.post("/v1/completions", **(SLOW | {"n": 5}))
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) > 0
            assert found.http.get("/ready").status_code == 200
        eventually(lambda: not found.client.busy)  # the four that had room, too


@pytest.mark.parametrize("limits", [Limits(write_s=0.3, waiting=10**6), Limits(write_s=1000, waiting=100)])
def test_a_reader_that_is_too_slow_is_cut(limits: Limits) -> None:
    """By its time, or by what waits for it; in both cases its calls end long before their last token."""
    long = "".join(chr(0x4E00 + i) for i in range(90))
    with served(limits=limits) as found:
        with connect(found) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.sendall(request({"model": "bot", "prompt": [long] * 40, "max_tokens": 4000, "stream": True}))
            cancelled = ("deltacompress_requests_total", "bot", "cancelled")
            eventually(lambda: found.metrics().get(cancelled) == 40)
            if limits.write_s < 1:
                eventually(lambda: not found.app_connections)
        assert not found.client.busy
        assert found.metrics()["deltacompress_generated_tokens_total",] < 40 * 4000


def test_a_whole_answer_waits_for_nobody() -> None:
    """However far behind its engine the server is: there is nobody who reads too slowly."""
    with served(limits=Limits(waiting=0)) as found:
        answer = found.post("/v1/completions", model="bot", prompt=["ab"] * 8, max_tokens=50)
        assert answer.status_code == 200
        assert [one["text"] for one in answer.json()["choices"]] == ["ab" * 25] * 8
        asked = {"model": "bot", "prompt": "SLOW", "max_tokens": 50, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            found.post("/v1/completions", **asked)


def test_who_says_nothing_is_cut() -> None:
    """Half a head, half a body; whoever waits for the next request has longer."""
    with served(limits=Limits(header_s=0.3, body_s=0.3)) as found:
        with connect(found) as silent, connect(found) as half, connect(found) as bodyless:
            half.sendall(b"GET /health HTTP/1.1\r\nhost:")
            bodyless.sendall(request(SLOW)[:-5])
            assert silent.recv(100) == half.recv(100) == b""
            heard = b"".join(iter(lambda: bodyless.recv(65536), b""))
            assert heard.startswith(b"HTTP/1.1 408 ")
            assert b"too_slow" in heard
        assert found.http.get("/health").status_code == 200
        time.sleep(0.6)
        assert found.http.get("/health").status_code == 200


def test_an_answer_that_is_never_read_keeps_no_connection() -> None:
    """Too little of it is left to hold anything up, and the connection waits for its next request."""
    with served(limits=Limits(write_s=0.3)) as found, connect(found) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while not any(one.transport.get_write_buffer_size() for one in found.server.server_state.connections):
            made.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
            time.sleep(0.005)
        eventually(lambda: not found.app_connections, 10)


def test_each_head_has_its_own_time() -> None:
    with served(limits=Limits(header_s=0.6)) as found, connect(found) as made:
        head = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
        for pause in (0.4, 0.4):
            made.sendall(head[:-3])
            time.sleep(pause)
            made.sendall(head[-3:])
            heard = b""
            while b'"ok"' not in heard:
                piece = made.recv(9000)
                assert piece, "it was cut"
                heard += piece


def test_too_many_connections() -> None:
    with served(limits=Limits(connections=3)) as found:
        made = [connect(found) for _ in range(3)]
        for one in made:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert one.recv(9000).startswith(b"HTTP/1.1 200 ")
        with connect(found) as fourth:
            heard = b"".join(iter(lambda: fourth.recv(65536), b""))
            assert heard.startswith(b"HTTP/1.1 503 ")
            assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["code"] == "connections"
        for one in made:
            one.close()
        eventually(lambda: not found.app_connections)
        assert found.http.get("/health").status_code == 200


def test_a_request_after_another_on_one_connection(live: Live) -> None:
    with connect(live) as made:
        for _ in range(3):
            made.sendall(request({"model": "bot", "prompt": "ab", "max_tokens": 2}))
            heard = b""
            while b'"text":"ab"' not in heard:
                heard += made.recv(65536)


def test_the_metrics_count_what_the_client_counts() -> None:
    with served() as found:
        for prompt, n in (("ab", 1), ("abc", 3), ("FAIL", 1), ("LATE", 1), ("x" * 5000, 1)):
            found.post("/v1/completions", model="bot", prompt=prompt, max_tokens=5, n=n)
        found.post("/v1/completions", model="tiny", prompt="ab", max_tokens=2)
        found.post("/v1/completions", model="nobody", prompt="ab")
        told = found.metrics()
        outcomes = {key[1:]: value for key, value in told.items() if key[0] == "deltacompress_requests_total"}
        assert outcomes == {
            ("bot", "length"): 4,
            ("bot", "failed"): 1,
            ("bot", "timeout"): 1,
            ("bot", "refused"): 1,
            ("tiny", "length"): 1,
        }
        assert told["deltacompress_generated_tokens_total",] == 4 * 5 + 3 + 2
        assert told["deltacompress_time_to_first_token_seconds_count",] == 6
        assert told["deltacompress_inter_token_seconds_count",] == 4 * 4 + 2 + 1
        assert told["deltacompress_request_seconds_count",] == 7
        assert told["deltacompress_queue_seconds_count",] == 6
        assert told["deltacompress_prompt_tokens_total",] == 70  # as the engine says
        assert [value for key, value in told.items() if key[0] == "deltacompress_kv_tokens"] == [48, 1024]
        assert told["deltacompress_known_prompt_tokens_total",] == 30
        assert (told["deltacompress_preemptions_total",], told["deltacompress_swapped_total",]) == (5, 4)
        assert told["deltacompress_variants", "device"] == 2
        assert told["deltacompress_variants", "disk"] == 0
        assert told["deltacompress_variant_bytes", "device"] == 200
        names = ("hits", "misses", "loads", "evictions")
        assert [told[f"deltacompress_variant_{name}_total",] for name in names] == [3, 2, 2, 1]
        assert told["deltacompress_http_responses_total", "/v1/completions", "200"] == 3
        assert told["deltacompress_http_responses_total", "/v1/completions", "404"] == 1
        assert (told["deltacompress_requests_queued",], told["deltacompress_requests_running",]) == (0, 0)


def test_labels_are_bounded() -> None:
    from deltacompress.serving.metrics import Metrics

    metrics = Metrics()
    for i in range(1000):
        metrics.ended(f"variant-{i}", "length", 1.0)
    text = metrics.text().decode()
    assert text.count("deltacompress_requests_total{") == 101
    assert 'deltacompress_requests_total{model="other",outcome="length"} 900.0' in text

"""Who may ask what: keys, their files, the routes of the admin; and that keys and prompts are told to nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.harness import ADMIN_KEY, API_KEY, Live, eventually, served

from deltacompress.errors import InputError, NumericsError
from deltacompress.serving.http.errors import model_unavailable
from deltacompress.serving.keys import Key, owner, read_key, read_keys
from deltacompress.serving.messages import Failure
from deltacompress.serving.rates import Rates
from deltacompress.serving.settings import Settings, budget_bytes, named, prefix_bytes, swap_bytes

BODY = {"model": "bot", "prompt": "a secret of mine", "max_tokens": 2}
OPEN = ("/health", "/ready", "/version")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(API_KEY[:-1]), bearer(API_KEY + "x"),
                                     {"authorization": API_KEY}, {"authorization": f"Basic {API_KEY}"}])  # fmt: skip
def test_without_the_key_nothing_is_told(guarded: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/models/bot", "/metrics"):
        answer = guarded.http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
    assert guarded.http.post("/v1/completions", json=BODY, headers=headers).status_code == 401
    assert guarded.http.post("/admin/drain", json={}, headers=headers).status_code == 401
    assert [guarded.http.get(path, headers=headers).status_code for path in OPEN] == [200] * 3


def test_each_key_opens_its_own_door(guarded: Live) -> None:
    assert guarded.http.get("/v1/models", headers=bearer(API_KEY)).status_code == 200
    assert guarded.http.get("/v1/models", headers={"authorization": f"bearer  {API_KEY}"}).status_code == 200
    assert guarded.http.get("/v1/models", headers=bearer(ADMIN_KEY)).status_code == 401
    assert guarded.http.post("/admin/unload", json={"name": "bot"}, headers=bearer(API_KEY)).status_code == 401


def test_without_an_admin_key_that_door_is_closed(live: Live) -> None:
    answer = live.post("/admin/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


def test_keys_and_prompts_are_in_no_log_and_no_answer(guarded: Live) -> None:
    guarded.http.post("/v1/completions", json=BODY, headers=bearer(API_KEY))
    told = guarded.http.post("/v1/completions", json=BODY | {"temperature": -1}, headers=bearer(API_KEY)).text
    told += guarded.http.get("/metrics", headers=bearer(API_KEY)).text
    told += guarded.http.post("/v1/completions", json=BODY, headers=bearer(ADMIN_KEY + "x")).text
    told += guarded.http.post("/v1/completions?key=" + API_KEY, json=BODY, headers=bearer(API_KEY)).headers.__repr__()
    told += guarded.log.getvalue() + repr(guarded.app.__dict__) + repr(guarded.client)
    for secret in (API_KEY, ADMIN_KEY, BODY["prompt"]):
        assert str(secret) not in told
    lines = [json.loads(line) for line in guarded.log.getvalue().splitlines()]
    assert {"request", "route", "status", "seconds"} <= set(lines[-1])


def test_a_failure_is_told_in_the_log_alone(live: Live) -> None:
    answer = live.post("/v1/completions", model="bot", prompt="FAIL")
    assert "/secret/path" not in answer.text
    assert (
        answer.json()["error"]["message"]
        == "the model 'bot' cannot be served: it is damaged, or was changed since it was loaded"
    )
    assert "/secret/path" in live.log.getvalue()


def test_logits_that_are_not_finite_are_told_as_such() -> None:
    error = Failure.of(NumericsError("variant bot gives logits that are not finite")).error()
    told = model_unavailable("bot", error)
    assert (told.status, told.body()["error"]["message"]) == (500, "the model 'bot' gives logits that are not finite")


@pytest.fixture(scope="module")
def own() -> Iterator[Live]:
    """A server to change."""
    with served(admin_key=Key(ADMIN_KEY.encode()), zoo="path/of/zoo") as found:
        yield found


def admin(live: Live, verb: str, **body: Any) -> tuple[int, str]:
    answer = live.http.post(f"/admin/{verb}", json=body, headers=bearer(ADMIN_KEY))
    return answer.status_code, answer.json().get("error", {}).get("param") or ""


def test_loading_and_unloading(own: Live) -> None:
    names = lambda: [one["id"] for one in own.http.get("/v1/models").json()["data"]]  # noqa: E731
    assert admin(own, "load", name="new", source="path/of/new", over="bot", pin=True) == (200, "")
    assert names() == ["tiny", "bot", "sql", "new"]  # at once
    told = own.http.get("/v1/models/new").json()
    assert (told["pin"], told["identity"]) == (True, "path/of/new over bot from path/of/zoo")
    assert own.http.get("/v1/models/bot").json()["identity"] == "path/of/bot over None from path/of/zoo"
    assert own.post("/v1/completions", model="new", prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"
    assert admin(own, "unload", name="new") == (200, "")
    assert names() == ["tiny", "bot", "sql"]
    assert own.post("/v1/completions", model="new", prompt="ab").status_code == 404


@pytest.mark.parametrize(
    ("verb", "body", "status", "param"),
    [
        ("load", {"name": "bot", "source": "x"}, 409, "name"),
        ("load", {"name": "tiny", "source": "x"}, 409, "name"),
        ("load", {"name": "new", "source": "missing"}, 400, ""),
        ("load", {"name": "new"}, 400, "source"),
        ("load", {"source": "x"}, 400, "name"),
        ("load", {"name": 1, "source": "x"}, 400, "name"),
        ("load", {"name": "new", "source": "x", "pin": 1}, 400, "pin"),
        ("load", {"name": "new", "source": "x", "zoo": "y"}, 400, "zoo"),
        ("unload", {"name": "nobody"}, 404, "model"),
        ("unload", {"name": "sql"}, 409, ""),
        ("unload", {"name": "tiny"}, 404, "model"),
        ("unload", {}, 404, "model"),
        ("drain", {"x": 1}, 400, "x"),
    ],
)
def test_changes_that_cannot_be_made(own: Live, verb: str, body: dict[str, Any], status: int, param: str) -> None:
    assert admin(own, verb, **body) == (status, param)


def test_a_drained_server_ends_what_runs_and_takes_nothing_new() -> None:
    body = BODY | {"prompt": "SLOW", "max_tokens": 40, "stream": True}
    with served(admin_key=Key(ADMIN_KEY.encode())) as found:
        running: httpx.Response
        with found.http.stream("POST", "/v1/completions", json=body) as running:
            eventually(lambda: found.client.busy)
            assert admin(found, "drain") == (200, "")
            for path in ("/v1/completions", "/v1/chat/completions"):
                refused = found.post(path, **BODY)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert int(refused.headers["retry-after"]) > 0
            assert found.http.get("/ready").status_code == 503
            assert found.http.get("/health").status_code == 200
            assert running.read().endswith(b"data: [DONE]\n\n")


def write_key(path: Path, raw: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(raw)
    path.chmod(mode)
    return path


def test_a_key_is_the_one_line_of_its_file(tmp_path: Path) -> None:
    key = read_key("--api-key-file", write_key(tmp_path / "key", b"abc123\n"))
    assert key.fits(b"abc123")
    assert not any(key.fits(one) for one in (b"", b"abc123\n", b"abc12", b"abc1234"))
    assert "abc123" not in repr(key)


@pytest.mark.parametrize(
    ("raw", "mode", "told"),
    [
        (b"", 0o600, "is empty"),
        (b" \n", 0o600, "is empty"),
        (b"abc", 0o644, "others may read"),
        (b"abc", 0o640, "others may read"),
        (b"abc", 0o604, "others may read"),
        (b"abc", 0o602, "others may read or change"),
        (b"abc", 0o620, "others may read or change"),
        (b"a b", 0o600, "one line"),
        (b"a\nb", 0o600, "one line"),
        (b"x" * 5000, 0o600, "at most"),
        ("schlüssel".encode(), 0o600, "ASCII"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, raw: bytes, mode: int, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        read_key("--api-key-file", write_key(tmp_path / "key", raw, mode))
    assert caught.value.where == f"--api-key-file {tmp_path / 'key'}"
    assert caught.value.way_out
    with pytest.raises(InputError):
        read_key("--api-key-file", tmp_path / "nothing")
    with pytest.raises(InputError):
        read_key("--api-key-file", tmp_path)


def test_several_keys_one_a_line_with_and_without_a_name(tmp_path: Path) -> None:
    keys = read_keys("--api-key-file", write_key(tmp_path / "keys", b"alice k-1\n\nk-2\r\n  bob   k-3"))
    assert [owner(keys, one) for one in (b"k-1", b"k-2", b"k-3")] == ["alice", "line-3", "bob"]
    assert [owner(keys, one) for one in (b"", b"k-", b"alice", b"alice k-1", b"k-4")] == [None] * 5
    assert owner((), b"k-1") is None
    assert not any(secret in repr(keys) for secret in ("k-1", "k-2", "k-3"))


@pytest.mark.parametrize(
    ("raw", "mode", "told"),
    [
        (b"\n \n", 0o600, "is empty"),
        (b"a k1\nb k2 more", 0o600, "line 2: is neither"),
        (b"a/b k1", 0o600, "line 1: is neither"),
        (b"a k1\na k2", 0o600, "line 2: its key or its name"),
        (b"a k1\nb k1", 0o600, "line 2: its key or its name"),
        ("a schlüssel".encode(), 0o600, "ASCII"),
        (b"a k1", 0o640, "others may read"),
        (b"a " + b"x" * 2**20, 0o600, "at most"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, raw: bytes, mode: int, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        read_keys("--api-key-file", write_key(tmp_path / "keys", raw, mode))
    assert not any(secret in str(caught.value) for secret in ("k1", "k2", "schl"))


def test_a_bucket_holds_a_minutes_worth_and_may_owe() -> None:
    now = [100.0]
    rates = Rates(30, lambda: now[0])
    assert [rates.take("a", 1) for _ in range(30)] == [None] * 30
    assert (rates.take("a", 1), rates.take("b", 1)) == (2, None)
    now[0] += 1.5
    assert rates.take("a", 1) == 1
    now[0] += 0.5
    assert (rates.take("a", 16), rates.take("a", 1)) == (None, 32)  # it had one, and owes fifteen
    now[0] += 31.9
    assert rates.take("a", 1) == 1
    now[0] += 0.1
    assert rates.take("a", 1) is None
    now[0] += 3600
    assert [rates.take("a", 1) for _ in range(31)] == [None] * 30 + [2]
    assert Rates(None).take("a", 10**9) is None


def test_names_that_are_owed_nothing_are_forgotten() -> None:
    now = [0.0]
    rates = Rates(60, lambda: now[0])
    for number in range(10_000):
        rates.take(f"v{number}", 1)
        now[0] += 0.1
    assert len(rates._buckets) < 5000
    assert [rates.take("busy", 1) for _ in range(61)] == [None] * 60 + [1]


def test_each_key_and_each_model_has_its_own_rate() -> None:
    """Answers are counted, so that one request cannot ask for many at the price of one."""
    keys = (Key(b"k-1", "alice"), Key(b"k-2", "bob"))
    with served(api_keys=keys, key_rate=4, model_rate=6) as found:

        def ask(key: str, model: str, **more: Any) -> tuple[int, str]:
            body = {"model": model, "prompt": "ab", "max_tokens": 2, **more}
            answer = found.http.post("/v1/completions", json=body, headers=bearer(key))
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "rate_limited"
                assert 0 < int(answer.headers["retry-after"]) <= 60
            return answer.status_code, answer.json().get("error", {}).get("message", "")[-25:]

        assert [ask("k-1", "bot", n=2)[0], ask("k-1", "bot", prompt=["a", "b"])[0]] == [200, 200]
        assert ask("k-1", "sql")[1].endswith("for this key in a minute")
        assert ask("k-1", "sql")[0] == 429
        assert ask("k-2", "bot", n=2) == (200, "")
        assert ask("k-2", "bot")[1].endswith("for this model in a minute"[-25:])
        assert ask("k-2", "sql") == (200, "")
        assert found.http.get("/v1/models", headers=bearer("k-1")).status_code == 200
        told = [json.loads(line) for line in found.log.getvalue().splitlines()]
        assert {one.get("key") for one in told if one["event"] == "request"} == {"alice", "bob"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"key_rate": 5}, "key_rate: needs keys"),
        ({"key_rate": 0, "api_keys": (Key(b"k"),)}, "key_rate 0"),
        ({"model_rate": 0}, "model_rate 0"),
        ({"variants": (("a", "x"), ("b", "y"), ("a", "z"))}, "the name a: is given twice"),
        ({"variants": (("base", "x"),)}, "the name base: is the base's own"),
        ({"variants": (("a\udcff", "x"),)}, r"a\\udcff is not valid UTF-8"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"drain_s": float("nan")}, "drain"),
        ({"drain_s": float("inf")}, "drain"),
        ({"drain_s": -1.0}, "drain"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"max_queue": 0}, "max_queue 0"),
        ({"step_tokens": 0}, "step_tokens 0"),
        ({"host": "0.0.0.0"}, "no key is asked"),
        ({"host": "::"}, "no key is asked"),
        ({"host": "example.org"}, "no key is asked"),
    ],
)
def test_servers_that_are_not_started(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Settings(Path("/models/base"), **given).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machines_own_addresses_need_no_key(host: str) -> None:
    Settings(Path("/models/base"), host=host).check()
    Settings(Path("/models/base"), host="0.0.0.0", api_keys=(Key(b"k"),)).check()


def test_names_and_sizes() -> None:
    assert named(["a=b", "c=d=e"]) == (("a", "b"), ("c", "d=e"))
    for one in ("a", "=a", "a="):
        with pytest.raises(InputError, match="NAME=SOURCE"):
            named([one])
    assert (budget_bytes(None), budget_bytes("2GB"), budget_bytes("1KiB")) == (None, 2 * 10**9, 1024)
    assert type(budget_bytes("2GB")) is int
    for one in ("", "many", "-1", "0"):
        with pytest.raises(InputError, match="budget"):
            budget_bytes(one)
    assert (prefix_bytes("0"), prefix_bytes("1GiB")) == (0, 2**30)
    assert type(prefix_bytes("1GB")) is int
    assert (swap_bytes("0"), swap_bytes("8GB"), swap_bytes("64MiB")) == (0, 8 * 10**9, 2**26)
    for one in ("8", "60MB"):
        with pytest.raises(InputError, match="is too little; give one such as 8GB, or 0"):
            swap_bytes(one)
    for one in ("", "many", "-1", "nan"):
        with pytest.raises(InputError, match="prefix_cache"):
            prefix_bytes(one)
        with pytest.raises(InputError, match="swap_space"):
            swap_bytes(one)

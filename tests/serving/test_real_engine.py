"""`deltacompress serve` as it is started, over the real engine: the answers are the runtime's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
import torch
from pairs import Pair
from serving.harness import eventually

from deltacompress.errors import BackendError
from deltacompress.runtime import Runtime
from deltacompress.runtime.cache.residents import Residents
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.engine import EngineLimits, QueueFullError
from deltacompress.runtime.parallel.others import ALONE
from deltacompress.serving.messages import Start
from deltacompress.serving.worker.process import build
from deltacompress.zoo import Zoo

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PROMPTS = ["a few words", "other words, and more of them", "x", "the last of four"]


def zoo_of(base: Path, artifact: Path, root: Path) -> Path:
    """A zoo: t/bot of one version that belongs to the base, t/other of another base."""
    made = Zoo.init(root / "zoo")
    made.add(base, "t/base")
    made.add(artifact, "t/bot")
    made.tag("t/bot@1", "prod")
    made.add_artifact(GOLDEN / "int4-24", "t/other")
    return root / "zoo"


class Started:
    """The process, and the runtime that it is held against."""

    def __init__(self, base: Path, artifact: Path, log: Path) -> None:
        argv = [sys.executable, "-m", "deltacompress", "serve", str(base), f"bot={artifact}", "entry=t/bot@prod"]
        argv += ["--port", "0", "--json", "--open-zoo", "--zoo", str(zoo_of(base, artifact, log.parent))]
        key = log.with_name("key")
        key.write_text("admins-own")
        key.chmod(0o600)
        argv += ["--device", "cpu", "--max-batch", "8", "--budget", "1GB", "--admin-key-file", str(key)]
        argv += ["--step-tokens", "64", "--prefix-cache", "10MB", "--swap-space", "100MB"]
        with log.open("wb") as told:
            env = {**os.environ, "DELTACOMPRESS_CACHE": str(log.with_name("cache"))}
            self.popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=told, text=True, env=env)
        self.base, self.log = base.name, log
        self.runtime = Runtime.from_base(base)
        self.runtime.load(artifact, "bot")
        assert self.popen.stdout is not None
        told_of = ""
        for line in self.popen.stdout:
            told_of += line
            if line == "}\n":
                break
        self.ready = json.loads(told_of)
        self.http = httpx.Client(base_url=self.ready["url"], timeout=60)

    def text(self, model: str, prompt: Any, **more: Any) -> str:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, **more}
        if not more.get("stream"):
            answer = self.http.post("/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])
        lines = self.http.post("/completions", json=body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2])

    def admin(self, verb: str, **body: Any) -> httpx.Response:
        url = self.ready["url"].removesuffix("/v1")
        return self.http.post(f"{url}/admin/{verb}", json=body, headers={"authorization": "Bearer admins-own"})

    def end(self) -> int:
        self.http.close()
        self.popen.terminate()
        self.popen.communicate(timeout=30)
        return self.popen.returncode


@pytest.fixture(scope="module")
def real(pair: Pair, artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(pair.base, artifact, tmp_path_factory.mktemp("log") / "log")
    yield started
    code = started.end()
    assert code == 0, started.log.read_text()


def test_it_says_where_and_what_it_serves(real: Started) -> None:
    assert real.ready["url"].startswith("http://127.0.0.1:")
    assert real.ready["models"] == [real.base, "bot", "entry"]
    told = {one["id"]: one for one in real.http.get("/models").json()["data"]}
    assert set(told) == {real.base, "bot", "entry"}
    assert (told["entry"]["entry"], told["entry"]["version"], told["entry"]["scores"]) == ("t/bot", 1, {})
    assert "entry" not in told["bot"]
    (there,) = real.runtime.residency().variants
    assert told["bot"]["identity"] == real.runtime.variants["bot"].variant.identity
    assert (told["bot"]["bytes"], told["bot"]["place"], told["bot"]["parent"]) == (there.nbytes, "device", real.base)


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_answers_are_the_runtimes_own(real: Started, stream: bool) -> None:
    """All at once over HTTP, one by one there."""
    asked = [(model, prompt) for prompt in PROMPTS for model in (real.base, "bot")]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: real.text(*one, stream=stream), asked))
    alone = [real.runtime.generate([(None if model == real.base else model, prompt)], 12)[0] for model, prompt in asked]
    assert found == alone
    assert len(set(found)) > 4


def test_a_seed_is_a_text(real: Started) -> None:
    def drawn(seed: int, **more: Any) -> str:
        return real.text("bot", PROMPTS[0], temperature=1.0, seed=seed, **more)

    assert drawn(1) == drawn(1) == drawn(1, stream=True)
    assert len({drawn(seed) for seed in (1, 2, 3, 2**63 - 1, -5)}) == 5
    sampling = Sampling(temperature=1.0, seed=7)
    assert drawn(7) == real.runtime.complete([("bot", PROMPTS[0])], 12, sampling=sampling)[0].text
    body = {"model": "bot", "prompt": PROMPTS[0], "max_tokens": 12, "seed": 1, "n": 3}
    texts = [one["text"] for one in real.http.post("/completions", json=body).json()["choices"]]
    assert texts == [drawn(seed) for seed in (1, 2, 3)]


def test_log_likelihoods_are_the_runtimes_own(real: Started) -> None:
    """As lm-eval asks for them: the prompt's own, by tokens, with one token more."""
    context, continuation = [5, 6, 7, 8], [9, 10, 11]
    for model, name in ((real.base, None), ("bot", "bot")):
        body = {"model": model, "prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "echo": True}
        told = real.http.post("/completions", json=body | {"temperature": 0}).json()["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(context + continuation) + 1
        assert told["token_logprobs"][0] is None
        ((wanted, _),) = real.runtime.loglikelihood([(name, torch.tensor(context), torch.tensor(continuation))])
        assert sum(told["token_logprobs"][len(context) : -1]) == pytest.approx(wanted, abs=1e-5)
        alone = real.http.post("/completions", json=body | {"max_tokens": 0}).json()["choices"][0]["logprobs"]
        assert {key: value[:-1] for key, value in told.items()} == alone


def test_what_the_engine_refuses(real: Started) -> None:
    many = {"model": "bot", "prompt": [10**6]}
    long = {"model": "bot", "prompt": PROMPTS[0], "max_tokens": 10**6}
    for body, words in ((many, "vocabulary"), (long, "the context takes")):
        answer = real.http.post("/completions", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    assert real.http.post("/completions", json={"model": "nobody", "prompt": "x"}).status_code == 404
    metrics = real.ready["url"].removesuffix("/v1") + "/metrics"
    eventually(lambda: "deltacompress_requests_running 0.0" in real.http.get(metrics).text)


def test_variants_come_and_go(real: Started, artifact: Path, pair: Pair, tmp_path: Path) -> None:
    """While others are asked; what cannot be loaded is told, and changes nothing."""
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(real.text, "bot", prompt, max_tokens=40) for prompt in PROMPTS]
        loaded = real.admin("load", name="again", source=str(artifact))
        assert loaded.status_code == 200, loaded.text
        assert real.text("again", PROMPTS[0]) == real.text("bot", PROMPTS[0])
        for source, words in ((tmp_path, "no manifest"), (pair.base, "not an artifact")):
            refused = real.admin("load", name="other", source=str(source))
            assert refused.status_code == 400, refused.text
            assert words in refused.json()["error"]["message"]
        found = [one.result() for one in asked]
    assert real.admin("unload", name="again").status_code == 200
    assert real.http.post("/completions", json={"model": "again", "prompt": "x"}).status_code == 404
    assert found == [real.runtime.generate([("bot", prompt)], 40)[0] for prompt in PROMPTS]


def test_the_tokens_of_prompts_are_counted(real: Started) -> None:
    metrics = real.ready["url"].removesuffix("/v1") + "/metrics"

    def counted() -> tuple[float, float]:
        lines = dict(line.rsplit(" ", 1) for line in real.http.get(metrics).text.splitlines() if line[0] != "#")
        names = ("deltacompress_prompt_tokens_total", "deltacompress_known_prompt_tokens_total")
        return float(lines[names[0]]), float(lines[names[1]])

    time.sleep(0.6)  # so that the state is that of all requests before
    asked, known = counted()
    body = {"model": "bot", "prompt": [7, 3] * 20, "max_tokens": 1}
    for _ in range(2):
        assert real.http.post("/completions", json=body).status_code == 200
    eventually(lambda: counted() == (asked + 80, known + 32))  # whole pages of 16


def test_any_entry_of_the_zoo_is_served(real: Started) -> None:
    assert real.text("t/bot@prod", PROMPTS[0]) == real.text("bot", PROMPTS[0]) == real.text("entry", PROMPTS[0])
    told = real.http.get("/models/t/bot@1").json()
    assert told["identity"] == real.http.get("/models/bot").json()["identity"]
    for model, status, words in (
        ("t/nobody", 404, "does not exist"),
        ("t/base", 404, "a base-ref, not a delta or adapter"),
        ("t/other", 400, "was made from another base"),
    ):
        answer = real.http.post("/completions", json={"model": model, "prompt": "x"})
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_an_endless_chat_template_is_its_own_models_affair(real: Started, artifact: Path, tmp_path: Path) -> None:
    """It is ended, its request is told so, and others get their answers before."""
    for name, template in (("endless", ENDLESS), ("brief", "{{ messages[0].content }}")):
        copied = shutil.copytree(artifact, tmp_path / name)
        (copied / "chat_template.jinja").write_text(template)
        assert real.admin("load", name=name, source=str(copied)).status_code == 200

    def chat(name: str) -> httpx.Response:
        talk = [{"role": "user", "content": PROMPTS[0]}]
        return real.http.post("/chat/completions", json={"model": name, "messages": talk, "temperature": 0, "n": 1})

    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(chat, "endless")
        assert chat("brief").json()["choices"][0]["message"]["content"] != ""
        assert real.text("bot", PROMPTS[0]) != ""
        assert not endless.done()
        refused = endless.result()
    assert refused.status_code == 400
    assert "2 seconds of computing" in refused.json()["error"]["message"]
    for name in ("endless", "brief"):
        eventually(lambda: real.admin("unload", name=name).status_code == 200)  # noqa: B023


def test_keys_are_in_no_list_of_processes(real: Started) -> None:
    server = psutil.Process(real.popen.pid)
    (worker,) = server.children()
    for one in (server, worker):
        assert "admins-own" not in f"{one.cmdline()} {one.environ()}"


def test_the_log_has_a_line_for_each_request_and_no_prompt(real: Started) -> None:
    real.text("bot", PROMPTS[1])
    told = real.log.read_text()
    assert PROMPTS[1] not in told
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert [one for one in lines if one["event"] == "bug"] == []
    assert any(one.get("route") == "/v1/completions" and one["status"] == 200 for one in lines)


@pytest.mark.parametrize(
    ("device", "given", "budget", "whole"),
    [
        ("cuda", 9 * 10**9, 9 * 10**9, 9 * 10**9),
        ("cuda", None, 9 * 10**9, 8_400_000_000),
        ("cuda of several", None, 9 * 10**9, 9 * 10**9),
        ("cpu", None, None, None),
    ],
)
def test_the_engine_is_made_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, device: str, given: int | None, budget: int | None, whole: int | None
) -> None:
    """And leaves room for keys and values on a GPU, where nothing is said of variants."""
    device, _, others = device.partition(" ")
    made: dict[str, Any] = {}
    limits, outcomes = list[int | None](), list[BackendError | None]([None])

    def warm() -> None:
        limits.append(served.models.cache.residents.budget_bytes)  # pages are taken there, beside what this leaves
        if outcomes[-1] is not None:
            raise outcomes[-1]

    engine = SimpleNamespace(warm=warm)

    class Fake:
        def __init__(self, base: str, **given: Any) -> None:
            made.update(given, base=base)
            self.notes, self.device = ["one"], torch.device(device)
            self.model = SimpleNamespace(others=Mock() if others else ALONE)
            residents = Residents(9, given["budget_bytes"])
            self.cache = SimpleNamespace(residents=residents, variants={"v": SimpleNamespace(nbytes=4 * 10**9)})

        def describe(self) -> str:
            return "two"

        def close(self) -> None:
            made.update(closed=True)

        def engine(self, emit: Any, limits: EngineLimits) -> Any:
            made.update(limits=limits, emit=emit)
            return engine

    monkeypatch.setattr(Runtime, "from_base", Fake)
    monkeypatch.setattr("deltacompress.devices.resolve_device", torch.device)
    monkeypatch.setattr("deltacompress.devices.free_bytes", lambda _: 20 * 10**9)
    start = Start(
        orders="o", reports="r", base="b", variants=(), zoo=None, device=device, dtype="float16", backend="triton",
        budget_bytes=given, max_batch=6, max_queue=7, step_tokens=8, prefix_bytes=9, swap_bytes=10, tp=2,
    )  # fmt: skip
    served = build(start, print)
    notes = [*served.models.notes]
    assert served.models.cache.residents.budget_bytes == budget  # while the first variants are being loaded
    served.warm()
    if whole != budget:
        notes[1] = "variants take at most 8.4 GB, 2 like those that are loaded: budget changes that"
    assert served.models.notes == notes
    assert made == {
        "base": "b",
        "device": device,
        "dtype": "float16",
        "backend": "triton",
        "budget_bytes": given,
        "cuda_graphs": device == "cuda",
        "tp": 2,
        "limits": EngineLimits(max_batch=6, max_queue=7, step_tokens=8, prefix_bytes=9, swap_bytes=10),
        "emit": print,
    }
    assert (served.engine, served.full, limits) == (engine, QueueFullError, [whole])
    told = "variants take at most 9.0 of the 20.0 GB beside the base: budget changes that"
    if whole == budget:
        assert served.models.notes == ["two", *([told] if budget != given else []), "one"]
    warmed = served.models.notes
    outcomes.append(BackendError("no memory to capture a forward"))
    served = build(start, print)
    served.warm()
    told = "forwards are not captured before the first call: no memory to capture a forward"
    assert served.models.notes == [*warmed, told]
    served.close()  # which ends the other devices' processes
    assert made["closed"]

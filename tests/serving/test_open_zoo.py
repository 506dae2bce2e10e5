"""Entries of a zoo as models: loaded when a request names them, once, as the version that the name means then."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving.harness import ADMIN_KEY, Live, eventually, served
from zoo.checkpoints import write_base
from zoo.samples import make_artifact

from deltacompress.errors import BackendError, BaseMismatchError, InputError
from deltacompress.files.hashing import sha256_hex
from deltacompress.serving.keys import Key
from deltacompress.serving.messages import Failure
from deltacompress.serving.settings import Limits, Settings
from deltacompress.zoo import Zoo
from deltacompress.zoo.errors import DamagedBlobError, NotFoundError
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import ADAPTER, FILE, Descriptor, EntryManifest
from deltacompress.zoo.store import osfs


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    """team/bot of two versions, and others whose names say what the stub makes of them."""
    root = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(osfs, "fsync", lambda fd: None)
        patch.setenv("DELTACOMPRESS_CACHE", str(root / "cache"))
        patch.delenv("DELTACOMPRESS_ZOO", raising=False)
        made = Zoo.init(root / "zoo")
        for number, name in enumerate(
            ["bot", "bot", "slow", "other-base", "odd", "broken", "lost", "held", *(f"n{i}" for i in range(6))]
        ):
            made.add_artifact(make_artifact(root / f"source-{number}", seed=number), f"team/{name}")
        made.tag("team/bot@1", "prod")
        others = {one.digest for one in made.show("team/bot")[1].layers}
        broken = next(one for one in made.show("team/broken")[1].layers if one.digest not in others)
        (blob,) = [one for one in (root / "zoo").rglob("*") if broken.digest in one.name and one.is_file()]
        blob.chmod(0o644)
        raw = blob.read_bytes()
        blob.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        (record,) = (one for one in (root / "zoo" / "names" / "team" / "lost").rglob("*") if one.is_file())
        record.chmod(0o644)
        record.write_bytes(b"{}")
        yield made


@pytest.fixture
def live(zoo: Zoo) -> Iterator[Live]:
    """A server of its own for each test, that keeps three and asks the zoo each time."""
    given = {"zoo": zoo.where, "opens_zoo": True, "admin_key": Key(ADMIN_KEY.encode())}
    with served(**given, limits=Limits(opened=3, name_s=0)) as found:
        yield found


@pytest.fixture(scope="module")
def shared(zoo: Zoo) -> Iterator[Live]:
    """One for what loads nothing."""
    with served(zoo=zoo.where, opens_zoo=True) as found:
        yield found


def ask(live: Live, model: str, prompt: str = "ab", **more: Any) -> tuple[int, str]:
    """The status, and the text or what is wrong."""
    answer = live.post("/v1/completions", model=model, prompt=prompt, **{"max_tokens": 2, **more})
    told = answer.json()
    return answer.status_code, told["choices"][0]["text"] if answer.status_code == 200 else told["error"]["message"]


def names(live: Live) -> list[str]:
    return [one["id"] for one in live.http.get("/v1/models").json()["data"]]


def events(live: Live, event: str) -> list[dict[str, Any]]:
    return [one for line in live.log.getvalue().splitlines() if (one := json.loads(line))["event"] == event]


def test_an_entry_is_loaded_when_it_is_named_and_once(live: Live) -> None:
    assert names(live) == ["tiny", "bot", "sql"]
    for model in ("team/bot@prod", "team/bot@1", "team/bot@prod"):
        assert ask(live, model) == (200, "ab")
        answer = live.post("/v1/completions", model=model, prompt="ab", max_tokens=2).json()
        assert answer["model"] == "team/bot@1"  # of which version it is
    assert names(live) == ["tiny", "bot", "sql", "team/bot@1"]
    assert ask(live, "team/bot") == ask(live, "team/bot@latest") == (200, "ab")
    assert names(live) == ["tiny", "bot", "sql", "team/bot@1", "team/bot@2"]
    assert live.metrics()["deltacompress_opened_total",] == 2
    assert [one["model"] for one in events(live, "opened")] == ["team/bot@1", "team/bot@2"]


def test_entries_that_left_make_room_on_disk(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are loaded stay."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(cache))
    entry = zoo.show("team/n0")[1]
    one = sum(layer.size for layer in entry.layers) + entry.config.size
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(2 * one + one // 2))
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(opened=9, name_s=0)) as live:
        for asked, kept in ((0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (3, [2, 3]), (2, [2, 3])):
            assert ask(live, f"team/n{asked}") == (200, "ab")
            assert sorted(names(live)[3:]) == [f"team/n{i}@1" for i in kept]
        assert [event["model"] for event in events(live, "closed")] == ["team/n1@1", "team/n0@1"]
        assert events(live, "open_failed") == []
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(one - 1))
    with served(zoo=zoo.where, opens_zoo=True) as live:
        status, told = ask(live, "team/n5")
        assert (status, "there is no room for it" in told) == (503, True)
        assert "CACHE_BYTES" not in told  # the log has why
        (failed,) = events(live, "open_failed")
        assert "DELTACOMPRESS_CACHE_BYTES higher" in failed["error"]
    monkeypatch.setenv("DELTACOMPRESS_CACHE_BYTES", str(2 * one + one // 2))
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(opened=1, name_s=0)) as live:
        for i in range(4):
            assert ask(live, f"team/n{i}") == (200, "ab")
            eventually(lambda i=i: names(live)[3:] == [f"team/n{i}@1"])
            there = {path.name for path in cache.iterdir() if path.is_dir()}
            assert zoo.resolve(f"team/n{i}").manifest in there
            assert len(there) <= 2
        for model in ("team/odd", "team/other-base"):  # pulled, and not loaded: what they took is let go of
            assert ask(live, model)[0] == 400
        for i in (0, 1):
            assert ask(live, f"team/n{i}") == (200, "ab")
            eventually(lambda i=i: names(live)[3:] == [f"team/n{i}@1"])


def test_where_it_came_from_is_told(live: Live, zoo: Zoo, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"accuracy": 0.75, "by": "someone"}))
    zoo.attest("team/n4", report)
    ask(live, "team/n4")
    told = live.http.get("/v1/models/team/n4@1").json()
    assert (told["id"], told["entry"], told["version"]) == ("team/n4@1", "team/n4", 1)
    assert told["scores"] == zoo.scores("team/n4@1") == {"accuracy": 0.75}
    assert live.http.get("/v1/models/team%2Fn4%401").json() == told
    assert live.http.get("/v1/models/team/n4").json() == told
    assert not {"entry", "version", "scores"} & set(live.http.get("/v1/models/bot").json())
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"name": "mine", "source": "team/bot@prod"}
    assert live.http.post("/admin/load", json=body, headers=admin).status_code == 200
    told = live.http.get("/v1/models/mine").json()
    assert (told["entry"], told["version"], told["scores"]) == ("team/bot", 1, {})


def test_an_entry_that_is_not_loaded_is_told_as_what_a_completion_would_load(shared: Live, zoo: Zoo) -> None:
    (bot,) = [one for one in shared.http.get("/v1/models").json()["data"] if one["id"] == "bot"]
    for model, version in (("team/bot", 2), ("team/bot@prod", 1), ("team/bot@2", 2)):
        answer = shared.http.get(f"/v1/models/{model}")
        told = {"place": "zoo", "bytes": 0, "identity": None, "entry": "team/bot", "version": version, "scores": {}}
        told["parent"] = None
        assert (answer.status_code, answer.json()) == (200, bot | {"id": f"team/bot@{version}"} | told)
    assert names(shared) == ["tiny", "bot", "sql"]  # and loads nothing
    zoo.add_base(write_base(Path(zoo.where).parent / "model"), "team/a-base")
    for model, status in (("team/nobody", 404), ("team/bot@3", 404), ("nobody", 404), ("", 404), ("team/lost", 503)):
        assert shared.http.get(f"/v1/models/{model}").status_code == status, model
    answer = shared.http.get("/v1/models/team/a-base")
    assert (answer.status_code, "a base-ref, not" in answer.json()["error"]["message"]) == (404, True)


def test_an_adapter_of_a_delta_is_loaded_over_it(live: Live, zoo: Zoo) -> None:
    """By whatever way it comes; a variant that is named by hand goes first."""
    bot, delta = zoo.show("team/bot@1")
    lineage = delta.lineage.model_copy(update={"parents": (bot.manifest,), "relation": "adapter"})
    raw = b"{}"
    config = Descriptor(media_type=ADAPTER, digest=sha256_hex(raw), size=len(raw))
    layer = config.model_copy(update={"media_type": FILE, "annotations": {"file": "adapter_config.json"}})
    entry = EntryManifest(kind="adapter", config=config, layers=(layer,), lineage=lineage)
    zoo.publish(entry, [Blob(config.digest, config.size, lambda: (raw,), "here")], "team/styled")
    assert ask(live, "team/styled") == (200, "ab")
    told = live.http.get("/v1/models/team/styled@1").json()["identity"]
    assert told.partition(" over ")[2].partition(" from ")[0].endswith(bot.manifest)
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    for name, over, end in (("one", None, bot.manifest), ("two", "sql", "sql")):
        body = {"name": name, "source": "team/styled"} | ({} if over is None else {"over": over})
        assert live.http.post("/admin/load", json=body, headers=admin).status_code == 200
        told = live.http.get(f"/v1/models/{name}").json()["identity"]
        assert told.partition(" over ")[2].partition(" from ")[0].endswith(end)


def test_reports_that_cannot_be_read_stop_nobody(live: Live, zoo: Zoo, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"accuracy": 0.5}))
    digest = zoo.attest("team/n5", report)
    (blob,) = [one for one in Path(zoo.where, "blobs").rglob("*") if digest in one.name and one.is_file()]
    blob.chmod(0o644)
    blob.write_bytes(b"x" * blob.stat().st_size)
    assert ask(live, "team/n5") == (200, "ab")
    assert live.http.get("/v1/models/team/n5@1").json()["scores"] is None


def test_a_tag_that_moves_serves_new_requests_with_the_new_version(live: Live, zoo: Zoo) -> None:
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(ask, live, "team/bot@prod", "SLOW", max_tokens=50)
        eventually(lambda: live.client.busy and "team/bot@1" in names(live))
        try:
            zoo.tag("team/bot@2", "prod")
            assert ask(live, "team/bot@prod") == (200, "ab")
            assert names(live)[3:] == ["team/bot@1", "team/bot@2"]
            assert not old.done()
            assert old.result() == (200, ("SLOW" * 13)[:50])
        finally:
            zoo.tag("team/bot@1", "prod")


def test_the_zoo_is_not_asked_each_time_what_a_name_means(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(name_s=1000)) as live:
        asked: list[str] = []
        resolve = live.app._opener._resolve
        monkeypatch.setattr(live.app._opener, "_resolve", lambda name: asked.append(name) or resolve(name))
        for model in ("team/bot@prod", "team/bot@prod", "team/bot", "team/bot@prod", "team/bot"):
            assert ask(live, model) == (200, "ab")
        assert [ask(live, "team/nobody")[0] for _ in range(2)] == [404, 404]
        assert asked == ["team/bot@prod", "team/bot", "team/nobody", "team/nobody"]
        assert names(live)[3:] == ["team/bot@1", "team/bot@2"]


def test_what_a_name_would_load_is_read_from_the_zoo_that_is_open(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    real = Zoo.open
    with served(zoo=zoo.where, opens_zoo=True) as live:
        monkeypatch.setattr(Zoo, "open", lambda location: opened.append(location) or real(location))
        for model in ("team/n4", "team/n5", "team/n4@1"):
            assert live.http.get(f"/v1/models/{model}").status_code == 200
    assert opened == [zoo.where]


def test_a_tag_that_moved_is_followed_soon(zoo: Zoo) -> None:
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(name_s=0.2, opened=2)) as live:
        assert ask(live, "team/bot@prod") == (200, "ab")
        try:
            zoo.tag("team/bot@2", "prod")
            eventually(lambda: ask(live, "team/bot@prod") == (200, "ab") and "team/bot@2" in names(live))
        finally:
            zoo.tag("team/bot@1", "prod")
        for model in ("team/n0", "team/n1", "team/n2"):
            assert ask(live, model) == (200, "ab")
        assert len(live.app._opener._known) <= 2


def test_those_who_ask_meanwhile_wait_for_the_same_load_and_others_go_on(live: Live) -> None:
    """The stub takes a second for this one."""
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, live, model) for model in ("team/slow", "team/slow@1", "team/slow@1", "team/slow")]
        eventually(lambda: live.client.busy == 4)
        assert ask(live, "bot") == (200, "ab")
        assert not any(one.done() for one in waiting)
        assert [one.result() for one in waiting] == [(200, "ab")] * 4
    assert live.metrics()["deltacompress_opened_total",] == 1
    eventually(lambda: live.client.busy == 0)


@pytest.mark.parametrize(
    ("model", "status", "told"),
    [
        ("team/nobody", 404, "does not exist"),
        ("team/bot@3", 404, "does not exist"),
        ("team/bot@canary", 404, "does not exist"),
        ("team/bot@", 404, "does not exist"),
        ("nobody", 404, "does not exist"),
        ("../zoo/names", 404, "does not exist"),
        ("Team/bot", 404, "does not exist"),
        ("team/other-base", 400, "was made from another base"),
        ("team/odd", 400, "cannot be served beside this base; the log has why"),
        ("team/broken", 503, "cannot be served: it is damaged"),
        ("team/lost", 503, "cannot be served: it is damaged"),
    ],
)
def test_what_cannot_be_had(shared: Live, zoo: Zoo, model: str, status: int, told: str) -> None:
    before = len(events(shared, "open_failed"))
    for _ in range(2):  # and again
        found, why = ask(shared, model)
        assert (found, told in why) == (status, True), why
        assert zoo.where not in why
    assert names(shared) == ["tiny", "bot", "sql"]
    assert len(events(shared, "open_failed")) == before + (0 if status == 404 else 2)
    assert ask(shared, "bot") == (200, "ab")


def test_a_removed_version_is_unknown_though_it_is_loaded(live: Live, zoo: Zoo) -> None:
    assert ask(live, "team/n3") == (200, "ab")
    zoo.rm("team/n3@1")
    assert ask(live, "team/n3@1")[0] == 404


def test_the_least_recently_used_goes_and_none_that_is_used(live: Live) -> None:
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(ask, live, "team/n0", "SLOW", max_tokens=60)
        eventually(lambda: "team/n0@1" in names(live))
        for name in ("bot", "n1", "bot", "n2"):
            assert ask(live, f"team/{name}") == (200, "ab")
        eventually(lambda: names(live)[3:] == ["team/n0@1", "team/bot@2", "team/n2@1"])
        assert not used.done()
        assert ask(live, "team/n1") == (200, "ab")  # comes again
        eventually(lambda: names(live)[3:] == ["team/n0@1", "team/n2@1", "team/n1@1"])
        assert used.result()[0] == 200
    assert [one["model"] for one in events(live, "closed")] == ["team/n1@1", "team/bot@2"]


def test_one_that_leaves_is_waited_for_and_comes_again(zoo: Zoo) -> None:
    """The stub takes its time to unload this one. An answer is sent before its variant is free: one that is asked for
    at once may find it loaded still, so it is asked for until it came twice."""
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(opened=1)) as live:

        def came_again() -> bool:
            for model in ("team/slow", "team/bot"):
                assert ask(live, model) == (200, "ab")
            return [one["model"] for one in events(live, "opened")].count("team/slow@1") > 1

        eventually(came_again)
        assert "team/slow@1" in [one["model"] for one in events(live, "closed")]


def test_one_that_cannot_leave_yet_stays(zoo: Zoo) -> None:
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(opened=1)) as live:
        for model in ("team/held", "team/bot"):
            assert ask(live, model) == (200, "ab")
        eventually(lambda: events(live, "close_failed"))
        assert ask(live, "team/held") == (200, "ab")
        eventually(lambda: names(live)[3:] == ["team/held@1"])
        assert live.metrics()["deltacompress_opened_total",] == 2


def test_one_that_could_not_be_loaded_takes_nobodys_place(zoo: Zoo) -> None:
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(opened=1)) as live:
        for model, status in (("team/bot", 200), ("team/odd", 400), ("team/bot", 200), ("team/bot", 200)):
            assert ask(live, model)[0] == status
        live.run(live.client.idle(20))
        assert names(live)[3:] == ["team/bot@2"]
        assert live.metrics()["deltacompress_opened_total",] == 1
        assert events(live, "closed") == events(live, "close_failed") == []


def test_a_name_is_never_a_path(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bot", "bot@2", "mine"):
        (tmp_path / "team" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with served(zoo=zoo.where, opens_zoo=True) as live:
        assert ask(live, "team/bot") == (200, "ab")
        told = live.http.get("/v1/models/team/bot@2").json()
        assert (told["entry"], told["version"]) == ("team/bot", 2)
        assert told["identity"].startswith(str(zoo.where).removesuffix("zoo"))  # pulled, not that directory
        assert ask(live, "team/mine")[0] == 404


def test_one_that_the_admin_unloaded_comes_again(live: Live) -> None:
    assert ask(live, "team/bot") == (200, "ab")
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert live.http.post("/admin/unload", json={"name": "team/bot@2"}, headers=headers).status_code == 200
    assert names(live) == ["tiny", "bot", "sql"]
    assert ask(live, "team/bot@2") == (200, "ab")
    assert names(live)[3:] == ["team/bot@2"]


def test_a_request_that_waits_too_long_for_a_load(zoo: Zoo) -> None:
    with served(zoo=zoo.where, opens_zoo=True, limits=Limits(request_s=0.3)) as live:
        assert ask(live, "team/slow") == (504, "the request took longer than it may")
        eventually(lambda: "team/slow@1" in names(live))  # it comes all the same
        assert ask(live, "team/slow") == (200, "ab")
        eventually(lambda: live.client.busy == 0)


def test_a_drain_waits_for_a_request_whose_variant_comes(live: Live) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, live, "team/slow")
        eventually(lambda: live.client.busy)
        begun = time.monotonic()
        assert live.run(live.client.idle(20))
        assert asked.result() == (200, "ab")
        assert time.monotonic() - begun > 0.2


def test_without_the_option_only_listed_names_are_served(zoo: Zoo) -> None:
    with served(zoo=zoo.where) as live:
        assert ask(live, "team/bot")[0] == 404
        assert names(live) == ["tiny", "bot", "sql"]


def test_the_option_needs_a_zoo() -> None:
    with pytest.raises(InputError, match="needs a zoo"):
        Settings(Path("/models/base"), opens_zoo=True).check()


@pytest.mark.parametrize("error", [DamagedBlobError("x"), NotFoundError("x", where="y"), BaseMismatchError("x"),
                                   BackendError("x", way_out="z")])  # fmt: skip
def test_errors_keep_their_class_on_the_way(error: Any) -> None:
    found = Failure.of(error).error()
    assert (type(found), str(found)) == (type(error), str(error))

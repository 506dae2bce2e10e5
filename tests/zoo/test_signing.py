"""Signatures: who signed what, and what a signature does not say."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltacompress.errors import BackendError, ChecksumError, InputError, install_hint
from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.hashing import sha256_hex
from deltacompress.zoo import Zoo
from deltacompress.zoo.entries.reports import scores
from deltacompress.zoo.entries.signing import attest, make_key, require, sign, signatures
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import SIGNATURE, Descriptor, EntryManifest
from deltacompress.zoo.store import osfs

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    made = Zoo.init(tmp_path / "zoo")
    made.add(GOLDEN / "int2-24", "t/bot")
    made.add(GOLDEN / "int4-24", "t/bot")
    make_key(tmp_path / "ann")
    make_key(tmp_path / "bob")
    return made


def test_a_signature_names_its_key(zoo: Zoo, tmp_path: Path) -> None:
    key = sign(zoo, "t/bot@1", tmp_path / "ann")
    assert sign(zoo, "t/bot@1", tmp_path / "ann") == key
    assert [(one.what, one.public_key) for one in signatures(zoo, "t/bot@1")] == [("entry", key)]
    assert require(zoo, "t/bot@1", [tmp_path / "bob.pub", tmp_path / "ann.pub"]).public_key == key
    with pytest.raises(NotFoundError, match="no signature of a key that you trust"):
        require(zoo, "t/bot@1", [tmp_path / "bob.pub"])
    with pytest.raises(NotFoundError):
        require(zoo, "t/bot@2", [tmp_path / "ann.pub"])
    assert zoo.verify().ok


def test_openssl_agrees(zoo: Zoo, tmp_path: Path) -> None:
    sign(zoo, "t/bot@1", tmp_path / "ann")
    (entry,) = zoo.referrers("t/bot@1")
    told = json.loads(zoo.store.get(f"blobs/sha256/{entry.config.digest[:2]}/{entry.config.digest}", limit=9999))
    (tmp_path / "said").write_text(f"deltacompress zoo signature v1\nsha256:{zoo.resolve('t/bot@1').manifest}\n")
    (tmp_path / "sig").write_bytes(bytes.fromhex(told["signature"]))
    try:
        files = ["-inkey", tmp_path / "ann.pub", "-in", tmp_path / "said", "-sigfile", tmp_path / "sig"]
        done = subprocess.run(["openssl", "pkeyutl", "-verify", "-pubin", "-rawin", *files], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    assert done.returncode == 0, done.stderr


def test_a_report_can_be_signed(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"sst2": {"accuracy": 0.9}}')
    digest = attest(zoo, "t/bot@1", tmp_path / "report.json", key=tmp_path / "ann")
    assert scores(zoo, "t/bot@1") == {"sst2.accuracy": 0.9}
    assert [one.what for one in signatures(zoo, "t/bot@1")] == [f"report {digest[:12]}"]
    with pytest.raises(NotFoundError):  # who signs a report has not signed the entry
        require(zoo, "t/bot@1", [tmp_path / "ann.pub"])


def statement(zoo: Zoo, name: str) -> dict[str, str]:
    """What the one signature of a version says."""
    (entry,) = zoo.referrers(name)
    raw = zoo.store.get(f"blobs/sha256/{entry.config.digest[:2]}/{entry.config.digest}", limit=9999)
    return dict(json.loads(raw))


@pytest.mark.parametrize("lie", ["of another", "retargeted", "one bit", "under another name", "no key"])
def test_a_signature_that_is_not_good_is_noticed(zoo: Zoo, tmp_path: Path, lie: str) -> None:
    sign(zoo, "t/bot@1", tmp_path / "ann")
    sign(zoo, "t/bot@2", tmp_path / "ann")
    first, good = statement(zoo, "t/bot@1"), statement(zoo, "t/bot@2")
    zoo.add(GOLDEN / "sign-24", "t/sign")
    sign(zoo, "t/sign", tmp_path / "bob")
    told = {
        "of another": first,
        "retargeted": first | {"target": good["target"]},
        "one bit": good | {"signature": f"{int(good['signature'], 16) ^ 1 << 9:0128x}"},
        "under another name": good | {"public_key": statement(zoo, "t/sign")["public_key"]},
        "no key": good | {"public_key": "0" * 64},
    }[lie]
    assert len(signatures(zoo, "t/bot@2")) == 1
    raw = canonical_bytes(told)
    blob = Blob(sha256_hex(raw), len(raw), lambda: (raw,), "x")
    config = Descriptor(media_type=SIGNATURE, digest=blob.digest, size=blob.size)
    zoo.attach(EntryManifest(kind="signature", config=config, subject=good["target"]), [blob])
    for ask in (lambda: signatures(zoo, "t/bot@2"), lambda: require(zoo, "t/bot@2", [tmp_path / "ann.pub"])):
        with pytest.raises(ChecksumError, match="is not good; whoever attached it did not sign this"):
            ask()


def test_keys(zoo: Zoo, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "ann").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="never overwritten"):
        make_key(tmp_path / "ann")
    for key in (tmp_path / "ann.pub", tmp_path / "none", GOLDEN / "int2-24" / "config.json"):
        with pytest.raises(InputError):
            sign(zoo, "t/bot", key)
    for key in (tmp_path / "ann", tmp_path / "none"):
        with pytest.raises(InputError):
            require(zoo, "t/bot", [key])


@pytest.mark.parametrize("there", ["new", "new.pub"])
def test_a_key_pair_is_made_whole_or_not_at_all(zoo: Zoo, tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(InputError, match=rf"{there}: exists already; a key is never overwritten"):
        make_key(tmp_path / "new")
    assert {path.name: path.read_text() for path in tmp_path.glob("new*")} == {there: "mine"}


@pytest.mark.parametrize("call", ["open_", "write", "fsync"])
def test_a_key_pair_that_cannot_be_written_leaves_nothing(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(osfs, call)

    def full_after(point: int) -> Callable[..., object]:
        left = iter(range(point))

        def limited(*args: object) -> object:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return real(*args)

        return limited

    for point in range(2):  # the private key, then (or its directory) the public one
        monkeypatch.setattr(osfs, call, full_after(point))
        with pytest.raises(InputError, match="the disk is full"):
            make_key(tmp_path / "new")
        assert not list(tmp_path.glob("new*"))
    monkeypatch.undo()
    make_key(tmp_path / "new")
    key = sign(zoo, "t/bot@1", tmp_path / "new")
    assert require(zoo, "t/bot@1", [tmp_path / "new.pub"]).public_key == key


def test_without_the_package(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BackendError, match=re.escape(install_hint("sign"))):
        sign(zoo, "t/bot", tmp_path / "ann")
    (tmp_path / "report.json").write_text('{"kl": 1}')
    attest(zoo, "t/bot", tmp_path / "report.json")  # unsigned reports need nothing

"""Signatures: who says that a manifest is what it should be. Ed25519, attached as referrers.

Hashes show that bytes are the ones that were published, not who published them. A signature is over one line that names
its purpose and the digest of a manifest, and a manifest holds the digest of everything else; so one signature covers
every byte of an entry. What counts is the reader's own list of public keys: a signature that comes with its key proves
nothing by itself.

Needs the package `cryptography` (extra `sign`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from deltacompress.errors import BackendError, ChecksumError, InputError, install_hint
from deltacompress.files.canonical_json import canonical_bytes
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.places import check_place
from deltacompress.files.regular import ANYWHERE, read_bytes, unreadable
from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.reports import read_report
from deltacompress.zoo.errors import NotFoundError
from deltacompress.zoo.ledger import blobs, canonical
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.canonical import Strict
from deltacompress.zoo.ledger.entry import SIGNATURE, Descriptor, EntryManifest
from deltacompress.zoo.ledger.records import Sha256
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.durable import again, because, close, sync_directory, write_all

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_KEY_BYTES = 1 << 16
_PURPOSE = "deltacompress zoo signature v1"


class Signature(Strict):
    """The config of a signature. target: digest of the signed manifest (an entry's, or that of a report about it)."""

    algorithm: Literal["ed25519"] = "ed25519"
    target: Sha256
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True, slots=True)
class Signed:
    """A good signature. what: `entry`, or `report` with its digest; public_key: hex."""

    what: str
    public_key: str


def make_key(path: Path) -> str:
    """Write a new private key to `path` (PEM, for its owner only) and the public one to `path`.pub; the latter as hex.

    Both or neither.

    Raises:
        BackendError: no cryptography.
        InputError: one of them exists, or cannot be written; `path` is no name of a file.
    """
    if not path.name:
        raise InputError("no name of a file", where=f"{str(path)!a}", way_out="give the private key to write, e.g. ann")
    check_place(path)
    crypto = _crypto()
    key = crypto.ed25519.Ed25519PrivateKey.generate()
    serial = crypto.serialization
    private = key.private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
    public = key.public_key().public_bytes(serial.Encoding.PEM, serial.PublicFormat.SubjectPublicKeyInfo)
    files = ((path, private, 0o600), (path.with_name(path.name + ".pub"), public, 0o644))
    with ExitStack() as made:
        for file, raw, mode in files:
            try:
                fd = again(osfs.open_, str(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
                made.callback(_remove, file)
                try:
                    write_all(fd, raw)
                    again(osfs.fsync, fd)
                finally:
                    close(fd)
                sync_directory(str(file.parent))
            except FileExistsError as error:
                raise InputError(
                    "exists already", where=file, way_out="a key is never overwritten, choose another name"
                ) from error
            except OSError as error:
                raise because(InputError, file, error) from error
        made.pop_all()  # both are there
    return _hex(key.public_key())


def sign(zoo: Catalog, name: str, key: Path, *, reporter: Reporter = SILENT) -> str:
    """Sign a version with the private key in `key` (PEM); the public key as hex. Signing twice is once.

    Raises:
        BackendError: no cryptography.
        InputError: no usable key.
        ZooError: no such version, or the zoo cannot be written.
    """
    private = _private(key)
    found = zoo.resolve(name)
    _attach(zoo, private, target=found.manifest, subject=found.manifest, reporter=reporter)
    return _hex(private.public_key())


def attest(zoo: Catalog, name: str, report: Path, *, key: Path | None = None, reporter: Reporter = SILENT) -> str:
    """Attach a report to a version, signed if there is a key; the report's digest. See reports.read_report.

    Raises:
        InputError: no usable key, told before anything is attached; no usable report.
        IntegrityError: an evaluation that was edited, is damaged, or newer.
        BackendError, ZooError: as sign.
    """
    private = None if key is None else _private(key)
    found, entry = zoo.show(name)
    described = read_report(report, found, entry)
    digest = zoo.attach(described.entry, described.blobs, reporter=reporter)
    if private is not None:
        _attach(zoo, private, target=digest, subject=found.manifest, reporter=reporter)
    return digest


def signatures(zoo: Catalog, name: str) -> list[Signed]:
    """Every signature of a version and of its reports; all of them are good.

    Raises:
        ChecksumError: one of them is not, or signs something that is not there.
        BackendError, ZooError: as sign.
    """
    found = zoo.resolve(name)
    attached = zoo.referrers(str(found))
    known = {found.manifest: "entry"} | {
        one.digest: f"report {one.digest[:12]}" for one in attached if one.kind == "report"
    }
    good = []
    for entry in attached:
        if entry.kind != "signature":
            continue
        where = f"{zoo.where}: signature {entry.digest[:12]} of {found}"
        config = entry.config
        raw = blobs.read(zoo.store, config.digest, config.size, limit=MAX_KEY_BYTES, what=f"a signature of {found}")
        told = canonical.validate(Signature, canonical.parse(raw, where), where)
        if told.target not in known or not _is_good(told):
            raise ChecksumError(f"{where} is not good; whoever attached it did not sign this")
        good.append(Signed(known[told.target], told.public_key))
    return good


def require(zoo: Catalog, name: str, keys: Iterable[Path]) -> Signed:
    """The signature of a version by one of `keys` (public keys, PEM).

    Raises:
        NotFoundError: none of them has signed it.
        ChecksumError, BackendError, ZooError, InputError: as signatures.
    """
    trusted = {_hex(_public(key)) for key in keys}
    for one in signatures(zoo, name):
        if one.what == "entry" and one.public_key in trusted:
            return one
    raise NotFoundError(
        f"{name} carries no signature of a key that you trust", where=zoo.where, way_out="ask who published it"
    )


def _attach(zoo: Catalog, private: Ed25519PrivateKey, *, target: str, subject: str, reporter: Reporter) -> None:
    statement = Signature(
        target=target, public_key=_hex(private.public_key()), signature=private.sign(_said(target)).hex()
    )
    raw = canonical_bytes(statement.model_dump(mode="json"))
    blob = Blob(sha256_hex(raw), len(raw), lambda: (raw,), "a signature")
    entry = EntryManifest(
        kind="signature",
        config=Descriptor(media_type=SIGNATURE, digest=blob.digest, size=blob.size),
        summary={"public_key": statement.public_key, "target": target},
        subject=subject,
    )
    zoo.attach(entry, [blob], reporter=reporter)


def _is_good(told: Signature) -> bool:
    crypto = _crypto()
    try:
        public = crypto.ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(told.public_key))
        public.verify(bytes.fromhex(told.signature), _said(told.target))
    except (crypto.InvalidSignature, ValueError):
        return False
    return True


def _said(target: str) -> bytes:
    return f"{_PURPOSE}\nsha256:{target}\n".encode()


def _private(path: Path) -> Ed25519PrivateKey:
    crypto = _crypto()
    try:
        key: object = crypto.serialization.load_pem_private_key(_key_bytes(path), password=None)
    except (ValueError, TypeError, crypto.UnsupportedAlgorithm) as error:
        raise InputError(
            "no unencrypted private key in PEM form", where=path, way_out="make one with `zoo keygen`"
        ) from error
    if not isinstance(key, crypto.ed25519.Ed25519PrivateKey):
        raise InputError("not an Ed25519 key", where=path, way_out="make one with `zoo keygen`")
    return key  # type: ignore[no-any-return]


def _public(path: Path) -> Ed25519PublicKey:
    crypto = _crypto()
    try:
        key: object = crypto.serialization.load_pem_public_key(_key_bytes(path))
    except (ValueError, crypto.UnsupportedAlgorithm) as error:
        raise InputError("no public key in PEM form", where=path, way_out="it is the file that ends in .pub") from error
    if not isinstance(key, crypto.ed25519.Ed25519PublicKey):
        raise InputError("not an Ed25519 key", where=path)
    return key  # type: ignore[no-any-return]


def _remove(file: Path) -> None:
    with suppress(OSError):
        again(osfs.unlink, str(file))


def _key_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, at_most=MAX_KEY_BYTES, links=ANYWHERE)
    except OSError as error:
        raise unreadable(InputError, path, error) from error


def _hex(key: Ed25519PublicKey) -> str:
    return key.public_bytes_raw().hex()


def _crypto() -> Any:
    """What is needed of `cryptography`, under one name.

    Raises:
        BackendError: it is not installed.
    """
    from types import SimpleNamespace

    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BackendError("signatures need the package cryptography", way_out=install_hint("sign")) from error
    return SimpleNamespace(
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
        serialization=serialization,
        ed25519=ed25519,
    )

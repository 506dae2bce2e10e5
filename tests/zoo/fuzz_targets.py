"""What the fuzzer feeds: every parser of what others wrote, with valid inputs to begin from, and greedy ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from deltacompress.adapters.settings import parse_settings
from deltacompress.artifact.manifest import parse_manifest
from deltacompress.checkpoints.header import load_json_object, parse_header
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.json_limits import parsed_bytes
from deltacompress.zoo.care import check
from deltacompress.zoo.entries.artifact import describe
from deltacompress.zoo.entries.bases import MAX_IDENTITY_BYTES, describe_base, parse_base
from deltacompress.zoo.entries.reports import MAX_REPORT_BYTES, describe_report
from deltacompress.zoo.entries.scores import Condition
from deltacompress.zoo.entries.signing import Signature
from deltacompress.zoo.exchange.export_format import (
    INDEX,
    ExportBlob,
    ExportRecord,
    ExportVersion,
    blob_member,
    end_of_archive,
    header_for,
    padding_for,
)
from deltacompress.zoo.exchange.export_reader import examine
from deltacompress.zoo.ledger import canonical, names
from deltacompress.zoo.ledger.entry import MAX_ENTRY_BYTES, PART, EntryManifest, parse_entry
from deltacompress.zoo.ledger.records import (
    MAX_RECORD_BYTES,
    AliasRecord,
    IntentRecord,
    LedgerRecord,
    OutcomeRecord,
    ReferrerRecord,
    RemovalRecord,
    VersionRecord,
    ZooRecord,
    decode,
    encode,
)
from deltacompress.zoo.ledger.versions import Resolved
from deltacompress.zoo.store import layout
from deltacompress.zoo.store.base import check_key

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
HEX = "0123456789abcdef" * 4
RECORDS: dict[str, LedgerRecord] = {
    layout.ZOO: ZooRecord(id=HEX[:32], capabilities=("ranges",)),
    layout.version_key("t/bot", 1): VersionRecord(manifest=HEX, size=9, txn=HEX[:32], created=1.5),
    layout.removal_key("t/bot", 1, 1): RemovalRecord(state="removed", nonce=HEX[:32], created=1.5),
    layout.alias_key("t/bot", "prod", 2): AliasRecord(
        version=1, previous=HEX, rollback=False, nonce=HEX[:32], created=1.5
    ),
    layout.referrer_key(HEX, HEX, 1): ReferrerRecord(
        state="attached", manifest=HEX, size=9, nonce=HEX[:32], created=1.5
    ),
    layout.INTENTS + HEX[:32]: IntentRecord(what="t/bot", blobs=(HEX,), created=1.5),
    layout.OUTCOMES + HEX[:32]: OutcomeRecord(state="commit", target="names/t", raw="{}", nonce=HEX[:32]),
}


def archive(entries: list[tuple[str, bytes, dict[str, bytes]]]) -> bytes:
    """An export of (name, manifest, blobs)."""
    blobs: dict[str, bytes] = {}
    versions = []
    for name, raw, needs in entries:
        digest = sha256_hex(raw)
        blobs |= {digest: raw} | needs
        versions.append(ExportVersion(name=name, version=1, manifest=digest, size=len(raw), attached=()))
    listed = tuple(ExportBlob(digest=digest, size=len(raw)) for digest, raw in blobs.items())
    index = encode(INDEX, ExportRecord(versions=tuple(versions), blobs=listed))
    out = header_for(INDEX, len(index)) + index + padding_for(len(index))
    for digest, raw in blobs.items():
        out += header_for(blob_member(digest), len(raw)) + raw + padding_for(len(raw))
    return out + end_of_archive()


def read_archive(raw: bytes) -> None:
    """The parser of export files, on bytes."""
    examine(lambda offset, length: raw[offset : offset + length], len(raw), "x.tar")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace") if len(raw) % 2 else raw.decode("latin-1")


def read_key(raw: bytes) -> None:
    """All parsers of keys."""
    text = _text(raw)
    layout.blob_of(text)
    layout.number_of(text)
    check_key(text)
    check.kind_of(text)


def _decode(key: str, kind: type[LedgerRecord], raw: bytes) -> LedgerRecord:
    return decode(key, raw, kind, "zoo")


class Target:
    """One parser: valid inputs, and what to do with bytes. json: valid inputs are JSON objects; limit: bytes that it
    promises to refuse more than (0: as another one, which is fed in its stead)."""

    def __init__(
        self, inputs: list[bytes], run: Callable[[bytes], object], *, json: bool = True, limit: int = 1 << 20
    ) -> None:
        self.inputs = inputs
        self.run = run
        self.json = json
        self.limit = limit


def targets() -> dict[str, Target]:
    """Every parser that is fuzzed."""
    shard = (GOLDEN / "int4-24" / "delta-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(shard[:8], "little")
    described = describe(GOLDEN / "sign-24")
    raw = described.entry.to_bytes()
    needs = {blob.digest: b"".join(bytes(chunk) for chunk in blob.chunks()) for blob in described.blobs}
    base = describe_base(GOLDEN / "base", hub_id="acme/llama", revision=None)
    identity = b"".join(bytes(chunk) for chunk in base.blobs[0].chunks())
    lora = {"peft_type": "LORA", "r": 8, "target_modules": ["q"], "rank_pattern": {"a": 1}, "modules_to_save": None}
    shira = {"peft_type": "SHIRA", "r": 2, "target_modules": ["q"]}
    rosa = {"peft_type": "ROSA", "d": 0.01, "target_modules": ["q"], "density_pattern": {"a": 0.5}}
    more = lora | {"layers_to_transform": [1], "trainable_token_indices": {"e": [1]}, "alpha_pattern": {"^a": 2}}
    boft = {"peft_type": "BOFT", "boft_block_size": 4, "boft_block_num": 0, "target_modules": "q|k"}
    version = Resolved("t/bot", 1, described.entry.digest, len(raw), 1.5)
    signature = Signature(target=HEX, public_key=HEX, signature=HEX * 2)
    found = {
        "header": Target([shard[8 : 8 + length]], lambda data: parse_header(data, len(shard), "x")),
        "artifact manifest": Target(
            [(GOLDEN / "sign-24" / "manifest.json").read_bytes()], lambda d: parse_manifest(d, "x")
        ),
        "entry manifest": Target(
            [raw, base.entry.to_bytes()], lambda data: parse_entry(data, "x"), limit=MAX_ENTRY_BYTES
        ),
        "base identity": Target([identity], lambda data: parse_base(data, "x"), limit=MAX_IDENTITY_BYTES),
        "adapter config": Target(
            [json.dumps(one).encode() for one in (lora, boft, shira, rosa, more)],
            lambda data: parse_settings(load_json_object(data, "x"), "x"),
        ),
        "report": Target(
            [b'{"tasks":[{"task":"sst2","acc":0.5}],"kl":{"mean":1e-3}}', evaluation(described.entry)],
            lambda d: describe_report(d, version, described.entry, "x"),
            limit=MAX_REPORT_BYTES,
        ),
        "signature": Target(
            [canonical_bytes(signature.model_dump(mode="json"))],
            lambda data: canonical.validate(Signature, canonical.parse(data, "x"), "x"),
            limit=0,
        ),
        "name": Target(
            [b"team/bot", b"team/bot@7", b"a-b/c.d_e@prod"], lambda data: names.parse(_text(data)), json=False
        ),
        "key": Target(
            [layout.version_key("t/bot", 1).encode(), layout.blob_key(HEX, 2).encode(), b"tmp/1-a"],
            read_key,
            json=False,
        ),
        "condition": Target([b"sst2.accuracy>=0.9"], lambda d: Condition.parse(d.decode("latin-1")), json=False),
        "tar": Target(
            [archive([("t/bot", raw, needs), ("t/base", base.entry.to_bytes(), {sha256_hex(identity): identity})])],
            read_archive,
            json=False,
        ),
    }
    for key, record in RECORDS.items():
        found[f"record {record.type}"] = Target(
            [encode(key, record)], partial(_decode, key, type(record)), limit=MAX_RECORD_BYTES if "intent" in key else 0
        )
    return found


def evaluation(entry: EntryManifest) -> bytes:
    """As much of a report.json of this artifact as a zoo reads."""
    digest = entry.summary["artifact"]
    data = {
        "schema_version": 1,
        "subjects": [{"label": "bot", "role": "delta", "identity": digest, "manifest_digest": digest}],
        "tasks": [{"name": "sst2", "metric": "acc"}],
        "scores": [{"task": "sst2", "subject": "bot", "value": 0.5, "fidelity": {"kl": 0.001}}],
        "verdicts": [{"policy": "default", "subject": "bot", "passed": True}],
    }
    return json.dumps(data | {"digest": canonical_digest(data)}).encode()


def special(target: Target) -> list[bytes]:
    """Short inputs that want much of little."""
    some = target.inputs[0]
    return [b"", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"9" * 100_000 + b"}", b"[]," * 50_000, some * 20]


def hungry(target: Target) -> Iterator[bytes]:
    """Inputs of every shape, as long as the parser lets them be, and as long as its estimate of their memory does."""
    if not target.json or not target.limit:
        return
    for unit in (b"{}", b"[]", b"1000", b"0.5", b'"ab"', b'{"a":{}}', b"[[[]]]", b'{"a":[]}', b"0"):
        many = target.limit // (len(unit) + 1) - 8
        for count in {many, min(many, canonical.MAX_MEMORY // (parsed_bytes(unit) + 61))}:
            yield b'{"a":[' + (unit + b",") * (count - 1) + unit + b"]}"
    for count in (target.limit // 12 - 8, canonical.MAX_KEYS):
        keys = bytearray(b'{"x":0')
        for number in range(count):
            keys += b',"%07d":0' % number
        yield bytes(keys) + b"}"
        del keys
    yield b'{"a":"' + b"a" * (target.limit - 20) + b'"}'
    for key in ("blobs", "layers", "tensors"):  # what some of them do hold, right but for the last
        layer = b'{"annotations":{"file":"a-1.safetensors","part":"w"},"digest":"%s","media_type":"%s","size":9}'
        unit = b'"%s"' % HEX.encode() if key == "blobs" else layer % (HEX.encode(), PART.encode())
        if key == "tensors":
            unit = b'{"dtype":"BF16","name":"layer.w","sha256":"%s","shape":[8,8]}' % HEX.encode()
        for record in target.inputs[:1]:
            data = json.loads(record)
            if key in data:
                count = (target.limit - len(record)) // (len(unit) + 1) - 8
                before, after = canonical_bytes(data | {key: ["@"]}).split(b'["@"]')
                yield before + b"[" + (unit + b",") * count + unit + b"]" + after
                yield before + b"[" + (unit + b",") * count + b"0]" + after

"""A byte-level fuzzer of everything in a zoo that reads what others wrote.

    python -m tests.zoo.fuzz --inputs 1000000

Each input is a valid one with a few bytes or JSON values changed; where a digest guards the rest, half of the inputs
get a right one, so that they come further. An input may be accepted, or refused by a DeltaCompressError of one line;
anything else is a fault, printed with its bytes, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deltacompress.errors import DeltaCompressError
from deltacompress.manifest import parse_manifest
from deltacompress.safetensors_header import load_json_object, parse_header
from deltacompress.zoo import canonical, check, layout, names
from deltacompress.zoo.adapters import parse_settings
from deltacompress.zoo.artifact import describe
from deltacompress.zoo.bases import describe_base, parse_base
from deltacompress.zoo.entry import parse_entry
from deltacompress.zoo.export_format import (
    INDEX,
    ExportBlob,
    ExportRecord,
    ExportVersion,
    blob_member,
    end_of_archive,
    header_for,
    padding_for,
)
from deltacompress.zoo.export_reader import examine
from deltacompress.zoo.records import (
    AliasRecord,
    IntentRecord,
    OutcomeRecord,
    Record,
    RemovalRecord,
    VersionRecord,
    ZooRecord,
    decode,
    encode,
)
from deltacompress.zoo.reports import Condition, describe_report
from deltacompress.zoo.store import check_key

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
MEMORY = 256 << 20
HEX = "0123456789abcdef" * 4
RECORDS: dict[str, Record] = {
    layout.ZOO: ZooRecord(id=HEX[:32], capabilities=("ranges",)),
    layout.version_key("t/bot", 1): VersionRecord(manifest=HEX, size=9, txn=HEX[:32], created=1.5),
    layout.removal_key("t/bot", 1, 1): RemovalRecord(state="removed", nonce=HEX[:32], created=1.5),
    layout.alias_key("t/bot", "prod", 2): AliasRecord(
        version=1, previous=HEX, rollback=False, nonce=HEX[:32], created=1.5
    ),
    layout.INTENTS + HEX[:32]: IntentRecord(what="t/bot", blobs=(HEX,), created=1.5),
    layout.OUTCOMES + HEX[:32]: OutcomeRecord(state="commit", target="names/t", raw="{}", nonce=HEX[:32]),
}
TOKENS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"0.5", b'""', b"[]", b"{}", b"[[[["),
    *(b"{" * 40, b'"a":', b"\\u0000", b"\\ud800", b"../", b"/", b"@", b"latest", b"\x00", b"\xff", b"\xc3\xa9", b" "),
    *(b"[0,4611686018427387904]", b"[-1,2]", b'"F64"', b"__metadata__", b"\r\n", b"ustar", b"0777777777777", b"\x80"),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**53,
    2**63,
    10**400,
    0.5,
    -0.0,
    "",
    "x" * 5000,
    "../x",
    [],
    {},
    [[]],
    {"a": {}},
)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """A few random changes of bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            del data[at : at + rng.choice((1, 1, 2, 8, 64, 512))]
        elif kind == 4:
            end = min(len(data), at + rng.randrange(64))
            data[at:at] = data[at:end]
        elif kind == 5:
            token = rng.choice(TOKENS)
            data[at : at + len(token)] = token
        else:
            del data[at:]
    return bytes(data)


def change(rng: random.Random, data: Any) -> Any:
    """One value or key somewhere in JSON data, replaced, added or removed."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(list(data))
        copy = dict(data)
        kind = rng.randrange(8)
        if kind == 0:
            del copy[key]
        elif kind == 1:
            copy[rng.choice(("", "x", key + "x", "type", "../"))] = rng.choice(VALUES)
        else:
            copy[key] = change(rng, data[key])
        return copy
    if isinstance(data, list) and data and rng.random() < 0.9:
        copy_ = list(data)
        at = rng.randrange(len(data))
        copy_[at : at + 1] = [[], [data[at], data[at]], [change(rng, data[at])]][rng.randrange(3)]
        return copy_
    if isinstance(data, str) and data and rng.random() < 0.7:
        return mutate(rng, data.encode()).decode("utf-8", "replace")
    return rng.choice(VALUES)


def resealed(rng: random.Random, raw: bytes) -> bytes:
    """A JSON value changed, and the digest made right again."""
    data = change(rng, json.loads(raw))
    if isinstance(data, dict) and "digest" in data:
        data.pop("digest")
        try:
            data["digest"] = canonical.sha256(canonical.spell(data))
        except ValueError:
            return raw
    try:
        return canonical.spell(data) if isinstance(data, dict) else json.dumps(data).encode()
    except ValueError:
        return raw


def archive(entries: list[tuple[str, bytes, dict[str, bytes]]]) -> bytes:
    """An export of (name, manifest, blobs)."""
    blobs: dict[str, bytes] = {}
    versions = []
    for name, raw, needs in entries:
        digest = canonical.sha256(raw)
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


def _decode(key: str, kind: type[Record], raw: bytes) -> Record:
    return decode(key, raw, kind, "zoo")


class Target:
    """One parser: valid inputs, and what to do with bytes. json: valid inputs are JSON objects."""

    def __init__(self, inputs: list[bytes], run: Callable[[bytes], object], *, json: bool = True) -> None:
        self.inputs = inputs
        self.run = run
        self.json = json


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
    boft = {"peft_type": "BOFT", "boft_block_size": 4, "boft_block_num": 0, "target_modules": "q|k"}
    found = {
        "header": Target([shard[8 : 8 + length]], lambda data: parse_header(data, len(shard), "x")),
        "artifact manifest": Target(
            [(GOLDEN / "sign-24" / "manifest.json").read_bytes()], lambda d: parse_manifest(d, "x")
        ),
        "entry manifest": Target([raw, base.entry.to_bytes()], lambda data: parse_entry(data, "x")),
        "base identity": Target([identity], lambda data: parse_base(data, "x")),
        "adapter config": Target(
            [json.dumps(one).encode() for one in (lora, boft)],
            lambda data: parse_settings(load_json_object(data, "x"), "x"),
        ),
        "report": Target(
            [b'{"tasks":[{"task":"sst2","acc":0.5}],"kl":{"mean":1e-3}}'], lambda d: describe_report(d, HEX, "x")
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
            [
                archive(
                    [("t/bot", raw, needs), ("t/base", base.entry.to_bytes(), {canonical.sha256(identity): identity})]
                )
            ],
            read_archive,
            json=False,
        ),
    }
    for key, record in RECORDS.items():
        found[f"record {record.type}"] = Target([encode(key, record)], partial(_decode, key, type(record)))
    return found


def special(target: Target) -> list[bytes]:
    """Inputs that want much of little."""
    some = target.inputs[0]
    return [b"", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"9" * 100_000 + b"}", b"[]," * 50_000, some * 20]


def fuzz(inputs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Run so many inputs; outcomes ("parser: class") with how often, and faults."""
    rng = random.Random(seed)
    found = targets()
    outcomes: Counter[str] = Counter()
    faults: list[str] = []

    def one(name: str, target: Target, raw: bytes) -> None:
        try:
            target.run(raw)
            outcomes[f"{name}: accepted"] += 1
        except DeltaCompressError as error:
            outcomes[f"{name}: {type(error).__name__}"] += 1
            if "\n" in str(error) or len(str(error)) > 4000:
                faults.append(f"{name}: a message of several lines or without end: {str(error)[:200]!a}")
        except Exception as error:  # noqa: BLE001 - what the fuzzer looks for
            outcomes[f"{name}: FAULT"] += 1
            faults.append(f"{name}: {type(error).__name__}: {error!s:.200}: {raw[:2000]!r}")

    weights = [20 if name in ("header", "entry manifest", "name", "tar") else 5 for name in found]
    for name, target in found.items():
        for raw in special(target):
            one(name, target, raw)
    while outcomes.total() < inputs:
        name, target = rng.choices(list(found.items()), weights)[0]
        raw = rng.choice(target.inputs)
        raw = resealed(rng, raw) if target.json and rng.random() < 0.5 else mutate(rng, raw)
        one(name, target, raw)
    return outcomes, faults


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent had before it started this program
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Fuzz, print the figures; 1 if there was a fault or too much memory was used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.monotonic()
    outcomes, faults = fuzz(options.inputs, options.seed)
    for name, count in sorted(outcomes.items()):
        print(f"{count:>10,}  {name}")
    for fault in faults[:20]:
        print("FAULT", fault)
    seconds = time.monotonic() - begin
    print(
        f"inputs {outcomes.total():,}, seed {options.seed}, faults {len(faults)}, peak memory {peak() / 2**20:.0f} MiB "
        f"of {MEMORY >> 20}, {seconds:.0f} s"
    )
    return 1 if faults or peak() > MEMORY else 0


if __name__ == "__main__":
    sys.exit(main())

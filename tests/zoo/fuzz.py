"""A byte-level fuzzer of everything in a zoo that reads what others wrote.

    python -m tests.zoo.fuzz --inputs 1000000

Each input is a valid one with a few bytes or JSON values changed; where a digest guards the rest, half of the inputs
get a right one, so that they come further. An input may be accepted, or refused by a DeltaCompressError of one line;
anything else is a fault, printed with its bytes, and the exit code is 1. So is more than 256 MB of memory; inputs as
long as a parser takes them, of every shape, are among the first.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zoo.fuzz_targets import Target, hungry, special, targets

from deltacompress.errors import DeltaCompressError
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest

MEMORY = 256 << 20
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
            data["digest"] = canonical_digest(data)
        except ValueError:
            return raw
    try:
        return canonical_bytes(data) if isinstance(data, dict) else json.dumps(data).encode()
    except ValueError:
        return raw


def fuzz(inputs: int, seed: int, *, large: bool = False) -> tuple[Counter[str], list[str]]:
    """Run so many inputs; outcomes ("parser: class") with how often, and faults. large: also some of many megabytes."""
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
        for raw in hungry(target) if large else ():
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
    outcomes, faults = fuzz(options.inputs, options.seed, large=True)
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

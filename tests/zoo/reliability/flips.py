"""Every single bit of a small zoo flipped, one at a time: `verify` must see each."""

from __future__ import annotations

import tempfile
from pathlib import Path

from zoo.memory import MemoryStore
from zoo.reliability.scenarios import report
from zoo.samples import make_artifact

from deltacompress.reporter import SILENT
from deltacompress.zoo import Zoo
from deltacompress.zoo.care.verify import verify
from deltacompress.zoo.errors import StoreError


def small_zoo() -> dict[str, bytes]:
    """Key -> bytes of a zoo with a delta, an alias that moved, a removal and an attached report."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_artifact(root / "a", {"w.planes": b"\x5a" * 4100, "n.planes": b"small"}, files={"config.json": b"{}"})
        zoo = Zoo.init(root / "zoo")
        for _ in range(2):
            zoo.add_artifact(root / "a", "t/m")
        zoo.tag("t/m@1", "p")
        zoo.tag("t/m@2", "p")
        zoo.rm("t/m@1")
        zoo.attach(*report(zoo.resolve("t/m@2").manifest, b"r"))
        return {key: zoo.store.get(key, limit=1 << 30) for key in zoo.store.list("") if not key.startswith("tmp/")}


def undetected(objects: dict[str, bytes], *, stride: int = 1) -> tuple[int, list[str]]:
    """(bits flipped, those that verify did not see); every `stride`-th bit."""
    flipped, missed = 0, []
    number = 0
    for key in sorted(objects):
        good = objects[key]
        for bit in range(len(good) * 8):
            number += 1
            if number % stride:
                continue
            flipped += 1
            bad = bytearray(good)
            bad[bit >> 3] ^= 1 << (bit & 7)
            try:
                if verify(MemoryStore(objects | {key: bytes(bad)}), SILENT).ok:
                    missed.append(f"{key}, bit {bit}")
            except StoreError as error:
                missed.append(f"{key}, bit {bit}: {error}")
    return flipped, missed

"""Writes a golden zoo and golden reports: `python tests/golden_stores/make_stores.py v1` (or v2).

As with the golden artifacts (tests/golden/make.py): every later version of the program must read them, so they are
written anew only while the format they show is unreleased.

    zoo.tar.xz       a zoo: a base, two versions of a delta (an alias moved from one to the other, the first removed),
                     an evaluation attached; a tar, because the files of a zoo are read-only and git keeps no modes
    report/          what `deltacompress eval` wrote of the second version, but for its page
    expected.json    what was read from them on that day

v2 holds a report of version 2, which measured an adapter, and its expected.json.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacompress.evaluation import Report
    from deltacompress.zoo import Zoo

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "golden"), str(HERE.parent), str(HERE.parent.parent)]


def read_zoo(zoo: Zoo) -> dict[str, Any]:
    """What a zoo says of itself, as far as it does not depend on where it lies or on the day."""
    return {
        "problems": [str(problem) for problem in zoo.verify().problems],
        "listed": [f"{row.name}@{row.version}" for row in zoo.list(all_versions=True, removed=True)],
        "alias": str(zoo.resolve("team/tiny@prod")),
        "digest": zoo.resolve("team/tiny@prod").manifest,
        "scores": dict(zoo.scores("team/tiny@prod")),
        "referrers": len(zoo.referrers("team/tiny@prod")),
    }


def judged(report: Report) -> dict[str, Any]:
    """What the default gate says of a report, check by check."""
    from deltacompress.evaluation import Gate

    return {"gate": Gate.load("default").check(report).to_json()}


def make(folder: Path) -> None:
    """Write the whole folder anew."""
    import torch
    from make import SIZES
    from pairs import make_pair, write_tokenizer

    from deltacompress.evaluation import evaluate
    from deltacompress.zoo import Zoo

    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        pair = make_pair(root, "llama", **SIZES)
        for checkpoint in (pair.base, pair.finetuned):
            write_tokenizer(checkpoint, [f"w{i}" for i in range(16)])
        zoo = Zoo.init(root / "zoo")
        zoo.add(pair.base, "team/base")
        for recipe in ("int4-24", "int2-24"):
            pair.compress(root / recipe, recipe=recipe)
            zoo.tag(str(zoo.add(root / recipe, "team/tiny").name), "prod")
        report = evaluate(
            {"int2": root / "int2-24"},
            base=pair.base,
            finetuned=pair.finetuned,
            tasks=["colours"],
            task_dir=write_task(root / "tasks"),
            with_base=True,
            out=folder / "report",
        )
        (folder / "report" / "report.html").unlink()  # a page for people: no later version reads it
        zoo.attest("team/tiny@prod", folder / "report" / "report.json")
        zoo.rm("team/tiny@1")
        expected = {"zoo": read_zoo(zoo), "report": judged(report)}
        with tarfile.open(folder / "zoo.tar.xz", "w:xz") as tar:
            tar.add(root / "zoo", "zoo", filter=lambda file: None if "/tmp/" in file.name else file)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def make_adapters(folder: Path) -> None:
    """Write the folder with a report of an adapter anew."""
    import peft_models
    import torch
    from make import SIZES
    from pairs import make_pair, write_tokenizer

    from deltacompress.evaluation import evaluate

    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        pair = make_pair(root, "llama", **SIZES)
        for checkpoint in (pair.base, pair.finetuned):
            write_tokenizer(checkpoint, [f"w{i}" for i in range(16)])
        adapter = peft_models.write(pair.base, root / "lora", "Lora", r=2, target_modules=["q_proj"])
        report = evaluate(
            {"lora": adapter},
            base=pair.base,
            finetuned=pair.finetuned,
            tasks=["colours"],
            task_dir=write_task(root / "tasks"),
            out=folder / "report",
        )
    (folder / "report" / "report.html").unlink()
    (folder / "expected.json").write_text(json.dumps({"report": judged(report)}, indent=1, sort_keys=True) + "\n")


def write_task(folder: Path) -> Path:
    """A task of 12 samples over the words of the tiny pair."""
    (folder / "colours").mkdir(parents=True)
    rng = random.Random(0)
    lines = [
        json.dumps(
            {
                "prompt": " ".join(f"w{rng.randrange(16)}" for _ in range(4)),
                "completion": " w3",
                "choices": [" w1 w2", " w3"],
            }
        )
        for _ in range(12)
    ]
    (folder / "colours" / "validation.jsonl").write_text("\n".join(lines) + "\n")
    return folder


if __name__ == "__main__":
    {"v1": make, "v2": make_adapters}[sys.argv[1]](HERE / sys.argv[1])

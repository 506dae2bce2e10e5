"""Tasks over the words of the tiny pairs, and an evaluation of one of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pairs import Pair

    from deltacompress.evaluation.report.data import Report


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(88)}" for _ in range(count))


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, colours (choose) and echo (generate), 24 samples each."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    for task in ("colours", "echo"):
        (folder / task).mkdir()
        for split, count in (("train", 30), ("validation", 24)):
            lines = []
            for _ in range(count):
                record: dict[str, object] = {"prompt": words(rng, rng.randrange(1, 9)), "completion": " w1 w2"}
                if task == "colours":
                    record |= {"completion": " w3", "choices": [" w1 w2 w4", " w3", " w5 w6"]}
                lines.append(json.dumps(record))
            (folder / task / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def lm_eval() -> None:
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed (the extra `eval`)")


@pytest.fixture(scope="session")
def evaluated(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Report, Path]:
    """A whole evaluation of the tiny pair, and where it was written."""
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed (the extra `eval`)")
    from deltacompress.evaluation import evaluate

    out = tmp_path_factory.mktemp("evaluated") / "report"
    report = evaluate(
        {"int4": artifact},
        base=pair.base,
        finetuned=pair.finetuned,
        tasks=["colours", "echo"],
        task_dir=task_dir,
        with_base=True,
        out=out,
    )
    return report, out


@pytest.fixture(scope="session")
def real_models(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real models, unpacked; slow."""
    models = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, shared_dir / "unpack.py", models], check=True, capture_output=True)
    return models

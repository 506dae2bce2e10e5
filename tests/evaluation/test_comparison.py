"""compare: every method on the same samples, deltas decoupled, direct compressions restored, artifacts used again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltacompress.content import list_content
from deltacompress.errors import InputError
from deltacompress.evaluation import compare
from deltacompress.evaluation.baselines import DONORS
from deltacompress.evaluation.comparison import METHODS, load_method
from deltacompress.recipe import Recipe

if TYPE_CHECKING:
    from pairs import Pair

DIRECT = """
name: direct
scope: full
calibration: {samples: 8, seq_len: 16}
rules:
  - {kind: linear, codec: obs, bits: 4, block_size: 16}
  - {codec: exact}
"""


def test_every_method_is_known() -> None:
    for name in METHODS.split(","):
        load_method(DONORS.get(name, name))
    for path in list_content("evals/baselines", ".yaml"):
        assert Recipe.load(path).name == path.stem
    with pytest.raises(InputError, match="unknown method 'gptq-direct'; did you mean gptq-direct-4bit"):
        load_method("gptq-direct")


@pytest.mark.usefixtures("lm_eval")
def test_methods_in_one_table(pair: Pair, task_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text(DIRECT)
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "tasks": ["colours"], "task_dir": task_dir, "out": out, "calibration": pair.data, "limit": 8,
        "methods": ["rtn-4bit", str(tmp_path / "direct.yaml")],
    }  # fmt: skip
    found = compare(pair.base, pair.finetuned, **options)
    rows = {row["method"]: row for row in found.to_json()["rows"]}
    assert rows.keys() == {"finetuned", "base", "rtn-4bit", "direct"}
    assert found.report.subject("rtn-4bit").role == "delta"
    direct = found.report.subject("direct")
    assert (direct.role, direct.recipe) == ("checkpoint", "direct")
    assert direct.ratio is not None
    assert direct.bytes < found.report.subject("finetuned").bytes
    assert rows["direct"]["compress_seconds"] > 0
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    before = (out / "artifacts" / "direct" / "manifest.json").stat().st_mtime_ns
    assert compare(pair.base, pair.finetuned, **options).report.scores == found.report.scores
    assert (out / "artifacts" / "direct" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="made by another recipe, model or seed"):
        compare(pair.base, pair.finetuned, **(options | {"seed": 1}))
    with pytest.raises(InputError, match="named twice"):
        compare(pair.base, pair.finetuned, **(options | {"methods": ["rtn-4bit", "rtn-4bit"]}))

"""A new codec is a file in codecs/ and its entry in codecs/registry.py: everything else knows it then.

Shown with a copy of the package: the toy keeps the signs of a delta and the mean magnitude of each row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import Pair

HALF = '''
from typing import Literal

from deltacompress.codecs.settings import Codec, Quantizing, spec_for


class HalfSettings(Quantizing):
    """Signs of the delta, times the mean magnitude of each row."""

    codec: Literal["half"] = "half"
    bits: Literal[1] = 1
    grid: Literal["midrise"] = "midrise"
    sparsity: Literal["dense"] = "dense"
    group_size: Literal["row"] = "row"


def encode(finetuned, base, settings, name):
    import torch

    from deltacompress.codecs.encoded import Encoded, delta_rows
    from deltacompress.codecs.packed import pack
    from deltacompress.numerics.grid import Grid

    read, rows, columns = delta_rows(finetuned, base, name)
    delta = read(0, rows)
    scale = 2 * delta.abs().mean(1, keepdim=True)
    grid = Grid(1, columns, scale, torch.full_like(scale, 0.5))
    spec = spec_for(settings, rows=rows, columns=columns, name=name)
    parts = pack(spec, codes=(delta > 0).to(torch.uint8), mask=torch.ones_like(delta, dtype=torch.bool), grid=grid)
    return Encoded("packed", spec.to_json(), parts)


HALF = Codec(HalfSettings, encode)
'''
IMPORT = "from deltacompress.codecs.half import HALF\n"
LAST = "        Codec(SkipSettings, _skip),\n"
ENTRY = "        HALF,\n"

RECIPE = """
name: halved
rules:
  - {kind: [linear, embedding, head], codec: half}
  - {codec: exact}
"""

SCRIPT = """
import sys
from pathlib import Path

import deltacompress
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import RecipeError
from deltacompress.evaluation.methods.names import load_methods

root, base, finetuned = map(Path, sys.argv[1:])
assert Path(deltacompress.__file__).is_relative_to(root), deltacompress.__file__
recipe = load_methods([str(root / "halved.yaml")])["halved"]  # as compare reads them
assert recipe.rules[0].codec == "half"
assert not recipe.needs_calibration
unknown = ({"codec": "halve"}, "'obs', 'rtn', 'exact', 'skip', 'half'")
for wrong, told in (unknown, ({"codec": "half", "bits": 2}, "bits")):
    try:
        Recipe.parse({"name": "n", "rules": [wrong]})
    except RecipeError as error:
        assert told in str(error), error
    else:
        raise AssertionError(wrong)
assert "torch" not in sys.modules
from deltacompress.schemas import recipe_schema

assert "HalfRule" in recipe_schema()["$defs"]

import torch
from runtime_cases import assert_close, oracle_logits, oracle_tokens, random_ids

from deltacompress import Runtime, compress, load_delta, restore, verify
from deltacompress.checkpoints.reader import Checkpoint

out = root / "delta"
compress(base, finetuned, recipe=recipe, out=out, device="cpu")
verify(out, base=base)
records = {record.name: record for record in load_delta(out).manifest.tensors}
assert {"half", "exact"} == {record.codec for record in records.values()}
restored = restore(out, base=base, out=root / "restored")
name = "model.layers.1.mlp.up_proj.weight"
assert records[name].codec == "half" and records[name].params["bits"] == 1
before, after, found = (Checkpoint.open(one).read(name).float() for one in (base, finetuned, restored))
delta = after - before
wanted = torch.where(delta > 0, 1.0, -1.0) * delta.abs().mean(1, keepdim=True)
assert_close(found - before, wanted, 0.05)  # a bf16 scale, added to bf16 weights

runtime = Runtime.from_base(base, backend="reference")
runtime.load(out, "v")
requests = [("v", random_ids(12)), (None, random_ids(5, 1)), ("v", random_ids(3, 2))]
for (variant, ids), logits in zip(requests, runtime.logits(requests), strict=True):
    assert_close(logits, oracle_logits(restored if variant else base, ids))
for (variant, ids), done in zip(requests, runtime.complete(requests, 6), strict=True):
    assert list(done.tokens) == oracle_tokens(restored if variant else base, ids, 6)[: len(done.tokens)]
    assert len(done.tokens) > 2
print("served")
"""


@pytest.mark.slow
def test_a_new_codec_is_a_file_and_its_entry(pair: Pair, tmp_path: Path, repo_root: Path) -> None:
    codecs = tmp_path / "deltacompress" / "codecs"
    shutil.copytree(repo_root / "deltacompress", codecs.parent, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("calibration", "evals", "registry"):
        if not (codecs.parent / "_content").exists():
            (tmp_path / folder).symlink_to(repo_root / folder)
    (codecs / "half.py").write_text(HALF)
    registry = (codecs / "registry.py").read_text()
    imports = "from deltacompress.codecs.settings import"
    assert (registry.count(imports), registry.count(LAST)) == (1, 1)
    registry = registry.replace(imports, IMPORT + imports).replace(LAST, LAST + ENTRY)
    (codecs / "registry.py").write_text(registry)
    assert len(list(codecs.glob("*.py"))) <= 12, "no room for another file: see tests/test_house.py"
    (tmp_path / "halved.yaml").write_text(RECIPE)
    path = os.pathsep.join((str(tmp_path), str(repo_root / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(pair.base), str(pair.finetuned)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"

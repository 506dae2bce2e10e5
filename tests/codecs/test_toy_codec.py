"""A new codec is a file in codecs/ and its entry in codecs/registry.py: everything else knows it then.

Shown with a copy of the package. One toy keeps the signs of a delta and the mean magnitude of each row; another one
calibrates: it weighs the magnitudes by the energy of the inputs; the third takes its magnitudes from the whole model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import Pair

HALF = '''
from typing import Literal

from deltacompress.codecs.codec import Codec
from deltacompress.codecs.settings import Quantizing, spec_for


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
    from deltacompress.codecs.formats.packed import pack
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
WEIGHED = '''
from typing import Literal

from deltacompress.codecs.codec import Codec
from deltacompress.codecs.settings import Settings


class WeighedSettings(Settings):
    """Signs of the delta, times a mean magnitude of each row, columns weighed by the Hessian's diagonal."""

    codec: Literal["weighed"] = "weighed"
    teacher: bool = False

    @property
    def needs_teacher(self):
        return self.teacher


def encode_group(jobs, statistics, settings):
    import torch

    from deltacompress.codecs.encoded import Encoded
    from deltacompress.codecs.formats.packed import PackedSpec, pack
    from deltacompress.numerics.grid import Grid
    from deltacompress.numerics.sparsity import Sparsity

    hessian, drift = statistics.finish()
    assert (drift is not None) == settings.teacher
    print(",".join(job.name for job in jobs), statistics.tokens)
    out, energy = {}, hessian.diagonal()
    for job in jobs:
        rows, columns = job.delta.shape
        assert job.finetuned.shape == job.delta.shape and hessian.shape == (columns, columns)
        scale = 2 * (job.delta.abs() @ energy / energy.sum()).unsqueeze(1)
        grid = Grid(1, columns, scale, torch.full_like(scale, 0.5))
        spec = PackedSpec(rows, columns, 1, Sparsity.parse("dense"), columns, "midrise")
        mask = torch.ones_like(job.delta, dtype=torch.bool)
        parts = pack(spec, codes=(job.delta > 0).to(torch.uint8), mask=mask, grid=grid)
        out[job.name] = Encoded("packed", spec.to_json(), parts, loss=0.5)
    return out


WEIGHED = Codec(WeighedSettings, encode_group=encode_group)
'''
FITTED = '''
from typing import Literal

from deltacompress.codecs.codec import Codec
from deltacompress.codecs.settings import Settings


class FittedSettings(Settings):
    """Signs of the delta, times the mean magnitude in the whole model and a factor."""

    codec: Literal["fitted"] = "fitted"
    factor: float = 1.0


def fit(seen):
    assert seen.bases.keys() == seen.settings.keys()
    weights = dict(seen.model.named_parameters())
    print(sorted({one.factor for one in seen.settings.values()}))
    return {name: float((weights[name].detach() - base).abs().mean()) for name, base in seen.bases.items()}


def encode(finetuned, base, settings, name, magnitude):
    from deltacompress.codecs import rtn
    from deltacompress.codecs.encoded import delta_rows
    from deltacompress.codecs.settings import RtnSettings

    read, rows, _ = delta_rows(finetuned, base, name)
    signs = (read(0, rows) > 0) * 2.0 - 1.0
    return rtn.encode(signs * magnitude * settings.factor, RtnSettings(bits=8), name)


FITTED = Codec(FittedSettings, encode, fit=fit)
'''
LAST = "        Codec(SkipSettings, _skip),\n"

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


CALIBRATES = """
import sys
from pathlib import Path

import torch
from runtime_cases import assert_close

from deltacompress import compress, restore, verify
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import CalibrationError, RecipeError

root, base, finetuned, data = map(Path, sys.argv[1:])


def recipe(kinds, **settings):
    rules = [{"kind": kinds, "codec": "weighed", **settings}, {"codec": "exact"}]
    return Recipe.parse({"name": "weighed", "rules": rules, "calibration": {"samples": 8, "seq_len": 16}})


for kinds, given, error in ((["linear"], None, CalibrationError), (["embedding"], data, RecipeError)):
    try:
        compress(base, finetuned, recipe=recipe(kinds), out=root / "no", calibration=given, device="cpu")
    except error as refused:
        assert "calibrate" in str(refused), refused
    else:
        raise AssertionError(kinds)
for teacher in (False, True):
    out = root / f"delta-{teacher}"
    made = recipe(["linear", "head"], teacher=teacher)
    done = compress(base, finetuned, recipe=made, out=out, calibration=data, device="cpu")
    assert (done.kl_on_calibration is not None) == teacher
    delta = verify(out, base=base)
    assert delta.manifest.calibration.samples == 8
    codecs = {record.kind: record.codec for record in delta.manifest.tensors if record.status != "identical"}
    assert (codecs["linear"], codecs["head"], codecs["norm"]) == ("weighed", "weighed", "exact")
    restored = Checkpoint.open(restore(out, base=base, out=root / f"restored-{teacher}"))
    for name, record in delta.tensors.items():
        before, after, found = (Checkpoint.open(one).read(name).float() for one in (base, finetuned, restored.path))
        if record.codec == "exact":
            assert torch.equal(found, after)
            continue
        assert record.loss == 0.5
        change, signs = found - before, torch.where(after - before > 0, 1.0, -1.0)
        size = (change * signs).mean(1, keepdim=True)  # of each row; not the mean magnitude, but near it
        assert_close(change, signs * size, 0.1)
        assert_close(size, (after - before).abs().mean(1, keepdim=True), 0.5)
"""


FITS = """
import sys
from pathlib import Path

import torch
from runtime_cases import assert_close

from deltacompress import compress, restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import Recipe

root, base, finetuned, data = map(Path, sys.argv[1:])
factors = {"linear": 0.5, "head": 2.0}
rules = [{"kind": kind, "codec": "fitted", "factor": factor} for kind, factor in factors.items()]
calibration = {"samples": 8, "seq_len": 16}
made = Recipe.parse({"name": "fitted", "rules": [*rules, {"codec": "exact"}], "calibration": calibration})
compress(base, finetuned, recipe=made, out=root / "delta", calibration=data, device="cpu")
restored = restore(root / "delta", base=base, out=root / "restored")
for name, factor in {"model.layers.1.mlp.up_proj.weight": 0.5, "lm_head.weight": 2.0}.items():
    before, after, found = (Checkpoint.open(one).read(name).float() for one in (base, finetuned, restored))
    size = ((found - before) * torch.where(after > before, 1.0, -1.0)).mean()  # sums of bf16 weights: about it
    assert_close(size, factor * (after - before).abs().mean(), 0.05)
"""


@pytest.mark.slow
def test_a_new_codec_is_a_file_and_its_entry(pair: Pair, tmp_path: Path, repo_root: Path) -> None:
    add_codec("half", HALF, tmp_path, repo_root)
    (tmp_path / "halved.yaml").write_text(RECIPE)
    assert run_there(SCRIPT, tmp_path, repo_root, pair.base, pair.finetuned) == "served\n"


@pytest.mark.slow
def test_one_that_calibrates_takes_no_more(make_pair: Callable[..., Pair], tmp_path: Path, repo_root: Path) -> None:
    """Linears that share an input come together, with the sums over all tokens; the head alone; down, of three times as
    many inputs as outputs, with D as the others.
    """
    pair = make_pair("llama", intermediate_size=96, num_hidden_layers=2)
    add_codec("weighed", WEIGHED, tmp_path, repo_root)
    told = run_there(CALIBRATES, tmp_path, repo_root, pair.base, pair.finetuned, pair.data).splitlines()
    groups = ("self_attn.q,self_attn.k,self_attn.v", "self_attn.o", "mlp.gate,mlp.up", "mlp.down")
    layers = [
        ",".join(f"model.layers.{i}.{name}_proj.weight" for name in group.split(","))
        for i in (0, 1)
        for group in groups
    ]
    assert told == [f"{names} 128" for names in (*layers, "lm_head.weight")] * 2


@pytest.mark.slow
def test_one_that_fits_the_model_gets_its_settings_too(pair: Pair, tmp_path: Path, repo_root: Path) -> None:
    add_codec("fitted", FITTED, tmp_path, repo_root)
    assert run_there(FITS, tmp_path, repo_root, pair.base, pair.finetuned, pair.data) == "[0.5, 2.0]\n"


def add_codec(name: str, source: str, root: Path, repo_root: Path) -> None:
    """Copy the package below `root`, and add a codec's file and its line."""
    line, entry = f"from deltacompress.codecs.{name} import {name.upper()}\n", f"        {name.upper()},\n"
    codecs = root / "deltacompress" / "codecs"
    shutil.copytree(repo_root / "deltacompress", codecs.parent, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("calibration", "evals", "registry"):
        if not (codecs.parent / "_content").exists():
            (root / folder).symlink_to(repo_root / folder)
    (codecs / f"{name}.py").write_text(source)
    registry = (codecs / "registry.py").read_text()
    imports = "from deltacompress.codecs.settings import"
    assert (registry.count(imports), registry.count(LAST)) == (1, 1)
    registry = registry.replace(imports, line + imports).replace(LAST, LAST + entry)
    (codecs / "registry.py").write_text(registry)
    assert len(list(codecs.glob("*.py"))) <= 12, "no room for another file: see tests/test_house.py"


def run_there(script: str, root: Path, repo_root: Path, *arguments: Path) -> str:
    """What a script prints that runs with the package below `root`."""
    path = os.pathsep.join((str(root), str(repo_root / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", script, str(root), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

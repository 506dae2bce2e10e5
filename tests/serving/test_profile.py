"""A profile is taken where it was made for, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltacompress._version import __version__
from deltacompress.bench.synthetic import SHAPE_TINY
from deltacompress.cli.main import main
from deltacompress.cli.verbs.serve import _tuned
from deltacompress.devices import device_name, resolve_device
from deltacompress.errors import InputError
from deltacompress.serving.messages import Start
from deltacompress.serving.profile import Profile, Run, Traffic, read_profile, sizes
from deltacompress.serving.worker import process

CONFIG = SHAPE_TINY.config()


def profile(**changes: Any) -> Profile:
    """One of this device and the tiny shape."""
    traffic = Traffic(
        trace="poisson", rate=4.0, variation=4.0, seconds=5.0, popularity="one", variants=3, seed=7, scale=0.1
    )
    known: dict[str, Any] = {
        "version": __version__, "device": device_name(resolve_device("cpu")), "backend": "reference",
        "date": "2026-11-24", "base": sizes(CONFIG), "recipe": "int2-24", "slots": 3, "max_batch": 4,
        "step_tokens": 256, "variant_bytes": 1000, "room_bytes": None, "times": {"base_ms": 1.5}, "traffic": traffic,
        "runs": (Run(slots=3, max_batch=4, step_tokens=256, measured_s=1.0, simulated_s=2.0),),
    }  # fmt: skip
    return Profile(**{**known, **changes})


def start(base: Path, path: Path | None) -> Start:
    return Start(
        orders="o", reports="r", base=str(base), variants=(), zoo=None, device="cpu", dtype="float32",
        backend="reference", budget_bytes=5, max_batch=6, max_queue=7, step_tokens=8, prefix_bytes=9,
        profile=None if path is None else str(path),
    )  # fmt: skip


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile(slots=2).write(path)
    profile().write(path)
    assert read_profile(path) == profile()
    assert profile().budget_bytes == 3000


def test_sizes_that_are_not_said() -> None:
    said = {"num_attention_heads": 4, "hidden_size": 128, "vocab_size": 9, "rope_theta": 1.0, "intermediate_size": None}
    assert sizes(said) == {
        "num_attention_heads": 4, "hidden_size": 128, "vocab_size": 9, "num_key_value_heads": 4, "head_dim": 32
    }  # fmt: skip
    assert sizes({**said, "num_key_value_heads": 2, "head_dim": 64})["num_key_value_heads"] == 2
    assert sizes({**said, "num_key_value_heads": 2, "head_dim": 64})["head_dim"] == 64
    assert sizes({}) == {}


def test_where_it_fits(tmp_path: Path) -> None:
    path, device = tmp_path / "p.json", profile().device
    profile().check(path, device=device, config=CONFIG)
    profile().check(path, device=device, config={**CONFIG, "head_dim": 32, "torch_dtype": "float16"})
    with pytest.raises(InputError, match=r"p\.json: was made on .*, this is 'H100'; tune again"):
        profile().check(path, device="H100", config=CONFIG)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads"):
        with pytest.raises(InputError, match=rf"p\.json: was made for a base with {name} \d+, this one has 3;"):
            profile().check(path, device=device, config={**CONFIG, name: 3, "head_dim": 32})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "0.0.9"}, rf"was made by version '0\.0\.9', this is {__version__}"),
        ({"format": 1}, "has times of format 1, this program's are of format 2; tune again"),
        ({"format": "3"}, "has times of format '3', this"),
        ({"slots": 0}, r"is no profile \(slots: "),
        ({"extra": 1}, r"is no profile \(extra: "),
        ({"times": None}, r"is no profile \(times: "),
    ],
)
def test_what_is_none(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**json.loads(profile().model_dump_json()), **changes}))
    with pytest.raises(InputError, match=rf"p\.json: {told}"):
        read_profile(path)


@pytest.mark.parametrize("command", [["serve", "BASE"], ["bench", "serve", "--rate", "1"], ["bench", "sweep"]])
def test_times_that_meant_something_else(
    command: list[str], tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that says no format is from before there was one."""
    path, base = tmp_path / "p.json", str(repo_root / "registry" / "demo" / "base")
    path.write_text(profile().model_dump_json(exclude={"format"}))
    where = [str(path)] if "sweep" in command else ["--device", "cpu", "--profile", str(path)]
    assert main([base if one == "BASE" else one for one in command] + where) == 2
    assert f"{path.name}: has times of format 1, this program's are of format 2" in capsys.readouterr().err


def test_what_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(InputError, match=r"p\.json: no such file; tune again"):
        read_profile(path)
    for text in ("", "[]", '{"a": 1}'):
        path.write_text(text)
        with pytest.raises(InputError, match="is no profile"):
            read_profile(path)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_profile(tmp_path)


def test_what_serve_takes_of_it(tmp_path: Path) -> None:
    """What is given counts."""
    path = tmp_path / "p.json"
    profile().write(path)
    assert _tuned(None, 2, None, None, None) == {}
    assert _tuned(None, 1, 7, None, 9) == {"budget_bytes": 7, "step_tokens": 9}
    assert _tuned(path, 1, None, None, None) == {"budget_bytes": 3000, "max_batch": 4, "step_tokens": 256}
    assert _tuned(path, 1, 7, 8, None) == {"budget_bytes": 7, "max_batch": 8, "step_tokens": 256}
    with pytest.raises(InputError, match=r"p\.json: was measured on one device, and tp is 2; give budget, max"):
        _tuned(path, 2, 7, 8, None)


def test_the_engine_refuses_it_before_it_loads_the_base(tmp_path: Path, repo_root: Path) -> None:
    base, path = repo_root / "registry" / "demo" / "base", tmp_path / "p.json"
    config = json.loads((base / "config.json").read_text())
    profile(base=sizes(config)).write(path)
    process._check_profile(path, start(base, path))
    profile().write(path)
    with pytest.raises(InputError, match="was made for a base with num_hidden_layers 2, this one has"):
        process.build(start(base, path), print)


def test_a_server_with_a_profile_of_another_device(
    tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    profile(device="H100").write(path)
    base = str(repo_root / "registry" / "demo" / "base")
    assert main(["serve", base, "--device", "cpu", "--port", "0", "--profile", str(path)]) == 2
    assert "p.json: was made on 'H100', this is 'CPU" in capsys.readouterr().err

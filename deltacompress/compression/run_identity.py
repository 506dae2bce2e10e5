"""What a run is: everything that can change a byte of the artifact, down to the processor and the libraries."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch

from deltacompress._version import __version__
from deltacompress.calibration.data import CalibrationTokens
from deltacompress.compression.planning import Plan
from deltacompress.devices import gpu_name
from deltacompress.errors import InputError, switch
from deltacompress.files.regular import read_text
from deltacompress.lossless import Coder
from deltacompress.numerics.compiled import fused as compiled
from deltacompress.numerics.triton import fused

IDENTITY = "identity.json"
MAX_IDENTITY_BYTES = 64 << 20
_TOOLS = ("torch", "transformers", "safetensors", "zstandard", "numpy")


def identity_of(
    plan: Plan, tokens: CalibrationTokens | None, devices: Sequence[torch.device], coder: Coder, *, hashed: bool
) -> dict[str, Any]:
    """Everything that can change a byte of the artifact: what a resumed run must share with the interrupted one.

    devices: of its processes; where there are several, sums are taken in another order. hashed: whether the weights
    are. Until they are, the files that they lie in stand for them.
    """
    where = devices[0]
    shared = {"processes": len(devices)} if len(devices) > 1 and plan.calibrated else {}
    return shared | {
        "base": plan.base.fingerprint() if hashed else None,
        "fine-tuned": plan.finetuned.fingerprint() if hashed else None,
        "files": {"base": plan.base.stamps, "fine-tuned": plan.finetuned.stamps},
        "config": plan.finetuned.config,
        "recipe": plan.recipe.model_dump(mode="json"),
        "calibration": tokens.sha256 if tokens else None,
        "lossless": lossless_of(coder),
        "device": gpu_name(where) or "cpu",
        "solver": solver(where) if plan.calibrated else None,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "versions": tool_versions(),
    }


def identity_file(out: Path) -> Path:
    """Where an unfinished run of `out` says what it is of."""
    return out.with_name(out.name + ".partial") / IDENTITY


def spelled(identity: dict[str, Any]) -> str:
    """As the file holds it."""
    return json.dumps(identity, sort_keys=True, indent=1)


def check_same(known: Path, identity: dict[str, Any]) -> None:
    """Compare the identity of an unfinished run with this one's, of hashed weights; raises InputError."""
    try:
        old = json.loads(read_text(known, at_most=MAX_IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"damaged ({error})", where=known, way_out=start_over()) from error
    if not isinstance(old, dict):
        raise InputError("damaged (not a JSON object)", where=known, way_out=start_over())
    before, now = _comparable(old, old), _comparable(json.loads(spelled(identity)), old)
    keys = sorted(now.keys() | before.keys())
    if changed := [key for key in keys if json.dumps(before.get(key)) != json.dumps(now.get(key))]:
        raise InputError(
            f"the unfinished run was started with other input ({', '.join(changed)})",
            where=known.parent,
            way_out=f"give the same again, {start_over()}",
        )


def is_same(known: Path, identity: dict[str, Any]) -> bool:
    """Whether a run that is resumed would go on with the unfinished one; as check_same, which says why not."""
    with suppress(InputError):
        check_same(known, identity)
        return True
    return False


def _comparable(identity: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: weights by their hashes, or by their files if the unfinished run was stopped before those."""
    files = identity.get("files")
    stamps = files if isinstance(files, dict) else {}
    weights = {key: stamps.get(key) for key in ("base", "fine-tuned") if old.get(key) is None}
    return {key: value for key, value in identity.items() if key != "files"} | weights


def start_over() -> str:
    """What to do with what an unfinished run left, where it is of no use."""
    return f"remove it, or leave out {switch('resume')} to start over"


def solver(device: torch.device) -> str:
    """What runs the column loops: they give nearly the same, not the same bytes."""
    if fused.usable(device):
        return f"solver in Triton {fused.triton_version()}"
    return f"solver in numba {compiled.numba_version()}" if compiled.usable(device) else "solver in PyTorch"


def solver_note(device: torch.device) -> str | None:
    """Why the column loops run in PyTorch, and what would help, where they do."""
    kernels = fused if device.type == "cuda" else compiled
    if (reason := kernels.missing(device)) is None:
        return None
    slower = "tens of times slower than its kernels" if device.type == "cuda" else "slower than compiled"
    return f"the solver's loops run in PyTorch, {slower}: {reason}"


def _processor() -> list[str]:
    """What the CPU can do, as far as torch tells: its kernels differ by it, and their sums in the last bit."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # new in torch 2.10
    return [torch.backends.cpu.get_cpu_capability(), *sorted(name for name, has in known.items() if has is True)]


def lossless_of(coder: Coder) -> list[str]:
    """What runs the lossless stage, with the versions of the libraries that tool_versions does not know."""
    found = [coder.name]
    if coder.codec in ("gdeflate", "ans"):
        found += sorted(f"{one.name} {one.version}" for one in distributions() if "nvcomp" in one.name.lower())
    return found


def tool_versions() -> dict[str, str]:
    """The versions that the manifest records."""
    tools = {name: version(name) for name in _TOOLS}
    return tools | {"deltacompress": __version__, "python": platform.python_version()}

"""What is here, what works, and what to do about the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deltacompress.errors import first_line, install_hint

_LIBRARIES = ("torch", "transformers", "safetensors", "datasets", "numpy", "zstandard")
_EXTRAS = {
    "adapters": ("peft", "making adapters, which are read without it"),
    "eval": ("lm-eval", "eval and --gate"),
    "plot": ("matplotlib", "pictures"),
    "serve": ("uvicorn", "serving over HTTP"),
    "sign": ("cryptography", "signatures"),
    "zoo": ("obstore", "s3:// zoos"),
    "gpu": ("nvidia-nvcomp-cu12", "gdeflate, ans and kernels"),
    "cpu": ("numba", "compressing on a CPU with compiled loops"),
    "gptq": ("gptqmodel", "running GPTQ exports"),
}


def diagnose() -> list[dict[str, Any]]:
    """A row for each thing that could be here: `what`, whether it `works`, and what was `found`, or the way out."""
    return [_row(what, look) for what, look in _checks()]


def _row(what: str, look: Callable[[], tuple[bool, str]]) -> dict[str, Any]:
    """A look that fails says so itself: nothing that is broken here may keep the rest from being told."""
    try:
        works, found = look()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was asked for
        works, found = False, f"does not work: {type(error).__name__}: {first_line(error)}"
    return {"what": what, "works": works, "found": found}


def _checks() -> list[tuple[str, Callable[[], tuple[bool, str]]]]:
    return [
        ("deltacompress", lambda: (True, _own_version())),
        ("Python", lambda: (True, f"{platform.python_version()}, {platform.platform()}")),
        ("memory", _memory),
        *((name, lambda name=name: _library(name)) for name in _LIBRARIES),
        ("GPU", _gpu),
        *((f"extra {extra}", lambda extra=extra: _extra(extra)) for extra in _EXTRAS),
        *((f"lossless {codec}", lambda codec=codec: _lossless(codec)) for codec in ("zstd", "gdeflate", "ans")),
        *((f"kernels {name}", lambda name=name: _kernels(name)) for name in ("reference", "triton", "cuda")),
        ("content", _content),
        ("zoo", _zoo),
    ]


def _own_version() -> str:
    from deltacompress._version import __version__

    return __version__


def _memory() -> tuple[bool, str]:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return True, f"{whole / 2**30:.1f} GiB, {os.cpu_count()} cores"


def _library(name: str) -> tuple[bool, str]:
    try:
        return True, version(name)
    except PackageNotFoundError:
        return False, "is missing; install deltacompress again"


def _gpu() -> tuple[bool, str]:
    import torch

    from deltacompress.devices import has_gpu

    if not has_gpu():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no driver or device"
        return False, f"none ({why}); everything but ans and the GPU kernels runs on the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return True, f"{', '.join(names)}, CUDA {torch.version.cuda}"


def _extra(extra: str) -> tuple[bool, str]:
    package, purpose = _EXTRAS[extra]
    try:
        return True, f"{package} {version(package)}, for {purpose}"
    except PackageNotFoundError:
        return False, f"not installed, for {purpose}: {install_hint(extra)}"


def _lossless(codec: str) -> tuple[bool, str]:
    from deltacompress.errors import BackendError
    from deltacompress.lossless import coder

    try:
        return True, coder(codec).name
    except BackendError as error:
        return False, str(error)


def _kernels(name: str) -> tuple[bool, str]:
    from deltacompress.devices import named_device
    from deltacompress.errors import BackendError
    from deltacompress.kernels import get_backend

    try:
        return True, f"run on {get_backend(name, named_device('auto')).device}"
    except BackendError as error:
        return False, str(error)


def _content() -> tuple[bool, str]:
    from deltacompress.files.content import content_root

    return True, str(content_root())


def _zoo() -> tuple[bool, str]:
    from deltacompress.errors import DeltaCompressError
    from deltacompress.zoo.exchange.resolve import ENVIRONMENT, open_zoo

    if not os.environ.get(ENVIRONMENT):
        return True, f"none; --zoo or {ENVIRONMENT} names one"
    try:
        return True, open_zoo().where
    except DeltaCompressError as error:
        return False, str(error)

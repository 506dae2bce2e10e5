"""CUDA C++ compiled at first use: NVRTC through NVIDIA's cuda-bindings, so that no user needs nvcc.

Compiled kernels are kept on disk, named by everything they depend on (sources, options, compiler), written under
another name first, and preceded by their own hash, so that a damaged file is compiled again. What is kept is machine
code, and the folder belongs to the user who runs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from deltacompress.errors import BackendError, install_hint

HEADERS = ("sbmm.cuh", "prefill.cuh", "units.cuh")
_HINT = f"{install_hint('gpu')} brings cuda-bindings and NVIDIA's compiler"


def missing() -> str | None:
    """None if kernels can be compiled here, else why not."""
    try:
        _version()
    except ImportError as error:
        return f"{error}; {_HINT}"
    except RuntimeError as error:
        # cuda-bindings looks for libnvrtc when it is first called
        return f"NVRTC does not load ({str(error).splitlines()[0]}); {_HINT}"
    return None


class Kernel:
    """One compiled function on the current device."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        """Load it, and allow it `shared_bytes` of dynamic shared memory.

        Raises:
            BackendError: the driver does not take it.
        """
        from cuda.bindings import driver

        self._driver, self.shared_bytes = driver, shared_bytes
        # the module keeps the image of the function alive
        self._module = _checked(driver.cuModuleLoadData(binary), "loading a kernel")
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), "reserving shared memory")

    def launch(self, grid: int, block: int, stream: int, arguments: Sequence[Any]) -> None:
        """Launch on a stream (its handle); arguments are ctypes values, in the order of the parameters."""
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
        done = self._driver.cuLaunchKernel(
            self._function, grid, 1, 1, block, 1, 1, self.shared_bytes, stream, ctypes.addressof(pointers), 0
        )
        _checked(done, "launching a kernel")


def compile_source(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code of kernels/cuda/source/<name>.cu for `arch` (such as sm_90), from the disk cache if it is there.

    Raises:
        BackendError: it does not compile; the message holds the compiler's first complaint.
    """
    source, headers = _source(f"{name}.cu"), {file: _source(file) for file in HEADERS}
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space"]
    options += [f"-D{key}={value}" for key, value in sorted(macros.items())]
    key = hashlib.sha256(repr((source, headers, options, _version())).encode()).hexdigest()
    path = cache_folder() / f"{name}-{arch}-{key[:32]}.bin"
    if (kept := _read(path)) is not None:
        return kept
    binary = _compile(name, source, headers, options)
    _write(path, binary)
    return binary


def cache_folder() -> Path:
    """Where compiled kernels are kept: `kernels` in DELTACOMPRESS_CACHE (beside it lie pulled zoo entries), or in the
    user's cache folder.
    """
    if chosen := os.environ.get("DELTACOMPRESS_CACHE"):
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltacompress" / "kernels"


def _compile(name: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    texts, names = ([item.encode() for item in items] for items in (headers.values(), headers))
    made = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(names), texts, names)
    program = _checked(made, "creating a program")
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(result[0]):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading the log")
        nvrtc.nvrtcGetProgramLog(program, log)
        complaint = next((line for line in log.decode().splitlines() if "error" in line), log.decode().strip())
        raise BackendError(f"NVRTC does not compile {name}.cu with {' '.join(options)}: {complaint}")
    size: int = _checked(nvrtc.nvrtcGetCUBINSize(program), "sizing a kernel")
    binary = b" " * size
    _checked(nvrtc.nvrtcGetCUBIN(program, binary), "fetching a kernel")
    _checked(nvrtc.nvrtcDestroyProgram(program), "releasing a program")
    return binary


def _source(file: str) -> str:
    return (resources.files("deltacompress.kernels") / "cuda" / "source" / file).read_text()


@cache
def _version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion: {error.name}")
    return major, minor


def _checked(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a call of cuda-bindings, whose first item is an error code."""
    if int(result[0]):
        raise BackendError(f"CUDA error while {doing}: {result[0].name}; the driver may be older than the compiler")
    return result[1] if len(result) > 1 else None


def _read(path: Path) -> bytes | None:
    """What is kept; None if nothing is, or if it is damaged or cannot be read: that only costs compiling."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    return raw[32:] if hashlib.sha256(raw[32:]).digest() == raw[:32] else None


def _write(path: Path, binary: bytes) -> None:
    """Keep it; a cache that cannot be written only costs the compilation of the next run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        Path(file.name).replace(path)
    except OSError:
        return

"""CUDA kernels on a CPU: the source of decode.cu, pack.cu or blake3.cu, with instructions and launch in plain C++.

No GPU is needed, so CI sees a wrong bit. It says nothing of speed; when copies arrive, it tries at the extremes (see
emulated_device.h).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

COMPILER = shutil.which("g++") or shutil.which("clang++")
_HERE = Path(__file__).parent
_ASSEMBLY = ("shared_address", "copy16", "stream16", "commit", "wait", "load_b", "add2", "fma2", "multiply")
_WORDS = re.compile(r"__device__|__forceinline__|__global__|__grid_constant__|__launch_bounds__\([^)]*\)|#pragma.*")


def build_decode(folder: Path, macros: Mapping[str, int], fault: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    """Compile decode.cu with these macros into a library whose `launch` runs it.

    fault: planted, text that is replaced by another.
    """
    return _build(folder, _decode_source(), macros, fault)


def build_blake3(folder: Path, subtree: int, fault: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    """Compile blake3.cu into a library whose `launch` runs its two kernels.

    subtree: chunks of one, and threads of a block; fault: as build_decode.
    """
    return _build(folder, _plain(_source("blake3.cu"), "blake3_launch"), {"SUBTREE": subtree}, fault)


def build_pack(folder: Path, macros: Mapping[str, int], fault: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    """Compile pack.cu with these macros into a library whose `launch` runs it; fault: as build_decode."""
    return _build(folder, _plain(_source("pack.cu"), "pack_launch"), macros, fault)


def _source(name: str) -> str:
    return (resources.files("deltacompress.kernels") / "cuda" / "source" / name).read_text()


def _plain(text: str, launch: str) -> str:
    """A kernel that uses no instruction of its own, as C++ for the CPU."""
    return "\n".join((_WORDS.sub("", text.replace("__shared__", "static")), _header(launch)))


def _build(folder: Path, text: str, macros: Mapping[str, int], fault: tuple[str, str]) -> ctypes.CDLL:
    source, library = folder / "kernel.cpp", folder / f"{abs(hash((text, *macros.items(), fault)))}.so"
    assert fault[0] in text
    source.write_text(text.replace(*fault) if fault[0] else text)
    options = [f"-D{name}={value}" for name, value in macros.items()]
    _compile("-shared", *options, "-include", str(_device(folder)), str(source), "-o", str(library))
    return ctypes.CDLL(str(library))


def _device(folder: Path) -> Path:
    """What every source begins with, compiled beforehand: a third of the time. No macro changes it."""
    header = folder / "device.h"
    if not header.exists():
        header.write_text(_header("device"))
        _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
    return header


def _compile(*options: str) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-O1", "-std=c++17", "-fPIC", "-w", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def _header(name: str) -> str:
    return (_HERE / f"emulated_{name}.h").read_text()


def _decode_source() -> str:
    """decode.cu and its headers as C++ for the CPU."""
    shared, units, kernel = map(_source, ("sbmm.cuh", "units.cuh", "decode.cu"))
    for name in _ASSEMBLY:
        shared = _without(shared, name)
    shared = _with_body(shared, "centered", "return LIFT && j % 2 ? fma2(field, LOWER, zero) : add2(field, zero);")
    shared = _with_body(shared, "to_bf16", "return bf16_bits(v);")
    shared = re.sub(r'asm\("lop3[^;]*;"[^;]*;', "out = (moved & (u32)MASK) | with;", shared)
    shared = re.sub(r'asm\("cvt.f32.f16[^;]*;"[^;]*;', "out = half_value(v);", shared)
    shared = re.sub(r'asm\("cvt.rn.f16.f32[^;]*;"[^;]*;', "out = half_bits(v);", shared)
    kernel = re.sub(r"extern __shared__[^;]*;", "", kernel).replace("__shared__", "static")
    text = "\n".join((shared, units, kernel))
    assert "asm" not in _WORDS.sub("", re.sub(r"//.*|#define.*", "", text))
    text = _WORDS.sub("", re.sub(r'#include "\w+\.cuh"', "", text))
    constants, code = text.split("struct Tile", 1)
    return "\n".join((constants, _header("instructions"), "struct Tile" + code, _header("decode_launch")))


def _without(text: str, name: str) -> str:
    """Without the function of that name, if it is there."""
    start, _, end = _span(text, name)
    return text[:start] + text[end:]


def _with_body(text: str, name: str, body: str) -> str:
    _, brace, end = _span(text, name)
    return f"{text[:brace]}{{ {body} }}{text[end:]}"


def _span(text: str, name: str) -> tuple[int, int, int]:
    """Where a function begins (its template line included), its body begins, and it ends; an empty span if none."""
    found = re.search(rf"(template <[^>]*>\n)?__device__ __forceinline__ \w+ {name}\([^{{]*", text)
    if found is None:
        return 0, 0, 0
    depth, at = 0, found.end()
    while True:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return found.start(), found.end(), at

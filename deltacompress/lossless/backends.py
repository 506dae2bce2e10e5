"""Which code runs a codec on this machine: chosen once, named, and never replaced silently.

`none` and `zstd` always run on the CPU, whatever the device. `gdeflate` takes a GPU where there is one (or is asked
for) and otherwise libnvcomp's CPU routine in a child process. `ans` needs a GPU: nothing else decodes its streams.
Each codec's module is imported only when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deltacompress.errors import BackendError, InputError, install_hint, option

CODECS = ("none", "zstd", "gdeflate", "ans")
DEVICES = ("auto", "cpu", "cuda")

_GPU_CHUNK_BYTES = {"gdeflate": 1 << 16, "ans": 1 << 18}


@dataclass(frozen=True, slots=True)
class ChunkCoder:
    """One way to run one codec. `encode(raw, sizes)` gives coded chunks, `decode(chunks, views)` fills the views."""

    name: str
    chunk_bytes: int
    encode: Callable[[memoryview, Sequence[int]], list[bytes]]
    decode: Callable[[Sequence[memoryview], Sequence[memoryview]], None]


def resolve(codec: str, *, encode: bool, device: str) -> ChunkCoder:
    """The backend that runs `codec` here.

    Raises:
        InputError: no such codec or device.
        BackendError: this machine cannot run the codec (on that device); the message says the way out.
    """
    if codec not in CODECS:
        raise InputError(f"unknown lossless codec {codec!r}", way_out=f"choose one of {', '.join(CODECS)}")
    if device not in DEVICES:
        raise InputError(f"unknown device {device!r}", way_out=f"choose one of {', '.join(DEVICES)}")
    if codec == "none":
        from deltacompress.lossless import stored

        return ChunkCoder("stored (CPU)", stored.CHUNK_BYTES, stored.encode_chunks, stored.decode_chunks)
    if codec == "zstd":
        from deltacompress.lossless import zstd

        return ChunkCoder("zstd (CPU)", zstd.CHUNK_BYTES, zstd.encode_chunks, zstd.decode_chunks)
    return _nvcomp_backend(codec, encode=encode, device=device)


def _nvcomp_backend(codec: str, *, encode: bool, device: str) -> ChunkCoder:
    from deltacompress.lossless import gdeflate_cpu, nvcomp

    title = nvcomp.ALGORITHMS[codec]
    reasons = []
    if device != "cpu":
        gpu_problem = nvcomp.problem()
        if gpu_problem is None:
            return ChunkCoder(
                f"{title} (nvCOMP, GPU)",
                _GPU_CHUNK_BYTES[codec],
                partial(nvcomp.encode_chunks, codec),
                partial(nvcomp.decode_chunks, codec),
            )
        reasons.append(gpu_problem)
    else:
        reasons.append("the device is cpu")
    if codec == "gdeflate" and device != "cuda":
        cpu_problem = gdeflate_cpu.problem()
        if cpu_problem is None:
            return ChunkCoder(
                "GDeflate (libnvcomp, CPU child process)",
                _GPU_CHUNK_BYTES[codec],
                gdeflate_cpu.encode_chunks,
                gdeflate_cpu.decode_chunks,
            )
        reasons.append(cpu_problem)
    raise BackendError(
        f"cannot {('code' if encode else 'decode')} {codec} here: {'; '.join(reasons)}", way_out=_way_out(encode=encode)
    )


def _way_out(*, encode: bool) -> str:
    gpu = f"run this on a machine with an NVIDIA GPU ({install_hint('gpu')})"
    if encode:
        return f"use {option('lossless')} zstd, which runs everywhere, or {gpu}"
    return f"compress again with {option('lossless')} zstd, or {gpu}"

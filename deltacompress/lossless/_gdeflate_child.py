"""The process that GDeflate's CPU routine runs in, because it aborts its process on input it does not like.

A program, not a module to import: the parent starts it by path with `python -I -S`, so nothing but the standard
library is loaded (20 ms to start) and no environment variable or directory can put other code in front. It takes the
path of libnvcomp's CPU library as its argument, one request on stdin, and answers on stdout. All integers are
little-endian; nothing is pickled.

    request   "GDC1"  u8 operation (0 code, 1 decode)  u8 level  u16 zero  u32 pages
              per page: u32 input bytes, u32 raw bytes      then the pages' input, back to back
    answer    "GDR1"  u32 pages    per page: u32 output bytes    then the pages' output, back to back

Exit codes: 0 answered; 3 the library or its functions cannot be loaded; 4 the request is malformed; 5 a page decoded
to another length than the request says. A signal: the routine crashed. An answer that is missing means failure.

The functions are C++ symbols of libnvcomp 6 (it offers no C names for them), checked when the parent probes with a
request of zero pages.
"""

from __future__ import annotations

import ctypes
import struct
import sys

NO_LIBRARY, BAD_REQUEST, WRONG_LENGTH = 3, 4, 5
MAX_PAGE_BYTES = 1 << 16
SLACK = 64  # bytes after the last page: bit readers fetch whole words
MEMORY_LIMIT = 1 << 31  # bytes of address space; a request of 64 MiB needs about 0.4 GiB


def main(library: str) -> int:
    """Serve one request; returns the exit code."""
    import resource  # not on every system that may read this module's constants

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    try:
        lib = ctypes.CDLL(library)
        bound = lib._ZN6nvcomp8gdeflate32compressCPUGetMaxOutputChunkSizeEmPm
        code = lib._ZN6nvcomp8gdeflate11compressCPUEPKPKvPKmmmPKPvPmi
        decode = lib._ZN6nvcomp8gdeflate13decompressCPUEPKPKvPKmmPKPvPmSA_
    except (OSError, AttributeError):
        return NO_LIBRARY
    for function in (bound, code, decode):
        function.restype = None

    request = sys.stdin.buffer.read()
    if len(request) < 12:
        return BAD_REQUEST
    magic, operation, level, zero, pages = struct.unpack_from("<4sBBHI", request)
    data_at = 12 + 8 * pages
    if magic != b"GDC1" or operation > 1 or zero or len(request) < data_at:
        return BAD_REQUEST
    table = struct.unpack_from(f"<{2 * pages}I", request, 12)
    in_bytes, raw_bytes = table[0::2], table[1::2]
    if len(request) != data_at + sum(in_bytes) or max(raw_bytes, default=0) > MAX_PAGE_BYTES:
        return BAD_REQUEST
    if pages == 0:
        return _answer([], b"")

    if operation == 0:
        most = ctypes.c_size_t()
        bound(ctypes.c_size_t(MAX_PAGE_BYTES), ctypes.byref(most))
        room = [most.value] * pages
    else:
        room = list(raw_bytes)
    source = ctypes.create_string_buffer(request[data_at:], len(request) - data_at + SLACK)
    del request
    target = ctypes.create_string_buffer(sum(room) + SLACK)
    sizes_in = (ctypes.c_size_t * pages)(*in_bytes)
    sizes_room = (ctypes.c_size_t * pages)(*room)
    sizes_out = (ctypes.c_size_t * pages)()
    from_pages, to_pages = _addresses(source, in_bytes), _addresses(target, room)
    if operation == 0:
        code(from_pages, sizes_in, ctypes.c_size_t(MAX_PAGE_BYTES), ctypes.c_size_t(pages), to_pages, sizes_out,
             ctypes.c_int(level))  # fmt: skip
    else:
        decode(from_pages, sizes_in, ctypes.c_size_t(pages), to_pages, sizes_room, sizes_out)
        if list(sizes_out) != room:
            return WRONG_LENGTH
    output = memoryview(target)
    parts = []
    at = 0
    for size, given in zip(sizes_out, room, strict=True):
        parts.append(output[at : at + size])
        at += given
    return _answer(list(sizes_out), b"".join(parts))


def _addresses(
    buffer: ctypes.Array[ctypes.c_char], sizes: list[int] | tuple[int, ...]
) -> ctypes.Array[ctypes.c_size_t]:
    """Address of each page in a buffer of pages laid back to back."""
    at = ctypes.addressof(buffer)
    addresses = (ctypes.c_size_t * len(sizes))()
    for index, size in enumerate(sizes):
        addresses[index] = at
        at += size
    return addresses


def _answer(sizes: list[int], output: bytes) -> int:
    sys.stdout.buffer.write(struct.pack(f"<4sI{len(sizes)}I", b"GDR1", len(sizes), *sizes))
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

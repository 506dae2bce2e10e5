"""BLAKE3 of many spans of one buffer: how a loader compares parts with their hashes where they are needed.

`digests` is the reference, by the blake3 package on the CPU; cuda/source/blake3.cu does the same on a GPU. A tree of
1 KiB chunks is what makes that fast there; SHA-256 of a part is one long chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.devices import sent

DIGEST_BYTES = 32
SUBTREE = 256
"""Chunks of 1 KiB that one block of the CUDA kernel takes, and its threads; a power of two."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of a buffer, on one device. table: int64 [n + 1, 3]: where each begins, its bytes, and the first of its
    subtrees among all, which the last row closes; subtrees: of all.
    """

    table: Tensor
    subtrees: int

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> Spans:
        """From (where it begins, its bytes) of each."""
        rows, subtrees = [], 0
        for begin, nbytes in spans:
            rows.append((begin, nbytes, subtrees))
            subtrees += max(1, -(-nbytes // (SUBTREE << 10)))
        return cls(sent(torch.tensor([*rows, (0, 0, subtrees)], dtype=torch.int64), device), subtrees)

    def __len__(self) -> int:
        return self.table.shape[0] - 1


def digests(data: Tensor, spans: Spans) -> Tensor:
    """The hashes of spans of `data` u8 [bytes]: u8 [len(spans), DIGEST_BYTES], on its device."""
    from blake3 import blake3

    raw = tensor_bytes(data.cpu())
    found = [blake3(raw[begin : begin + nbytes]).digest() for begin, nbytes, _ in spans.table[:-1].tolist()]
    made = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8) if found else torch.empty(0).byte()
    return made.view(-1, DIGEST_BYTES).to(data.device)

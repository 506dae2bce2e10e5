"""Keys and values of prompts that were computed, for others that begin alike: in blocks, least recently used out first.

A block is known by a hash of all tokens up to its end and of what computed them: the content of a variant, never its
name. So variants share nothing with each other or with the base, and what is loaded again, under any name, has its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from deltacompress.runtime.engine.requests import Request

BLOCK = 64
"""Tokens of a block."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Keys and values [1, heads, BLOCK, size] of each layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for layer in self.layers for one in layer)


class Prefixes:
    """asked, found: tokens of prompts since the start, and how many of them were not computed again."""

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes: of all blocks; 0 keeps none."""
        self.asked = self.found = 0
        self._limit, self._nbytes = limit_bytes, 0
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # the least recently used first

    def find(self, request: Request, ids: Sequence[int]) -> tuple[DynamicCache, int]:
        """A cache with the longest beginning that is known, and how many tokens it has: at least one is left over."""
        cache, blocks = DynamicCache(), []
        self.asked += len(ids)
        keys = list(_keys(request, ids[:-1])) if self._limit else []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        self._touch(keys[: len(blocks)])
        for layer, parts in enumerate(zip(*(block.layers for block in blocks), strict=True)):
            cache.update(torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2), layer)
        self.found += len(blocks) * BLOCK
        return cache, len(blocks) * BLOCK

    def keep(self, request: Request, ids: Sequence[int], cache: DynamicCache, row: int) -> None:
        """Know the blocks of a prompt that was computed, in this row of a cache."""
        keys = list(_keys(request, ids)) if self._limit else []
        for at, key in enumerate(keys):
            if key not in self._blocks:
                part = slice(at * BLOCK, (at + 1) * BLOCK)
                block = _Block(
                    tuple(
                        (layer.keys[row : row + 1, :, part].clone(), layer.values[row : row + 1, :, part].clone())
                        for layer in cache.layers
                    )
                )
                self._blocks[key] = block
                self._nbytes += block.nbytes
        self._touch(keys)
        while self._nbytes > self._limit:
            self._nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget all blocks, and give their memory back."""
        self._blocks.clear()
        self._nbytes = 0

    def _touch(self, keys: Sequence[bytes]) -> None:
        """A block is of no use without those before it, so those leave later."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _keys(request: Request, ids: Sequence[int]) -> Iterator[bytes]:
    """Of each whole block."""
    content = "" if request.loaded is None else request.loaded.variant.identity
    key = hashlib.blake2b(content.encode(), digest_size=32).digest()
    for first in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hashlib.blake2b(key + array("q", ids[first : first + BLOCK]).tobytes(), digest_size=32).digest()
        yield key

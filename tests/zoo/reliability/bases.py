"""The right base and no other: every base against the identity of every other one, whole and resharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zoo.checkpoints import WORDS, tensor, weights, write_base

from deltacompress.errors import BaseMismatchError
from deltacompress.zoo.entries.bases import BaseIdentity, check_base, describe_base, parse_base

Q = "model.layers.0.self_attn.q_proj.weight"
SHARDS = 3


def variants() -> dict[str, Callable[..., Path]]:
    """Name -> writer of a base that differs from `plain` in one thing; all take (root, shards)."""
    plain = weights()
    dtype, shape, raw = plain[Q]
    changes = {
        "plain": plain,
        "one bit": plain | {Q: (dtype, shape, _flipped(raw))},
        "transposed": plain | {Q: (dtype, shape, _transposed(raw, 8))},
        "transposed shape": plain | {"model.layers.0.mlp.down_proj.weight": tensor((0, "d"), 16, 8)},
        "other dtype": plain | {Q: ("F16", shape, raw)},
        "two swapped": plain | {"model.layers.0.input_layernorm.weight": tensor("x", 8)},
        "renamed": {("model.x" if name == Q else name): one for name, one in plain.items()},
        "one more": plain | {"lm_head.weight": tensor("h", 12, 8)},
    }
    made: dict[str, Callable[..., Path]] = {
        name: lambda root, shards=1, tensors=tensors: write_base(root, tensors, shards=shards)
        for name, tensors in changes.items()
    }
    swapped = WORDS | {"a": 2, "b": 1}
    made["other tokenizer"] = lambda root, shards=1: write_base(root, plain, words=swapped, shards=shards)
    made["larger vocabulary"] = lambda root, shards=1: write_base(root, plain, words=WORDS | {"d": 4}, shards=shards)
    return made


def identity(directory: Path) -> BaseIdentity:
    """What a zoo keeps of a base."""
    described = describe_base(directory, hub_id=None, revision=None)
    return parse_base(b"".join(bytes(chunk) for chunk in described.blobs[0].chunks()), "here")


def accepted(told: BaseIdentity, directory: Path) -> bool:
    """Whether a base passes for the one that was told of. A refusal that does not name it counts as none."""
    try:
        check_base(told, directory, "team/base@1")
    except BaseMismatchError as error:
        return not (str(directory) in str(error) and "\n" not in str(error))
    return True


def matrix(folder: Path) -> tuple[int, int, list[str]]:
    """(bases, cases, faults): each identity against each base, as one file and as SHARDS."""
    writers = variants()
    whole = {name: write(folder / f"{name} whole") for name, write in writers.items()}
    sharded = {name: write(folder / f"{name} sharded", SHARDS) for name, write in writers.items()}
    told = {name: identity(directory) for name, directory in whole.items()}
    cases, faults = 0, []
    for how, directories in (("whole", whole), ("sharded", sharded)):
        for wanted, identity_ in told.items():
            for given, directory in directories.items():
                cases += 1
                if accepted(identity_, directory) != (wanted == given):
                    faults.append(f"{given} ({how}) for {wanted}: {'refused' if wanted == given else 'accepted'}")
    return len(writers), cases, faults


def _flipped(raw: bytes) -> bytes:
    return raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]


def _transposed(raw: bytes, size: int) -> bytes:
    rows = [raw[2 * i : 2 * i + 2] for i in range(size * size)]
    return b"".join(rows[row * size + column] for column in range(size) for row in range(size))

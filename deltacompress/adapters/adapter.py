"""A PEFT adapter, read and held against its base: what it is, module by module. The entry to this room."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from deltacompress.adapters.changes import changes_of, check_together, half_note, head_note, modules_of
from deltacompress.adapters.checks.base import DoesNotFitError, NoSuchTargetError, NotReadError, Shape
from deltacompress.adapters.directory import read_config, weights_of
from deltacompress.adapters.fields import MERGE
from deltacompress.adapters.records import Change
from deltacompress.adapters.settings import AdapterConfig, parse_settings
from deltacompress.checkpoints.header import TensorSpan, read_header
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deltacompress.errors import BaseMismatchError, CheckpointError
from deltacompress.files.canonical_json import canonical_digest
from deltacompress.files.hashing import blake3_file, blake3_hex
from deltacompress.files.regular import Stamp, stamp, stat_regular, unreadable

SAVE_AGAIN = "save it again with PEFT, or get it again"
_TAKE_OUT = f"take it out of target_modules in {ADAPTER_CONFIG}"
ANEW = ", also where an earlier version of the program did: it named adapters otherwise"
"""What follows the advice to evaluate, where a report may be of before digests were of BLAKE3s."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """What the directory of an adapter says of itself, without a base. The fields are those of `Adapter`."""

    path: Path
    settings: AdapterConfig
    hashing: Future[str]
    weights: Path
    stamp: Stamp
    tensors: Mapping[str, TensorSpan]

    @property
    def digest(self) -> str:
        """See Adapter."""
        return self.hashing.result()


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base.

    path: its directory; settings: what its config says; weights: its file of tensors; tensors: name -> where it lies
    there, in file order; changes: module, as the model calls it -> what is brought for it, in file order. lacking: what
    to tell of what its config means and the file has not, as far as the base's checkpoint says. hashing: gives
    `digest`, while what follows goes on. stamp: of the file that digest and tensors are of: what is read later is to be
    of that very file.
    """

    path: Path
    settings: AdapterConfig
    hashing: Future[str]
    weights: Path
    stamp: Stamp
    tensors: Mapping[str, TensorSpan]
    changes: Mapping[str, Change]
    lacking: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what it is: of the canonical JSON of [[file, hex BLAKE3], ...], sorted, of its config and
        weights; waits until these are read. Whoever loads it waits, so it is not SHA-256 of files, one long chain.

        Raises:
            CheckpointError: they cannot be, or were replaced meanwhile.
        """
        return self.hashing.result()

    @property
    def kind(self) -> str:
        """What to call it: "lora", "dora", "boft", "shira" or "rosa"."""
        return kind_of(self.settings)

    @property
    def modules(self) -> int:
        """How many modules have matrices, rotations or entries of their own."""
        return sum(any((one.low_rank, one.embedding, one.rotation, one.sparse)) for one in self.changes.values())

    @property
    def unread_note(self) -> str | None:
        """What to tell of modules that an expression of the config may leave out; None: it has none."""
        unread = self.settings.unread
        if unread is None:
            return None
        return f"{unread} is an expression, which is not run: all {self.modules} modules of its file are served"

    @property
    def notes(self) -> list[str]:
        """All that is to be told where no model is loaded, which knows better what is lacking."""
        return [*self.lacking, *([] if self.unread_note is None else [self.unread_note])]

    @property
    def title(self) -> str:
        """What a list calls it: the kind, and the rank where it has one."""
        return self.kind if self.kind == "boft" else f"{self.kind}-r{self.settings.rank}"


def kind_of(settings: AdapterConfig) -> str:
    """`Adapter.kind` of what its config says."""
    return "dora" if settings.dora else settings.kind


def digest_of(config: str, weights: str) -> str:
    """`Adapter.digest` of hex BLAKE3s of its config and of its file of tensors."""
    return canonical_digest(sorted([[ADAPTER_CONFIG, config], [ADAPTER_WEIGHTS, weights]]))


def adapter_identity(digest: str, over: str | None) -> str:
    """Names an adapter, and what it goes over: its own digest, or one of both. over: manifest digest of the delta."""
    return digest if over is None else canonical_digest([digest, over])


def open_adapter(directory: Path, base_shapes: Mapping[str, Shape], *, base_name: str = "") -> Adapter:
    """Read the adapter in a directory that PEFT wrote, and check it against its base: config, names, shapes, dtypes.

    What its tensors hold is not looked at: `values.check_values` does.

    base_shapes: tensor name -> shape of the base's checkpoint; base_name: of the base, for messages.

    Raises:
        CheckpointError: no adapter that is read here, damaged, pickled, or at odds with its own config; of one that is
            replaced while it is read, `digest` tells.
        BaseMismatchError: it does not fit the base.
    """
    read = read_adapter(directory)
    told = f" (base {base_name})" if base_name else ""
    infos = {name: span.info for name, span in read.tensors.items()}
    try:
        changes = changes_of(infos, read.settings, base_shapes)
    except DoesNotFitError as error:
        raise BaseMismatchError(
            f"{error}{told}", where=read.weights, way_out="give the base it was trained on"
        ) from None
    except NoSuchTargetError as error:
        way_out = f"{_TAKE_OUT}, or give the base it was trained on"
        raise CheckpointError(f"{error}{told}", where=read.weights, way_out=way_out) from None
    except ValueError as error:
        way_out = MERGE if isinstance(error, NotReadError) else SAVE_AGAIN
        raise CheckpointError(str(error), where=read.weights, way_out=way_out) from None
    told_of = half_note(changes, read.settings, *modules_of(changes, base_shapes)), head_note(changes, base_shapes)
    lacking = tuple(one for one in told_of if one is not None)
    return Adapter(directory, read.settings, read.hashing, read.weights, read.stamp, read.tensors, changes, lacking)


def check_alone(read: ReadAdapter) -> None:
    """Make sure of what can be known without a base: what belongs together is there, as the config says. Raises
    CheckpointError.
    """
    try:
        check_together({name: span.info for name, span in read.tensors.items()}, read.settings)
    except ValueError as error:
        way_out = f"{_TAKE_OUT}, or {SAVE_AGAIN}" if isinstance(error, NoSuchTargetError) else SAVE_AGAIN
        raise CheckpointError(str(error), where=read.weights, way_out=way_out) from None


def read_adapter(directory: Path) -> ReadAdapter:
    """What a directory says of itself.

    Raises:
        CheckpointError: no adapter that is read here, damaged, or pickled; of one that is replaced while it is read,
            `digest` tells.
    """
    config, raw = read_config(directory)
    settings = parse_settings(config, str(directory / ADAPTER_CONFIG))
    weights = weights_of(directory)
    before = _stamp(weights)
    tensors = read_header(weights, links=link_homes(directory)).tensors

    hashing: Future[str] = Future()

    def hash_both() -> None:
        try:
            digest = _digest(raw, weights)
            if _stamp(weights) != before:
                raise CheckpointError("changed while it was read", where=weights, way_out="run it again")
            hashing.set_result(digest)
        except BaseException as error:  # noqa: BLE001 - of any other, who waits would never hear
            hashing.set_exception(error)

    Thread(target=hash_both, name="deltacompress-hash", daemon=True).start()  # a process that ends waits for no hash
    return ReadAdapter(directory, settings, hashing, weights, before, tensors)


def digest_in(directory: Path) -> str:
    """`Adapter.digest` of the adapter in a directory.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    _, raw = read_config(directory)
    return _digest(raw, weights_of(directory))


def _digest(config: bytes, weights: Path) -> str:
    try:
        digest = blake3_file(weights, links=link_homes(weights.parent))
    except OSError as error:
        raise unreadable(CheckpointError, weights, error) from error
    return digest_of(blake3_hex(config), digest)


def _stamp(weights: Path) -> Stamp:
    try:
        return stamp(stat_regular(weights, links=link_homes(weights.parent)))
    except OSError as error:
        raise unreadable(CheckpointError, weights, error) from error

"""Who takes part: artifacts and adapters, the fine-tuned model, the base, other checkpoints; opened and checked.

A comparison is worth nothing if the fine-tuned model is not the one the delta was made from, or if a model reads other
tokens. Both are told before any computing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltacompress.adapters.adapter import Adapter, adapter_identity, open_adapter
from deltacompress.adapters.directory import bytes_of, is_adapter, need_adapter
from deltacompress.adapters.values import check_values
from deltacompress.artifact.delta import Delta, load_delta
from deltacompress.artifact.summary import kinds, natural
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import InputError, IntegrityError, option, spelled
from deltacompress.evaluation.labels import BASE_LABEL, FINETUNED_LABEL, as_file_name, check_label
from deltacompress.evaluation.report.records import LayerRecord, Role, SubjectRecord
from deltacompress.evaluation.tasks.encoding import Encoder, check_same_tokenizer
from deltacompress.models.tokenizers import has_tokenizer

_NONE: Mapping[str, Path] = MappingProxyType({})
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to be measured; exactly one of checkpoint, delta and adapter is set.

    stored_as: the artifact that a checkpoint was restored from: its size is what counts. base: the base of an adapter;
    over: the delta that the adapter goes over.
    """

    label: str
    role: Role
    path: Path
    checkpoint: Checkpoint | None
    delta: Delta | None
    stored_as: Delta | None = None
    adapter: Adapter | None = None
    base: Checkpoint | None = None
    over: Delta | None = None

    @property
    def identity(self) -> str:
        """What names its weights: content hash, manifest digest, or digest of an adapter (`adapter_identity`)."""
        if self.adapter is not None:
            return adapter_identity(self.adapter.digest, None if self.over is None else self.over.digest)
        if self.delta is not None:
            return self.delta.digest
        assert self.checkpoint is not None
        return self.checkpoint.fingerprint()

    @property
    def is_variant(self) -> bool:
        """Whether it runs beside its base."""
        return self.delta is not None or self.adapter is not None

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is: an adapter without one reads as what it goes over does."""
        if self.base is None or has_tokenizer(self.path):
            return self.path
        return self.base.path if self.over is None or not has_tokenizer(self.over.path) else self.over.path

    def record(self, seconds: float, compress_seconds: float | None = None) -> SubjectRecord:
        """What the report says about it."""
        stored = self.delta or self.stored_as
        if self.adapter is not None:
            assert self.base is not None
            title, size = self.adapter.title, bytes_of(self.path)
            if self.over is not None:
                title = f"{title} over {self.over.summary()['recipe']}"
                size += self.over.artifact_bytes
            figures: dict[str, Any] = {"recipe": title, "bytes": size, "ratio": self.base.nbytes / size}
        elif stored is None:
            assert self.checkpoint is not None
            figures = {"bytes": self.checkpoint.nbytes}
        else:
            figures = _figures(stored) | {"compress_seconds": compress_seconds}
        return SubjectRecord(
            label=self.label,
            role=self.role,
            source=self.path.name,
            identity=self.identity,
            seconds=seconds,
            **figures,
        )


def _figures(stored: Delta) -> dict[str, Any]:
    """What is known of an artifact."""
    summary, used = stored.summary(), stored.manifest.calibration
    return {
        "manifest_digest": stored.manifest.digest,
        "recipe": summary["recipe"],
        "calibration": None if used is None else f"{used.source}, {used.tokens} tokens, seed {used.seed}",
        "bytes": summary["artifact_bytes"],
        "ratio": summary["ratio"],
        "linear_bits_per_weight": summary["linear_bits_per_weight"],
        "layers": _layers(stored),
    }


def open_subjects(
    artifacts: Mapping[str, Path],
    *,
    base: Path,
    finetuned: Path | None,
    others: Mapping[str, Path],
    stored_as: Mapping[str, Path],
    with_base: bool,
    over: Mapping[str, Path] = _NONE,
) -> tuple[Checkpoint, list[Subject], Encoder]:
    """Open the base, everything that takes part (the fine-tuned model first), and the tokenizer they share.

    over: label of an adapter -> the delta that it goes over.

    Raises:
        InputError: nothing to measure, a label twice or reserved, or what goes over a delta is no adapter.
        IntegrityError: a delta of another base, or of another fine-tuned model; an adapter that does not fit the base.
        CheckpointError: an adapter that is not read here, or damaged.
        PairError: a tokenizer that differs.
    """
    labels = [*artifacts, *others]
    for label in labels:
        check_label(label)
    if len({*map(as_file_name, labels)}) != len(labels):
        raise InputError("two are alike", where=f"labels {', '.join(labels)}", way_out="write LABEL=PATH")
    if strange := sorted(over.keys() - artifacts.keys()):
        raise InputError("no artifact has that label", where=f"{option('over')} {strange[0]}")
    base_checkpoint = Checkpoint.open(base)
    subjects: list[Subject] = []
    if finetuned is not None:
        subjects.append(Subject(FINETUNED_LABEL, "finetuned", finetuned, Checkpoint.open(finetuned), None))
    if with_base:
        subjects.append(Subject(BASE_LABEL, "base", base, base_checkpoint, None))
    for label, path in artifacts.items():
        subjects.append(_variant(label, path, base_checkpoint, over.get(label)))
    for label, path in others.items():
        stored = load_delta(stored_as[label]) if label in stored_as else None
        subjects.append(Subject(label, "checkpoint", path, Checkpoint.open(path), None, stored))
    if not subjects:
        how = spelled("--against LABEL=PATH", "others={LABEL: PATH}")
        raise InputError(f"nothing to evaluate: give an artifact, or a checkpoint with {how}")
    if finetuned is not None:
        _check_made_from(subjects)
    return base_checkpoint, subjects, _shared_encoder(subjects, base_checkpoint)


def _variant(label: str, path: Path, base: Checkpoint, over: Path | None) -> Subject:
    if over is not None:
        need_adapter(path, f"leave out {option('over')} of {label}")
    if not is_adapter(path):
        delta = load_delta(path)
        delta.check_base(base)
        return Subject(label, "delta", path, None, delta)
    below = None if over is None else load_delta(over)
    if below is not None:
        below.check_base(base)
    tensors = base.tensors if below is None else below.tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    adapter = open_adapter(path, shapes, base_name=str(base.path if below is None else below.path))
    check_values(adapter)
    return Subject(label, "adapter", path, None, None, adapter=adapter, base=base, over=below)


def _check_made_from(subjects: Sequence[Subject]) -> None:
    reference = subjects[0]
    for subject in subjects:
        if subject.delta is None:
            continue
        made_from = subject.delta.manifest.finetuned
        if made_from.content_hash != reference.identity:
            raise IntegrityError(
                f"{subject.path} was made from another model ({made_from.name}, {made_from.content_hash[:12]})",
                where=f"{spelled('--against finetuned=', 'finetuned ')}{reference.path}",
                way_out="give that one",
            )


def _shared_encoder(subjects: Sequence[Subject], base: Checkpoint) -> Encoder:
    """The tokenizer of the fine-tuned model, or of the first subject; every other one must agree with it."""
    first = next((one for one in subjects if one.role != "base"), subjects[0])
    config = base.config if first.checkpoint is None else first.checkpoint.config
    own = first.tokenizer_folder
    encoder = Encoder.open(own, config)
    for path in dict.fromkeys([base.path, *(one.tokenizer_folder for one in subjects)]):
        if path != own:
            check_same_tokenizer(own, encoder, path)
    return encoder


def _layers(delta: Delta) -> tuple[LayerRecord, ...]:
    """Loss and bits of each decoder layer, then of what stands outside of them."""
    groups: dict[str, list[tuple[float | None, int, int]]] = {}
    known = kinds(delta.manifest)
    for record in delta.manifest.tensors:
        kind = known[record.name]
        if record.status == "alias" or kind not in ("linear", "embedding", "head"):
            continue
        match = _LAYER.search(record.name)
        numel = 1
        for size in record.shape:
            numel *= size
        where = f"layer {match[1]}" if match and kind == "linear" else kind
        groups.setdefault(where, []).append((record.loss, record.bytes, numel))
    made = []
    for name in sorted(groups, key=natural):
        losses = [loss for loss, _, _ in groups[name] if loss is not None]
        bits = 8 * sum(size for _, size, _ in groups[name]) / max(sum(numel for _, _, numel in groups[name]), 1)
        loss = sum(losses) / len(losses) if losses else None
        made.append(LayerRecord(layer=name, loss=loss, bits_per_weight=bits))
    return tuple(sorted(made, key=lambda one: not one.layer.startswith("layer ")))

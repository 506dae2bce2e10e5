"""Steps of one run: finishing tensors, saving them to the workspace, and recalling them when a run is resumed."""

from __future__ import annotations

import hashlib
import resource
import sys
from collections.abc import Iterable

import torch
from safetensors import SafetensorError
from torch import Tensor

from deltacompress import lossless
from deltacompress.checkpoint import DTYPES, tensor_bytes
from deltacompress.codecs import packed
from deltacompress.codecs.encoded import Encoded, restore_tensor
from deltacompress.encoding import Outcome, finish
from deltacompress.errors import ChecksumError, InputError, IntegrityError
from deltacompress.manifest import TensorRecord
from deltacompress.planning import Plan, TensorPlan
from deltacompress.workspace import Workspace


class Steps:
    """What a run has finished so far."""

    def __init__(self, plan: Plan, work: Workspace, codec: str, device: str) -> None:
        self._plan, self._work, self._codec, self._device = plan, work, codec, device
        self._records: dict[str, list[TensorRecord]] = {}

    def finish(self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None) -> tuple[Outcome, Tensor]:
        """encoding.finish with this run's lossless codec."""
        return finish(self._plan, tensor, encoded, reference, self._codec, self._device)

    def save(self, step: str, outcomes: Iterable[Outcome]) -> None:
        """Store a step durably."""
        done = list(outcomes)
        self._work.save(step, done)
        self._records[step] = [outcome.record for outcome in done]

    def recall(self, step: str) -> dict[str, Tensor] | None:
        """What the tensors of a step that an interrupted run finished are restored to; None if it is still to do."""
        records = self._work.finished(step)
        if records is None:
            return None
        self._records[step] = records
        try:
            return {record.name: self._restored(step, record) for record in records}
        except (IntegrityError, SafetensorError) as error:
            raise InputError(
                f"{self._work.path}: step {step} is damaged ({error}); leave out --resume to start over"
            ) from error

    def _restored(self, step: str, record: TensorRecord) -> Tensor:
        parts: dict[str, Tensor] = {}
        for part in record.parts:
            stored = self._work.read(step, f"{record.name}.{part.name}")
            if self._codec != "none":
                count = DTYPES[part.dtype].itemsize * torch.Size(part.shape).numel()
                raw = lossless.decode(bytes(stored.numpy()), raw_bytes=count, device=self._device)
                stored = torch.frombuffer(raw, dtype=DTYPES[part.dtype]) if count else torch.empty(0)
            parts[part.name] = stored.to(DTYPES[part.dtype]).reshape(part.shape)
        if self._codec != "none" and record.format == "packed":
            parts = packed.to_serving(packed.PackedSpec.from_json(dict(record.params), record.name), parts, record.name)
        reference, _ = self._plan.reference(self._plan.tensors[record.name])
        like = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
        restored = restore_tensor(record.format, dict(record.params), parts, reference, like, record.name).contiguous()
        if hashlib.sha256(tensor_bytes(restored)).hexdigest() != record.sha256:
            raise ChecksumError(f"{record.name} is not what was stored")
        return restored

    def records(self, step: str) -> list[TensorRecord]:
        """Records of a finished step."""
        return self._records[step]

    def stored(self) -> dict[str, str]:
        """Name of every finished tensor -> its step."""
        return {record.name: step for step, records in self._records.items() for record in records}

    def all_records(self) -> list[TensorRecord]:
        """Records of all finished steps."""
        return [record for records in self._records.values() for record in records]

    @staticmethod
    def peak_memory() -> int:
        """Peak resident memory of this process so far, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

"""Steps of one run: finishing tensors, saving them to the workspace, and recalling them when a run is resumed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from deltacompress.artifact.checks import check_tensor
from deltacompress.artifact.decoding import restored_pieces, restored_tensor, serving_parts
from deltacompress.artifact.records import PartRecord, TensorRecord
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.codecs.encoded import Encoded
from deltacompress.compression.encoding import (
    LaidOut,
    Outcome,
    encode_uncalibrated,
    finish,
    finish_on_disk,
    lay_out,
    record_of,
)
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.workspace import Workspace
from deltacompress.devices import current, free_bytes
from deltacompress.errors import CheckpointError, FormatError, IntegrityError
from deltacompress.lossless import Coder
from deltacompress.numerics.triton.repeated import held_bytes
from deltacompress.reporter import part

_FINISHERS = 4
"""Threads that hash and code beside a GPU: one takes longer for a 7B layer than the GPU does for its last group."""
RESTORING = 16
"""Bytes of memory that restoring takes for each weight: base and delta in f32, codes, mask, result."""
_RECORDS, _NUMBERS = TypeAdapter(list[TensorRecord]), TypeAdapter(list[int])


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A tensor that is being finished. outcome: waits for it and returns it, or raises what went wrong.

    loss: of its record. beside: whether that goes on in a thread.
    """

    loss: float | None
    outcome: Callable[[], Outcome]
    beside: bool = False


class Steps:
    """What a run has finished so far.

    before_saving: is called before each step is saved; what it raises ends the run.
    """

    def __init__(self, plan: Plan, work: Workspace, coder: Coder, before_saving: Callable[[], None]) -> None:
        self._plan, self._work, self._coder, self._before_saving = plan, work, coder, before_saving
        self._records: dict[str, list[TensorRecord]] = {}
        self._wide_from: dict[str, list[int]] = {}
        self._finisher = ThreadPoolExecutor(_FINISHERS, "finish")  # starts no thread before the first submit
        self._saver = ThreadPoolExecutor(1, "save")
        self._saving: Future[None] | None = None

    def close(self) -> None:
        """End the threads that finish tensors: what is being saved is saved first, what has not begun is dropped."""
        self._saver.shutdown()
        self._finisher.shutdown(cancel_futures=True)

    def finish(
        self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None, restored: Tensor | None = None
    ) -> tuple[Unfinished, Tensor]:
        """Lay out, hash and code a tensor with this run's coder; returns (the outcome to come, restored).

        Hashing and coding are a CPU's work: while a GPU solves the next tensor they go on beside it. On a CPU, where
        they would only take its cores from it, they are done at once.
        """
        with part("restoring"):
            laid_out = lay_out(tensor, encoded, reference, self._coder, restored)
        if _on_cpu(laid_out):
            outcome = finish(self._plan, tensor, laid_out, self._coder)
            return Unfinished(encoded.loss, lambda: outcome), laid_out.restored
        on_host, wait = laid_out.to_host()
        where = laid_out.restored.device  # all that `work` keeps of what is there

        def work() -> Outcome:
            wait()
            with current(where):  # a lossless codec may need one
                return finish(self._plan, tensor, on_host, self._coder)

        return Unfinished(encoded.loss, self._finisher.submit(work).result, beside=True), laid_out.restored

    def encode(self, tensor: TensorPlan, device: torch.device) -> tuple[Unfinished, Tensor]:
        """Encode a tensor that needs no activations, and go on as `finish`.

        On `device`, if its codec computes there, whatever room there is: another one may round otherwise. Restoring it
        is exact, and takes room for all of it at once, so that happens on the CPU where a GPU has none.
        """
        encoded = encode_uncalibrated(self._plan, tensor, device)
        if device.type == "cuda" and RESTORING * tensor.pair.info.numel > free_bytes(device) - held_bytes():
            encoded = replace(encoded, parts={name: part.cpu() for name, part in encoded.parts.items()})
        return self.finish(tensor, encoded, self._plan.base_of(tensor, encoded.place))

    def finish_on_disk(self, tensor: TensorPlan, encoded: Encoded) -> Unfinished:
        """As `finish`, where nobody waits for the restored tensor: memory holds its parts, and never all of it."""
        outcome = finish_on_disk(self._plan, tensor, encoded, self._coder)
        return Unfinished(encoded.loss, lambda: outcome)

    def save(self, step: str, outcomes: Iterable[Unfinished], *, wide_from: Sequence[int] = ()) -> None:
        """Store a step durably, as soon as all of it is finished. wide_from: of a layer, as `wide_from` gives it.

        Where tensors are finished in threads, so is the step, while a GPU goes on with the next: whoever saves that one
        or asks what there is waits for this one, and is told what went wrong with it.
        """
        self._before_saving()
        self._saved()
        outcomes = list(outcomes)
        if any(one.beside for one in outcomes):
            self._saving = self._saver.submit(self._store, step, outcomes, wide_from)
        else:
            self._store(step, outcomes, wide_from)

    def _store(self, step: str, outcomes: Iterable[Unfinished], wide_from: Sequence[int]) -> None:
        with part("wait", on_host=True):
            done = [one.outcome() for one in outcomes]
        with part("write", on_host=True):
            self._work.save(step, done, wide_from=wide_from if any(k >= 0 for k in wide_from) else ())
        self._records[step] = [outcome.record for outcome in done]

    def _saved(self) -> dict[str, list[TensorRecord]]:
        """Records of all steps, by name, once the last is stored."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()
        return self._records

    def recall(self, step: str, names: Iterable[str]) -> dict[str, Tensor] | None:
        """What the tensors of a step that an interrupted run finished are restored to; None if it is still to do.

        names: of the tensors that the step is of.

        Raises:
            OutputError: the step's file is not what this run would have written.
        """
        records = self._finished(step, names)
        return None if records is None else {record.name: self._restored(step, record) for record in records}

    def check(self, step: str, names: Iterable[str]) -> bool:
        """Whether an interrupted run finished a step; its tensors are restored piece by piece, and compared.

        Takes and raises what `recall` does.
        """
        records = self._finished(step, names)
        if records is None:
            return False
        for record in records:
            base, _ = self._plan.rows(self._plan.tensors[record.name])
            with self._damage_told(step), self._work.open_parts(step, record, self._coder) as sources:
                for _ in restored_pieces(record, sources, base, storage=self._coder.codec != "none"):
                    pass
        return True

    def _finished(self, step: str, names: Iterable[str]) -> list[TensorRecord] | None:
        found = self._work.values(step)
        if found is None:
            return None
        try:
            if isinstance(found, dict):
                self._wide_from[step] = _NUMBERS.validate_python(found.get("wide_from"))
                found = found.get("records")
            records = _RECORDS.validate_python(found)
        except ValidationError as error:
            raise self._work.damaged(step, "its records are none of tensors") from error
        if sorted(record.name for record in records) != sorted(names):
            raise self._work.damaged(step, "its tensors are not those of this step")
        with self._damage_told(step):
            for record in records:
                check_tensor(record, step, scope=self._plan.recipe.scope, lossless=self._coder.codec)
                if record != self._as_planned(record):
                    raise FormatError(f"its record of {record.name} is none of this run")
        self._records[step] = records
        return records

    def _as_planned(self, record: TensorRecord) -> TensorRecord:
        """The record with what this run says of its tensor, where that does not come from encoding it."""
        told = {name: getattr(record, name) for name in ("loss", "damp_fraction", "kept", "tokens")}
        encoded = Encoded(record.format, record.params, {}, **told)
        return record_of(self._plan, self._plan.tensors[record.name], encoded, record.sha256, record.parts)

    def _restored(self, step: str, record: TensorRecord) -> Tensor:
        def stored(part: PartRecord) -> bytes:
            return bytes(tensor_bytes(self._work.read(step, f"{record.name}.{part.name}")))

        base = self._plan.base_of(self._plan.tensors[record.name])  # outside: damage of the base is not the step's
        with self._damage_told(step):
            return restored_tensor(record, serving_parts(record, self._coder, stored), base)

    @contextmanager
    def _damage_told(self, step: str) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, CheckpointError) as error:
            raise self._work.damaged(step, error) from error

    def wide_from(self, step: str) -> list[int]:
        """The batches from which on the student (and the teacher) left a recalled layer with wider products, if any."""
        return self._wide_from.get(step, [])

    def records(self, step: str) -> list[TensorRecord]:
        """Records of a finished step."""
        return self._saved()[step]

    def stored(self) -> dict[str, str]:
        """Name of every finished tensor -> its step."""
        return {record.name: step for step, records in self._saved().items() for record in records}

    def all_records(self) -> list[TensorRecord]:
        """Records of all finished steps."""
        return [record for records in self._saved().values() for record in records]

    @staticmethod
    def peak_memory() -> int:
        """Peak resident memory of this process so far, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _on_cpu(laid_out: LaidOut) -> bool:
    return laid_out.restored.device.type == "cpu"

"""Steps of one run: finishing tensors, saving them to the workspace, and recalling them when a run is resumed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from torch import Tensor

from deltacompress.artifact.decoding import restored_pieces, restored_tensor, serving_parts
from deltacompress.artifact.records import PartRecord, TensorRecord
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.codecs.encoded import Encoded
from deltacompress.compression.encoding import LaidOut, Outcome, finish, finish_on_disk, lay_out
from deltacompress.compression.planning import Plan, TensorPlan
from deltacompress.compression.run_identity import start_over
from deltacompress.compression.workspace import Workspace
from deltacompress.errors import CheckpointError, IntegrityError, OutputError
from deltacompress.lossless import Coder

Unfinished = Callable[[], Outcome]
"""Waits for an outcome and returns it, or raises what went wrong."""


class Steps:
    """What a run has finished so far."""

    def __init__(self, plan: Plan, work: Workspace, coder: Coder) -> None:
        self._plan, self._work, self._coder = plan, work, coder
        self._records: dict[str, list[TensorRecord]] = {}
        self._finisher = ThreadPoolExecutor(1, "finish")  # starts no thread before the first submit

    def close(self) -> None:
        """End the thread that finishes tensors; what it has not begun is dropped."""
        self._finisher.shutdown(cancel_futures=True)

    def finish(self, tensor: TensorPlan, encoded: Encoded, reference: Tensor | None) -> tuple[Unfinished, Tensor]:
        """Lay out, hash and code a tensor with this run's coder; returns (the outcome to come, restored).

        Hashing and coding are a CPU's work: while a GPU solves the next tensor they go on beside it. On a CPU, where
        they would only take its cores from it, they are done at once.
        """
        laid_out = lay_out(tensor, encoded, reference, self._coder)
        if _on_cpu(laid_out):
            outcome = finish(self._plan, tensor, laid_out, self._coder)
            return lambda: outcome, laid_out.restored
        on_host, wait = laid_out.to_host()

        def work() -> Outcome:
            wait()
            return finish(self._plan, tensor, on_host, self._coder)

        return self._finisher.submit(work).result, laid_out.restored

    def finish_on_disk(self, tensor: TensorPlan, encoded: Encoded) -> Unfinished:
        """As `finish`, where nobody waits for the restored tensor: memory holds its parts, and never all of it."""
        outcome = finish_on_disk(self._plan, tensor, encoded, self._coder)
        return lambda: outcome

    def save(self, step: str, outcomes: Iterable[Unfinished]) -> None:
        """Store a step durably, as soon as all of it is finished."""
        done = [outcome() for outcome in outcomes]
        self._work.save(step, done)
        self._records[step] = [outcome.record for outcome in done]

    def recall(self, step: str) -> dict[str, Tensor] | None:
        """What the tensors of a step that an interrupted run finished are restored to; None if it is still to do."""
        records = self._work.finished(step)
        if records is None:
            return None
        self._records[step] = records
        return {record.name: self._restored(step, record) for record in records}

    def check(self, step: str) -> bool:
        """Whether an interrupted run finished a step; its tensors are restored piece by piece, and compared."""
        records = self._work.finished(step)
        if records is None:
            return False
        self._records[step] = records
        for record in records:
            base, _ = self._plan.rows(self._plan.tensors[record.name])
            with self._damage_told(step), self._work.open_parts(step, record, self._coder) as sources:
                for _ in restored_pieces(record, sources, base, storage=self._coder.codec != "none"):
                    pass
        return True

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
            # not the input's fault: the other steps stay
            raise OutputError(f"damaged ({error})", where=self._work.file_of(step), way_out=start_over()) from error

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


def _on_cpu(laid_out: LaidOut) -> bool:
    return laid_out.restored.device.type == "cpu"

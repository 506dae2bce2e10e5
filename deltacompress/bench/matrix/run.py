"""The matrix, cell by cell: what is there is kept, what is missing is measured, table and picture follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import deltacompress
from deltacompress.bench.matrix.cells import Cell, code_digest, read_cells, write_cell
from deltacompress.bench.matrix.picture import draw
from deltacompress.bench.matrix.table import highest, rows, to_markdown
from deltacompress.bench.serve import models
from deltacompress.bench.serve.calls import CONTEXT, Asked, scaled
from deltacompress.bench.serve.models import Models
from deltacompress.bench.serve.records import Record, told
from deltacompress.bench.serve.replay import replay
from deltacompress.bench.serve.run import Setup, made_for
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.bench.traffic.choice import chosen
from deltacompress.bench.traffic.choice import told as name_of
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.devices import device_name, resolve_device
from deltacompress.errors import BackendError, InputError, Interrupted, option
from deltacompress.files.output import make_directory, write_once
from deltacompress.reporter import SILENT, Reporter
from deltacompress.runtime.engine.live.engine import EngineLimits

TABLE, PICTURE = "serving.md", "serving.svg"


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is the same for all cells. seconds: in which requests come; wait_s: after which those that are left are
    cancelled, and count as not served.
    """

    setup: Setup
    limits: EngineLimits
    slo: Slo
    trace: str
    variation: float
    seconds: float
    wait_s: float
    seed: int
    scale: float

    def arrivals(self, rate: float) -> list[Arrival]:
        """At so many requests a second; raises as traffic.choice.chosen and scaled."""
        found = chosen(self.trace, rate, self.variation, self.seconds, self.seed)
        return scaled(found, self.scale, CONTEXT)[0]

    @property
    def identity(self) -> dict[str, Any]:
        """All that can change a number, but for the cell itself."""
        package = Path(deltacompress.__file__).parent
        return {
            "device": device_name(resolve_device(self.setup.device)),
            "code": code_digest(package),
            "torch": torch.__version__,
            "shape": str(models.shape_of(self.setup.shape, self.setup.device)),
            "backend": self.setup.backend,
            "variants": self.setup.variants,
            "slots": self.setup.slots,
            "max_batch": self.limits.max_batch,
            "step_tokens": self.limits.step_tokens,
            "prefix_bytes": self.limits.prefix_bytes,
            "slo_ttft_s": self.slo.first_s,
            "slo_token_ms": self.slo.token_ms,
            "trace": name_of(self.trace),
            "variation": self.variation,
            "seconds": self.seconds,
            "wait_s": self.wait_s,
            "seed": self.seed,
            "scale": self.scale,
        }


def run(matrix: Matrix, todo: Sequence[Cell], folder: Path, reporter: Reporter | None = None) -> dict[str, Any]:
    """Measure those of `todo` that are missing; table and picture of all that are there are written as they come.

    Raises:
        InputError: a cell in the folder was measured otherwise: another device, other code, other settings.
        Interrupted: stopped; the same call goes on.
    """
    reporter, identity = reporter or SILENT, matrix.identity
    make_directory(folder)
    there = read_cells(folder, identity)
    missing = [cell for cell in todo if cell not in there]
    for cell in missing:
        matrix.arrivals(cell.rate)  # what cannot be is told before anything is made
        assigned(1, matrix.setup.variants, cell.popularity, matrix.seed)
    reporter.phase("cells", len(missing))
    try:
        for system, cells in groupby(missing, key=lambda cell: cell.system):
            with made_for(replace(matrix.setup, system=system)) as made:
                for cell in cells:
                    write_cell(folder, cell, identity, measured(matrix, made, cell))
                    _write(folder)
                    reporter.step(cell.file)
    except (KeyboardInterrupt, Interrupted) as stop:
        raise Interrupted("interrupted", way_out=f"finished cells stay in {folder}: run it again") from stop
    return {**summary(folder), "measured": len(missing), "kept": len(todo) - len(missing)}


def summary(folder: Path) -> dict[str, Any]:
    """Of the cells that a folder holds; table and picture of them are written.

    Raises:
        InputError: there are none, they were not measured alike, or one is no cell.
    """
    found = _write(folder)
    if not found:
        raise InputError("there is no measured cell", where=folder, way_out=f"give {option('rates')} to measure some")
    return {"highest": highest(found), "rows": rows(found), "out": str(folder)}


def _write(folder: Path) -> dict[Cell, dict[str, Any]]:
    found = read_cells(folder)
    if found:
        write_once(folder / TABLE, to_markdown(found).encode(), replace=True)
        write_once(folder / PICTURE, draw(found).encode(), replace=True)
    return found


def measured(matrix: Matrix, made: Models, cell: Cell) -> dict[str, Any]:
    """One replay. requests: of each, in their order, seconds to its first token and for each other; null of those that
    got no end.
    """
    arrivals = matrix.arrivals(cell.rate)
    numbers = assigned(len(arrivals), matrix.setup.variants, cell.popularity, matrix.seed)
    asked = [Asked(at, made.names[n], one) for at, (n, one) in enumerate(zip(numbers, arrivals, strict=True))]
    models.start(made)
    limits = replace(matrix.limits, max_queue=len(asked))
    records, _ = replay(made, asked, limits, matrix.seed, matrix.seconds + matrix.wait_s)
    if failed := next((one.error for one in records if one.error), None):
        raise BackendError(f"a request failed: {failed}", where=cell.file)
    whole = any(one.is_whole for one in records)
    row = told(records, matrix.slo) if whole else dict.fromkeys(_NOTHING) | {"failed": len(records)}
    return {"slots": made.slots, "row": row, "requests": [_request(one) for one in records]}


_NOTHING = ("failed", "e2e_mean", "ttft_mean", "ttft_p99", "tokens_s")


def _request(record: Record) -> list[float] | None:
    if not record.is_whole:
        return None
    first, others = record.token_s[0] - record.asked.arrival.at_s, record.gaps_s
    return [first, sum(others) / len(others) if others else 0.0]

"""What `analyze --predict` takes, and so what a size or a quality takes before anything is compressed: a random pair's.

What is predicted of it says nothing, and is not told.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deltacompress.bench.layers import Laps, write_pair
from deltacompress.bench.synthetic import SHAPES
from deltacompress.budget.prediction.frontier import predict
from deltacompress.compression.steps import Steps
from deltacompress.devices import device_name, map_in_pages, resolve_device
from deltacompress.reporter import SILENT, Reporter

_JUDGED = 1 << 15
"""Tokens of the data beyond those that are calibrated on: records to judge by are taken of these."""


def run(
    *,
    device: str = "auto",
    samples: int = 256,
    seq_len: int = 256,
    layers: int = 3,
    shape: str | None = None,
    device_memory: str | None = None,
    scratch: Path | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Predict the frontier of a random pair; arguments as `bench layers`.

    `rows` has the seconds of each step, in order, `total_seconds` those of all of them and of what comes between.

    Raises:
        InputError: as analyze. BackendError: no such device here.
    """
    map_in_pages()
    where, outer = resolve_device(device), reporter or SILENT
    on_gpu = where.type == "cuda"
    chosen = SHAPES[shape or ("llama-7b" if on_gpu else "tiny")].with_layers(layers)
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        root = Path(made)
        outer.phase("writing a random pair", 3)
        write_pair(root, chosen, samples * seq_len + _JUDGED, where, outer)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(where)
        laps, started = Laps(outer), time.perf_counter()
        predict(
            root / "base",
            root / "finetuned",
            calibration=root / "calibration.txt",
            samples=samples,
            seq_len=seq_len,
            device=device,
            device_memory=device_memory,
            reporter=laps,
        )
        seconds = time.perf_counter() - started
    settings = {"device_memory": device_memory} if device_memory else {}
    return settings | {
        "shape": str(chosen),
        "samples": samples,
        "seq_len": seq_len,
        "layers": layers,
        "backend": device_name(where),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "total_seconds": seconds,
        "peak_memory_bytes": Steps.peak_memory(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(where) if on_gpu else None,
        "rows": laps.laps,
    }

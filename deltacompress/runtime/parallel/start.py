"""A base in this process, or split over several devices: loaded, with all of its ranks."""

from __future__ import annotations

import torch

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BackendError
from deltacompress.runtime.modules.model import DecoupledModel, load_base
from deltacompress.runtime.parallel.part import BasePart
from deltacompress.runtime.parallel.parts.split import Split, devices_of
from deltacompress.runtime.parallel.ranks.crew import Crew
from deltacompress.runtime.variants.layout import read_layout
from deltacompress.runtime.variants.precision import Numerics


def open_base(path: str, *, device: torch.device, numerics: Numerics, tp: int) -> DecoupledModel:
    """Load a base; tp: over how many devices, a process for each of which this one is the first.

    Raises:
        CheckpointError, UnsupportedModelError, BackendError: as load_base; fewer GPUs are here.
        InputError: its heads or its MLP do not divide by `tp`.
    """
    devices = devices_of(device, tp)
    if tp == 1:
        return load_base(path, device=device, numerics=numerics)
    base = Checkpoint.open(path)
    split = Split.of(read_layout(base.path, base.tensors), 0, tp, base.path)
    crew = Crew(devices, split)
    try:
        group = crew.meet(base.path, numerics)
        with crew.loading():
            made = load_base(path, device=devices[0], numerics=numerics, part=BasePart(split, group))
    except BaseException:
        crew.close()
        raise
    made.others = crew
    return made


def check_graphs(device: torch.device, *, cuda_graphs: bool) -> None:
    """That forwards can be captured, if they are to be; raises BackendError."""
    if cuda_graphs and device.type != "cuda":
        raise BackendError(f"cuda_graphs on device {device}: they need a GPU", way_out="leave them out")

"""Tiny fleets: fine-tuned models of one base, and the jobs file that names them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from pairs import Pair, Weights, edit

SMALL: dict[str, Any] = {"recipe": "int4-24", "samples": 8, "seq_len": 16, "device": "cpu"}


def tuned(pair: Pair, place: Path, seed: int) -> Path:
    """Another fine-tuned model of the pair's base."""
    shutil.copytree(pair.base, place)

    def noise(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (w.float() + 0.02 * torch.randn(w.shape, generator=generator)).to(w.dtype)
            for name, w in sorted(weights.items())
        }

    return edit(place, noise)


def write_jobs(path: Path, whole: dict[str, Any]) -> Path:
    """A jobs file, its keys in the order given."""
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    return path


def fleet_of(pair: Pair, place: Path, models: list[Path], **more: Any) -> Path:
    """A jobs file for some models, with outputs `place`/out/<model's name>."""
    entries = [{"model": str(one), "out": str(place / "out" / one.name)} for one in models]
    defaults = SMALL | {"calibration": str(pair.data)}
    whole = {"base": str(pair.base), "defaults": defaults, "finetunes": entries} | more
    return write_jobs(place / "fleet.yaml", whole)

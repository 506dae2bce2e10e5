"""What codecs find in the whole model before a tensor is encoded (codecs.codec.Codec.fit): BitDelta's scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltacompress.calibration.data import CalibrationTokens
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.codec import Fit
from deltacompress.codecs.registry import CODECS
from deltacompress.codecs.settings import Settings
from deltacompress.models.load import load_model
from deltacompress.models.names import module_paths
from deltacompress.reporter import Reporter


def fit_codecs(
    finetuned: Checkpoint,
    bases: Mapping[str, Mapping[str, Tensor]],
    settings: Mapping[str, Settings],
    tokens: CalibrationTokens,
    device: torch.device,
    reporter: Reporter,
) -> dict[str, Any]:
    """Let codecs look at the fine-tuned model; returns what `encode` is to get, by tensor name.

    bases: by the codec's name, what each of its tensors is encoded against, f32. settings: of these tensors, by name.

    Raises:
        UnsupportedModelError: a codec does not know what it meets in the model; else as models.load.load_model and
            models.names.module_paths.
    """
    model = load_model(finetuned, device=device, dtype=torch.float32)
    paths = module_paths(finetuned.path, finetuned.config, finetuned.tensors)
    values: dict[str, Any] = {}
    for name, own in bases.items():
        fit = CODECS[name].fit
        assert fit is not None
        modules = {one: paths[one] for one in own}
        rules = {one: settings[one] for one in own}
        values |= fit(Fit(finetuned.path, model, modules, own, rules, tokens.ids, tokens.seed, reporter))
    return values

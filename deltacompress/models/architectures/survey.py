"""Which causal model types of the installed transformers can be calibrated, each tried on its default config.

A config with the type's own defaults, cut down to two layers, goes the way that a checkpoint's goes before any weight
is read, with the tensor names that transformers would save. Nothing is loaded: the models are on the meta device.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deltacompress.errors import DeltaCompressError, InputError, first_line
from deltacompress.files.places import CONFIG
from deltacompress.models.architectures.refusals import is_text
from deltacompress.models.config import unusable
from deltacompress.models.quiet import quiet
from deltacompress.models.skeleton import Skeleton
from deltacompress.models.support import outline, read_decoder
from deltacompress.reporter import SILENT, Reporter

VERSION: str = transformers.__version__
"""Of the installed transformers."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_TENSORS = 10_000
_WHOLE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_key_value_heads": 32, "head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
"""What defaults leave to whoever writes a config, of types whose defaults alone make no model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A model type; reason: why it is refused, None if it is taken. linears: of its two layers, coded from inputs."""

    model_type: str
    reason: str | None
    linears: int = 0

    @property
    def taken(self) -> bool:
        """Whether a checkpoint of this type can be compressed with calibration."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Survey:
    """One verdict for each model type that was tried."""

    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        taken = sum(one.taken for one in self.verdicts)
        return {
            "transformers": VERSION,
            "types": len(self.verdicts),
            "taken": taken,
            "refused": len(self.verdicts) - taken,
            "rows": [_row(one) for one in self.verdicts],
        }


def run(types: Sequence[str] = (), *, reporter: Reporter = SILENT) -> Survey:
    """Try these model types, by default all that the installed transformers has a causal language model for.

    Raises:
        InputError: a type that it has none for.
    """
    known = causal_types()
    for name in types:
        if name not in known:
            told = f"no model type {name!r} with a causal language model in transformers {VERSION}"
            raise InputError(told, way_out="leave it out to try all")
    chosen = list(types) or known
    reporter.phase("trying architectures", len(chosen))
    verdicts = []
    for name in chosen:
        verdicts.append(judge(name))
        reporter.step(name)
    return Survey(tuple(verdicts))


def causal_types() -> list[str]:
    """Every model type that the installed transformers has a causal language model for."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def judge(model_type: str) -> Verdict:
    """Try one type on its default config, as a decoder where it can be an encoder too."""
    try:
        raw = default_config(model_type)
    except Exception as error:  # noqa: BLE001 - each config class checks itself, with whatever errors
        return Verdict(model_type, f"its default config is none ({first_line(error)})")
    with tempfile.TemporaryDirectory(prefix="deltacompress-") as made:
        (Path(made) / CONFIG).write_text(json.dumps(raw))
        try:
            names = saved_names(raw, Path(made) / CONFIG)
            skeleton = Skeleton.from_config(Path(made), names, device="cpu")
        except DeltaCompressError as error:
            where = "" if error.where is None else error.where.rpartition(f"{CONFIG}: ")[2]
            field = "" if where.startswith(made) or not where else f"{where}: "
            return Verdict(model_type, f"{field}{error.what}".replace(made, ""))
    linears = sum(len(skeleton.linear_names(i)) for i in range(skeleton.num_layers))
    return Verdict(model_type, None, linears)


def default_config(model_type: str) -> dict[str, Any]:
    """config.json of a type's defaults with two layers, of the first kind and of another one where there is one."""
    with quiet():
        config = CONFIG_MAPPING[model_type](**_WHOLE.get(model_type, {}))
    raw: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    raw["model_type"] = model_type
    for name in ("dtype", "transformers_version"):
        raw.pop(name, None)
    if "is_encoder_decoder" in raw:  # the decoder alone is what a causal model of such a type has
        raw["is_encoder_decoder"] = False
    if "is_decoder" in raw:
        raw["is_decoder"] = True
    for one in (raw, *_inner(raw)):
        _cut(one)
    return raw


def saved_names(raw: dict[str, Any], file: Path) -> list[str]:
    """The tensors of a checkpoint with this config, as transformers would name them, those of images and sound too.

    Raises:
        UnsupportedModelError, CheckpointError: as support.read_decoder and support.outline.
    """
    config = read_decoder(raw, file, tensors=_TENSORS)
    model = outline(config, file, tensors=_TENSORS)
    with quiet(), torch.device("meta"):
        if not is_text(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            try:
                model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
            except Exception as error:  # values meet any line of the model's own code
                raise unusable(file, error) from error
        return sorted(revert_weight_conversion(model, model.state_dict()))


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "model_type": verdict.model_type,
        "taken": verdict.taken,
        "linears": verdict.linears,
        "reason": verdict.reason,
    }


def _inner(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for value in raw.values():
        if isinstance(value, dict):
            yield value
            yield from _inner(value)


def _cut(raw: dict[str, Any]) -> None:
    """Two layers: the first, and the next that a list of the layers' kinds tells from it."""
    for field in (name for name in _LAYERS if isinstance(raw.get(name), int)):
        count: int = raw[field]
        lists = [name for name, value in raw.items() if isinstance(value, list) and len(value) == count > 2]
        other = next((i for i in range(1, count) if any(raw[name][i] != raw[name][0] for name in lists)), 1)
        for name in lists:
            raw[name] = [raw[name][0], raw[name][other]]
        raw[field] = min(count, 2)
        if isinstance(raw.get("per_layer_config"), dict):
            raw["per_layer_config"] = {}

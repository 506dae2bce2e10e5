"""generation_config.json: which tokens begin and end a text, and how a model likes to be sampled. Numbers only.

A file that transformers reads itself may also choose caches, compilers, assistants and code of its own; none of that is
asked of it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from deltacompress.checkpoints.side_files import GENERATION_CONFIG
from deltacompress.errors import CheckpointError, first_line
from deltacompress.files.places import CONFIG
from deltacompress.models.folder import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

_NUMBERS = (
    "max_length max_new_tokens min_length min_new_tokens do_sample temperature top_k top_p min_p typical_p "
    "epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size num_beams"
).split()
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens")


def read_generation(directory: Path) -> GenerationConfig | None:
    """What a model directory says of generation, as far as it is one of the settings above; None without the file.

    Raises:
        CheckpointError: the file is no JSON, or a setting is no number, or none that transformers takes.
    """
    raw = read_json(directory, GENERATION_CONFIG)
    if raw is None:
        return None
    file = directory / GENERATION_CONFIG
    found: dict[str, Any] = {name: list(_ids(raw, name, file)) for name in _ID_LISTS if raw.get(name) is not None}
    for name in _IDS:
        if ids := _ids(raw, name, file):
            found[name] = list(ids) if isinstance(raw[name], list) else ids[0]
    for name in _NUMBERS:
        if (value := raw.get(name)) is None:
            continue
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{name} is no number", where=file, way_out="mend it, or get the file that came with the weights"
            )
        found[name] = value
    try:
        return GenerationConfig(**found)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            first_line(error), where=file, way_out="mend that setting, or get the file that came with the weights"
        ) from error


def token_ids(directory: Path, config: PretrainedConfig, field: str) -> tuple[int, ...]:
    """A token id field of a model directory, as generation uses it: generation_config.json first, then the config.

    Raises:
        CheckpointError: the field holds something else, or the file is no JSON.
    """
    raw = read_json(directory, GENERATION_CONFIG) or {}
    if raw.get(field) is not None:
        return _ids(raw, field, directory / GENERATION_CONFIG)
    return _ids({field: getattr(config, field, None)}, field, directory / CONFIG)


def _ids(raw: Mapping[str, Any], field: str, file: Path) -> tuple[int, ...]:
    value = raw.get(field)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int for one in listed):
        raise CheckpointError(
            f"{field} is neither a token id nor a list of them",
            where=file,
            way_out="mend it, or get the file that came with the weights",
        )
    return tuple(listed)

"""Where each tensor of a checkpoint goes in the model, as plain transformers would read that checkpoint.

A variant may name, tie or size its tensors otherwise than its base does (a head of its own where the base is tied,
added tokens, a missing prefix). So its own config builds its own skeleton on the meta device, and the checkpoint names
are matched against that; base and variant then meet in the one thing they share, the module paths. The same configs
say whether the two models compute alike at all: a variant with another rotary base would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress.checkpoints.side_files import MAX_USED_CONFIG_BYTES
from deltacompress.errors import CheckpointError, InputError, PairError
from deltacompress.files.places import CONFIG
from deltacompress.models.architectures.refusals import is_text, others
from deltacompress.models.config import other_way_out, unsupported
from deltacompress.models.folder import parsed, read_file
from deltacompress.models.names import match_names
from deltacompress.models.support import check_served, decoder_layers, outline, read_decoder
from deltacompress.types import TensorKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SERVE_WAY_OUT = "`deltacompress restore` it and serve the checkpoint with another engine"

# What may differ between a variant and its base, because the runtime follows the variant's own value (vocabulary, ties,
# token ids, context length) or because inference never reads it.
_FREE = frozenset(
    (
        "_name_or_path architectures attention_dropout attn_pdrop bos_token_id chunk_size_feed_forward "
        "classifier_dropout dtype embd_pdrop eos_token_id hidden_dropout id2label initializer_range label2id "
        "max_position_embeddings output_attentions output_hidden_states pad_token_id pretraining_tp "
        "problem_type resid_pdrop return_dict task_specific_params tie_word_embeddings tokenizer_class "
        "torch_dtype transformers_version use_cache vocab_size"
    ).split()
)


@dataclass(frozen=True)
class Place:
    """Which checkpoint tensor fills a module's tensor, and what kind of tensor that is."""

    name: str
    kind: TensorKind


@dataclass(frozen=True)
class Layout:
    """One checkpoint as its model sees it.

    places: module tensor path ("model.layers.0.self_attn.q_proj.weight") -> Place; tied paths share a name. config: the
    transformers config; context: tokens it was made for, None where it does not say.
    """

    places: dict[str, Place]
    config: PreTrainedConfig

    @property
    def context(self) -> int | None:
        """max_position_embeddings; less where positions would turn otherwise once any sequence of a batch is long.

        Rotary scalings that switch at a length (dynamic, longrope) switch for the whole batch: a request would then
        depend on its neighbours. So sequences stay below the switch.
        """
        found = getattr(self.config, "max_position_embeddings", None)
        if not isinstance(found, int):
            return None
        for rope in _ropes(self.config):
            if rope.get("rope_type") in ("dynamic", "longrope"):
                original = rope.get("original_max_position_embeddings")
                original = original or getattr(self.config, "original_max_position_embeddings", None)
                found = min(found, original or found)
        return found


def read_layout(path: Path, names: Iterable[str]) -> Layout:
    """Layout of the checkpoint (or artifact) directory `path` with these tensor names; reads config.json only.

    Raises:
        CheckpointError: no usable config.json.
        UnsupportedModelError: an architecture that the runtime cannot serve.
    """
    raw = read_file(path, CONFIG, at_most=MAX_USED_CONFIG_BYTES)
    if raw is None:
        raise CheckpointError(
            "missing", where=path / CONFIG, way_out="give the directory of a checkpoint or an artifact"
        )
    return _layout(path, raw, tuple(sorted(names)))


@lru_cache(maxsize=64)
def _layout(path: Path, config_bytes: bytes, names: tuple[str, ...]) -> Layout:
    """Cached, since the fine-tunes of one base mostly have one config; its bytes are part of the key."""
    with other_way_out(SERVE_WAY_OUT):
        config = read_decoder(parsed(config_bytes, path / CONFIG), path / CONFIG, tensors=len(names))
        model = outline(config, path / CONFIG, tensors=len(names))
        if others(model) or not is_text(config):
            raise unsupported(path, f"model type {config.model_type!r} is multimodal, only text decoders are served")
        model.tie_weights()
        layers = decoder_layers(model, path)
        check_served(model, layers, path)
        slots = match_names(model, layers, names, path)
    paths = {id(module): name for name, module in model.named_modules()}
    places = {
        f"{paths[id(module)]}.{attribute}": Place(slot.name, slot.kind)
        for slot in slots.values()
        for module, attribute in slot.sites
    }
    return Layout(places, config)


def check_alike(base: Layout, variant: Layout, where: str) -> None:
    """Make sure that the variant's forward is the base's, weights and vocabulary aside.

    Raises:
        PairError: names the config field that differs.
        InputError: the variant has a parameter that the base's model has not, or the other way round.
    """
    ours, theirs = _essence(base.config), _essence(variant.config)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            told = f"config.json has {key} {theirs.get(key)!r:.200}, the base {ours.get(key)!r:.200}"
            raise PairError(f"{told}, and one forward serves both", where=where, way_out=SERVE_WAY_OUT)
    if odd := base.places.keys() ^ variant.places.keys():
        raise InputError(f"parameter {min(odd)} is not in both base and variant", where=where, way_out=SERVE_WAY_OUT)


def _essence(config: PreTrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {key: value for key, value in config.to_dict().items() if key not in _FREE}
    if any(rope.get("rope_type", "default") != "default" for rope in _ropes(config)):
        fields["max_position_embeddings"] = config.max_position_embeddings  # some scalings depend on it
    return fields


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings, of each kind of layer where there are several."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]

"""The runtime inside transformers: a base that `from_pretrained` loads, decoupled, with one variant attached.

    import deltacompress.runtime
    from transformers import AutoModelForCausalLM

    config = deltacompress.runtime.DeltaConfig(delta="path/of/artifact")
    model = AutoModelForCausalLM.from_pretrained("path/of/base", quantization_config=config)

It is a quantizer to transformers, since that is its hook for a model whose weights are more than its checkpoint. Every
row of every forward is the variant's; mixed batches are what `Runtime` is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG
from deltacompress.errors import CheckpointError, InputError, UnsupportedModelError
from deltacompress.files.places import CONFIG
from deltacompress.models.config import check_layers
from deltacompress.models.fields import REFUSED, says
from deltacompress.models.generation import read_generation
from deltacompress.models.load import misfit
from deltacompress.models.support import read_decoder
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.modules.model import ATTENTION, decouple
from deltacompress.runtime.variants.layout import read_layout
from deltacompress.runtime.variants.opening import open_variant
from deltacompress.runtime.variants.precision import Numerics
from deltacompress.zoo.exchange.resolve import artifact_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

METHOD = "deltacompress"
_SLOT = 1


@register_quantization_config(METHOD)
class DeltaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """delta, zoo: as in `Runtime.load`; backend, merge_rounding: as in `Runtime.from_base`."""

    def __init__(
        self,
        delta: str | Path,
        backend: str = "auto",
        merge_rounding: bool | None = None,
        zoo: str | Path | None = None,
        **others: Any,
    ) -> None:
        if unknown := sorted(others.keys() - {"quant_method"}):  # what transformers itself passes
            raise InputError(f"DeltaConfig has no {unknown[0]}; it takes delta, zoo, backend and merge_rounding")
        self.quant_method = METHOD
        self.delta, self.zoo = str(delta), None if zoo is None else str(zoo)
        self.backend, self.merge_rounding = backend, merge_rounding


@register_quantizer(METHOD)
class DeltaQuantizer(HfQuantizer):  # type: ignore[misc]
    """Attaches the variant once the base's weights are in place."""

    requires_calibration = False
    _base: Checkpoint | None = None

    @property
    def is_trainable(self) -> bool:
        """The variant's weights are no parameters."""
        return False

    def is_serializable(self, **_: Any) -> bool:
        """`save_pretrained` would write the base alone; `deltacompress restore` writes the variant."""
        return False

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Called with the config as transformers read it, before it looks for weights and builds modules.

        Where the config lies is not known yet: its own `_name_or_path` is what the file says.

        Raises:
            UnsupportedModelError: it would have other files or modules loaded, or more than there can be.
        """
        for name, reason in REFUSED.items():
            if says(getattr(config, name, None)):
                raise UnsupportedModelError(f"the base's {CONFIG}: {name}: {reason}", way_out="remove that line")
        check_layers(config)
        if config._attn_implementation not in (None, *ATTENTION):  # it would be replaced later on, and might be fetched
            config._attn_implementation = None
        config._experts_implementation = None
        return config

    def update_tp_plan(self, config: PretrainedConfig) -> PretrainedConfig:
        """What versions of transformers before 5.23 call at that point."""
        return self.update_attn_implementation(config)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self._base = open_base(model.config.name_or_path)
        check_files(self._base, checkpoint_files or [])
        check_shapes(self._base, model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        settings = self.quantization_config
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise InputError(
                f"the base is spread over {len(devices)} devices", way_out="load it on one (device_map={'': 0})"
            )
        checkpoint = self._base
        assert checkpoint is not None
        layout = read_layout(checkpoint.path, checkpoint.tensors)
        numerics = Numerics.choose(settings.backend, devices.pop(), model.dtype, settings.merge_rounding)
        decoupled = decouple(model, checkpoint, layout, numerics)
        delta = artifact_path(settings.delta, settings.zoo, base=checkpoint.path)
        variant = open_variant(delta, decoupled.base)
        found = ((path, variant.operand(path)) for path in variant.paths())
        device, kernels = decoupled.device, numerics.kernels
        decoupled.install(_SLOT, {path: one.placed(device, kernels) for path, one in found if one is not None})
        decoupled.context.batch = Batch([_SLOT], decoupled.device)  # one segment, whatever the number of rows
        model.config.vocab_size = variant.vocabulary(decoupled.head_path)
        if generation := read_generation(variant.generation_folder):
            model.generation_config = generation
        return model


def open_base(path: str) -> Checkpoint:
    """The checkpoint that transformers is about to load, if it will load what this project would.

    Raises:
        CheckpointError: it is none, or an adapter lies beside it.
        UnsupportedModelError: a config that would choose other files, code or another model.
    """
    checkpoint = Checkpoint.open(path)
    file, tensors = checkpoint.path / CONFIG, len(checkpoint.tensors)
    read_decoder(checkpoint.config, file, tensors=tensors)
    if (checkpoint.path / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            "transformers would apply this adapter to the base",
            where=checkpoint.path / ADAPTER_CONFIG,
            way_out="move it elsewhere",
        )
    return checkpoint


def check_files(checkpoint: Checkpoint, chosen: Sequence[str]) -> None:
    """Make sure that transformers reads the weights from the files that are hashed.

    Raises:
        CheckpointError: names the first file that is another.
    """
    known = {file.resolve() for file in checkpoint.weight_files}
    for name in chosen:
        if Path(name).resolve() not in known:
            raise CheckpointError(
                "transformers would read weights from it, which is no file of the checkpoint",
                where=name,
                way_out="remove it",
            )


def check_shapes(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Compare tensors with the parameters of the same name, since transformers makes room for any that do not fit.

    Raises:
        CheckpointError: names the first that differs.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    for name, info in checkpoint.tensors.items():
        for target in (name, f"{model.base_model_prefix}.{name}"):
            if info.shape != wanted.get(target, info.shape):
                raise misfit(checkpoint.path, name, info.shape, wanted[target])

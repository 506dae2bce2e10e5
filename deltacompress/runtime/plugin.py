"""The runtime inside transformers: a base that `from_pretrained` loads, decoupled, with one variant attached.

    import deltacompress.runtime
    from transformers import AutoModelForCausalLM

    config = deltacompress.runtime.DeltaConfig(delta="path/of/artifact")
    model = AutoModelForCausalLM.from_pretrained("path/of/base", quantization_config=config)

It is a quantizer to transformers, since that is its hook for a model whose weights are more than its checkpoint. Every
row of every forward is the variant's; mixed batches are what `Runtime` is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from deltacompress.checkpoint import Checkpoint
from deltacompress.errors import InputError
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.layout import read_layout
from deltacompress.runtime.model import decouple
from deltacompress.runtime.numerics import Numerics
from deltacompress.runtime.operands import placed
from deltacompress.runtime.variant import Variant
from deltacompress.zoo.resolve import artifact_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    @property
    def is_trainable(self) -> bool:
        """The variant's weights are no parameters."""
        return False

    def is_serializable(self, **_: Any) -> bool:
        """`save_pretrained` would write the base alone; `deltacompress restore` writes the variant."""
        return False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        settings = self.quantization_config
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise InputError(f"the base is spread over {len(devices)} devices; load it on one (device_map={{'': 0}})")
        checkpoint = Checkpoint.open(model.config._name_or_path)
        layout = read_layout(checkpoint.path, checkpoint.tensors)
        numerics = Numerics.choose(settings.backend, devices.pop(), model.dtype, settings.merge_rounding)
        decoupled = decouple(model, checkpoint, layout, numerics.kernels)
        delta = artifact_path(settings.delta, settings.zoo, base=checkpoint.path)
        variant = Variant.open(delta, decoupled.base, numerics)
        found = ((path, variant.operand(path)) for path in variant.paths())
        kernels = numerics.kernels
        decoupled.install(
            _SLOT, {path: placed(one, decoupled.device, kernels) for path, one in found if one is not None}
        )
        decoupled.current.batch = Batch([_SLOT], decoupled.device)  # one segment, whatever the number of rows
        model.config.vocab_size = variant.vocabulary(decoupled.head_path)
        if (variant.delta.path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(variant.delta.path, local_files_only=True)
        return model

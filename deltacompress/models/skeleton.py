"""A decoder model whose weights come and go: one decoder layer in memory at a time.

Nothing of any architecture is re-implemented. The model is built by transformers on the meta device; its own forward
prepares what each layer receives (embeddings, masks, rotary tables) while recorders stand in for the layers, each
layer then runs through its own forward, and the model's own forward finishes with relays that inject the last hidden
states. Each layer's *own* arguments are kept, because layers differ (alternating attention windows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deltacompress.errors import CheckpointError
from deltacompress.files.places import CONFIG
from deltacompress.models import support
from deltacompress.models.architectures.trial import tried
from deltacompress.models.config import unsupported
from deltacompress.models.experts.forward import run_one_by_one
from deltacompress.models.experts.stages import ExpertStage, expert_stages
from deltacompress.models.folder import read_json
from deltacompress.models.load import misfit
from deltacompress.models.names import Slot, match_names, odd_linears
from deltacompress.models.relay import BrokenChain, Chain, HeadTap, LayerCall, Relay
from deltacompress.types import OddLinears, TensorKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LayerCall", "Skeleton"]


@dataclass(eq=False)
class Skeleton:
    """A model on the meta device, loaded and run piece by piece; see `from_config`."""

    path: Path
    model: PreTrainedModel
    device: torch.device
    num_layers: int
    _layers: nn.ModuleList
    _slots: dict[str, Slot]
    _names: tuple[str, ...]
    odd_linears: OddLinears
    _width: int  # of the tuple that a layer returns, the hidden states first; 0 where it returns those alone

    @classmethod
    def from_config(
        cls,
        path: Path,
        tensor_names: Iterable[str],
        *,
        device: str | torch.device,
    ) -> Skeleton:
        """Build the model of a checkpoint directory, in float32, without reading any weight.

        Args:
            path: directory with config.json; code in it is never run.
            tensor_names: every tensor name of the checkpoint.
            device: where loaded weights, buffers and activations live.

        Raises:
            CheckpointError: config.json is missing or unusable.
            UnsupportedModelError: not a decoder whose checkpoint names map one to one onto its parameters.
        """
        support.settle_vector_math()
        path, device, names = Path(path), torch.device(device), tuple(sorted(tensor_names))
        file = path / CONFIG
        raw = read_json(path, CONFIG)
        if raw is None:
            raise CheckpointError("missing", where=file, way_out="give the directory of a Hugging Face checkpoint")
        config = support.read_decoder(raw, file, tensors=len(names))
        layers_path, walk = tried(raw, config, file, tensors=len(names))
        model = support.build_model(config, file)
        run_one_by_one(model)
        model.tie_weights()  # again: becoming meta parted what had been tied
        model.eval().requires_grad_(False)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        layers = model.get_submodule(layers_path)
        assert isinstance(layers, nn.ModuleList)
        slots = match_names(model, layers_path, names, path)
        odd = odd_linears(model, slots, walk.once)
        return cls(path, model, device, len(layers), layers, slots, names, odd, walk.width)

    # --- names -------------------------------------------------------------------------------------------------------

    def kind(self, name: str) -> TensorKind:
        """What a checkpoint tensor is; "other" for tensors that no part of the model uses (old buffers)."""
        slot = self._slots.get(name)
        return "other" if slot is None else slot.kind

    def uses(self, name: str) -> bool:
        """Whether some part of the model is made of a checkpoint tensor."""
        return name in self._slots

    def layer_names(self, i: int) -> list[str]:
        """Checkpoint names of decoder layer i, in module order."""
        return [name for name, slot in self._slots.items() if slot.layer == i]

    def outer_names(self) -> list[str]:
        """Checkpoint names outside the decoder layers, unused ones included: with all layers, every name once."""
        return [name for name in self._names if name not in self._slots or self._slots[name].layer is None]

    def linear_names(self, i: int) -> list[str]:
        """Checkpoint names of the linear weights of layer i that run once, in module order (mostly that of running)."""
        names = (name for name in self.layer_names(i) if self._slots[name].kind == "linear")
        return [name for name in names if name not in self.odd_linears.unwalked]

    def expert_stages(self, i: int) -> list[ExpertStage]:
        """The products of experts in layer i, whose linears have no modules of their own."""
        sites = {name: self._slots[name].sites[0] for name in self.linear_names(i)}
        return list(expert_stages(self._layers[i], sites))

    @property
    def embedding_name(self) -> str:
        """Checkpoint name of the input embedding (of the head, where only that half of a tied pair is stored)."""
        return next(name for name, slot in self._slots.items() if slot.kind == "embedding")

    @property
    def head_name(self) -> str | None:
        """Checkpoint name of the output projection's weight; None where the embedding serves as the head."""
        return next((name for name, slot in self._slots.items() if slot.kind == "head"), None)

    @property
    def hidden_size(self) -> int:
        """Features of the hidden states between the layers."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    def module_of(self, name: str) -> nn.Module:
        """The module that a checkpoint tensor belongs to."""
        return self._slots[name].sites[0][0]

    def layer(self, i: int) -> nn.Module:
        """Decoder layer i."""
        return self._layers[i]

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the shapes of checkpoint tensors with those that config.json implies, before any is read.

        Raises:
            CheckpointError: names the first tensor that does not fit.
        """
        for name, shape in shapes.items():
            if name in self._slots and shape != tuple(self._slots[name].tensor.shape):
                raise self._misfit(name, shape)

    def _misfit(self, name: str, got: tuple[int, ...]) -> CheckpointError:
        return misfit(self.path, name, got, self._slots[name].tensor.shape)

    # --- weights -----------------------------------------------------------------------------------------------------

    def load(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        """Fill the parameters of these checkpoint names; names that no parameter uses are not read.

        Raises:
            CheckpointError: as `prepare`.
        """
        for name in names:
            if name in self._slots:
                self.swap({name: self.prepare(name, read(name))})

    @torch.no_grad()
    def prepare(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor as the model holds it: cast, on the device, in memory of its own; see `swap`.

        Raises:
            CheckpointError: a tensor whose shape is not the one that config.json implies.
        """
        now = self._slots[name].tensor
        if value.shape != now.shape:
            raise self._misfit(name, tuple(value.shape))
        ready = torch.empty(now.shape, dtype=now.dtype, device=self.device)
        ready.copy_(value.to(self.device, non_blocking=True))  # move first: the cast runs there, from fewer bytes
        return nn.Parameter(ready, requires_grad=False) if isinstance(now, nn.Parameter) else ready

    def weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What the model holds under these names now: the tensors themselves, to compute with or to `swap` back in."""
        return {name: self._slots[name].tensor for name in names}

    def swap(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put tensors of `prepare` or `weights` into the model; a tied head changes with its embedding.

        Only references change hands: it costs nothing to go back and forth between two sets.
        """
        for name, value in weights.items():
            for module, attribute in self._slots[name].sites:  # one object for every site: tied stays tied
                setattr(module, attribute, value)

    def free(self, names: Iterable[str]) -> None:
        """Give the memory of these parameters back (buffers stay: they are small and hold computed values)."""
        for name in names:
            slot = self._slots.get(name)
            if slot is not None and isinstance(slot.tensor, nn.Parameter):
                empty = torch.empty_like(slot.tensor, device="meta")
                self.swap({name: nn.Parameter(empty, requires_grad=False)})

    def free_layer(self, i: int) -> None:
        """Give the memory of decoder layer i back."""
        self.free(self.layer_names(i))

    # --- forward -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """What the first layer receives, and how the model calls each of its layers.

        Needs the outer weights, but no head that is not the embedding.

        Args:
            ids: int64 [B, T], without padding.

        Returns:
            hidden states [B, T, H], and one call per layer. Calls depend on B and T only.

        Raises:
            UnsupportedModelError: the model does more between its layers than hand the hidden states on.
        """
        ids = ids.to(self.device)
        chain, _ = self._relayed(lambda: self.model.base_model(input_ids=ids, use_cache=False))
        assert chain.first is not None
        return chain.first, chain.calls

    def run_layer(self, i: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Decoder layer i through its own forward: hidden states [B, T, H] -> [B, T, H].

        It can be differentiated where the hidden states require a gradient.

        Raises:
            CheckpointError: a config.json that the layer cannot run with.
        """
        call.check(hidden)
        with torch.set_grad_enabled(hidden.requires_grad), self._telling(hidden):
            output = call.run(self._layers[i], hidden)
        result: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
        return result

    @torch.no_grad()
    def run_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the output projection, from the last layer's output: [B, T, H] -> [B, T, H].

        No logits are made; needs the outer weights, but neither embedding nor head.
        """
        head = self.model.get_output_embeddings()
        tap = HeadTap(head)
        # By path, for set_output_embeddings would record the tap in the config of some models.
        path = next(name for name, module in self.model.named_modules() if module is head)
        self.model.set_submodule(path, tap)
        try:
            self.run_head(hidden)
        finally:
            self.model.set_submodule(path, head)
        assert tap.seen is not None
        return tap.seen

    def run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] from the last layer's output [B, T, H], caps and scales included.

        Needs the outer weights, but no embedding that is not the head. Differentiates as `run_layer`.
        """
        with torch.set_grad_enabled(hidden.requires_grad):
            _, output = self._relayed(lambda: self.model(inputs_embeds=hidden, use_cache=False), inject=hidden)
        logits: torch.Tensor = output.logits
        return logits

    def _relayed(self, run: Callable[[], Any], inject: torch.Tensor | None = None) -> tuple[Chain, Any]:
        """Run the model's own forward with relays for layers, which return what its layers return."""
        chain = Chain(self._width, inject)
        try:
            with self._relays(chain), self._telling(inject):
                output = run()
        except BrokenChain as error:
            reason = f"{type(self.model).__name__} changes the hidden states between its layers"
            raise unsupported(self.path, reason) from error
        if len(chain.calls) != self.num_layers:
            raise unsupported(self.path, f"the model ran {len(chain.calls)} of its {self.num_layers} layers")
        return chain, output

    def _telling(self, hidden: torch.Tensor | None) -> AbstractContextManager[None]:
        """Names config.json where a forward fails; one that shall be differentiated may fail for that."""
        return nullcontext() if hidden is not None and hidden.requires_grad else support.failing_forward(self.path)

    @contextmanager
    def _relays(self, chain: Chain) -> Iterator[None]:
        layers = list(self._layers)
        try:
            for i, layer in enumerate(layers):
                self._layers[i] = Relay(layer, i, chain)
            yield
        finally:
            for i, layer in enumerate(layers):
                self._layers[i] = layer

"""The base as transformers loads it, with its linears, norms and embedding made variant-aware in place.

Nothing of any architecture is re-implemented: the model's own forward runs, and only the modules that hold weights
know that rows differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import InputError, UnsupportedModelError
from deltacompress.kernels.triton import fused
from deltacompress.kernels.writes import together
from deltacompress.models.load import Weights, load_model
from deltacompress.models.support import is_norm
from deltacompress.runtime.batch import BASE, Batch, ForwardContext, StepRows
from deltacompress.runtime.modules.attention import fuse_attention
from deltacompress.runtime.modules.embedding import decouple_embedding
from deltacompress.runtime.modules.linear import DecoupledLinear, group_linears
from deltacompress.runtime.modules.vectors import VectorBank, decouple_norm
from deltacompress.runtime.operands.operand import Operand, Traits
from deltacompress.runtime.parallel.others import ALONE, Others
from deltacompress.runtime.variants.layout import SERVE_WAY_OUT, Layout, read_layout
from deltacompress.runtime.variants.precision import Numerics
from deltacompress.runtime.variants.variant import BaseSide, Role

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_JOINT = 1024
"""Sets of kinds of which is remembered what they need together."""
Kind = frozenset[Hashable] | None
"""Traits of a slot, in all places; None: no captured forward serves it."""
ATTENTION = ("sdpa", "eager")
"""Implementations of transformers that the masks of the scheduler are for."""


class Seat(Protocol):
    """A module (or a parameter of one) that takes operands, by slot. takes: of these kinds."""

    takes: ClassVar[tuple[type[Operand], ...]]

    def set(self, slot: int, operand: Any) -> None:
        """Give `slot` its operand, of a kind for this place, or (None) none any more."""

    def traits(self, slot: int) -> Traits | None:
        """What a captured step must have been captured with, in this place, to serve `slot`.

        Tables, formats: what launches are for, and where they read. Whatever is captured with more serves it, too.
        None: what it does for this slot is decided on the host at every forward.
        """

    def launched(self, slots: Collection[int]) -> Traits:
        """What a forward that is captured over these slots, each of which has traits, serves in this place.

        More than their traits, where a launch for one format is followed by those for all others that were ever there.
        """


@dataclass(eq=False)
class DecoupledModel:
    """A model whose modules serve many variants.

    context: the batch that its modules read; base: names, roles and checkpoint of the base, all of it even where the
    model is a part. others: the ranks that have the other parts. installed: slots of variants. _seats: by module tensor
    path.
    """

    model: PreTrainedModel
    context: ForwardContext
    base: BaseSide
    device: torch.device
    embedding_path: str
    head_path: str
    _seats: dict[str, Seat]
    fused: bool = False  # whether kernels/triton/fused.py is used
    paged: bool = False  # whether its attention takes pages (modules/attention.py)
    others: Others = ALONE
    installed: set[int] = field(default_factory=set)
    _kinds: dict[int, Kind] = field(default_factory=dict)  # of slots that were asked for
    _joint: dict[frozenset[Kind], Kind] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def vocabulary(self) -> int:
        """Tokens of the base."""
        return self.base.checkpoint.tensors[self.base.layout.places[self.head_path].name].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        found: torch.dtype = self.model.dtype
        return found

    @contextmanager
    def serving(self, batch: Batch, rows: StepRows | None = None) -> Iterator[None]:
        """Forwards in this block are of `batch`; rows: see ForwardContext."""
        self.context.batch, self.context.rows = batch, rows
        try:
            yield
        finally:
            self.context.batch = self.context.rows = None

    def traits(self, slots: Iterable[int]) -> frozenset[Hashable] | None:
        """Of these slots in all places; None: there is one that no captured forward serves."""
        kinds = frozenset([self._kind(slot) for slot in slots if slot != BASE])  # few, however many slots there are
        if kinds not in self._joint:
            if len(self._joint) >= _JOINT:
                self._joint.clear()
            known = [kind for kind in kinds if kind is not None]
            self._joint[kinds] = frozenset[Hashable]().union(*known) if len(known) == len(kinds) else None
        return self._joint[kinds]

    def _kind(self, slot: int) -> Kind:
        if slot not in self._kinds:
            own = self._found_kind(slot)
            alike = (kind for kind in self._kinds.values() if kind == own)
            self._kinds[slot] = next(alike, own)  # one object for all, which compares fast
        return self._kinds[slot]

    def _found_kind(self, slot: int) -> Kind:
        each = [(path, seat.traits(slot)) for path, seat in self._seats.items()]
        plain = any(found is None for _, found in each)
        return None if plain else frozenset((path, trait) for path, found in each for trait in found or ())

    def _look_again(self, slot: int) -> None:
        """A slot has another variant, for which tables may have moved: for all slots of a kind, or for none."""
        self._kinds.pop(slot, None)
        for kind, one in {kind: one for one, kind in self._kinds.items()}.items():
            if self._found_kind(one) != kind:
                self._kinds = {other: its for other, its in self._kinds.items() if its != kind}
                self._joint.clear()

    def launched(self, slots: Collection[int]) -> frozenset[Hashable]:
        """All that a forward serves which is captured over these slots; they have traits."""
        return frozenset((path, trait) for path, seat in self._seats.items() for trait in seat.launched(slots))

    def _parameter(self, path: str) -> nn.Parameter:
        """The base's; any thread may ask, also while a forward has something else in its place (vectors.Shadow)."""
        module, _, name = path.rpartition(".")
        own: dict[str, nn.Parameter] = dict(self.model.get_submodule(module).named_parameters(recurse=False))
        return own[name]

    def check(self, operands: Mapping[str, Operand], where: Path) -> None:
        """Make sure that these operands of the variant in folder `where` can be installed.

        Raises:
            InputError: names the first that cannot, and why.
        """
        for path, operand in operands.items():
            if path not in self._seats:
                raise InputError(f"brings {path}, where no variant can bring anything", where=where)
            if not isinstance(operand, self._seats[path].takes):
                kinds = " or ".join(kind.__name__ for kind in self._seats[path].takes)
                raise InputError(f"brings {type(operand).__name__} for {path}, which takes {kinds}", where=where)
            why = operand.misfit(self._parameter(path), self.dtype)
            if why is not None:
                raise InputError(f"brings {type(operand).__name__} for {path} of {why}", where=where)

    @torch.inference_mode()
    def install(self, slot: int, operands: dict[str, Operand]) -> None:
        """Let `slot` use these operands, by module tensor path."""
        self.installed.add(slot)
        try:
            with together():
                for path, operand in operands.items():
                    self._seats[path].set(slot, operand)
        finally:
            self._look_again(slot)

    @torch.inference_mode()
    def uninstall(self, slot: int) -> None:
        """Let go of everything of `slot`."""
        self.installed.discard(slot)
        with together():
            for seat in self._seats.values():
                seat.set(slot, None)
        self._look_again(slot)


class Part(Protocol):
    """A part of a base, of which other processes have the others."""

    def weights(self, checkpoint: Checkpoint, layout: Layout) -> Weights:
        """Of the whole checkpoint, this part's."""

    @property
    def shrink(self) -> Callable[[PretrainedConfig], None]:
        """As load_model takes it."""

    def join(self, model: PreTrainedModel) -> None:
        """Let its modules give what those of the whole model would."""


def load_base(path: str, *, device: torch.device, numerics: Numerics, part: Part | None = None) -> DecoupledModel:
    """Load the base checkpoint, or a part of it, and make it variant-aware.

    Raises:
        CheckpointError: not a checkpoint, or one that transformers cannot load whole.
        UnsupportedModelError: an architecture that the runtime cannot serve.
        BackendError: it does not fit into the device's memory.
    """
    checkpoint = Checkpoint.open(path)
    layout = read_layout(checkpoint.path, checkpoint.tensors)
    if part is None:
        model = load_model(checkpoint, device=device, dtype=numerics.dtype)
    else:
        weights = part.weights(checkpoint, layout)
        model = load_model(weights, device=device, dtype=numerics.dtype, shrink=part.shrink)
    made = decouple(model, checkpoint, layout, numerics)
    if part is not None:
        part.join(model)
    if numerics.kernels is not None:
        group_linears(model, [module for module in model.modules() if isinstance(module, DecoupledLinear)])
    if made.fused:
        made.paged = fuse_attention(model, made.context)
    return made


def decouple(model: PreTrainedModel, checkpoint: Checkpoint, layout: Layout, numerics: Numerics) -> DecoupledModel:
    """Make a loaded model variant-aware in place.

    Raises:
        UnsupportedModelError: a norm of a kind that no rule covers, or positions by ALiBi.
    """
    model.eval().requires_grad_(False)
    if hasattr(model.base_model, "build_alibi_tensor") or getattr(model.config, "alibi", False):
        raise UnsupportedModelError(
            f"{model.config.model_type} has its positions in the attention's biases (ALiBi), which no rule serves",
            where=checkpoint.path,
            way_out=SERVE_WAY_OUT,
        )
    if model.config._attn_implementation not in ATTENTION:
        model.set_attn_implementation("eager")
    context, kernels, adapters = ForwardContext(), numerics.kernels, numerics.adapter_kernels
    fuse = kernels is not None and fused.usable(model.device)
    paths = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_path, head_path = f"{paths[id(embedding)]}.weight", f"{paths[id(head)]}.weight"
    roles: dict[str, Role] = {}
    linears: dict[str, DecoupledLinear] = {}
    banks: dict[str, VectorBank] = {}
    for module_path in sorted({place.rpartition(".")[0] for place in layout.places}):
        module = model.get_submodule(module_path)
        if isinstance(module, nn.Linear):
            linear = DecoupledLinear(module, context, kernels, adapters, is_head=module is head)
            model.set_submodule(module_path, linear)
            linears[f"{module_path}.weight"] = linear
            roles[f"{module_path}.weight"] = "head" if module is head else "linear"
            if linear.biases is not None:
                banks[f"{module_path}.bias"] = linear.biases
        elif is_norm(module):
            banks |= {
                f"{module_path}.{name}": bank
                for name, bank in decouple_norm(module, context, module_path, fuse=fuse).items()
            }
    roles |= dict.fromkeys(banks, "vector")
    roles[embedding_path] = "embedding"
    side = BaseSide(checkpoint, layout, roles, numerics)
    seats: dict[str, Seat] = {**linears, **banks, embedding_path: decouple_embedding(embedding, context, fuse=fuse)}
    return DecoupledModel(model, context, side, embedding.weight.device, embedding_path, head_path, seats, fuse)


def mask_value(dtype: torch.dtype) -> float:
    """What an additive mask puts where nothing may be attended to."""
    return torch.finfo(dtype).min


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True = attend) as one that is added to the scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, mask_value(dtype))

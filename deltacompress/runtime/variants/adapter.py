"""A PEFT adapter as a variant: beside the base, or over a fine-tuned model that the runtime holds as a delta.

    y = s * ((W + D) (x R) + c B A x + S x) + bias

D is the delta under it, packed or decoded; c B A is LoRA's, with s DoRA's; R and s are BOFT's; S is SHiRA's and, beside
B A, RoSA's; each is there for the modules that have it. Checked at `open`: config, names and shapes against the base,
every value, and that the runtime has a place for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from deltacompress.adapters.adapter import Adapter, adapter_identity, open_adapter
from deltacompress.adapters.changes import check_saved, half_note
from deltacompress.adapters.directory import base_note
from deltacompress.adapters.records import Change
from deltacompress.adapters.values import check_values
from deltacompress.checkpoints.hub import hub_origin
from deltacompress.errors import CheckpointError, UnsupportedModelError
from deltacompress.models.tokenizers import has_tokenizer
from deltacompress.numerics.adapters.butterfly import MERGED
from deltacompress.numerics.adapters.magnitude import Rows
from deltacompress.runtime.operands.embedding_rows import EmbeddingRows
from deltacompress.runtime.operands.operand import Operand, Vector
from deltacompress.runtime.operands.product import Combined, LinearOperand
from deltacompress.runtime.operands.stored import Stored
from deltacompress.runtime.variants.adapter_operands import AdapterOperands
from deltacompress.runtime.variants.adapter_tables import Ties, own_weight
from deltacompress.runtime.variants.adapter_tensors import AdapterTensors, RowsOfBase
from deltacompress.runtime.variants.delta import DeltaVariant
from deltacompress.runtime.variants.layout import Layout
from deltacompress.runtime.variants.variant import BaseSide, Memory, Variant, plain_memory


class AdapterVariant(Variant):
    """An opened adapter that fits the base, or the delta `over` which it goes; make it with `AdapterVariant.open`."""

    def __init__(self, adapter: Adapter, layout: Layout, base: BaseSide, over: DeltaVariant | None) -> None:
        super().__init__(adapter.path, layout, base)
        self.adapter, self.over = adapter, over
        self._base_note = None if over is not None else base_note(adapter.path, hub_origin(base.checkpoint.path)[0])
        self._operands = AdapterOperands(adapter, AdapterTensors(adapter, base.numerics.dtype))
        self._weights = {f"{module}.weight": one for module, one in adapter.changes.items() if _changes_weight(one)}
        self._biases = {
            f"{module}.bias": one.whole.bias
            for module, one in adapter.changes.items()
            if one.whole is not None and one.whole.bias is not None
        }
        ties = Ties(layout, base.roles, self._are_alike)
        self._weights |= ties.tables_of_both(self._weights)
        self._tied_rows = ties.rows_of_heads(self._weights)
        modules = [path.removesuffix(".weight") for path, role in base.roles.items() if role != "vector"]
        biased = [path.removesuffix(".bias") for path in base.roles if path.endswith(".bias")]
        half = half_note(adapter.changes, adapter.settings, modules, biased)
        self._file_notes = [one for one in (half, adapter.unread_note) if one is not None]

    @classmethod
    def open(cls, path: Path, base: BaseSide, over: DeltaVariant | None = None) -> AdapterVariant:
        """Open the adapter in directory `path`; over: the fine-tuned model that it was trained on, None: the base.

        Raises:
            CheckpointError: no adapter, one that is not read here, or one that is damaged or not finite.
            BaseMismatchError: it does not fit what it is to go over.
            UnsupportedModelError: it changes what the runtime has no place for; names the module.
        """
        found = {name: info.shape for name, info in base.checkpoint.tensors.items()}
        called, layout = str(base.checkpoint.path), base.layout
        if over is not None:
            found = {name: info.shape for name, info in over.delta.tensors.items()}
            called, layout = str(over.folder), over.layout
        adapter = open_adapter(path, found, base_name=called)
        check_values(adapter)
        made = cls(adapter, layout, base, over)
        made._check_places()
        made._check_tables()
        made._check_saved()
        made.layout = made._grown(layout)
        return made

    @cached_property  # each prompt asks for it
    @override
    def identity(self) -> str:
        return adapter_identity(self.adapter.digest, None if self.over is None else self.over.identity)

    @property
    @override
    def decodes(self) -> bool:
        made = self.adapter.kind in ("dora", "boft")
        return made or (self.over is not None and self.over.decodes)

    @override
    @contextmanager
    def reading(
        self,
        memory: Memory = plain_memory,
        threads: Executor | None = None,
        device: torch.device | None = None,
    ) -> Iterator[None]:
        with self._operands.tensors.gathered(memory, threads, device):
            yield

    @property
    @override
    def generation_folder(self) -> Path:
        return self._base.checkpoint.path if self.over is None else self.over.generation_folder

    @property
    @override
    def tokenizer_folder(self) -> Path:
        return self.folder if self.over is None or has_tokenizer(self.folder) else self.over.tokenizer_folder

    @override
    def vocabulary(self, module_path: str) -> int:
        change = self._weights.get(module_path)
        if change is not None and own_weight(change) is not None:
            return change.shape[0]
        return super().vocabulary(module_path) if self.over is None else self.over.vocabulary(module_path)

    @override
    def paths(self) -> list[str]:
        under = () if self.over is None else self.over.paths()
        return list(dict.fromkeys([*under, *self._weights, *self._biases, *self._tied_rows]))

    @override
    def stored(self, module_path: str) -> Stored | None:
        return None if self.over is None or self._brings(module_path) else self.over.stored(module_path)

    @override
    def operand_bytes(self, module_path: str) -> int | None:
        return None if self.over is None or self._brings(module_path) else self.over.operand_bytes(module_path)

    @override
    def operand(self, module_path: str) -> Operand | None:
        if module_path in self._biases:
            return self._vector(module_path, self._biases[module_path])
        change, rows, role = self._weights.get(module_path), self._tied_rows.get(module_path), self._base.roles
        if change is not None and role[module_path] == "vector":
            assert change.whole is not None
            assert change.whole.weight is not None
            return self._vector(module_path, change.whole.weight)
        if change is not None and self._is_copy(module_path, change):
            change = replace(change, whole=None)
        replaces = change is not None and own_weight(change) is not None
        under = None if self.over is None or replaces else self.over.operand(module_path)
        if rows is None and (change is None or not _changes_weight(change)):
            return under
        if role[module_path] == "embedding":
            assert change is not None
            assert under is None or isinstance(under, EmbeddingRows)
            return self._operands.embedding(change, under, lambda: self._under(module_path))
        assert under is None or isinstance(under, LinearOperand)
        parts = [] if under is None else [under]
        if change is not None:
            parts += self._operands.linear(
                change, lambda: self._under(module_path), lambda: self._rows_under(module_path)
            )
        if rows is not None:
            module = module_path.removesuffix(".weight")
            parts.append(self._operands.delta_of_rows(rows, lambda: self._under(module_path), module))
        return parts[0] if len(parts) == 1 else Combined.of(*parts)

    @override
    def note(self) -> str | None:
        told = [f"{self.adapter.kind} adapter, {self.adapter.modules} modules beside the base's weights"]
        chains = Counter(
            one.rotation.factors
            for one in self._weights.values()
            if one.rotation is not None and one.rotation.factors > 1
        )
        for factors, count in sorted(chains.items()):
            turns = -(-factors // MERGED)
            form = "merged into one rotation" if turns == 1 else f"as a chain of {turns} rotations"
            told.append(f"{factors} butterfly factors of {count} modules {form}")
        if self.over is not None:
            told.append(f"over the delta {self.over.folder.name}")
            if note := self.over.note():
                told.append(note)
        told += self._file_notes
        if self._base_note is not None:  # over a delta it was said what it is of
            told.append(self._base_note)
        return "; ".join(told)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _brings(self, module_path: str) -> bool:
        """Whether something of the adapter itself is for this path."""
        return module_path in self._weights or module_path in self._biases or module_path in self._tied_rows

    def _vector(self, module_path: str, name: str) -> Vector:
        module = module_path.rpartition(".")[0]
        values = self._operands.tensors.served(module, module_path, self._operands.tensors.read(name))
        return Vector({"vector": values})

    def _is_copy(self, module_path: str, change: Change) -> bool:
        """Whether the whole weight that a module brings is what is there anyway: PEFT saves embeddings and heads."""
        name = own_weight(change)
        if name is None:
            return False
        there, own = self._under(module_path, restored=True), self._operands.tensors.read(name)
        return own.shape == there.shape and torch.equal(own.float(), there.float())

    def _are_alike(self, one: str, other: str) -> bool:
        return torch.equal(*(self._under(path, restored=True) for path in (one, other)))

    def _under(self, module_path: str, *, restored: bool = False) -> Tensor:
        """The weight that the adapter goes over; restored: as in DeltaVariant.weight."""
        if self.over is not None:
            return self.over.weight(module_path, restored=restored)
        return self._base.checkpoint.read(self._base.layout.places[module_path].name)

    def _rows_under(self, module_path: str) -> Rows:
        """The same, but rows of the base are read when they are asked for."""
        if self.over is not None:
            return self.over.weight(module_path)
        return RowsOfBase(self._base.checkpoint, self._base.layout.places[module_path].name)

    def _grown(self, layout: Layout) -> Layout:
        """The same with the vocabulary that the adapter brings, if it brings one."""
        sizes = [self.vocabulary(path) for path, change in self._weights.items() if self._is_table(path, change)]
        if not sizes or max(sizes) == layout.config.vocab_size:
            return layout
        config = copy(layout.config)
        config.vocab_size = max(sizes)
        return replace(layout, config=config)

    def _is_table(self, path: str, change: Change) -> bool:
        return self._base.roles[path] in ("embedding", "head") and change.whole is not None

    def _check_places(self) -> None:
        """Make sure that there is a place for all of it."""
        for path in (*self._weights, *self._biases):
            if path not in self._base.layout.places:
                raise UnsupportedModelError(
                    f"the adapter changes {path}, and nothing in the model is called so",
                    where=self.adapter.weights,
                    way_out="train it on the whole model (AutoModelForCausalLM), with as new a transformers as is here",
                )
            role, change = self._base.roles.get(path), self._weights.get(path)
            fits = role is not None
            if change is not None and fits:
                beside = change.low_rank or change.rotation or change.sparse
                fits = not (beside and role not in ("linear", "head")) and not (
                    change.embedding is not None and role != "embedding"
                )
                fits = fits and not (change.rows is not None and role not in ("embedding", "head"))
            if not fits:
                raise UnsupportedModelError(
                    f"the adapter changes {path}, where the runtime has no place for it",
                    where=self.adapter.weights,
                    way_out="merge it into its base and serve that, or serve it with another engine",
                )

    def _check_saved(self) -> None:
        """Make sure that the file has what the config says it was saved with."""
        try:
            check_saved(self.adapter.changes, self.adapter.settings, self._base.roles)
        except ValueError as error:
            raise CheckpointError(str(error), where=self.adapter.weights, way_out="get the whole file") from None

    def _check_tables(self) -> None:
        """Make sure that whatever the head may write can be read."""
        tables = ((path, role) for path, role in self._base.roles.items() if role in ("embedding", "head"))
        rows = {role: self.vocabulary(path) for path, role in tables}
        of_tokens = [*self._tied_rows, *(path for path, change in self._weights.items() if change.rows is not None)]
        for path in of_tokens:
            if path.removesuffix("weight") + "bias" in self._base.roles:  # a head: no embedding has one
                raise UnsupportedModelError(
                    f"the adapter has rows of tokens for {path}, without whose bias PEFT then computes the logits",
                    where=self.adapter.weights,
                    way_out="save embedding and head whole (modules_to_save), or keep it with PEFT",
                )
        head, embedding = rows.get("head", 0), rows.get("embedding", 0)
        if head > embedding:
            raise UnsupportedModelError(
                f"the adapter's head has {head} rows, its embedding {embedding}: it could write what it cannot read",
                where=self.adapter.weights,
                way_out="save the embedding with it (modules_to_save), or merge it into its base and serve that",
            )


def _changes_weight(change: Change) -> bool:
    return any((own_weight(change), change.low_rank, change.embedding, change.rotation, change.sparse, change.rows))

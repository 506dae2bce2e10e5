"""A rank's part of a base: which it is, what it reads, and with whom it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.models.load import Weights
from deltacompress.runtime.parallel.group import Group
from deltacompress.runtime.parallel.joints import join
from deltacompress.runtime.parallel.parts.checkpoint import PartOfCheckpoint
from deltacompress.runtime.parallel.parts.split import Split
from deltacompress.runtime.variants.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class BasePart:
    """As runtime.modules.model.Part."""

    split: Split
    group: Group

    def weights(self, checkpoint: Checkpoint, layout: Layout) -> Weights:
        """Of the whole checkpoint, this rank's."""
        return PartOfCheckpoint(checkpoint, layout, self.split)

    @property
    def shrink(self) -> Callable[[PretrainedConfig], None]:
        """Makes the whole model's config this part's."""
        return self.split.shrink

    def join(self, model: PreTrainedModel) -> None:
        """Let the model's modules give the result of all ranks."""
        join(model, self.split, self.group)

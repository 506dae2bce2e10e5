"""What a codec is: its settings, and the functions that encode by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltacompress.codecs.settings import Settings
from deltacompress.types import TensorKind

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from deltacompress.codecs.encoded import Encoded, LinearToEncode
    from deltacompress.numerics.hessian import HessianAccumulator
    from deltacompress.reporter import Reporter


@dataclass(frozen=True, slots=True)
class Fit:
    """What a codec may look at before it encodes a tensor: the whole model.

    path: of the fine-tuned checkpoint, for messages. model: the fine-tuned one, of transformers, in fp32; to be left as
    it is. modules: name of each tensor that this codec is to encode -> path of the module in the model whose weight it
    is. bases: by the same names, what it is encoded against, f32. settings: what its rule says.
    ids: int64 [samples, tokens], the calibration tokens. seed: of whatever is drawn.
    """

    path: Path
    model: nn.Module
    modules: Mapping[str, str]
    bases: Mapping[str, Tensor]
    settings: Mapping[str, Settings]
    ids: Tensor
    seed: int
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to choose the values of a tensor; registry.CODECS lists them all.

    It has one of two functions. Rows beyond the base's (added tokens) are neither's business: the caller stores them.

    encode: (fine-tuned tensor, its base or None, settings, tensor name for messages) -> Encoded, for a codec that codes
        a tensor by itself. Both are read piece by piece. The base has the leading rows of the tensor, and is as
        Plan.rows gives it.
    encode_group: (linears, statistics, settings) -> Encoded by name, for a codec that calibrates: linears that share
        one input and the same settings are solved together, from the sums over their inputs, which it may use up.
    fit: (what Fit holds) -> a value for each tensor, which `encode` gets as a fifth argument. Called once, before any
        tensor is coded; for a codec that looks at the whole model first. Values are plain data, as JSON knows it, so
        that a run that is resumed has the very same.
    accepts: value -> whether it is one of `fit`'s, asked of what a resumed run reads back; any is, without it.
    any_device: whether `encode` takes tensors that are read to a GPU, and computes there.
    counts: whether `encode` gets how often calibration data has each token, i64, as a fifth argument: a codec of
        embeddings.
    by_outputs: whether a linear that is solved alone may come with `moved`, and its sums without D.
    """

    settings: type[Settings]
    encode: Callable[..., Encoded] | None = None
    encode_group: Callable[[list[LinearToEncode], HessianAccumulator, Any], dict[str, Encoded]] | None = None
    fit: Callable[[Fit], Mapping[str, Any]] | None = None
    accepts: Callable[[Any], bool] | None = None
    any_device: bool = False
    counts: bool = False
    by_outputs: bool = False

    def __post_init__(self) -> None:
        if (self.encode is None) == (self.encode_group is None) or ((self.fit or self.counts) and not self.encode):
            raise TypeError(
                f"codec {self.name} needs encode or encode_group, one of them; fit and counts go with encode"
            )
        if self.fit and self.counts:
            raise TypeError(f"codec {self.name} has fit and counts, and encode takes what one of them gives")

    @property
    def name(self) -> str:
        """What recipes and manifests call it."""
        return str(self.settings.model_fields["codec"].default)

    @property
    def calibrates(self) -> bool:
        """Whether it chooses by what a tensor receives, layer after layer."""
        return self.encode_group is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether it wants calibration tokens."""
        return self.calibrates or self.fit is not None or self.counts

    def takes(self, kind: TensorKind) -> bool:
        """Whether it can code tensors of a kind: those that run the model find linears and the head for certain."""
        if self.counts:
            return kind == "embedding"
        return kind in ("linear", "head") or not self.needs_tokens

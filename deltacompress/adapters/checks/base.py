"""The base that an adapter is held against: which of its tensors a module of the model is."""

from __future__ import annotations

from collections.abc import Mapping

from deltacompress.checkpoints.header import FLOATS
from deltacompress.types import TensorInfo

Shape = tuple[int, ...]
_TABLES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
HEAD, HEAD_OF_NEOX = "lm_head", "embed_out"
"""What models call it, and what checkpoints of GPT-NeoX do (and its models did, before transformers 5)."""
_TEXT = "model.language_model."


class DoesNotFitError(ValueError):
    """What an adapter brings does not fit this base. As every ValueError of these checks: a line without its file."""


class NotReadError(ValueError):
    """What it brings is of no kind that is read here, whatever the base."""


class NoSuchTargetError(ValueError):
    """The config names a target that the file has nothing for, nor the base, as far as there is one."""


def is_table(module: str) -> bool:
    """Whether a module is an embedding or a head by its name: rows are tokens, and may be more than the base's."""
    return module.rpartition(".")[2] in _TABLES


def find(name: str, base: Mapping[str, Shape]) -> str | None:
    """A module's tensor under its name in the checkpoint: some leave out its prefix, a tied head is absent."""
    own = _own(name, base)
    return embedding_of(base) if own is None and name == f"{HEAD}.weight" else own


def embedding_of(base: Mapping[str, Shape]) -> str | None:
    """The weight of the input embedding, if there is one."""
    tables = [one for one in base if one.endswith(_EMBEDDINGS)]
    return tables[0] if len(tables) == 1 else None


def is_tied(base: Mapping[str, Shape]) -> bool:
    """Whether the head has no weight of its own in the checkpoint; one that is stored beside its equal has."""
    return _own(f"{HEAD}.weight", base) is None


def _own(name: str, base: Mapping[str, Shape]) -> str | None:
    _, _, short = name.partition(".")
    candidates = [name, short, f"model.{name}"]
    if name.startswith(_TEXT):  # of a model that sees, as its file has it
        candidates.append("language_model.model." + name.removeprefix(_TEXT))
    elif name.startswith(f"{HEAD}."):
        candidates += ["language_model." + name, f"{HEAD_OF_NEOX}.{short}"]
    return next((one for one in candidates if one in base), None)


def weight_of(module: str, base: Mapping[str, Shape]) -> str:
    """What the base calls the weight of a module that has matrices beside it.

    Raises:
        DoesNotFitError: there is none, or it is no matrix of its own.
    """
    found = find(f"{module}.weight", base)
    if "experts" in module.split(".") and any("experts" in name.split(".") for name in base):
        raise NotReadError(f"module {module} is an expert's, whose matrices are one parameter in the model")
    if found is None:
        raise DoesNotFitError(f"module {module} is not in the base")
    if len(base[found]) != 2:
        raise DoesNotFitError(f"module {module} has a weight of shape {list(base[found])} in the base, not a matrix")
    return found


def same(module: str, what: str, info: TensorInfo, wanted: Shape, *, needs: str = "the base needs") -> None:
    """Check a tensor of values. needs: what says how large it is to be.

    Raises:
        DoesNotFitError: it has another shape.
        ValueError: its values are no floating-point numbers.
    """
    if info.shape != wanted:
        raise DoesNotFitError(f"module {module}: {what} has shape {list(info.shape)}, {needs} {list(wanted)}")
    if info.dtype not in FLOATS:
        raise ValueError(f"module {module}: {what} has dtype {info.dtype}; read are {', '.join(sorted(FLOATS))}")

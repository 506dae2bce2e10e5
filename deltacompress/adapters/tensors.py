"""The tensors of an adapter's file, by module: which of PEFT's names says what.

What PEFT 0.21 saves, <module> being a module of the base, <whole> being `weight` or `bias`:

    all     base_model.model.<module>.<whole>: in the place of the base's, for modules_to_save and trained biases;
            <module>.base_layer.<whole> where <module> has matrices too: `bias`, and `weight` of an embedding or head
            (.token_adapter.base_layer.<whole> where it has rows of tokens);
            <module>.modules_to_save.<whole>, .original_module.<whole>: copies that a grown vocabulary or trained
            biases leave, the second of the base's; of a <part> of a module that is saved whole
            <module>.modules_to_save.<adapter's name>.<part>.<whole>, .original_module.<part>.<whole>
    LoRA    <module>.lora_A.weight [r, in], .lora_B.weight [out, r]; .lora_B.bias [out] with lora_bias;
            .lora_embedding_A [r, rows], .lora_embedding_B [dim, r] for an embedding; .lora_magnitude_vector with
            use_dora (`.weight` behind it in files of some versions; of a grown embedding both, alike): [out], of an
            embedding [dim];
            <module>.token_adapter.trainable_tokens_delta [n, dim], for trainable_token_indices
    BOFT    <module>.boft_R [m, D, b, b], m butterfly factors, D blocks of b columns, D * b = in; .boft_s [out, 1]
    SHiRA   <module>.shira_weight [n]; .shira_indices [2, n]
    RoSA    <module>.rosa_A.weight [r, in], .rosa_B.weight [out, r]; .rosa_spa.values [n], .row_offs [out + 1],
            .col_idx [n]; besides, for its kernels only: .row_idx, and tr_* (the same transposed)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

PREFIX = "base_model.model."
_ROLES = {
    "lora": {
        "lora_A.weight": "A",
        "lora_B.weight": "B",
        "lora_B.bias": "B bias",
        "lora_embedding_A": "embedding A",
        "lora_embedding_B": "embedding B",
        "lora_magnitude_vector": "magnitude",
        "lora_magnitude_vector.weight": "magnitude",
        "token_adapter.trainable_tokens_delta": "rows",
    },
    "boft": {"boft_R": "R", "boft_s": "s"},
    "shira": {"shira_weight": "values", "shira_indices": "indices"},
    "rosa": {
        "rosa_A.weight": "A",
        "rosa_B.weight": "B",
        "rosa_spa.values": "values",
        "rosa_spa.row_offs": "row offsets",
        "rosa_spa.col_idx": "columns",
    }
    | {f"rosa_spa.{one}": "" for one in ("row_idx", "tr_perm", "tr_row_offs", "tr_row_idx", "tr_col_idx")},
}
_OF_ALL = {
    "base_layer.weight": "weight beside",
    "token_adapter.base_layer.weight": "weight beside",
    "base_layer.bias": "bias beside",
    "token_adapter.base_layer.bias": "bias",
    "weight": "weight",
    "bias": "bias",
}
_COPIES = {"weight": "copy of the weight", "bias": "copy of the bias"}
TWICE = "copy of the magnitude"
_MAGNITUDE = ".lora_magnitude_vector"


@dataclass(slots=True)
class Brought:
    """What the file has for one module. roles: what a tensor is -> its name; unused: names of copies of others."""

    module: str
    roles: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    @property
    def matrices(self) -> set[str]:
        """Roles besides whole tensors and rows."""
        return self.roles.keys() - {*_OF_ALL.values(), *_COPIES.values(), TWICE, "rows"}


def original(name: str) -> str | None:
    """The tensor that one is a copy of, which PEFT leaves of what is saved whole; None: it is none."""
    before, mark, after = name.partition(".modules_to_save.")
    if not mark:
        return None
    *within, leaf = after.split(".")
    return ".".join([before, *within[1:], leaf])  # the first is the name of the adapter


def copied(name: str, there: Container[str]) -> str | None:
    """As `original`, and of a magnitude that is there twice; there: the tensors of the file."""
    other = name.removesuffix(".weight") if name.endswith(_MAGNITUDE + ".weight") else None
    return other if other is not None and other in there else original(name)


def by_module(names: Iterable[str], kind: str) -> dict[str, Brought]:
    """Module, as the model calls it -> what is there for it; in the order of the file.

    Raises:
        ValueError: a name that is none of an adapter of this kind, or two for the same.
    """
    known = _ROLES[kind] | _OF_ALL
    found: dict[str, Brought] = {}
    for name in names:
        if not name.startswith(PREFIX):
            raise ValueError(f"tensor {name} does not begin with {PREFIX}, as PEFT's do")
        copied, of_base = original(name), name.replace(".original_module.", ".")
        module, role = _read(copied or of_base, known)
        if role is not None and copied is not None:
            role = _COPIES.get(role)
        elif role is not None and of_base != name:
            role = "" if role in _COPIES else None
        if role is None:
            raise ValueError(f"tensor {name} is no tensor of a {kind} adapter that is read here")
        brought = found.setdefault(module, Brought(module))
        if not role:
            brought.unused.append(name)
        elif role == "magnitude" and name == brought.roles.get(role, "") + ".weight":
            brought.roles[TWICE] = name
        elif role in brought.roles:
            raise ValueError(f"tensors {brought.roles[role]} and {name} are both the {role} of {module}")
        else:
            brought.roles[role] = name
    return found


def _read(name: str, roles: Mapping[str, str]) -> tuple[str, str | None]:
    """Module and role; roles: by the end of a name."""
    parts = name[len(PREFIX) :].split(".")
    for count in (3, 2, 1):  # the longer one first: `lora_B.bias` is no bias of a module called lora_B
        role = roles.get(".".join(parts[-count:])) if len(parts) > count else None
        if role is not None:
            return ".".join(parts[:-count]), role
    return "", None

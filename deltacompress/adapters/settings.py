"""What of an adapter's config decides shapes, scale and meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltacompress.adapters import given
from deltacompress.adapters.checks.base import is_table
from deltacompress.adapters.fields import FIELDS, MERGE, UNKNOWN_KINDS, check_fields
from deltacompress.adapters.patterns import Pattern, is_called, is_named, is_plain, layer_of, of_module, pattern_of
from deltacompress.errors import CheckpointError

ALL_LINEAR = "all-linear"
"""What PEFT takes for all linears but the head."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of adapter_config.json decides shapes, scale and meaning.

    kind: "lora", "boft", "shira" or "rosa".
    targets, saved, excluded: target_modules, modules_to_save, exclude_modules (text is one module's name, or an
    expression, which is not read); layers, lists: layers_to_transform (None: all) and layers_pattern; transposed:
    fan_in_fan_out (weights stored [in, out]); biases: whose biases are in the file: "none", "all" or "targets".
    LoRA, RoSA: rank, ranks: r and rank_pattern, alpha, alphas: lora_alpha and alpha_pattern, rslora: use_rslora;
    biased: lora_bias; dora: use_dora; tokens: trainable_token_indices by name of the module, "" the input embedding.
    RoSA: density, densities: d and density_pattern. SHiRA: rank.
    BOFT: factors, block, blocks: butterfly factors, block size and number (0 = follows from the other).
    """

    kind: str
    rank: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    alpha: float = 0.0
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    biased: bool = False
    dora: bool = False
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    density: float = 0.0
    densities: Mapping[str, float] = field(default_factory=dict)
    targets: str | tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    biases: str = "none"
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    lists: tuple[str, ...] = ()
    transposed: bool = False
    factors: int = 0
    block: int = 0
    blocks: int = 0

    def rank_of(self, module: str) -> int:
        """r of LoRA or RoSA for this module."""
        if self.kind == "rosa":
            return self.ranks.get(self._rosa_key(module), self.rank)
        return of_module(self.ranks, module, self.rank)

    def density_of(self, module: str) -> float:
        """d of RoSA for this module."""
        return self.densities.get(self._rosa_key(module), self.density)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r)."""
        rank = self.rank_of(module)
        if self.kind == "rosa":
            alpha = self.alphas.get(self._rosa_key(module), self.alpha)
        else:
            alpha = of_module(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _rosa_key(self, module: str) -> str:
        """The key that RoSA's fork looks all three patterns up with: the first that fits, of whichever it is."""
        keys = (*self.ranks, *self.densities, *self.alphas)
        return next((key for key in keys if pattern_of(key).fits(module, dotted=True)), module)

    def is_target(self, module: str) -> bool:
        """Whether PEFT puts matrices beside this module, as far as can be told without running an expression."""
        return self.why_none(module) is None

    def why_none(self, module: str) -> str | None:
        """Why it puts none there; None: it does."""
        if isinstance(self.excluded, str):
            if is_plain(self.excluded) and is_called(module, self.excluded):
                return "is the one that exclude_modules names"
        elif is_named(module, self.excluded):
            return "is among exclude_modules"
        if self.is_saved(module):
            return "is among modules_to_save, or part of one"
        if self.all_linear:
            return "is not among target_modules, which are all linears but the head" if is_table(module) else None
        if isinstance(self.targets, str):
            named = not is_plain(self.targets) or is_called(module, self.targets)
            return None if named else "is not among target_modules"
        if not is_named(module, self.targets):
            return "is not among target_modules"
        if module in self.targets or self.layers is None or layer_of(module, self.lists) in self.layers:
            return None
        return "is left out by layers_to_transform (and layers_pattern)"

    @property
    def all_linear(self) -> bool:
        """Whether target_modules is PEFT's word for all linears but the head."""
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    @property
    def by_expression(self) -> bool:
        """Whether exclude_modules is an expression."""
        return isinstance(self.excluded, str) and bool(self.excluded) and not is_plain(self.excluded)

    @property
    def unread(self) -> str | None:
        """The field that is an expression, which is not run: which modules it means is not known."""
        if isinstance(self.targets, str) and not is_plain(self.targets):
            return "target_modules"
        return "exclude_modules" if self.by_expression else None

    def has_matrices(self, module: str) -> bool:
        """As is_target, but for modules of RoSA both of whose parts are of size 0."""
        empty = self.kind == "rosa" and not self.rank_of(module) and not self.density_of(module)
        return self.is_target(module) and not empty

    def is_saved(self, module: str) -> bool:
        """Whether a module, or one that it is part of, is among modules_to_save, by the end of its name."""
        parts = module.split(".")
        return any(".".join(parts[: i + 1]).endswith(self.saved) for i in range(len(parts))) if self.saved else False


def parse_settings(config: Mapping[str, Any], path: str) -> AdapterConfig:
    """Check an adapter's config, `path` names it.

    Raises:
        CheckpointError: not an adapter of a known kind, or a field that is not what it should be.
    """
    try:
        return _parsed(config, path)
    except CheckpointError as error:
        way_out = error.way_out or "mend it there, or save the adapter again with PEFT"
        raise error.retold(CheckpointError, way_out=way_out) from None


def _parsed(config: Mapping[str, Any], path: str) -> AdapterConfig:
    if "peft_type" not in config:
        raise CheckpointError("has no peft_type, by which PEFT tells kinds of adapters apart", where=path)
    told = config["peft_type"]
    if not isinstance(told, str):
        raise CheckpointError(f"peft_type must be text, not {type(told).__name__}", where=path)
    kind = told.lower()
    if kind in FIELDS and told != told.upper():
        raise CheckpointError(f"peft_type {told!a} is none to PEFT", where=path, way_out=f"write {told.upper()!a}")
    if kind not in FIELDS:
        what, way_out = UNKNOWN_KINDS.get(kind, ("", None))
        way_out = way_out or MERGE
        raise CheckpointError(
            f"peft_type {told[:40]!a}{what and f' ({what})'}; read are {', '.join(one.upper() for one in FIELDS)}",
            where=path,
            way_out=way_out,
        )
    check_fields(config, kind, path)
    of_kind = {"lora": _lora, "boft": _boft, "shira": _shira, "rosa": _rosa}[kind]
    return AdapterConfig(kind, **_shared(config, kind, path), **of_kind(config, path))


def _shared(config: Mapping[str, Any], kind: str, path: str) -> dict[str, Any]:
    targets = config.get("target_modules")
    if not (targets and (targets.strip() if isinstance(targets, str) else given.is_texts(targets))):
        raise CheckpointError("target_modules must be text or a list of module names, not empty", where=path)
    biases = ("none", "all", f"{kind}_only")  # which were trained; they are in the file as they are
    trained = config.get("bias", "none")
    if trained not in biases:
        raise CheckpointError(f"bias must be {', '.join(biases[:2])} or {biases[2]}", where=path)
    if trained == biases[2]:
        trained = "none" if kind == "rosa" else "targets"  # the fork of RoSA saves none
    excluded = config.get("exclude_modules")
    return {
        "targets": targets if isinstance(targets, str) else tuple(targets),
        "saved": given.texts(config, "modules_to_save", path),
        "biases": trained,
        "excluded": excluded if isinstance(excluded, str) else given.texts(config, "exclude_modules", path),
        "layers": given.layers(config, "layers_to_transform", path),
        "lists": given.names(config, "layers_pattern", path),
        "transposed": given.switch(config, "fan_in_fan_out", path),
    }


def _lora(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    found = _scaled(config, path) | {
        "biased": given.switch(config, "lora_bias", path),
        "dora": given.switch(config, "use_dora", path),
        "tokens": given.tokens(config, "trainable_token_indices", path),
    }
    if found["rank"] < 1:
        raise CheckpointError("r must be at least 1", where=path)
    _check_layers(config, path)
    for name in ("layers_to_transform", "layers_pattern"):
        if isinstance(config["target_modules"], str) and config.get(name) is not None:
            raise CheckpointError(f"{name} is set and target_modules is text, which PEFT refuses", where=path)
    if found["biased"] and found["dora"]:
        raise CheckpointError("lora_bias and use_dora are set, which PEFT does not take together", where=path)
    return found


def _rosa(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    if given.switch(config, "fan_in_fan_out", path):
        raise CheckpointError("fan_in_fan_out is set, which is not read of RoSA", where=path)
    densities = given.patterns(config, "density_pattern", given.is_share, "densities", path)
    density = config.get("d", 0.003)
    if not given.is_share(density):
        raise CheckpointError(f"d must be a number from 0 to 1, found {str(density)[:40]!a}", where=path)
    found = _scaled(config, path, least=0)
    for key in (*found["ranks"], *found["alphas"], *densities):
        if not Pattern(key).plain:
            raise CheckpointError(
                f"a pattern has the key {key[:80]!a}, which RoSA's fork reads otherwise than PEFT", where=path
            )
    return found | {"density": float(density), "densities": {key: float(one) for key, one in densities.items()}}


def _shira(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    rank = given.whole(config, "r", 32, path)
    if rank < 1:
        raise CheckpointError("r must be at least 1", where=path)
    if given.switch(config, "fan_in_fan_out", path):
        raise CheckpointError("fan_in_fan_out is set, but SHiRA is for nn.Linear only", where=path)
    return {"rank": rank}


def _boft(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    factors = given.whole(config, "boft_n_butterfly_factor", 1, path)
    if factors < 1:
        raise CheckpointError("boft_n_butterfly_factor must be at least 1", where=path)
    _check_layers(config, path)
    block, blocks = (given.whole(config, f"boft_block_{one}", plain, path) for one, plain in (("size", 4), ("num", 0)))
    if bool(block) == bool(blocks):
        raise CheckpointError(
            f"boft_block_size is {block} and boft_block_num {blocks}, of which PEFT takes one", where=path
        )
    return {"factors": factors, "block": block, "blocks": blocks}


def _check_layers(config: Mapping[str, Any], path: str) -> None:
    if given.names(config, "layers_pattern", path) and config.get("layers_to_transform") is None:
        raise CheckpointError("layers_pattern is set and layers_to_transform is not, which PEFT refuses", where=path)


def _scaled(config: Mapping[str, Any], path: str, least: int = 1) -> dict[str, Any]:
    def is_rank(value: object) -> bool:
        return type(value) is int and least <= value <= given.MAX_WHOLE

    alpha = config.get("lora_alpha", 8)
    if not given.is_number(alpha):
        raise CheckpointError(f"lora_alpha must be a number below 1e30, found {ascii(alpha)[:60]}", where=path)
    alphas = given.patterns(config, "alpha_pattern", given.is_number, "numbers", path)
    return {
        "rank": given.whole(config, "r", 8, path),
        "ranks": given.patterns(config, "rank_pattern", is_rank, "ranks", path),
        "alpha": float(alpha),
        "alphas": {name: float(one) for name, one in alphas.items()},
        "rslora": given.switch(config, "use_rslora", path),
    }

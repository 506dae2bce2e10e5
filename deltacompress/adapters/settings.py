"""What of an adapter's config decides shapes and scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltacompress.adapters.fields import FIELDS, check_fields
from deltacompress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of adapter_config.json decides shapes and scale.

    kind: "lora" or "boft"; rank, ranks: r and rank_pattern, alpha, alphas: lora_alpha and alpha_pattern, rslora:
    use_rslora, biased: lora_bias (all LoRA); targets, saved: target_modules, modules_to_save; transposed:
    fan_in_fan_out (weights stored [in, out]); factors, block, blocks: butterfly factors, block size and number (BOFT;
    0 = follows from the other).
    """

    kind: str
    rank: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    alpha: float = 0.0
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    biased: bool = False
    targets: str | tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    transposed: bool = False
    factors: int = 0
    block: int = 0
    blocks: int = 0


def parse_settings(config: Mapping[str, Any], path: str) -> AdapterConfig:
    """Check an adapter's config, `path` names it.

    Raises:
        CheckpointError: not a plain adapter of a known kind, or a field that is not what it should be.
    """
    kind = str(config.get("peft_type", "")).lower()
    if kind not in FIELDS:
        raise CheckpointError(f"peft_type {str(config.get('peft_type'))[:40]!a}; a zoo holds LORA and BOFT", where=path)
    check_fields(config, kind, path)
    targets = config.get("target_modules")
    if not isinstance(targets, str) and not (_texts(targets) and targets):
        raise CheckpointError("target_modules must be text or a list of module names", where=path)
    saved = config.get("modules_to_save")
    if saved is not None and not _texts(saved):
        raise CheckpointError("modules_to_save must be a list of module names", where=path)
    biases = ("none", "all", f"{kind}_only")  # which were trained; they are in the file as they are
    if config.get("bias", "none") not in biases:
        raise CheckpointError(f"bias must be {', '.join(biases[:2])} or {biases[2]}", where=path)
    shared: dict[str, Any] = {
        "targets": targets if isinstance(targets, str) else tuple(targets),
        "saved": tuple(saved or ()),
        "transposed": _switch(config, "fan_in_fan_out", path),
    }
    if kind == "boft":
        return AdapterConfig(
            kind,
            **shared,
            factors=_whole(config, "boft_n_butterfly_factor", 1, path),
            block=_whole(config, "boft_block_size", 4, path),
            blocks=_whole(config, "boft_block_num", 0, path),
        )
    rank, ranks, alphas = _whole(config, "r", 8, path), config.get("rank_pattern"), config.get("alpha_pattern")
    ranks, alphas = ranks or {}, alphas or {}
    if rank < 1:
        raise CheckpointError("r must be at least 1", where=path)
    if not isinstance(ranks, dict) or not all(type(one) is int and one > 0 for one in ranks.values()):
        raise CheckpointError("rank_pattern must map module names to ranks", where=path)
    if not isinstance(alphas, dict) or not all(_is_number(one) for one in alphas.values()):
        raise CheckpointError("alpha_pattern must map module names to numbers", where=path)
    alpha = config.get("lora_alpha", 8)
    if not _is_number(alpha):
        raise CheckpointError(f"lora_alpha must be a number, found {str(alpha)[:40]!a}", where=path)
    return AdapterConfig(
        kind,
        **shared,
        rank=rank,
        ranks=ranks,
        alpha=float(alpha),
        alphas={name: float(one) for name, one in alphas.items()},
        rslora=_switch(config, "use_rslora", path),
        biased=_switch(config, "lora_bias", path),
    )


def _whole(config: Mapping[str, Any], key: str, default: int, path: str) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise CheckpointError(f"{key} must be a whole number, found {str(value)[:40]!a}", where=path)
    return value


def _switch(config: Mapping[str, Any], key: str, path: str) -> bool:
    value = config.get(key) or False
    if type(value) is not bool:
        raise CheckpointError(f"{key} must be true or false, found {str(value)[:40]!a}", where=path)
    return value


def _is_number(value: object) -> bool:
    """Whether `value` is a number that scales anything (so no NaN, and no yes or no)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)

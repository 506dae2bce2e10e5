"""A base, deltas of it and adapters for it, each with what serves it alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft_models
import runtime_cases
from pairs import Pair, changed
from runtime_cases import Served, noise, serve

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ALL[:4]
GROWN = 98
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "lora 64": (
        "Lora",
        {
            "r": 64,
            "target_modules": ALL,
            "rank_pattern": {"k_proj": 3, "layers.1.self_attn.q_proj": 17},
            "alpha_pattern": {"down_proj": 30},
            "size": 0.03,
        },
    ),
    "rslora": ("Lora", {"r": 16, "use_rslora": True, "target_modules": ALL, "size": 0.03}),
    "dora": ("Lora", {"r": 8, "use_dora": True, "target_modules": ALL}),
    "grown": (
        "Lora",
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "vocabulary": GROWN},
    ),
    "boft b4 m1": ("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 1, "target_modules": ALL}),
    "boft b8 m3": ("BOFT", {"boft_block_size": 8, "boft_n_butterfly_factor": 3, "target_modules": ATTENTION}),
    "boft b32 m2": (
        "BOFT",
        {"boft_block_size": 32, "boft_n_butterfly_factor": 2, "target_modules": ["q_proj", "up_proj"]},
    ),
    "shira": ("Shira", {"r": 2, "target_modules": ALL}),
}


@dataclass(frozen=True)
class Kind:
    """path: of what is loaded; model: makes what serves it alone."""

    path: Path
    model: Callable[[], Any]

    def logits(self, ids: Sequence[int]) -> Any:
        return peft_models.logits(self.model(), ids)

    def is_greedy(self, ids: Sequence[int], new: Sequence[int]) -> bool:
        return peft_models.is_greedy(self.model(), ids, new)


@dataclass(frozen=True)
class Family:
    """A base, and kinds of variants by name; `deltas` of them are packed."""

    pair: Pair
    kinds: dict[str, Kind]
    deltas: dict[str, Served]

    @property
    def base(self) -> Kind:
        return Kind(self.pair.base, lambda: runtime_cases.load(self.pair.base))


def make_family(pair: Pair, root: Path) -> Family:
    """Deltas and adapters of a pair below `root`."""
    deltas = {}
    for seed, recipe in enumerate(("int2-24", "int4-24", "lossless")):
        (root / recipe).mkdir()
        own = pair if not seed else changed(pair, root / recipe, noise(seed))
        deltas[recipe] = serve(own, root / recipe, recipe)
    kinds = {name: Kind(one.artifact, _restored(one)) for name, one in deltas.items()}
    for seed, (name, (kind, config)) in enumerate(ADAPTERS.items()):
        path = peft_models.write(pair.base, root / name, kind, seed=seed, **config)
        kinds[name] = Kind(path, _tuned(pair.base, path, config.get("vocabulary")))
    path = peft_models.rosa(pair.base, root / "rosa", ALL)
    kinds["rosa"] = Kind(path, lambda: peft_models.rosa_model(pair.base, path))
    return Family(pair, kinds, deltas)


def _restored(served: Served) -> Callable[[], Any]:
    return lambda: runtime_cases.load(served.restored)


def _tuned(base: Path, adapter: Path, vocabulary: int | None) -> Callable[[], Any]:
    return lambda: peft_models.model_of(base, adapter, vocabulary)

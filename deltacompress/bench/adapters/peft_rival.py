"""PEFT's own way to serve many LoRAs in one batch: `adapter_names` beside the rows, in plain transformers.

PEFT is an extra, and imported here alone, once it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from deltacompress.bench import figures
from deltacompress.bench.adapters.directories import Kind
from deltacompress.bench.adapters.loops import PROMPT_TOKENS
from deltacompress.bench.adapters.served import Stand
from deltacompress.evaluation.scoring.checkpoints import load_model
from deltacompress.models.architectures.caches import cache_of, with_cache
from deltacompress.models.quiet import quiet

_STEPS = 6


def is_there() -> bool:
    """Whether PEFT can be imported."""
    return find_spec("peft") is not None


@torch.inference_mode()
def peft_rows(stand: Stand, kind: Kind, counts: Sequence[int], at_once: int) -> list[dict[str, Any]]:
    """Rows for each number of adapters, rising: milliseconds in which each of `at_once` rows gets a token.

    A LoRA of `kind`, of random numbers; rows take turns over adapters, prompts are all of one length.
    """
    with quiet():
        import peft

        own: Any = load_model(
            stand.base, device=str(stand.device), dtype=str(stand.runtime.dtype).removeprefix("torch.")
        )
        config = kind.config()
        made = peft.LoraConfig(
            r=kind.rank,
            lora_alpha=config["lora_alpha"],
            target_modules=config["target_modules"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        cast: dict[str, Any] = {"autocast_adapter_dtype": False}
        with torch.device(stand.device):  # where random numbers are soon made
            model: Any = peft.get_peft_model(own, made, adapter_name="a0", **cast).eval()
        found, there, dtype = [], 1, stand.runtime.dtype
        for count in counts:
            with torch.device(stand.device):
                for number in range(there, count):
                    model.add_adapter(f"a{number}", made, **cast)
            model.to(device=stand.device, dtype=dtype)
            there = max(there, count)
            ms = _step_ms(model, [f"a{row % count}" for row in range(at_once)], stand)
            what = f"PEFT, {kind.name}, adapter_names"
            tokens_s = at_once / ms * 1e3
            found.append(
                {"adapters": count, "rows": at_once, "what": what, "ms": ms, "set_up_ms": 0.0, "tokens_s": tokens_s}
            )
    return found


def _step_ms(model: Any, names: Sequence[str], stand: Stand) -> float:
    """The median of a few steps, the first left out."""
    ids = torch.randint(0, stand.shape.vocabulary, (len(names), sum(PROMPT_TOKENS) // 2), device=stand.device)
    cache, times = None, list[float]()
    for _ in range(1 + _STEPS):
        if stand.on_gpu:
            torch.cuda.synchronize(stand.device)
        began = time.perf_counter()
        given = {"input_ids": ids, "use_cache": True}
        if cache is not None:
            given |= with_cache(model.get_base_model(), {"cache": cache})
        output = model(**given, adapter_names=list(names))
        cache, ids = cache_of(output), output.logits[:, -1:].argmax(-1)
        if stand.on_gpu:
            torch.cuda.synchronize(stand.device)
        times.append((time.perf_counter() - began) * 1e3)
    return figures.median(times[1:])

"""The kernels of adapters in the runtime without a GPU: one batch of all kinds, through Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import peft_models
from interpreted import inside
from pairs import Pair
from runtime_cases import assert_close, random_ids, serve

from deltacompress.runtime import Runtime

SLOTS = "q_proj", "k_proj", "v_proj", "down_proj"
KINDS = {
    "rank 3": ("Lora", {"r": 3, "target_modules": ["q_proj", "v_proj"]}),
    "rank 8": ("Lora", {"r": 8, "target_modules": [*SLOTS]}),
    "dora": ("Lora", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "boft": ("BOFT", {"boft_block_size": 4, "boft_n_butterfly_factor": 2, "target_modules": ["q_proj", "up_proj"]}),
    "shira": ("Shira", {"r": 2, "target_modules": ["v_proj", "down_proj"]}),
}


@inside
def test_a_batch_of_all_kinds(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """As the reference backend's loops, also once slots have been given to others."""
    pair = make_pair("llama", num_hidden_layers=1)
    packed = serve(pair, tmp_path, "int2-24").artifact
    paths = {"packed": packed} | {
        name: peft_models.write(pair.base, tmp_path / name, kind, seed=seed, **config)
        for seed, (name, (kind, config)) in enumerate(KINDS.items())
    }
    served = {
        backend: Runtime.from_base(pair.base, backend=backend, merge_rounding=False)
        for backend in ("triton", "reference")
    }
    assert "adapters triton (asked for)" in served["triton"].describe()
    assert served["reference"].describe().endswith("adapters reference")
    names = list(paths)
    for seed, chosen in enumerate([names, [*names[3:], *names[:2]]]):
        random.Random(seed).shuffle(chosen)
        for runtime in served.values():
            for name in list(runtime.variants):
                runtime.unload(name)
            for name in chosen:
                runtime.load(paths[name], name)
        requests = [(None, random_ids(2)), *((name, random_ids(1 + at % 2, at)) for at, name in enumerate(chosen))]
        found = (runtime.logits(requests) for runtime in served.values())
        for one, wanted in zip(*found, strict=True):
            assert_close(one, wanted, 1e-5)

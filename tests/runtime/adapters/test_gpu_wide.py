"""Company on a GPU, at widths where sums in another order show: bf16 of a tiny model hides most of that."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import peft_models
import pytest
import torch
from pairs import write_tokenizer
from runtime.adapters.family import ALL
from runtime_cases import random_ids
from tiny_models import save_random

from deltacompress.bench.synthetic import ModelShape, write_delta
from deltacompress.kernels import available
from deltacompress.kernels.triton.lowrank.linear import LowRankLinear, helpers_for
from deltacompress.runtime import Runtime

pytestmark = pytest.mark.gpu
WIDTH = 2048
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {"r": 16, "target_modules": ALL}),
    "lora 64": ("Lora", {"r": 64, "target_modules": ALL, "size": 0.05}),
    "dora": ("Lora", {"r": 8, "use_dora": True, "target_modules": ALL}),
    "boft": ("BOFT", {"boft_block_size": 32, "boft_n_butterfly_factor": 2, "target_modules": ALL}),
    "shira": ("Shira", {"r": 2, "target_modules": ALL}),
}
PACKED = {"2 bits": 2, "4 bits": 4}
NAMES = [*KINDS, "rosa", *PACKED]
OTHERWISE_WHEN_LONG = ["shira", "rosa", *PACKED]
"""Of which many rows take other kernels than few."""
Asked = tuple[str | None, list[int]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    if reason := available("cuda")["triton"]:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    base = save_random(
        root / "base", "llama", torch.bfloat16, shard="1GB", num_hidden_layers=2, max_position_embeddings=512, **sizes
    ).path
    write_tokenizer(base)
    made = Runtime.from_base(base, device="cuda", dtype=torch.bfloat16, cuda_graphs=False, merge_rounding=False)
    for seed, (name, (kind, config)) in enumerate(KINDS.items()):
        made.load(peft_models.write(base, root / name, kind, seed=seed, **config), name)
    made.load(peft_models.rosa(base, root / "rosa", ALL), "rosa")
    shape = ModelShape(WIDTH, layers=2, mlp=4096, heads=16, vocabulary=96)
    for name, bits in PACKED.items():
        (root / name).mkdir()
        write_delta(root / name, shape, made.model.base.checkpoint, made.device, bits=bits)
        made.load(root / name, name)
    yield made
    made.close()


def companies(requests: Sequence[Asked], *pools: Sequence[str | None]) -> Iterator[tuple[int, int, list[Asked]]]:
    """(number of a request, its place, a batch of as many): others drawn from each pool, and others of its own."""
    draw = random.Random(0)
    for k, (name, ids) in enumerate(requests):
        for pool in (*pools, [name] * len(requests)):
            drawn, at = draw.sample(list(pool), len(requests) - 1), draw.randrange(len(requests))
            others = [(one, random_ids(len(ids), 100 + draw.randrange(1000))) for one in drawn]
            yield k, at, [*others[:at], (name, ids), *others[at:]]


def test_tokens_in_any_company(wide: Runtime) -> None:
    names = [None, *NAMES]
    requests = [(name, random_ids(7, seed)) for seed, name in enumerate(names)]
    told = [one.tokens for one in wide.complete(requests, 24)]
    assert len(set(told)) == len(told)
    batches = companies(requests, [None] * len(names), names * 2)
    assert not [names[k] for k, at, others in batches if wide.complete(others, 24)[at].tokens != told[k]]


@pytest.mark.parametrize("length", [8, 100])
def test_logits_of_prompts_however_many_rows_have_an_adapter(wide: Runtime, length: int) -> None:
    """Tiles of few rows and of many give the same bits."""
    ids, others = random_ids(length, 1), [random_ids(length, 2 + i) for i in range(4)]
    for name in NAMES:
        if length == 8 or name not in OTHERWISE_WHEN_LONG:
            among_the_base, crowd = (
                wide.logits([(name, ids), *((company, one) for one in others)])[0] for company in (None, name)
            )
            assert torch.equal(crowd, among_the_base), name


def test_logits_of_long_prompts(wide: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, and in batches whose low rank is in the launch of the base's product, or is not."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    if torch.cuda.get_device_capability()[0] != 9 or not helpers_for(1280, 3 * WIDTH, 36, processors):
        pytest.skip("not a Hopper GPU that does so with 1,280 rows")
    launches, launch = [], LowRankLinear.launch

    def noted(self: LowRankLinear, *given: Any) -> None:
        launches.append(given)
        launch(self, *given)

    monkeypatch.setattr(LowRankLinear, "launch", noted)
    names = [None, "lora", "lora 64", "boft", "dora"]
    requests: list[Asked] = [(names[i % 5], random_ids(160, i)) for i in range(8)]
    alone = [wide.logits([one])[0] for one in requests]
    assert not launches
    mixed = wide.logits(requests)
    assert not [name for (name, _), one, own in zip(requests, mixed, alone, strict=True) if not torch.equal(one, own)]
    ways = set()
    for k, at, others in companies(requests, ["lora"] * 8, ["lora 64"] * 8, [None, "lora", "lora 64"] * 5, names * 3):
        launches.clear()
        assert torch.equal(wide.logits(others)[at], alone[k]), requests[k][0]
        ways |= {(name, bool(launches)) for name, _ in others}
    assert {("lora", True), ("lora", False), ("lora 64", True), ("lora 64", False)} <= ways

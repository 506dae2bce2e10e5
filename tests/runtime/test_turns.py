"""Whose turn it is, when a request ends, and what stays in which memory: the promises that show only under pressure."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import Weights, changed
from runtime_cases import Served, as_on_a_gpu, assert_close, oracle_logits, random_ids, serve
from transformers import DynamicCache

from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import BASE, Batch
from deltacompress.runtime.engine.steps.kvcache import DecodedRows, PagedRows
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.modules.linear import DecoupledLinear
from deltacompress.runtime.modules.vectors import VectorBank
from deltacompress.runtime.operands.operand import Vector
from deltacompress.runtime.operands.packed_delta import PackedProduct
from deltacompress.runtime.variants.precision import Numerics


def late(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, names: set[str]) -> None:
    """Variants `names` are still on their way when they are first asked for, as on a GPU."""
    ready = runtime.cache.ready

    def scripted(name: str) -> bool:
        if name in names:
            names.remove(name)
            return False
        return ready(name)

    monkeypatch.setattr(runtime.cache, "ready", scripted)


def first_tokens(runtime: Runtime, requests: list[tuple[str | None, list[int]]], max_batch: int) -> list[int]:
    """The requests in the order in which they wrote their first token."""
    order: list[int] = []
    runtime.complete(requests, 4, max_batch=max_batch, on_token=lambda index, *_: order.append(index))
    return list(dict.fromkeys(order))


def test_requests_of_one_variant_keep_their_order(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch, runtime, {"b"})
    requests = [("a", random_ids(4)), ("b", random_ids(5)), ("b", random_ids(6)), ("b", random_ids(7))]
    assert first_tokens(runtime, requests, 2) == [0, 1, 2, 3]


def test_requests_that_were_passed_over_keep_their_order(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch, runtime, {"b", "c"})
    requests = [("a", random_ids(4)), ("b", random_ids(5)), ("c", random_ids(6)), (None, random_ids(7))]
    order = first_tokens(runtime, requests, 2)
    assert order.index(1) < order.index(2)


def test_the_end_token_ends_a_request(trio: dict[str, Served], tmp_path: Path) -> None:
    base, prompt = shutil.copytree(trio["a"].pair.base, tmp_path / "base"), random_ids(6)
    written = Runtime.from_base(base).complete([(None, prompt)], 8)[0].tokens
    end = next(token for token in written[2:] if token not in written[:2])  # one that it writes anyway
    for file in (base / "config.json", base / "generation_config.json"):
        if file.is_file():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, end]}))
    done = Runtime.from_base(base).complete([(None, prompt)], 8)[0]
    assert done.finished == "eos"
    assert done.tokens == written[: written.index(end) + 1]


def test_pages_hold_what_transformers_cache_holds() -> None:
    """Models ask how long it is before they store a token, whatever masks and positions they are given."""
    theirs = DynamicCache()
    theirs.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), 0)
    pages = Pages(2)
    taken = pages.take(4)
    table = torch.tensor([taken])
    places = table.repeat_interleave(2, 1)[:, :5] * 2 + torch.arange(5) % 2
    before = PagedRows(pages, table, places, torch.arange(5)[None], fused=False, whole=False)
    before.update(theirs.layers[0].keys, theirs.layers[0].values, 0)
    for _ in range(3):
        seen = theirs.get_seq_length()
        ours = DecodedRows(pages, table, torch.tensor([seen]), fused=False, whole=False)
        assert ours.get_seq_length() == 7
        key, value = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
        for mine, wanted in zip(ours.update(key, value, 0), theirs.update(key, value, 0), strict=True):
            assert torch.equal(mine[:, :, : seen + 1], wanted)


def test_pinned_memory_keeps_what_was_used_last(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime.from_base(trio["a"].pair.base)
    as_on_a_gpu(monkeypatch, runtime)
    for name, one in trio.items():
        runtime.load(one.artifact, name)
    cache, ids = runtime.cache, random_ids(4)
    sizes = {name: one.pinned_bytes for name, one in runtime.variants.items()}
    for name in ("b", "a", "c"):
        runtime.logits([(name, ids)])
    cache.host_bytes = max(sizes["a"], sizes["b"]) + sizes["c"]
    cache._trim_host()
    assert {name for name, one in runtime.variants.items() if one.sources is not None} == {"a", "c"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes serve packed deltas as they do on a GPU, through the reference of the kernels."""
    monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))


@pytest.mark.usefixtures("kernels")
def test_packed_deltas_beside_each_other(trio: dict[str, Served]) -> None:
    runtime = Runtime.from_base(trio["a"].pair.base, merge_rounding=False)
    for name, one in trio.items():
        runtime.load(one.artifact, name)
    requests = [(name, random_ids(3 + 2 * i, i)) for i, name in enumerate(["b", None, "a", "c", "b"])]
    for (name, ids), logits in zip(requests, runtime.logits(requests), strict=True):
        where = trio["a"].pair.base if name is None else trio[name].restored
        assert_close(logits, oracle_logits(where, ids), 0.02)  # the restored weights are rounded to bfloat16
        assert_close(logits, runtime.logits([(name, ids)])[0], 1e-5)


def without_mlp(weights: Weights) -> Weights:
    return {name: w if "mlp" in name else w + 0.05 for name, w in weights.items()}


@pytest.mark.usefixtures("kernels")
def test_what_was_unloaded_leaves_nothing_behind(trio: dict[str, Served], tmp_path: Path) -> None:
    """Neither its memory, nor its weights where the next variant in its slot has none of its own."""
    pair, base = trio["a"].pair, trio["a"].pair.base
    (tmp_path / "fine").mkdir()
    shutil.copytree(base, tmp_path / "fine" / "base")
    part = changed(replace(pair, finetuned=base), tmp_path / "fine", without_mlp)
    partly = serve(part, tmp_path / "partly")
    runtime = Runtime.from_base(base, merge_rounding=False)
    runtime.load(trio["c"].artifact, "c")
    runtime.load(trio["a"].artifact, "a")
    slot = runtime.variants["a"].slot
    buffers = [
        weakref.ref(product.operands[slot].tensors["buffer"])
        for module in runtime.model.model.modules()
        if isinstance(module, DecoupledLinear)
        for product in module.products([slot])
        if isinstance(product, PackedProduct)
    ]
    assert len(buffers) > 7
    runtime.unload("a")
    gc.collect()
    assert not any(one() is not None for one in buffers)
    runtime.load(partly.artifact, "partly")
    assert runtime.variants["partly"].slot == slot
    ids = random_ids(7)
    found = runtime.logits([("c", ids), ("partly", ids)])[1]  # beside one whose linears are packed
    assert_close(found, oracle_logits(partly.restored, ids), 0.02)


def test_slots_above_the_last_with_its_own_vector_use_the_base_s() -> None:
    bank = VectorBank(torch.zeros(3))
    bank.set(2, Vector({"vector": torch.full((3,), 2.0)}))
    batch = Batch([BASE, 1, 2, 3, 7], torch.device("cpu"))
    assert bank.shaped(batch, 2)[:, 0].tolist() == [0, 0, 2, 0, 0]
    assert bank.shaped(batch, 3).shape == (5, 1, 3)


@pytest.mark.usefixtures("kernels")
def test_a_shared_product_is_for_the_input_it_was_made_of(trio: dict[str, Served]) -> None:
    """Query, key and value come from one product; whoever gives one of them another input gets the product of that."""
    runtime = Runtime.from_base(trio["a"].pair.base, merge_rounding=False)
    slot = runtime.variants[runtime.load(trio["a"].artifact, "a")].slot
    attention = runtime.model.model.model.layers[0].self_attn
    x, other = torch.randn(2, 1, 2, attention.q_proj.in_features)
    with torch.inference_mode(), runtime.model.serving(Batch([slot], torch.device("cpu"))):
        wanted = attention.k_proj(other)
        attention.q_proj(x)
        assert torch.allclose(attention.k_proj(other), wanted, atol=1e-5)

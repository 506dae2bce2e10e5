"""Slots are given to what is on the device: any number may be loaded, and who shares a slot shares nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pairs import Pair
from runtime_cases import as_on_a_gpu, random_ids
from safetensors.torch import load_file, save_file

from deltacompress.errors import BackendError, CheckpointError, InputError, IntegrityError, for_the_command_line
from deltacompress.kernels import writes
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import MAX_VARIANTS
from deltacompress.runtime.variants.adapter import AdapterVariant

MODULES = ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")
TOKENS = 5


def write(folder: Path, base: Path, seed: int) -> Path:
    """A LoRA of rank 1 for two linears, strong enough that each seed writes another text."""
    shapes = {name.removesuffix(".weight"): w.shape for name, w in load_file(base / "model.safetensors").items()}
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for module in MODULES:
        out, into = shapes[f"model.{module}"]
        stem = f"base_model.model.model.{module}.lora_"
        tensors[f"{stem}A.weight"] = torch.randn(1, into, generator=draw)
        tensors[f"{stem}B.weight"] = torch.randn(out, 1, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Many:
    """A base and adapters, written when they are asked for, and what each writes alone."""

    def __init__(self, base: Path, root: Path) -> None:
        self.base, self._root = base, root
        self._alone: dict[int, tuple[int, ...]] = {}

    def path(self, seed: int) -> Path:
        folder = self._root / str(seed)
        return folder if folder.exists() else write(folder, self.base, seed)

    def runtime(self, count: int = 0, *, slots: int | None = None, room: float | None = None, **of: Any) -> Runtime:
        """With adapters "0", "1", ...; room: budget, in adapters."""
        made = Runtime.from_base(self.base, budget_bytes=None if room is None else int(room * self.nbytes), **of)
        if slots is not None:
            made.cache.residents.slots = slots
        for seed in range(count):
            made.load(self.path(seed), str(seed))
        return made

    @property
    def nbytes(self) -> int:
        return sum(4 * tensor.numel() for tensor in load_file(self.path(0) / "adapter_model.safetensors").values())

    def tokens(self, seed: int) -> tuple[int, ...]:
        """What `prompt(seed)` gives in a runtime that has nothing else."""
        if seed not in self._alone:
            runtime = self.runtime()
            runtime.load(self.path(seed), "alone")
            self._alone[seed] = runtime.complete([("alone", prompt(seed))], TOKENS)[0].tokens
        return self._alone[seed]


@pytest.fixture(scope="session")
def many(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> Many:
    return Many(make_pair("llama").base, tmp_path_factory.mktemp("many"))


def prompt(seed: int) -> list[int]:
    return random_ids(3 + seed % 4, seed)


def resident(runtime: Runtime) -> list[str]:
    return [one.name for one in runtime.residency().variants if one.place == "device"]


def check_slots(runtime: Runtime) -> None:
    """Whoever is on the device has one, nobody else, and nothing is left in the others."""
    found = {one.slot: one for one in runtime.variants.values() if one.slot is not None}
    assert found == runtime.cache.residents.by_slot
    assert all(one.installed or one.arriving for one in found.values())
    assert all(1 <= slot <= runtime.cache.residents.slots for slot in found)
    for seat in runtime.model._seats.values():
        for product in getattr(seat, "_products", {}).values():
            assert product.operands.keys() <= found.keys()
    assert not any(one.users for one in runtime.variants.values())


def test_more_loaded_variants_than_slots(many: Many) -> None:
    """300, with room for 3: nobody gets what another one left behind."""
    count = MAX_VARIANTS + 44
    runtime = many.runtime(count, room=3.5)
    assert len(runtime.variants) == count
    assert resident(runtime) == ["297", "298", "299"]
    asked = [299, 7, 280, 0, 7, 298, 13, 0, 255, 256, 257]
    done = runtime.complete([(str(seed), prompt(seed)) for seed in asked], TOKENS)
    assert [one.tokens for one in done] == [many.tokens(seed) for seed in asked]
    assert len({one.tokens for one in done}) > 5
    check_slots(runtime)


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("max_batch", [2, 64])
def test_batches_over_time(many: Many, monkeypatch: pytest.MonkeyPatch, max_batch: int, on_a_gpu: bool) -> None:
    """Ten variants take turns in three slots, in batches that change all the time."""
    runtime = many.runtime(slots=3)
    if on_a_gpu:
        as_on_a_gpu(monkeypatch, runtime)
    for seed in range(10):
        runtime.load(many.path(seed), str(seed))
    draw, slots = random.Random(5), set()
    for _ in range(3):
        asked = [draw.choice([None, *range(10)]) for _ in range(12)]
        requests = [(None if seed is None else str(seed), prompt(seed or 0)) for seed in asked]
        found = runtime.complete(requests, TOKENS, max_batch=max_batch)
        for seed, one in zip(asked, found, strict=True):
            assert seed is None or one.tokens == many.tokens(seed)
        slots |= {(one.name, one.slot) for one in runtime.cache.residents.by_slot.values()}
        check_slots(runtime)
    assert len(slots) > len({slot for _, slot in slots}) == 3


def test_a_request_learns_its_slot_when_its_turn_comes(many: Many) -> None:
    """Variant 0 has left since it was asked for, and comes back elsewhere."""
    runtime = many.runtime(2, slots=2)
    first = runtime.variants["0"].slot
    seen: list[int | None] = []

    def away(*_: object) -> None:
        if not seen:
            for seed in (2, 3):  # takes the slot of 0, the only idle one, and then that of 2
                runtime.load(many.path(seed), str(seed))
            seen.append(runtime.variants["0"].slot)

    done = runtime.complete([("1", prompt(1)), ("0", prompt(0))], TOKENS, max_batch=1, on_token=away)
    assert seen == [None]
    assert runtime.variants["0"].slot is not None
    assert [one.tokens for one in done] == [many.tokens(1), many.tokens(0)]
    assert first is not None


def test_the_least_recently_used_gives_its_slot(many: Many) -> None:
    runtime = many.runtime(4, slots=3)
    assert resident(runtime) == ["1", "2", "3"]
    runtime.logits([("1", [5])])
    taken = runtime.variants["2"].slot
    runtime.logits([("0", [5])])
    assert resident(runtime) == ["0", "1", "3"]
    assert runtime.variants["0"].slot == taken
    runtime.logits([("2", [5])])
    assert resident(runtime) == ["0", "1", "2"]


def test_one_forward_over_more_variants_than_slots(many: Many) -> None:
    runtime = many.runtime(4, slots=3)
    ids = [(str(seed), prompt(seed)) for seed in range(4)]
    told = r"^4 variants would be in use, and there are 3 slots: none for \d; use fewer at once$"
    with pytest.raises(BackendError, match=told):
        runtime.logits(ids)
    check_slots(runtime)
    wide = many.runtime(4)
    wanted = wide.logits(ids)
    mixed = wide.logits([*ids, *ids[::-1]])  # rows of one variant need not be neighbours
    for logits, other in zip([*wanted, *wanted[::-1]], mixed, strict=True):
        torch.testing.assert_close(logits, other, rtol=1e-4, atol=1e-4)
    found = dict(runtime.forward(ids))
    for index, logits in enumerate(wanted):
        torch.testing.assert_close(found[index], logits, rtol=1e-4, atol=1e-4)
    scored = [(name, prefix, [5, 6]) for name, prefix in ids]
    for one, other in zip(runtime.loglikelihood(scored), wide.loglikelihood(scored), strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
    check_slots(runtime)


def test_rows_of_serving_stand_in_any_order(many: Many) -> None:
    """Evaluation sorts rows before variants have slots: by the order in which they were loaded."""
    runtime, wide = many.runtime(3, slots=2), many.runtime(3)
    runtime.logits([("2", [5])])
    runtime.logits([("0", [5])])  # 0 has a higher slot than 2 then, or a lower one after the next
    for names in (["0", "0", "2"], ["2", "0", "0"], [None, "1", "2"]):
        inputs = torch.tensor([prompt(3)] * 3)
        with torch.inference_mode():
            with runtime.serving(names):
                found = runtime.model.model(input_ids=inputs, use_cache=False).logits
            with wide.serving(names):
                wanted = wide.model.model(input_ids=inputs, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    check_slots(runtime)


@pytest.mark.parametrize("limits", [{"slots": 3}, {"room": 3.5}])
def test_what_is_pinned_never_leaves(many: Many, limits: dict[str, Any]) -> None:
    runtime = many.runtime(**limits)
    runtime.load(many.path(0), "0", pin=True)
    slot = runtime.variants["0"].slot
    for seed in range(1, 6):
        runtime.load(many.path(seed), str(seed))
    for seed in (1, 2, 3, 4, 5, 1):
        assert runtime.complete([(str(seed), prompt(seed))], TOKENS)[0].tokens == many.tokens(seed)
        assert "0" in resident(runtime)
    assert runtime.variants["0"].slot == slot
    assert runtime.variants["0"].counters.loads == 1
    with pytest.raises(BackendError):
        runtime.logits([(str(seed), [5]) for seed in (1, 2, 3)])
    assert len(dict(runtime.forward([(str(seed), [5]) for seed in (1, 2, 3)]))) == 3  # in batches beside it
    runtime.unload("0")
    runtime.logits([(str(seed), [5]) for seed in (1, 2, 3)])
    assert len(resident(runtime)) == 3


def test_a_pin_that_does_not_fit_is_refused(many: Many) -> None:
    size = many.nbytes
    runtime = many.runtime(1, room=2.5)
    runtime.load(many.path(1), "1", pin=True)
    budget, left = int(2.5 * size), int(2.5 * size) - size
    told = (
        rf"{size} bytes as it is served: pinned, it leaves {left - size} of the budget of {budget}, and 0 needs {size}"
    )
    with pytest.raises(BackendError, match=told + "; raise budget_bytes, or load it without pin"):
        runtime.load(many.path(2), "2", pin=True)
    with for_the_command_line(), pytest.raises(BackendError, match=told + "; raise --budget, or load it without pin"):
        runtime.load(many.path(2), "2", pin=True)
    runtime.unload("0")
    runtime.load(many.path(2), "2", pin=True)
    told = rf"{size} bytes as it is served, and what is pinned leaves {left - size} of the budget of {budget}; raise"
    for pin in (False, True):
        with pytest.raises(BackendError, match=told + " budget_bytes, or unload what is pinned"):
            runtime.load(many.path(3), "3", pin=pin)
    assert sorted(runtime.variants) == ["1", "2"]
    check_slots(runtime)


def test_slots_that_are_all_pinned(many: Many) -> None:
    runtime = many.runtime(1, slots=2)
    runtime.load(many.path(1), "1", pin=True)
    told = "1 variants are pinned, and there are 2 slots: none is left for the 1 others; unload one that is pinned, or"
    with pytest.raises(BackendError, match=told):
        runtime.load(many.path(2), "2", pin=True)
    runtime.unload("0")
    runtime.load(many.path(2), "2", pin=True)
    with pytest.raises(BackendError, match="2 variants are pinned, and there are 2 slots: none is left for it; unload"):
        runtime.load(many.path(0), "0")
    assert sorted(runtime.variants) == ["1", "2"]


def test_a_pin_beside_what_is_in_use(many: Many) -> None:
    """It must be there when `load` returns, so it is refused while running requests have the room."""
    runtime = many.runtime(2, slots=2)
    caught: list[BackendError] = []

    def load(*_: object) -> None:
        if not caught:
            with pytest.raises(BackendError, match="3 variants would be in use, and there are 2 slots") as told:
                runtime.load(many.path(2), "2", pin=True)
            caught.append(told.value)

    done = runtime.complete([("0", prompt(0)), ("1", prompt(1))], TOKENS, on_token=load)
    assert caught
    assert [one.tokens for one in done] == [many.tokens(0), many.tokens(1)]
    assert sorted(runtime.variants) == ["0", "1"]
    check_slots(runtime)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_load_that_fails_leaves_no_slot_taken(many: Many, monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool) -> None:
    runtime = many.runtime(1, slots=2)
    if on_a_gpu:
        as_on_a_gpu(monkeypatch, runtime)
    for where in (
        "deltacompress.runtime.cache.transfer.Transfer.place",
        "deltacompress.runtime.modules.model.DecoupledModel.install",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, broken)
            with pytest.raises(CheckpointError, match="damaged"):
                load_and_use(runtime, many)  # over a stream it is installed when it is asked for
        if "1" in runtime.variants:
            runtime.unload("1")
        assert len(runtime.cache.residents.by_slot) == 1
        check_slots(runtime)
    runtime.load(many.path(1), "1")
    assert runtime.complete([("1", prompt(1))], TOKENS)[0].tokens == many.tokens(1)


def load_and_use(runtime: Runtime, many: Many) -> None:
    runtime.load(many.path(1), "1")
    runtime.logits([("1", [5])])


def broken(*_: object, **__: object) -> None:
    raise CheckpointError("damaged")


def test_what_cannot_come_back_keeps_no_slot(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stream: it failed on its way for a request that is gone, and others need the room."""
    runtime = many.runtime(slots=2)
    as_on_a_gpu(monkeypatch, runtime)
    for seed in range(3):
        runtime.load(many.path(seed), str(seed))
    runtime.logits([("1", [5]), ("2", [5])])
    with monkeypatch.context() as patch:
        patch.setattr("deltacompress.runtime.cache.transfer.Transfer.place", broken)
        assert runtime.cache.start("0")
        arriving = runtime.variants["0"].arriving
        assert arriving is not None
        assert isinstance(arriving.exception(), CheckpointError)
    runtime.logits([("1", [5]), ("2", [5])])
    assert resident(runtime) == ["1", "2"]
    check_slots(runtime)


@pytest.mark.parametrize("fails", [False, True])
def test_what_came_for_nobody_gives_way(many: Many, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Over a stream: it was loaded, or its request is gone, and nobody has looked whether it arrived."""
    runtime = many.runtime(slots=1)
    as_on_a_gpu(monkeypatch, runtime)
    for seed in range(2):
        runtime.load(many.path(seed), str(seed))
    assert runtime.complete([("0", prompt(0))], TOKENS)[0].tokens == many.tokens(0)
    with monkeypatch.context() as patch:
        if fails:
            patch.setattr("deltacompress.runtime.cache.transfer.Transfer.place", broken)
        assert runtime.cache.start("1")
        arriving = runtime.variants["1"].arriving
        assert arriving is not None
        arriving.exception()
    for _ in range(2):
        assert runtime.complete([("0", prompt(0))], TOKENS)[0].tokens == many.tokens(0)
    check_slots(runtime)


@pytest.mark.parametrize("error", [IntegrityError("another device refuses its part"), torch.OutOfMemoryError("full")])
def test_what_came_for_nobody_and_does_not_fit_troubles_nobody(
    many: Many, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It came, but cannot be installed."""
    runtime = many.runtime(slots=1)
    as_on_a_gpu(monkeypatch, runtime)
    for seed in range(2):
        runtime.load(many.path(seed), str(seed))
    with monkeypatch.context() as patch:
        patch.setattr("deltacompress.runtime.modules.model.DecoupledModel.install", Mock(side_effect=error))
        [one] = runtime.cache.residents.by_slot.values()
        assert one.arriving is not None
        one.arriving.exception()
        runtime.cache.collect({one.name})
        assert one.slot is not None
        runtime.cache.collect(())
        assert not runtime.cache.residents.by_slot
    for seed in range(2):
        assert runtime.complete([(str(seed), prompt(seed))], TOKENS)[0].tokens == many.tokens(seed)
    check_slots(runtime)


@pytest.mark.parametrize("where", ["cache.transfer.Transfer.place", "modules.model.DecoupledModel.install"])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_request_whose_variant_cannot_come_keeps_no_slot(
    many: Many, monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool, where: str
) -> None:
    runtime = many.runtime(slots=2)
    if on_a_gpu:
        as_on_a_gpu(monkeypatch, runtime)
    for seed in range(3):
        runtime.load(many.path(seed), str(seed))
    runtime.logits([("1", [5]), ("2", [5])])
    with monkeypatch.context() as patch:
        patch.setattr(f"deltacompress.runtime.{where}", broken)
        with pytest.raises(CheckpointError, match="damaged"):
            runtime.logits([("0", [5])])
    assert resident(runtime) == ["2"]
    check_slots(runtime)
    assert runtime.complete([("0", prompt(0))], TOKENS)[0].tokens == many.tokens(0)


@pytest.mark.parametrize("when", ["read", "add", "note", "confirm", "publish"])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_an_interrupt_leaves_nothing(many: Many, monkeypatch: pytest.MonkeyPatch, when: str, on_a_gpu: bool) -> None:
    runtime = many.runtime(1)
    if on_a_gpu:
        as_on_a_gpu(monkeypatch, runtime)
    of: Any = AdapterVariant if when == "note" else runtime.cache
    act = getattr(of, when)

    def stop(*of: Any, **options: Any) -> None:
        if when != "publish":
            act(*of, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(of, when, stop)
        with pytest.raises(KeyboardInterrupt):
            runtime.load(many.path(1), "1")
    assert list(runtime.variants) == ["0"]
    assert not runtime.cache._new
    assert "1" not in runtime._tokenizers._folders
    check_slots(runtime)
    runtime.load(many.path(1), "1")


def test_nobody_uses_what_is_still_being_loaded(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = many.runtime(1)
    confirm = runtime.cache.confirm

    def asked_meanwhile(loaded: Any) -> None:
        with pytest.raises(InputError, match="no variant named 1 is loaded"):
            runtime.logits([("1", [5])])
        with pytest.raises(InputError, match="a variant named 1 is loaded already"):
            runtime.load(many.path(2), "1")
        confirm(loaded)

    monkeypatch.setattr(runtime.cache, "confirm", asked_meanwhile)
    runtime.load(many.path(1), "1")
    assert runtime.complete([("1", prompt(1))], TOKENS)[0].tokens == many.tokens(1)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_threads_load_and_unload_while_requests_run(
    many: Many, monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool
) -> None:
    runtime = many.runtime(slots=4)
    if on_a_gpu:
        as_on_a_gpu(monkeypatch, runtime)
    for seed in range(3):
        runtime.load(many.path(seed), str(seed))
    paths = [many.path(seed) for seed in range(50)]

    def come_and_go(number: int) -> None:
        name = f"guest {number}"
        runtime.load(paths[number], name)
        runtime.unload(name)

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(come_and_go, number) for number in range(50)]
        rounds = 0
        while not all(one.done() for one in loads) or rounds < 2:
            asked = [0, 1, 2, 1, 0]
            done = runtime.complete([(str(seed), prompt(seed)) for seed in asked], TOKENS, max_batch=2 + rounds % 4)
            assert [one.tokens for one in done] == [many.tokens(seed) for seed in asked]
            rounds += 1
        for one in loads:
            one.result()
    assert sorted(runtime.variants) == ["0", "1", "2"]
    check_slots(runtime)
    assert runtime._tokenizers._folders.keys() == {None, "0", "1", "2"}


def test_what_tables_hold_of_a_variant_goes_there_together(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, seen = many.runtime(), list[tuple[object, bool]]()

    def noted(set_: Callable[..., None]) -> Callable[..., None]:
        def noting(slot: int, operand: object) -> None:
            seen.append((operand, writes._waiting.get() is not None))
            set_(slot, operand)

        return noting

    for seat in {id(one): one for one in runtime.model._seats.values()}.values():
        monkeypatch.setattr(seat, "set", noted(seat.set))
    runtime.load(many.path(0), "0")
    assert [together for operand, together in seen if operand is not None] == [True] * len(MODULES)
    seen.clear()
    runtime.unload("0")
    assert {together for _, together in seen} == {True}


def test_residency_counts(many: Many) -> None:
    runtime = many.runtime(3, room=2.5)
    first = runtime.residency()
    assert [(one.name, one.place, one.loads, one.evictions) for one in first.variants] == [
        ("0", "disk", 1, 1),
        ("1", "device", 1, 0),
        ("2", "device", 1, 0),
    ]
    assert (first.hits, first.misses, first.loads, first.evictions) == (0, 0, 3, 1)
    runtime.logits([("1", [5]), ("2", [5])])
    runtime.logits([("0", [5]), (None, [5])])
    runtime.complete([("0", [5]), ("0", [6]), ("1", [7])], 2)
    found = {one.name: one for one in runtime.residency().variants}
    assert {name: (one.hits, one.misses, one.loads, one.evictions) for name, one in found.items()} == {
        "0": (2, 1, 2, 1),
        "1": (1, 1, 2, 1),
        "2": (1, 0, 1, 1),
    }
    assert all(one.nbytes == many.nbytes and one.load_seconds >= one.last_load_seconds > 0 for one in found.values())
    runtime.unload("0")
    after = runtime.residency()
    assert (after.hits, after.misses, after.loads, after.evictions) == (4, 2, 5, 3)
    assert after.device_bytes == many.nbytes
    assert after.budget_bytes == int(2.5 * many.nbytes)
    assert (after.slots, after.slots_taken) == (MAX_VARIANTS, 1)


def test_residency_of_the_tiers_of_a_gpu(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = many.runtime(slots=1)
    as_on_a_gpu(monkeypatch, runtime)
    runtime.cache.host_bytes = many.nbytes
    for seed in range(3):
        runtime.load(many.path(seed), str(seed))
    runtime.logits([("1", [5])])
    runtime.logits([("0", [5])])
    found = runtime.residency()
    assert {one.name: one.place for one in found.variants} == {"0": "device", "1": "disk", "2": "disk"}
    runtime.cache.host_bytes = None
    runtime.logits([("1", [5])])
    found = runtime.residency()
    assert {one.name: one.place for one in found.variants} == {"0": "host", "1": "device", "2": "disk"}
    assert found.host_bytes == 2 * many.nbytes
    assert found.misses == 3

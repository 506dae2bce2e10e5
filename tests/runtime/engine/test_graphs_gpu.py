"""Captured steps on a GPU give what plain ones give, whoever comes and goes. `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_calls import drain, engine
from runtime_cases import Served, lora, random_ids

from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.steps.pieces import Pieces

pytestmark = pytest.mark.gpu
LONG = Sampling(ignore_eos=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_comes_and_goes(
    trio: dict[str, Served], tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More variants than slots, of three formats and two ranks; fewer captures than requests."""
    if dtype == torch.bfloat16:  # plain prompts join no step, whose kernels round otherwise: see below
        monkeypatch.setattr(Pieces, "joins", lambda self, slot: False)
    base, logs, captured = trio["a"].pair.base, [], 0
    adapters = {f"lora{rank}": lora(tmp_path / str(rank), base, rank, rank) for rank in (4, 40)}
    names = [None, "a", "b", "a", "c", "lora4", "b", None, "lora40", "c", "a", "lora4"] * 4
    asked = [Call(str(i), name, tuple(random_ids(3 + 5 * i % 60, i)), 5 + i % 11, LONG) for i, name in enumerate(names)]
    for cuda_graphs in (False, True):
        runtime = Runtime.from_base(base, device="cuda", dtype=dtype, cuda_graphs=cuda_graphs)
        runtime.cache.residents.slots = 3
        for name, path in [*((name, one.artifact) for name, one in trio.items()), *adapters.items()]:
            runtime.load(path, name)
        running, log = engine(runtime, max_batch=6, step_tokens=48)
        for call in asked:
            running.submit(call)
            running.step()
        drain(running)
        logs.append(log)
        if cuda_graphs:
            graphs = running._scheduler.graphs
            assert graphs is not None
            captured = graphs.captured
            assert graphs.replays > graphs.plain
        running._scheduler.prefixes.clear()
        assert running._scheduler.pages.held == 0
    for call in asked:
        assert logs[1].tokens(call.id) == logs[0].tokens(call.id)
    assert 0 < captured < len(asked) // 2


def test_warm(trio: dict[str, Served]) -> None:
    """Nothing is captured, and nothing runs plainly, once an engine is warm; keys and values do not move."""
    found = {}
    for warm in (False, True):
        runtime = Runtime.from_base(trio["a"].pair.base, device="cuda", cuda_graphs=True)
        for name, one in trio.items():
            runtime.load(one.artifact, name)
        running, log = engine(runtime, max_batch=6)
        if warm:
            running.warm()
        graphs = running._scheduler.graphs
        assert graphs is not None
        shapes, plain, version = {*graphs.by_shape}, graphs.plain, running._scheduler.pages.version
        names = [None, *trio] * 4
        for i, name in enumerate(names):
            running.submit(Call(str(i), name, tuple(random_ids(3 + 3 * i, i)), 20, LONG))
            if i % 4 == 3:  # four prompts share a piece
                running.step()
        drain(running)
        found[warm] = [log.tokens(str(i)) for i in range(len(names))]
        if warm:
            assert {*graphs.by_shape} == shapes
            assert (graphs.plain, running._scheduler.pages.version) == (plain, version)
    assert found[True] == found[False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_prompts_join_steps(trio: dict[str, Served], dtype: torch.dtype) -> None:
    """They answer what they answer in forwards of their own, as do those whose step they join."""
    runtime, exact = (
        Runtime.from_base(trio["a"].pair.base, device="cuda", dtype=one, cuda_graphs=True)
        for one in (dtype, torch.float32)
    )
    for name, served in trio.items():
        runtime.load(served.artifact, name)
        exact.load(served.artifact, name)
    asked = [Call(str(i), (None, *trio)[i % 4], tuple(random_ids(3 + 9 * i % 50, i)), 24, LONG) for i in range(24)]
    tokens, replays = {}, {}
    for joins in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not joins:
                patch.setattr(Pieces, "joins", lambda self, slot: False)
            running, log = engine(runtime, max_batch=12)
            running.warm()
            graphs = running._scheduler.graphs
            assert graphs is not None
            plain, before = graphs.plain, graphs.replays
            for call in asked:
                running.submit(call)
                running.step()
            drain(running)
            assert graphs.plain == plain
            tokens[joins], replays[joins] = [log.tokens(call.id) for call in asked], graphs.replays - before
    assert replays[True] < replays[False] - 15  # of 24, but for the first, and what a later first token costs
    for call, own, other in zip(asked, tokens[True], tokens[False], strict=True):
        at = next((at for at, (mine, its) in enumerate(zip(own, other, strict=True)) if mine != its), None)
        if at is None:
            continue
        assert dtype == torch.bfloat16
        assert isinstance(call.prompt, tuple)
        rounded, wanted = (one.logits([(call.variant, [*call.prompt, *own[:at]])])[0][-1] for one in (runtime, exact))
        # each way is off by what bf16 is off, in both logits
        assert abs(float(wanted[own[at]] - wanted[other[at]])) <= 4 * float((rounded.float() - wanted).abs().max())


def test_attention_takes_pages(trio: dict[str, Served]) -> None:
    assert Runtime.from_base(trio["a"].pair.base, device="cuda", backend="cuda").model.paged

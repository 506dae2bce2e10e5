"""What waiting forwards let go: only what they never use again, and all of it that frames have names for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from plain_layers import GROUPS
from turns_of_a_layer import FP32, Halves, Walk, names_of, walk_of

from deltacompress.calibration.forwards.spent import NOTHING, _held
from deltacompress.calibration.forwards.turns import taking_turns

PRECISIONS = [FP32, Halves("fp16", wider=FP32)]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (5, 24), generator=torch.Generator().manual_seed(2))


def holding(walk: Walk) -> int:
    """Bytes of what the waiting forwards' frames have names for, but for the stream itself."""
    streams = {hidden.untyped_storage().data_ptr() for hidden in walk.turns._stream}
    held = [one for forward in walk.turns._waiting.values() for _, one in _held(forward)]
    stores = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    return sum(size for place, size in stores.items() if place not in streams)


def go(walk: Walk, groups: Sequence[Sequence[str]], *, find: bool) -> list[int]:
    """Through the layer, waiting at each group; what is held there."""
    found = []
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        if find:
            walk.turns.spent = walk.turns.find_spent([group[0] for group in groups])
        for group in groups:
            for k in range(3):
                walk.turns.inputs(k, [group[0]])
                walk.turns.rest(k)
            found.append(holding(walk))
        walk.turns.finish_all()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("samples", "batch"), [(5, 2), (7, 3)])
@pytest.mark.parametrize("architecture", GROUPS)
def test_no_value_depends_on_it(
    tiny: Callable[..., Any], architecture: str, samples: int, batch: int, precision: Any
) -> None:
    """Nor on how many samples it is found with."""
    ids = torch.randint(3, 96, (samples, 24), generator=torch.Generator().manual_seed(2))
    kept, freed = (walk_of(tiny(architecture), ids, precision=precision, batch=batch) for _ in range(2))
    groups = names_of(kept.skeleton, GROUPS[architecture])
    before, after = go(kept, groups, find=False), go(freed, groups, find=True)
    assert all(torch.equal(*both) for both in zip(kept.turns._stream, freed.turns._stream, strict=True))
    assert freed.turns.spent != NOTHING  # nothing had to run again
    assert freed.turns.precision == precision
    assert all(x <= y for x, y in zip(after, before, strict=True))
    assert sum(after) < sum(before)


def test_where_a_llama_waits_it_holds_what_it_needs(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    """In fp32, each of the tokens: the normed input; what attention made; the sum and its norm; the sum and the MLP's.

    And next to nothing else: one NaN is left of each.
    """
    walk = walk_of(tiny("llama"), ids)
    config = walk.skeleton.model.config
    tokens, hidden, inner = ids.numel(), config.hidden_size, config.intermediate_size
    needed = [4 * tokens * features for features in (hidden, hidden, 2 * hidden, hidden + inner)]
    held = go(walk, names_of(walk.skeleton, GROUPS["llama"]), find=True)
    assert [found - least for found, least in zip(held, needed, strict=True)] == pytest.approx([0] * 4, abs=4096)


def test_a_view_that_is_let_go_holds_nothing_that_it_is_a_view_of(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    """Values of attention are a view of what their projection made, which no frame has a name for."""
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        walk.turns.spent = walk.turns.find_spent([group[0] for group in groups])
        for group in groups[:2]:
            walk.turns.inputs(0, [group[0]])
            walk.turns.rest(0)
        held = {place[-1]: one for place, one in _held(walk.turns._waiting[0])}
        assert held["value_states"]._base is not None
        assert held["value_states"]._base.untyped_storage().nbytes() == 4
        assert held["attn_output"].isfinite().all()
        walk.turns.finish_all()
    assert walk.turns.spent != NOTHING  # nothing had to run again


def test_hidden_states_that_wait_on_the_host_are_copies_which_go_too(
    tiny: Callable[..., Any], ids: torch.Tensor
) -> None:
    """They are needed up to the sum with what attention made; the stream itself stays as it is."""
    walk, here = (walk_of(tiny("llama"), ids, host_share=share) for share in (1.0, 0.0))
    config = walk.skeleton.model.config
    tokens, hidden, inner = ids.numel(), config.hidden_size, config.intermediate_size
    groups = names_of(walk.skeleton, GROUPS["llama"])
    needed = [4 * tokens * features for features in (2 * hidden, 2 * hidden, 2 * hidden, hidden + inner)]
    held = go(walk, groups, find=True)
    assert [found - least for found, least in zip(held, needed, strict=True)] == pytest.approx([0] * 4, abs=4096)
    go(here, groups, find=True)
    assert walk.turns.spent != NOTHING
    assert all(torch.equal(*both) for both in zip(walk.turns._stream, here.turns._stream, strict=True))


def test_what_is_used_behind_the_back_of_torch_is_seen(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    """By a kernel of somebody's own, say: the forward gives NaN, so it runs again and lets nothing go any more."""
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    mlp = walk.skeleton.layer(0).mlp
    inner = mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = inner(x)
        return out + torch.tensor(x.tolist())  # reads memory, with no operation of PyTorch

    mlp.forward = forward
    expected = [walk.plain(k) for k in range(3)]
    go(walk, groups, find=True)
    assert walk.turns.spent == NOTHING
    assert all(torch.equal(walk.turns._stream[k], expected[k]) for k in range(3))


def test_a_forward_that_cannot_wait_lets_nothing_go(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    walk = walk_of(tiny("llama"), ids)
    groups = names_of(walk.skeleton, GROUPS["llama"])
    attention = walk.skeleton.layer(0).self_attn
    inner = attention.forward

    def in_a_block(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(*args, **kwargs)

    attention.forward = in_a_block
    with taking_turns(walk.skeleton, groups, [walk.turns]):
        assert walk.turns.find_spent([group[0] for group in groups]) == NOTHING

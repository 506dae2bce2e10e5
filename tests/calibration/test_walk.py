"""Recorded inputs against hooks on the plain model, and groups against what each architecture is known to share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_layers import GROUPS, SPLIT, loaded, plain_inputs

from deltacompress.calibration.forwards.recording import InputGroup, InputRecorder, capture_calls, record_inputs
from deltacompress.errors import UnsupportedModelError


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (5, 24), generator=torch.Generator().manual_seed(2))


def leaves(groups: list[InputGroup]) -> list[list[str]]:
    return [[name.split(".")[-2] for name in group.names] for group in groups]


@pytest.mark.parametrize("architecture", GROUPS)
def test_groups_are_the_linears_that_share_an_input_in_the_plain_model(
    tiny: Callable[..., Any], architecture: str, ids: torch.Tensor
) -> None:
    checkpoint = tiny(architecture)
    expected = plain_inputs(checkpoint.model(), ids[:2])
    skeleton = loaded(checkpoint)
    hidden, calls = skeleton.capture(ids[:2])
    for i in range(skeleton.num_layers):
        with record_inputs(skeleton, i) as recorder:
            hidden = skeleton.run_layer(i, hidden, calls[i])
        assert leaves(recorder.groups) == GROUPS[architecture]
        assert sorted(name for group in recorder.groups for name in group.names) == sorted(skeleton.linear_names(i))
        for group in recorder.groups:
            assert all(torch.equal(expected[group.names[0]], expected[name]) for name in group.names)


def test_nothing_outlives_its_forward(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    skeleton = loaded(tiny("llama"))
    batches, calls = capture_calls(skeleton, ids, 2)
    with record_inputs(skeleton, 0) as recorder:
        for hidden in batches:
            skeleton.run_layer(0, hidden, calls[len(hidden)][0])
            assert not recorder._alive
    assert leaves(recorder.groups) == SPLIT


def test_inputs_stay_alive_while_groups_are_made() -> None:
    """Else the next input may lie where the last one did, and pass for it."""
    recorder = InputRecorder("model", ("a", "b"))
    for _ in range(2):
        recorder.begin()
        recorder.see("a", torch.ones(64, 64))
        recorder.see("b", torch.ones(64, 64))
        recorder.end()
    assert [group.names for group in recorder.groups] == [["a"], ["b"]]


def test_hooks_are_gone_after_the_context_even_on_errors(tiny: Callable[..., Any]) -> None:
    skeleton = loaded(tiny("llama"))
    with pytest.raises(KeyboardInterrupt), record_inputs(skeleton, 0):
        raise KeyboardInterrupt
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in skeleton.model.modules())


def test_only_named_linears_are_recorded(tiny: Callable[..., Any], ids: torch.Tensor) -> None:
    skeleton = loaded(tiny("llama"))
    hidden, calls = skeleton.capture(ids)
    names = [name for name in skeleton.linear_names(0) if "k_proj" in name or "down_proj" in name]
    with record_inputs(skeleton, 0, names) as recorder:
        skeleton.run_layer(0, hidden, calls[0])
    assert leaves(recorder.groups) == [["k_proj"], ["down_proj"]]


def test_a_tensor_changed_in_place_is_another_input() -> None:
    recorder = InputRecorder("model", ("a", "b", "c"))
    x = torch.ones(2, 3)
    recorder.begin()
    recorder.see("a", x)
    recorder.see("b", x)
    x.add_(1)
    recorder.see("c", x)
    recorder.end()
    assert [group.names for group in recorder.groups] == [["a", "b"], ["c"]]


def test_a_linear_that_runs_twice_or_never_or_changes_group_is_refused() -> None:
    x = torch.ones(2, 3)
    recorder = InputRecorder("model", ("a", "b"))
    recorder.begin()
    recorder.see("a", x)
    with pytest.raises(UnsupportedModelError, match="'a' runs more than once"):
        recorder.see("a", x)
    with pytest.raises(UnsupportedModelError, match="'b' did not run"):
        recorder.end()
    recorder.see("b", x)
    recorder.end()
    recorder.begin()
    recorder.see("a", x)
    with pytest.raises(UnsupportedModelError, match="'a' and 'b' do not always share"):
        recorder.see("b", x.clone())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "bloom"])
def test_one_capture_per_batch_size_serves_every_batch(
    tiny: Callable[..., Any], architecture: str, ids: torch.Tensor, share: float
) -> None:
    checkpoint = tiny(architecture)
    skeleton = loaded(checkpoint)
    batches, calls = capture_calls(skeleton, ids, 2, host_share=share)
    assert [len(hidden) for hidden in batches] == [2, 2, 1]
    assert {size: len(layer_calls) for size, layer_calls in calls.items()} == dict.fromkeys([2, 1], skeleton.num_layers)
    for i in range(skeleton.num_layers):
        for k, hidden in enumerate(batches):
            batches[k] = skeleton.run_layer(i, hidden, calls[len(hidden)][i])
    model = checkpoint.model()
    for hidden, batch in zip(batches, ids.split(2), strict=True):
        assert torch.equal(skeleton.run_head(hidden), model(batch, use_cache=False).logits)


def test_calls_that_depend_on_the_tokens_are_refused(
    tiny: Callable[..., Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = loaded(tiny("llama"))
    capture = skeleton.capture

    def with_token_input(batch: torch.Tensor) -> Any:
        hidden, calls = capture(batch)
        return hidden, [replace(call, kwargs=call.kwargs | {"per_layer_input": batch}) for call in calls]

    monkeypatch.setattr(skeleton, "capture", with_token_input)
    with pytest.raises(UnsupportedModelError, match="depends on the tokens"):
        capture_calls(skeleton, ids, 2)

"""Which linears of one layer share an input, and what all layers are called with.

Which do (q/k/v, gate/up, and with parallel residuals more) is found by looking, not by a table of
names: linears that receive the very same tensor share one Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deltacompress.calibration.forwards.streams import HiddenStates
from deltacompress.models.config import unsupported
from deltacompress.models.experts.routing import Routing
from deltacompress.models.experts.stages import ExpertStage, watched_stages
from deltacompress.models.relay import LayerCall
from deltacompress.models.skeleton import Skeleton

FEW = 2
"""Samples of a forward that nothing is computed with; not one, of which a copy may be no copy."""


@dataclass(eq=False)
class InputGroup:
    """Linears (checkpoint names, in execution order) that receive one and the same tensor, or rows of it (experts)."""

    names: list[str]


Identity = tuple[Any, ...]
"""What tells an input from others that are alive."""


def identity_of(inputs: torch.Tensor) -> Identity:
    """Where a tensor lies; the version counter tells it from itself after a change in place."""
    return (inputs.data_ptr(), inputs.shape, inputs.stride(), inputs.dtype, inputs._version)


@dataclass(eq=False)
class InputRecorder:
    """Watches inputs forward by forward; made by `record_inputs`. `groups` is in execution order."""

    where: Any
    names: tuple[str, ...]
    groups: list[InputGroup] = field(default_factory=list)
    _group_of: dict[str, InputGroup] = field(default_factory=dict)
    _seen: dict[str, Identity] = field(default_factory=dict)  # name -> that of its input, this forward
    _alive: list[torch.Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """A forward of the layer begins: drop what the last one left."""
        self._seen.clear()
        self._alive.clear()

    def see(self, name: str, inputs: torch.Tensor) -> None:
        """A linear is about to run on `inputs`, [..., in_features]."""
        if name in self._seen:
            raise unsupported(self.where, f"linear {name!r} runs more than once in a forward")
        # Addresses are unique as long as every input is alive, hence all are held throughout the forward in which the
        # groups are made: the first.
        identity = identity_of(inputs)
        if name not in self._group_of:
            self._join(name, identity)
            self._alive.append(inputs)
        group = self._group_of[name]
        self._seen[name] = identity
        if self._seen.get(group.names[0]) != identity:
            raise unsupported(self.where, f"linears {group.names[0]!r} and {name!r} do not always share an input")

    def see_experts(self, stage: ExpertStage, inputs: torch.Tensor, _routing: Routing) -> torch.Tensor:
        """The linears of all experts of a stage are about to run, each on what is routed to it."""
        names = [name for name in stage.expert_of if name in self.names]
        for name in names:
            if name in self._seen:
                raise unsupported(self.where, f"linear {name!r} runs more than once in a forward")
            self._seen[name] = ()
            if name not in self._group_of:
                self._group_of[name] = InputGroup(names)
        if names and self._group_of[names[0]] not in self.groups:
            self.groups.append(self._group_of[names[0]])
        return inputs

    def end(self) -> None:
        """The forward is over: every linear must have run."""
        for name in self.names:
            if name not in self._seen:
                told = f"linear {name!r} did not run in the forward of its layer"
                raise unsupported(self.where, told, first=f"give {name} a rule with codec: exact")
        self._alive.clear()

    def _join(self, name: str, identity: tuple[Any, ...]) -> None:
        for group in self.groups:
            if self._seen.get(group.names[0]) == identity:
                group.names.append(name)
                break
        else:
            group = InputGroup([name])
            self.groups.append(group)
        self._group_of[name] = group


@contextmanager
def record_inputs(skeleton: Skeleton, i: int, names: Iterable[str] | None = None) -> Iterator[InputRecorder]:
    """Watch the inputs of layer i's linears while the context is open, and find which of them share one.

    Nothing is kept, but for the first forward, which keeps all inputs until the layer returns.

    Args:
        skeleton: the model; layer i must be loaded when it runs.
        i: index of the decoder layer.
        names: checkpoint names of linear weights of layer i; all of them by default.

    Raises:
        UnsupportedModelError: during a forward, if a linear does not run exactly once, or groups change.
    """
    chosen = tuple(skeleton.linear_names(i) if names is None else names)
    recorder = InputRecorder(skeleton.path, chosen)

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _module, args, kwargs: recorder.see(name, args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        layer = skeleton.layer(i)
        hooks.enter_context(_removed(layer.register_forward_pre_hook(lambda _module, _args: recorder.begin())))
        hooks.enter_context(_removed(layer.register_forward_hook(lambda _module, _args, _output: recorder.end())))
        stages = skeleton.expert_stages(i)
        of_experts = {name for stage in stages for name in stage.expert_of}
        hooks.enter_context(watched_stages(stages, recorder.see_experts))
        for name in (name for name in chosen if name not in of_experts):
            linear = skeleton.module_of(name)
            hooks.enter_context(_removed(linear.register_forward_pre_hook(watch(name), with_kwargs=True)))
        yield recorder


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def capture_calls(
    skeleton: Skeleton, ids: torch.Tensor, batch_size: int, *, host_share: float = 0.0
) -> tuple[HiddenStates, dict[int, list[LayerCall]]]:
    """Hidden states before the first layer, batch by batch, and the layer calls of each distinct batch size.

    Needs the outer weights. The last batch is smaller where batch_size does not divide the number of samples. There are
    calls of `FEW` samples, too, or of a batch where that has fewer: what only looks at how a layer works runs it on
    those.

    Args:
        skeleton: the model.
        ids: int64 [N, T], without padding.
        batch_size: samples per batch.
        host_share: of the batches, those whose hidden states wait in host memory.

    Returns:
        hidden states [B, T, H] of each batch, and calls[B][layer].

    Raises:
        UnsupportedModelError: calls that depend on the tokens, which one capture per batch size would get wrong.
    """
    stream = HiddenStates(skeleton.device, host_share=host_share)
    few = ids[: min(FEW, batch_size)]
    calls = {len(few): skeleton.capture(few)[1]}
    for batch in ids.split(batch_size):
        hidden, batch_calls = skeleton.capture(batch)
        known = calls.setdefault(len(batch), batch_calls)
        if not all(old.same_as(new) for old, new in zip(known, batch_calls, strict=True)):
            raise unsupported(skeleton.path, "what the layers are called with depends on the tokens")
        stream.append(hidden)
    return stream, calls

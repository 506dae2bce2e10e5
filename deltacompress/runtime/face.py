"""Runtime: the public face. One base, variants by name, requests of any of them in one batch.

What is evaluated is what is served: all of its calls run the same modules over the same operands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deltacompress.devices import resolve_device
from deltacompress.errors import InputError
from deltacompress.models.config import notes
from deltacompress.numerics.likelihood import LogLikelihood
from deltacompress.processes.collector import collector_paused
from deltacompress.runtime.batch import BASE, Batch
from deltacompress.runtime.cache.loaded_variant import LoadedVariant
from deltacompress.runtime.cache.memory import explained
from deltacompress.runtime.cache.residency import Residency
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.engine import forwards
from deltacompress.runtime.engine.admission import admit
from deltacompress.runtime.engine.generation_config import GenerationConfig, Sampling
from deltacompress.runtime.engine.input_processor import Ids, InputProcessor
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits
from deltacompress.runtime.engine.live.events import Event
from deltacompress.runtime.engine.requests import Completion, Listener, OnToken, Told
from deltacompress.runtime.engine.scheduler import Scheduler
from deltacompress.runtime.engine.tokenizers import Tokenizers
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.parallel.start import check_graphs, open_base
from deltacompress.runtime.variants.precision import Numerics, resolve_dtype
from deltacompress.runtime.variants.variant import Variant


class Runtime:
    """Serves a base model and its variants; make it with `from_base`.

    backend: the name; merge_rounding: see `from_base`. One thread computes at a time; others may load and unload.
    """

    def __init__(self, model: DecoupledModel, cache: VariantCache, *, cuda_graphs: bool = False) -> None:
        self.model, self.cache, numerics = model, cache, model.base.numerics
        self.backend, self.merge_rounding = numerics.backend.name, numerics.merge_rounding
        self.device, self.dtype = model.device, numerics.dtype
        self.notes: list[str] = []  # what a user should know about how base and variants are served
        self._cuda_graphs = cuda_graphs
        self._tokenizers = Tokenizers(model.base.checkpoint.path)
        self._input = InputProcessor(model, cache.variants, self._tokenizers)
        self._lock = threading.RLock()
        self._memory = partial(explained, model, cache)

    @classmethod
    def from_base(
        cls,
        path_or_id: str | Path,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32,
        backend: str = "auto",
        budget_bytes: int | None = None,
        *,
        merge_rounding: bool | None = None,
        host_bytes: int | None = None,
        cuda_graphs: bool = False,
        tp: int = 1,
    ) -> Runtime:
        """Load a base model.

        Args:
            path_or_id: checkpoint directory or hub id.
            device: "cpu", "cuda" or "auto" (a GPU if there is one).
            dtype: of weights and activations; "auto": fp32 on a CPU, bf16 elsewhere.
            backend: "auto", "reference", "triton" or "cuda": what computes the products of packed deltas.
            budget_bytes: of resident variants, as they are served (decoded by the reference backend, else packed).
            merge_rounding: round base + delta to the checkpoint's dtype, as restoring does; needs the reference
                backend. False applies the codes as they are. Default: True in fp32 on that backend, else False.
            host_bytes: of pinned memory for variants that are not there; None: no limit. cuda_graphs: capture forwards.
            tp: devices that base and variants are split over, a process for each; `budget_bytes` is of each.

        Raises:
            CheckpointError, UnsupportedModelError: the base cannot be loaded or served.
            BackendError: backend, device or memory.
        """
        where = resolve_device(device)
        check_graphs(where, cuda_graphs=cuda_graphs)
        numerics = Numerics.choose(backend, where, resolve_dtype(dtype, where), merge_rounding)
        model = open_base(str(path_or_id), device=where, numerics=numerics, tp=tp)
        cache = VariantCache(model, numerics.kernels, budget_bytes=budget_bytes, host_bytes=host_bytes)
        made = cls(model, cache, cuda_graphs=cuda_graphs)
        made.notes += notes(model.base.checkpoint.config, model.base.checkpoint.path)
        return made

    def describe(self) -> str:
        """One line: device, dtype, backend and why, how deltas are applied, and over how many devices."""
        return self.model.base.numerics.describe() + self.model.others.describe()

    def residency(self) -> Residency:
        """Where each variant is (device, pinned host memory, disk), and what was counted: hits, misses, loads."""
        with self._lock:
            return self.cache.residency()

    @property
    def variants(self) -> Mapping[str, LoadedVariant]:
        """The loaded variants by name."""
        return MappingProxyType(self.cache.variants)

    def load(
        self,
        artifact: str | Path,
        name: str | None = None,
        *,
        over: str | Path | None = None,
        zoo: str | Path | None = None,
        verify: bool = True,
        pin: bool = False,
    ) -> str:
        """Load a variant; returns its name (the directory's or entry's, if none is given).

        Args:
            artifact: directory of an artifact or a PEFT adapter; or an entry of a zoo, `team/bot@prod`, pulled once.
            over: the delta of an adapter's model: the name of a loaded one, or a Path; None: its entry's, or the base.
            zoo: path or URL; None: the one that DELTACOMPRESS_ZOO names.
            verify: compare every part with its recorded hash. False believes files that the `cuda` backend takes as
                they are; other parts are compared, and shapes, scales and patterns checked, either way.
            pin: keep it on the device until it is unloaded, whatever else is asked for.

        Raises:
            InputError: the name is taken, or empty; `over` is no loaded delta, and no directory of one.
            BaseMismatchError: made from another base.
            IntegrityError, UnsupportedModelError, PairError, BackendError: see open_variant and VariantCache.add.
            ZooError: the zoo does not have the entry.
        """
        from deltacompress.zoo.exchange.resolve import served_path

        path, over = served_path(artifact, zoo, over, base=self.model.base.checkpoint.path)
        if name is None:
            name = path.resolve().name if path == Path(artifact) else str(artifact)
        self.cache.check_free(name)
        beneath = self._input.find(over).variant if isinstance(over, str) else over
        with collector_paused():
            variant = self.model.others.opened(path, self.model.base, beneath)
        return self.add(variant, name, verify=verify, pin=pin)

    def add(self, variant: Variant, name: str, *, verify: bool = True, pin: bool = False) -> str:
        """Load an opened variant of any kind; raises as `load`, and InputError for operands that do not fit."""
        if not isinstance(variant, Variant):
            raise InputError(f"{variant!r:.60} is no Variant", way_out="open one, or use load for an artifact")
        self.model.others.check_opened(variant)
        note = admit(variant, name, self.cache, self._tokenizers, self._lock, verify=verify, pin=pin)
        if note:
            self.notes.append(f"{name}: {note}")
        return name

    def unload(self, name: str) -> None:
        """Forget a variant; raises InputError: there is none of that name, or running requests use it."""
        with self._lock:
            self._input.find(name)
            self.cache.remove(name)
            self._tokenizers.remove(name)
            for note in [one for one in self.notes if one.startswith(f"{name}: ")]:
                self.notes.remove(note)

    def logits(self, requests: Sequence[tuple[str | None, Ids]]) -> list[Tensor]:
        """Logits [tokens, vocabulary] of each (variant or None for the base, token ids), in one mixed forward.

        Raises:
            InputError: unknown variant, no tokens, tokens out of the vocabulary, or more than the context.
            BackendError: the variants do not fit the budget together.
        """
        items = self._input.items(requests)
        found: list[Tensor] = [torch.empty(0)] * len(items)
        for item, piece in self._run(items) if items else ():
            found[item.index] = piece
        return found

    def forward(self, requests: Sequence[tuple[str | None, Ids]]) -> Iterator[tuple[int, Tensor]]:
        """(index, logits [tokens, vocabulary]) of each request, batch by batch: logits never pile up.

        The order is that of the batches; raises as `logits`, and where a variant was unloaded before its batch came.
        """
        items = self._input.items(requests)
        for batch in forwards.batches(items, self.cache.fits):
            for item, piece in self._run(batch):
                yield item.index, piece

    @contextmanager
    def serving(self, variants: Sequence[str | None]) -> Iterator[None]:
        """In this block, forwards are of a row of each variant, equal ones side by side; raises as `logits`."""
        with self._lock, self.model.others.apart():
            names = {self._input.find(name).name for name in variants if name is not None}
            with forwards.held(self.cache, names) as held:
                slots = [BASE if name is None else held[name] for name in variants]
                with self.model.serving(Batch(slots, self.device)):
                    yield

    def loglikelihood(self, requests: Sequence[tuple[str | None, Ids, Ids]]) -> list[LogLikelihood]:
        """(sum of log-probabilities in nats, whether greedy) of each (variant, context ids, continuation ids).

        Raises:
            InputError: as `logits`; an empty context (give at least the bos token) or continuation.
            NumericsError: logits are not finite.
        """
        scored = list(self._input.scored(requests))
        found = [LogLikelihood(0.0, False)] * len(scored)
        for batch in forwards.batches([item for item, _ in scored], self.cache.fits):
            with self._lock, forwards.holding(self.cache, batch) as held, self._memory("log-likelihoods"):
                ordered, logits = forwards.run(self.model, held)
                targets = [scored[one.index][1] for one in ordered]
                for one, result in zip(ordered, forwards.log_likelihoods(ordered, logits, targets), strict=True):
                    found[one.index] = result
                self.model.others.check()  # what came of a rank that is lost is no answer
        return found

    def generate(
        self,
        requests: Sequence[tuple[str | None, str | Ids]],
        max_new_tokens: int = 32,
        *,
        stop: str | Sequence[str] = (),
        on_token: OnToken | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        bos: bool | None = None,
        max_batch: int = 64,
    ) -> list[str]:
        """The continuation of each (variant or None for the base, prompt or token ids), greedy unless asked otherwise.

        Args:
            max_new_tokens: at most; the context of the model ends a request too.
            stop: strings at which a text ends (they are cut off), beside the model's own end token.
            on_token: called as on_token(request index, token id, new text) for each token.
            temperature, top_p: sampling; 0 is greedy. seed: of the draws; request i draws from seed + i. bos: put the
                bos token before prompts that are text; None leaves that to the tokenizer.
            max_batch: requests that run at once; the others wait.

        Raises:
            InputError: unknown variant, empty or too long prompt, tokens out of the vocabulary.
            IntegrityError: a variant that had left the device came back damaged; told when all other requests are done.
            BackendError: out of memory or budget.
        """
        options: dict[str, Any] = {"stop": stop, "on_token": on_token, "bos": bos, "max_batch": max_batch}
        done = self.complete(requests, max_new_tokens, sampling=Sampling(temperature, top_p, seed), **options)
        for completion in done:
            if completion.error is not None:
                raise completion.error
        return [completion.text for completion in done]

    def complete(
        self,
        requests: Sequence[tuple[str | None, str | Ids]],
        max_new_tokens: int = 32,
        *,
        stop: str | Sequence[str] = (),
        on_token: OnToken | None = None,
        sampling: Sampling | None = None,
        bos: bool | None = None,
        max_batch: int = 64,
    ) -> list[Completion]:
        """As `generate`, with the tokens and the reason for the end of each; one that fails says so itself."""
        if max_batch < 1:
            raise InputError("at least 1", where=f"max_batch {max_batch}")
        streams = on_token is not None
        generation = GenerationConfig.checked(max_new_tokens, stop, sampling or Sampling(), bos, streams=streams)
        made = self._input.requests(requests, generation)
        scheduler = self._scheduler(Told(on_token), max_batch=max_batch)
        scheduler.run(made, self._lock, partial(self._memory, f"{len(made)} requests, max_batch {max_batch}"))
        return [request.completion() for request in made]

    def engine(self, emit: Callable[[Event], None], limits: EngineLimits | None = None) -> Engine:
        """A long-lived engine over this runtime: calls come and go, `emit` is told what becomes of them."""
        make = partial(self._scheduler, **(chosen := limits or EngineLimits()).of_scheduler)
        return Engine(make, self._input, self._tokenizers, self._lock, self._memory, emit, chosen)

    def close(self) -> None:
        """End the processes of the other devices, if there are any; a runtime that is dropped ends them, too."""
        self.model.others.close()

    def chat_ids(self, variant: str | None, messages: list[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation in the variant's chat template; None if its tokenizer has none."""
        return self._tokenizers.chat(variant, messages)

    def _scheduler(self, listener: Listener, **limits: Any) -> Scheduler:
        return Scheduler(self.model, self.cache, listener, cuda_graphs=self._cuda_graphs, **limits)

    def _run(self, items: list[forwards.Item]) -> list[tuple[forwards.Item, Tensor]]:
        doing = self._memory(f"one forward over {len(items)} sequences")
        with self._lock, forwards.holding(self.cache, items) as held, doing:
            ordered, logits = forwards.run(self.model, held)
        pieces = logits.split([one.kept for one in ordered])
        return [(one, piece[:, : one.vocabulary]) for one, piece in zip(ordered, pieces, strict=True)]

"""Continuous batching: requests of any variants and lengths enter and leave one running batch.

A step admits waiting requests (as many as rows and budget allow), runs their prompts, and decodes one token for every
running one. Rows are sorted by slot, so each variant's rows are contiguous; the cache holds one row per request, with
its own positions (kvcache.py), so a request computes what it computes alone. A request whose variant is still on its
way to the device waits, while the others go on; one whose variant comes back damaged, or was unloaded, fails by itself.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from transformers import DynamicCache

from deltacompress.errors import InputError, IntegrityError
from deltacompress.runtime.batch import Batch, to_device
from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.engine.graphs import GRAPH_AFTER, GraphedStep
from deltacompress.runtime.engine.kvcache import RowCache
from deltacompress.runtime.engine.requests import OnToken, Request, choose
from deltacompress.runtime.modules.model import DecoupledModel, additive

PROMPT_TOKENS = 8192
"""Tokens, padding included, of one forward over prompts."""
DROP_SHARE = 4
"""Rows of ended requests are dropped when they are at least one in this many."""


class Scheduler:
    """Runs requests to their end; one per `generate`."""

    def __init__(
        self,
        model: DecoupledModel,
        variants: VariantCache,
        *,
        max_batch: int,
        on_token: OnToken | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self._model, self._variants = model, variants
        self._max_batch, self._on_token = max_batch, on_token
        self._waiting: deque[Request] = deque()
        self._live: list[Request] = []
        self._rows: list[Request] = []  # what the cache's rows belong to, requests that ended included
        self._kv_cache = RowCache(fused=model.fused)
        self._batch: Batch | None = None
        self._graph: GraphedStep | None = None
        self._graph_version = self._plain_steps = 0
        self._pool = torch.cuda.graph_pool_handle() if cuda_graphs else None
        config = model.config
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._additive = config._attn_implementation == "eager"

    def submit(self, request: Request) -> None:
        """Put a request into the queue; it may join a batch that is running."""
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is not done."""
        return bool(self._waiting or self._live)

    @property
    def graph(self) -> GraphedStep | None:
        """The captured step of the present arrangement of rows, if there is one."""
        return self._graph

    def close(self) -> None:
        """Let go of the variants of whatever still runs."""
        for request in self._live:
            self._release(request)
        self._live, self._rows = [], []
        self._waiting.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what can be admitted, decode one token for each running request; returns those that ended."""
        new, failed = self._admitted()
        self._arrange(new)
        ended = failed + self._leave()
        if self._live:
            self._decode()
            ended += self._leave()
        return ended

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def _admitted(self) -> tuple[list[Request], list[Request]]:
        """The waiting requests whose turn it is, variants ready and held; and those whose variant is not to be had."""
        chosen: list[Request] = []
        failed: list[Request] = []
        passed: deque[Request] = deque()
        blocked: set[str | None] = set()
        try:
            while self._waiting and len(self._live) + len(chosen) < self._max_batch:
                request = self._waiting.popleft()
                try:
                    held = request.variant not in blocked and self._hold(request, alone=not (self._live or chosen))
                except (IntegrityError, InputError) as error:
                    failed += self._fail(request, error)
                    continue
                if held:
                    chosen.append(request)
                else:
                    blocked.add(request.variant)
                    passed.append(request)
        except BaseException:
            for request in chosen:
                self._release(request)
            raise
        self._waiting.extendleft(reversed(passed))
        return chosen, failed

    def _fail(self, request: Request, error: IntegrityError | InputError) -> list[Request]:
        """End a request, and all that wait for the same variant: to read it once more for each would tell no more."""
        ended = [request, *(one for one in self._waiting if one.variant == request.variant)]
        self._waiting = deque(one for one in self._waiting if one.variant != request.variant)
        for one in ended:
            one.fail(error)
        return ended

    def _hold(self, request: Request, *, alone: bool) -> bool:
        """Reserve the variant of a request, and with it its slot, if it is ready; where nothing else runs, wait."""
        if (name := request.variant) is None:
            return True
        if request.loaded is not None:  # it may have been loaded again while the request waited
            request.loaded = self._variants.current(request.loaded)
        if not alone and not (self._variants.start(name) and self._variants.ready(name)):
            return False
        request.slot = self._variants.acquire([name])[name]
        return True

    def _release(self, request: Request) -> None:
        if request.variant is not None:
            self._variants.release([request.variant])

    def _arrange(self, new: list[Request]) -> None:
        """Run the prompts of new requests and give every running one its row.

        Rows of requests that ended are dropped when there is something to do anyway, or when they are many: moving
        the others costs more than computing a row for nothing.
        """
        idle = len(self._rows) - len(self._live)
        if not new and idle * DROP_SHARE < len(self._rows):
            return
        caches = []
        joined = [(request, 0, row) for row, request in enumerate(self._rows) if request.finished is None]
        self._live += new
        for number, group in enumerate(_prompt_groups(new), start=1):
            caches.append(self._prompts(group))
            joined += [(request, number, row) for row, request in enumerate(group)]
        joined.sort(key=lambda item: item[0].slot)
        self._rows = [request for request, _, _ in joined]
        if self._rows:
            columns = max(len(request.ids) + request.limit for request in self._rows)
            self._kv_cache.rebuild([(source, row) for _, source, row in joined], caches, columns)
            self._batch = Batch([request.slot for request in self._rows], self._model.device)
            self._graph, self._plain_steps = None, 0

    def _prompts(self, group: list[Request]) -> DynamicCache:
        """One forward over prompts, padded on the right (where causal attention never looks); takes the first token."""
        device = self._model.device
        longest = max(len(request.ids) for request in group)
        ids = to_device([token for one in group for token in one.ids + [0] * (longest - len(one.ids))], device)
        last = [row * longest + len(request.ids) - 1 for row, request in enumerate(group)]
        cache = DynamicCache()
        with self._model.serving(Batch([one.slot for one in group], device, keep=last, kept=[1] * len(group))):
            logits = self._model.model(
                input_ids=ids.view(len(group), longest), past_key_values=cache, use_cache=True
            ).logits
        self._take(logits[0], group)
        return cache

    def _leave(self) -> list[Request]:
        """The requests that ended since the last call; their variants are let go."""
        ended = [request for request in self._live if request.finished is not None]
        self._live = [request for request in self._live if request.finished is None]
        for request in ended:
            self._release(request)
        return ended

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every running request."""
        places = [request.length - 1 for request in self._rows]  # of the token that goes in
        # the variant of a request that ended may be gone, and with it tokens that only that variant had
        last = [request.tokens[-1] if request.finished is None else 0 for request in self._rows]
        inputs = to_device(last + places, self._model.device)
        logits = self._logits(inputs, max(places) + 1)
        self._take(logits, self._rows)

    def _logits(self, inputs: Tensor, seen: int) -> Tensor:
        """Logits [rows, vocabulary] of one step, from a graph if this arrangement of rows has one."""
        assert self._batch is not None
        batch, rows = self._batch, len(self._rows)
        self._plain_steps += 1
        if self._pool is None or self._plain_steps <= GRAPH_AFTER:
            return self.forward_step(batch, inputs[:rows].unsqueeze(1), inputs[rows:], seen)
        if self._graph is None or self._graph_version != self._model.version:
            columns = self._kv_cache.columns
            self._graph = GraphedStep(
                lambda ids, positions: self.forward_step(batch, ids, positions, columns), inputs, self._pool
            )
            self._graph_version = self._model.version
        return self._graph.replay(inputs)

    def forward_step(self, batch: Batch, ids: Tensor, positions: Tensor, seen: int) -> Tensor:
        """The device's part of a step: ids int64 [rows, 1] at positions int64 [rows] -> logits [rows, vocabulary].

        seen: columns of the cache to attend to. Never waits for the device, so it can be captured in a CUDA graph.
        """
        self._kv_cache.at(positions, seen)
        with self._model.serving(batch, positions):
            logits: Tensor = self._model.model(
                input_ids=ids,
                position_ids=positions.unsqueeze(1),
                attention_mask=self._masks(positions, seen),
                past_key_values=self._kv_cache,
                use_cache=True,
            ).logits
        return logits[:, -1]

    def _masks(self, positions: Tensor, seen: int) -> Tensor | dict[str, Tensor]:
        """What each row may attend to: the columns up to its own, within the window where there is one."""
        columns = torch.arange(seen, device=positions.device)
        full = columns <= positions[:, None]
        window = full if self._window is None else full & (columns > positions[:, None] - self._window)
        shaped = {"full_attention": self._shaped(full), "sliding_attention": self._shaped(window)}
        if self._layer_types is not None:  # models with layers of several kinds take one mask of each
            return shaped
        return shaped["full_attention" if self._window is None else "sliding_attention"]

    def _shaped(self, mask: Tensor) -> Tensor:
        mask = mask[:, None, None, :]
        return additive(mask, self._model.dtype) if self._additive else mask

    def _take(self, logits: Tensor, requests: list[Request]) -> None:
        for request, token in zip(requests, choose(logits, requests), strict=True):
            if request.finished is None:
                request.take(token, self._on_token)


def _prompt_groups(requests: list[Request]) -> list[list[Request]]:
    """Groups of prompts of like length, each sorted by slot and at most PROMPT_TOKENS with padding."""
    groups: list[list[Request]] = []
    for request in sorted(requests, key=lambda one: len(one.ids)):
        if groups and len(request.ids) * (len(groups[-1]) + 1) <= PROMPT_TOKENS:
            groups[-1].append(request)
        else:
            groups.append([request])
    return [sorted(group, key=lambda one: one.slot) for group in groups]

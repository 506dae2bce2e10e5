"""Whose turn it is: the policy (policy/) over the requests of one scheduler and the variants of its runtime.

What the policy knows of variants is what the cache says; those that others hold (an evaluation, another scheduler) stay
where they are. Requests that have no chance are failed, each with its own reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice

from deltacompress.errors import BackendError, DeltaCompressError, InputError, IntegrityError
from deltacompress.runtime.cache.variant_cache import Sizes, VariantCache
from deltacompress.runtime.engine.generation_config import Finish
from deltacompress.runtime.engine.policy.desk import Desk
from deltacompress.runtime.engine.policy.state import Limits, Plan, Resident, Rules
from deltacompress.runtime.engine.policy.ticket import Ticket
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.pace import Pace
from deltacompress.runtime.engine.steps.pages import Pages, no_memory
from deltacompress.runtime.engine.steps.swap import Swap

GiveWay = Callable[[Collection[Request], Collection[Request]], None]
"""Takes requests out of their rows: of some of them, the second ones, what was computed is to go to the host."""
OWN_END = ("eos", "stop", "length", "context")
"""What tells how long the answers of a variant are."""


class Turns:
    """Requests from their submission to their end; those that run hold their variant."""

    def __init__(self, variants: VariantCache, pages: Pages, swap: Swap, pace: Pace, rules: Rules) -> None:
        self._variants, self._pages, self._swap, self._pace, self._rules = variants, pages, swap, pace, rules
        self._desk = Desk()
        self._requests: dict[str, Request] = {}
        self._over: list[Request] = []  # that have ended, and of which nobody was told
        self.gave_way = 0  # times that a request did
        self.ran = 0  # in the last step, those that ended or gave way in it included

    @property
    def counts(self) -> tuple[int, int]:
        """Requests in line, and that run; any thread may ask."""
        return len(self._desk.line), len(self._desk.running)

    def to_compute(self, most: int) -> int:
        """Tokens that are to be computed for those in line, added up until they are no fewer than `most`."""
        return self._desk.line.counted(self._uncomputed, most)

    def _uncomputed(self, ticket: Ticket) -> int:
        request = self._requests[ticket.id]
        return 0 if self._swap.holds(request) else request.length

    @property
    def running(self) -> list[Request]:
        """Those that hold their variant, in the order in which they started."""
        return [self._requests[name] for name in self._desk.running]

    @property
    def busy(self) -> bool:
        """Whether any request is left, or its end not told."""
        return bool(self._requests or self._over)

    def submit(self, request: Request) -> None:
        """It takes its place in line."""
        name = str(request.index)
        self._requests[name] = request
        kv, tokens, now = self._pages.needed(request.length + 1), request.length, time.monotonic()
        request.stand(now)
        self._desk.submit(
            name, request.variant, now=now, max_tokens=request.limit, kv=kv, prompt=tokens, latency=request.latency
        )

    def back(self, requests: Iterable[Request]) -> None:
        """Some that run stand in line again, at their places."""
        for request in requests:
            self._desk.back(str(request.index))
            self._leave(request)

    def end(self, request: Request, finish: Finish) -> None:
        """One is to end before its time, wherever it is; `ended` tells of it."""
        if request.finished is None:
            request.finished = finish
            if not request.holds:
                self._gone(request)
                self._over.append(request)

    def settle(self) -> None:
        """Those that ran and have ended let go of their variants; `ended` tells of them."""
        for request in self.running:
            if request.finished is not None:
                self._gone(request)
                self._over.append(request)

    def ended(self) -> list[Request]:
        """All that have ended since the last call."""
        self.settle()
        found, self._over = self._over, []
        return found

    def fail(self, error: DeltaCompressError) -> None:
        """All that run fail; if none does, the first in line: somebody's step it was."""
        first = [self._requests[ticket.id] for ticket in islice(self._desk.line, 1)]
        self._fail(self.running or first, error)

    def close(self) -> list[Request]:
        """All are gone; returns those that were left, and those whose end was not told."""
        left = list(self._requests.values())
        for request in left:
            self._gone(request)
        left, self._over = [*left, *self._over], []
        return left

    def take(self, rows: int, computing: Collection[Request], give_way: GiveWay) -> list[Request]:
        """Who starts, with their variants held; others were asked to give way, and variants brought and evicted.

        rows: requests that may run at once; computing: whose prompt is not through. Waits for a variant if nothing runs
        and nobody can start. Failures are told by `ended`. There are pages for all that the coming step takes: where
        there is no memory for these, the last in line give way, and one fails that finds none even alone.
        """
        started: list[Request] = []
        self.ran = len(self._desk.running)
        is_short = False
        while True:
            if (self._desk.line or is_short) and self._turn(rows, computing, started, give_way):
                continue
            try:
                self._pages.reserve(self._lacking({*computing, *started}))
            except BackendError as error:
                is_short = True  # the pages know how much there is from now on, and so does the policy
                if len(self._desk.running) == 1:
                    give_way(self.running, ())
                    self._fail(self.running, error)
                    started.clear()
            else:
                return started

    def _turn(
        self,
        rows: int,
        computing: Collection[Request],
        started: list[Request],
        give_way: GiveWay,
    ) -> bool:
        """One plan, carried out; whether another one may do more at once. started: who did, and still runs."""
        self._arrive()
        plan = self._plan(rows, {*computing, *started})
        preempted = [self._requests[one.ticket.id] for one in plan.preempt]
        for request in preempted:
            self._leave(request)
        outgrown = [self._requests[ticket.id] for ticket in plan.outgrown]
        for request, ticket in zip(outgrown, plan.outgrown, strict=True):
            self._fail([request], no_memory((ticket.kv + 1) * self._pages.size))  # with the page that nobody holds
        # who started in this very step and gives way in it waits again, and must not start twice
        started[:] = [request for request in started if request not in (*preempted, *outgrown)]
        for ticket in plan.hopeless:  # which the desk has forgotten
            self._swap.drop(request := self._requests.pop(ticket.id))
            assert request.variant is not None
            request.fail(self._variants.no_room(request.variant))
            self._over.append(request)
        if preempted or outgrown:
            swapped = [self._requests[one.ticket.id] for one in plan.preempt if one.how == "swap"]
            give_way([*preempted, *outgrown], swapped)  # which may find no memory: all else is as the plan has it
        for variant in plan.evict:
            self._variants.evict(variant)
        came = [self._bring(variant) for variant in plan.bring]
        started += [request for request in map(self._start, plan.admit) if request is not None]
        return any(came) or (bool(self._desk.line) and not self._desk.running and self._await())

    def _plan(self, rows: int, computing: Collection[Request]) -> Plan:
        held = 0
        for name, ticket in self._desk.running.items():
            request = self._requests[name]
            ticket.generated, ticket.pending = len(request.tokens), request in computing
            ticket.kv = self._to_go_on(request, computing)
            held += len(request.pages)
        residents, room = self._variants.residents, self._pages.room
        limits = Limits(
            rows,
            residents.slots,
            residents.budget_bytes,
            loads=residents.slots,
            kv=None if room is None else room + held,
            headroom=min(rows, len(self._desk.running) + len(self._desk.line)),  # a page for each
            alone=self._pages.most,
        )
        costs, host = self._pace.costs(self._pages.size, self._swap.page_s), self._swap.room
        return self._desk.plan(
            list(self._residents()), Sizes(self._variants.variants), limits, costs, self._rules, host
        )

    def _to_go_on(self, request: Request, computing: Collection[Request]) -> int:
        """Pages that one that runs holds after the coming step, or once its prompt is through."""
        return max(len(request.pages), self._pages.needed(request.length + (request in computing)))

    def _lacking(self, computing: Collection[Request]) -> int:
        """Pages that those that run are still to take for that."""
        return sum(self._to_go_on(request, computing) - len(request.pages) for request in self.running)

    def _residents(self) -> Iterator[Resident]:
        own: dict[str | None, int] = {}
        for name in self._desk.running:
            variant = self._requests[name].variant
            own[variant] = own.get(variant, 0) + 1
        for one in self._variants.residents.by_slot.values():
            kept = one.pin or one.users > own.get(one.name, 0)
            rank = self._desk.usage.rank(one.name)
            asked = rank > float("-inf")  # by a request of this scheduler; of others, the last that was used
            yield Resident(one.name, one.nbytes, one.installed, kept, rank if asked else -1 / one.used)

    def _arrive(self) -> None:
        """Take in variants that have come; whoever waits for one that could not come, or is gone, fails."""
        heads = list(self._desk.line.firsts())
        self._variants.collect({head.variant for head in heads})
        for head in heads:
            if head.variant is None:
                continue
            for ticket in list(self._desk.line.of(head.variant)):
                request = self._requests[ticket.id]
                try:
                    if request.loaded is not None:  # it may have been loaded again while the request waited
                        request.loaded = self._variants.current(request.loaded)
                except InputError as error:
                    self._fail([request], error)
                    continue
                self._try(head.variant, partial(self._variants.ready, head.variant))
                break

    def _bring(self, variant: str) -> bool:
        """Whether it is there already: on a CPU it is, and can be used in this step."""
        self._try(variant, partial(self._variants.start, variant))
        return variant in self._variants.variants and self._variants.variants[variant].installed

    def _await(self) -> bool:
        """Wait for the variant on its way that is most urgent; False if there is none."""
        for head in list(self._desk.line.firsts()):
            if head.variant is not None and self._variants.variants[head.variant].arriving is not None:
                self._try(head.variant, partial(self._variants.settle, head.variant))
                return True
        return False

    def _try(self, variant: str, doing: Callable[[], object]) -> None:
        """What fails fails for all that wait for this variant: to read it once more for each would tell no more."""
        try:
            doing()
        except (IntegrityError, InputError) as error:
            self._fail([self._requests[one.id] for one in self._desk.line.of(variant)], error)

    def _start(self, ticket: Ticket) -> Request | None:
        request = self._requests[ticket.id]
        if request.variant is None:
            self.ran += 1
            request.stand_no_more(time.monotonic())
            return request
        try:
            if request.loaded is not None:
                request.loaded = self._variants.current(request.loaded)
            request.slot = self._variants.acquire([request.variant])[request.variant]
        except (IntegrityError, InputError) as error:
            self._fail([request], error)
            return None
        request.holds = True
        self.ran += 1
        request.stand_no_more(time.monotonic())
        return request

    def _fail(self, requests: Iterable[Request], error: DeltaCompressError) -> None:
        for request in list(requests):
            request.fail(error)
            self._gone(request)
            self._over.append(request)

    def _gone(self, request: Request) -> None:
        name = str(request.index)
        self._release(request)
        self._swap.drop(request)
        request.stand_no_more(time.monotonic())
        if self._requests.pop(name, None) is not None:
            if (ticket := self._desk.running.get(name)) is not None:
                ticket.generated = len(request.tokens)
            self._desk.end(name, now=time.monotonic(), complete=request.finished in OWN_END)

    def _leave(self, request: Request) -> None:
        """It gave its row, and stands in line again."""
        self._release(request)
        request.gave_way += 1
        self.gave_way += 1
        request.stand(time.monotonic())

    def _release(self, request: Request) -> None:
        if request.holds and request.variant is not None:
            self._variants.release([request.variant])
            request.holds = False

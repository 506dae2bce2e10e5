"""Prompts on their way: computed in pieces of a bounded number of tokens, so that running requests never wait for long.

Prompts of like length share a forward, padded on the right (where causal attention never looks); one that is longer
than a step's tokens goes through in pieces, over the keys and values of the pieces before it. Where others decode,
short ones join their step instead (decoder.py), and so do the last tokens of longer ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from math import isnan
from typing import NamedTuple

from torch import Tensor

from deltacompress.runtime.batch import to_device
from deltacompress.runtime.engine.policy.portions import fits, most_tokens
from deltacompress.runtime.engine.requests import NO_TOKEN, Listener, Request
from deltacompress.runtime.engine.sampling.choose import Choice, Wanted, score
from deltacompress.runtime.engine.steps.decoder import JOINED
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.pieces import SMALLEST, TOGETHER, Piece, Pieces, padded
from deltacompress.runtime.engine.steps.prefixes import Prefixes

_LOOKED_AT = 128 * 128 // 2
"""Tokens that those of prompts that join a step look at in all, at most: each reads its own, as a decoded one does."""


class Through(NamedTuple):
    """What became of prompts in a step.

    through: those that are in pages, and have a first token once `take` is called; joining: those of which the decoder
    computes the rest, and how many of their tokens are in pages; tokens: that this takes, padding included.
    """

    through: list[Request]
    joining: dict[Request, int]
    tokens: int = 0


class Group:
    """Requests whose prompts are computed together, sorted by slot; `done` columns of them are in their pages.

    Only a request by itself is computed in pieces. scored: whether the tokens of each prompt are. looked_up: whether
    what is known of their beginnings was.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = sorted(requests, key=lambda one: one.slot)
        self.ids = [one.known for one in self.requests]  # one that had to give way has tokens already
        self.scored = [one.sampling.prompt_logprobs is not None and not one.tokens for one in self.requests]
        for request, scored in zip(self.requests, self.scored, strict=True):
            if scored:
                request.prompt_scores.clear()  # of a forward that was given up
        self.done, self.looked_up = 0, False

    @property
    def columns(self) -> int:
        """Of the longest."""
        return max(len(ids) for ids in self.ids)


class Prompts:
    """Those of requests that hold their variant and have no row yet, in the order in which they came."""

    def __init__(self, pieces: Pieces, listener: Listener, step_tokens: int, pages: Pages, prefixes: Prefixes) -> None:
        """step_tokens: padding included, that one step computes of prompts; pages: where keys and values go."""
        self._pieces, self._listener, self._step_tokens = pieces, listener, step_tokens
        self._pages, self._prefixes = pages, prefixes
        self._groups: deque[Group] = deque()
        self._joined: list[tuple[Request, list[int]]] = []  # and the tokens of each
        self._due: list[tuple[list[Request], Choice]] = []  # first tokens

    @property
    def requests(self) -> list[Request]:
        """All that are on their way."""
        return [request for group in self._groups for request in group.requests]

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests at the end; short ones of like length go together."""
        waiting: dict[bool, list[Request]] = {True: [], False: []}  # by whether their forward is captured
        for request in sorted(requests, key=lambda one: one.length):
            captured = self._captures(request)
            rows = len(waiting[captured]) + 1
            tokens = padded(rows, request.length) if captured else rows * request.length
            if rows > 1 and tokens > (min(self._step_tokens, TOGETHER) if captured else self._step_tokens):
                self._groups.append(Group(waiting[captured]))
                waiting[captured] = []
            waiting[captured].append(request)
        self._groups += [Group(mates) for mates in waiting.values() if mates]

    def _captures(self, request: Request) -> bool:
        """Whether its prompt is computed in captured pieces; not where the logits of all its tokens are wanted."""
        scored = request.sampling.prompt_logprobs is not None and not request.tokens
        return self._pieces.captures(request.slot) and not scored

    def clear(self) -> None:
        """Forget all of them."""
        for group in self._groups:
            self._let_go(group)
        self._groups.clear()
        self._joined.clear()
        self._due.clear()

    def drop(self, gone: Collection[Request]) -> None:
        """Forget some, and those that have ended."""
        groups, self._groups = self._groups, deque()
        for group in groups:
            left = [request for request in group.requests if request not in gone and request.finished is None]
            if len(left) == len(group.requests):
                self._groups.append(group)
                continue
            self._let_go(group)
            if left:
                self._groups.append(Group(left))

    def step(self, *, alone: bool = False, in_line: int = 0) -> Through:
        """Compute so many tokens as a step has.

        alone: nobody waits for other tokens, so there may be more of these, and there is no step to join; in_line:
        tokens of prompts that are not here yet, as far as they make a difference.
        """
        found = Through([], {})
        left = most = self._most(alone, in_line)
        while self._groups and left > 0:
            group = self._groups[0]
            if not group.looked_up:
                self._look_up(self._groups.popleft())
                continue
            if not alone and (tokens := self._join(group, left, found.joining)):
                left -= tokens
                continue
            rows, columns = len(group.requests), group.columns - group.done
            if rows == 1:
                columns = min(columns, most)
            tokens = rows * columns
            if self._captures(group.requests[0]):  # which a scored one counts as, too, once it has a token
                tokens = padded(rows, columns) if rows > 1 else max(columns, SMALLEST)
            if not fits(tokens, left, most):
                break
            self._forward(group, columns)
            left -= tokens
            if group.done == group.columns:
                self._groups.popleft()
                for request, ids in zip(group.requests, group.ids, strict=True):
                    self._prefixes.keep(request, ids, request.pages)
                found.through.extend(group.requests)
        return found._replace(tokens=most - left)

    def take(self) -> None:
        """The first tokens of those that are through; waits for them."""
        due, self._due = self._due, []
        for requests, choice in due:
            found = choice.wait()
            self._pieces.check()
            for request, picked in zip(requests, found, strict=True):
                if picked.token == NO_TOKEN or any(isnan(one.logprob or 0.0) for one in request.prompt_scores):
                    request.fail_without_answer()
                    continue
                if not request.tokens:
                    self._listener.started(request)
                self._listener.token(request, picked, request.take(picked.token))

    def joined(self) -> None:
        """Those that joined the step are in their pages, which others may look at from now on."""
        for request, ids in self._joined:
            self._prefixes.keep(request, ids, request.pages)
        self._joined.clear()

    def _join(self, group: Group, left: int, joining: dict[Request, int]) -> int:
        """Let those of the first group that can join the coming step; returns how many tokens these are."""
        taken = sum(request.length - begin for request, begin in joining.items())
        looked_at = sum(_looks(request.length, begin) for request, begin in joining.items())
        room, rest, before = min(JOINED, taken + left), list[Request](), taken
        for request in group.requests:
            count, looks = request.length - group.done, _looks(request.length, group.done)
            short = taken + count <= room and looked_at + looks <= _LOOKED_AT
            if short and self._captures(request) and self._pieces.joins(request.slot):
                request.pages += self._pages.take(max(0, self._pages.needed(request.length) - len(request.pages)))
                self._joined.append((request, request.known))
                self._listener.computed(count)
                joining[request] = group.done
                taken, looked_at = taken + count, looked_at + looks
            else:
                rest.append(request)
        if taken > before:
            self._groups.popleft()
            if rest:
                left_over = Group(rest)
                left_over.looked_up = True
                self._groups.appendleft(left_over)
        return taken - before

    def _most(self, alone: bool, in_line: int) -> int:
        here = sum(len(group.requests) * (group.columns - group.done) for group in self._groups)
        return most_tokens(self._step_tokens, here + in_line, alone=alone)

    def _let_go(self, group: Group) -> None:
        for request in group.requests:
            self._pages.release(request.pages)
            request.pages = []

    def _look_up(self, group: Group) -> None:
        """Put a group back, requests of which the beginning is known before it, each by itself from there on."""
        known: list[Group] = []
        for request in group.requests:
            alone = Group([request])
            if not alone.scored[0]:  # else the logits of all its tokens are wanted
                request.pages = self._prefixes.find(request, alone.ids[0])
            if request.pages:
                alone.done = len(request.pages) * self._pages.size
                known.append(alone)
        rest = [one for one in group.requests if all(one not in other.requests for other in known)]
        for one in [*([Group(rest)] if rest else []), *reversed(known)]:
            one.looked_up = True
            self._groups.appendleft(one)

    def _forward(self, group: Group, columns: int) -> None:
        """The next columns of a group; chooses the first token of each request whose last one is among them."""
        first, last = group.done, group.done + columns
        for ids, one in zip(group.ids, group.requests, strict=True):
            one.pages += self._pages.take(max(0, self._pages.needed(min(last, len(ids))) - len(one.pages)))
        spans = [_wanted(len(ids), first, last, every) for ids, every in zip(group.ids, group.scored, strict=True)]
        slots = [one.slot for one in group.requests]
        pages = [one.pages for one in group.requests]
        logits = self._pieces.forward(Piece(slots, [ids[:last] for ids in group.ids], first, pages, spans))
        group.done = last
        self._listener.computed(sum(max(0, min(last, len(ids)) - first) for ids in group.ids))
        self._choose(group, spans, logits)

    def _choose(self, group: Group, spans: list[range], logits: Tensor) -> None:
        """logits: of the positions in `spans`, one request after another."""
        ends: list[tuple[Request, int]] = []
        at = 0
        for request, ids, span in zip(group.requests, group.ids, spans, strict=True):
            inner = [place for place in span if place + 1 < len(ids)]
            if inner:
                wanted = [Wanted(ids[place + 1], request.sampling.prompt_logprobs or 0) for place in inner]
                request.prompt_scores += score(logits[at : at + len(inner), : request.vocabulary], wanted)
            at += len(span)
            if len(span) > len(inner) and request.finished is None:
                ends.append((request, at - 1))
        if ends:
            rows = to_device([row for _, row in ends], logits.device)
            requests = [request for request, _ in ends]
            self._due.append((requests, Choice(logits[rows], requests)))


def _wanted(tokens: int, first: int, last: int, every: bool) -> range:
    """Positions in [first, last) of a prompt whose logits are wanted: every one's, or the last one's alone."""
    return range(first if every else max(first, tokens - 1), max(first, min(last, tokens)))


def _looks(length: int, begin: int) -> int:
    """Tokens that all from `begin` on look at, each at those before it."""
    return (length - begin) * (begin + length) // 2

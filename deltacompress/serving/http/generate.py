"""/v1/completions and /v1/chat/completions: a request's calls, and their answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from deltacompress.serving.client import Client
from deltacompress.serving.group import Group, RefusedError
from deltacompress.serving.http.answers import Answers
from deltacompress.serving.http.asked import Asked
from deltacompress.serving.http.errors import ApiError, no_engine, of_end, of_refusal, too_many
from deltacompress.serving.http.exchange import Exchange, GoneError
from deltacompress.serving.http.opened import Opener
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Began, Happening, Over, Token
from deltacompress.serving.rates import Rates


async def generate(
    exchange: Exchange, asked: Asked, client: Client, opener: Opener, rates: Rates, number: str, log: Log
) -> None:
    """Answer a request. opener: has the variants; rates: of each; number: a name that no other request has.

    Raises:
        ApiError: before the answer began.
        GoneError: the client went away; its calls are cancelled.
    """
    async with opener.using(asked.model) as variant:
        if (seconds := rates.take(variant or "", asked.calls)) is not None:
            raise too_many("this model", seconds)
        submits = asked.submits(number, variant, client.settings.limits.request_s)
        try:
            group = await client.submit(submits, asked.model, is_stream=asked.stream)
        except RefusedError as error:
            if client.gone.is_set():
                raise no_engine(failed=client.failure is not None) from None
            raise of_refusal(error.refused, asked.model, "messages" if asked.chat else "prompt") from None
        answers = Answers(asked, number, group.prompt_tokens, variant)
        async with _watched(exchange, group):
            if asked.stream:
                await _stream(exchange, asked, group, answers, client, log)
            else:
                await _whole(exchange, group, answers, client, log)


@asynccontextmanager
async def _watched(exchange: Exchange, group: Group) -> AsyncIterator[None]:
    """In this block a client that goes away ends its calls; they are ended at its end in any case."""

    async def watch() -> None:
        await exchange.until_gone()
        group.leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        group.leave()
        await asyncio.gather(task, return_exceptions=True)


async def _whole(exchange: Exchange, group: Group, answers: Answers, client: Client, log: Log) -> None:
    async for happenings in group.happenings():
        for place, told in happenings:
            _chunk(answers, place, told, group, client, log)
    if group.is_left:
        raise GoneError
    await exchange.answer(200, answers.whole())


async def _stream(exchange: Exchange, asked: Asked, group: Group, answers: Answers, client: Client, log: Log) -> None:
    """Nothing is sent before something happened, so that a call that fails at once has its status."""
    async for happenings in group.happenings():
        chunks: list[dict[str, Any]] = []
        failed: ApiError | None = None
        try:
            for place, told in happenings:
                if (chunk := _chunk(answers, place, told, group, client, log)) is not None:
                    chunks.append(chunk)
        except ApiError as error:
            if not exchange.status and not chunks:
                raise
            failed = error
        if not exchange.status:
            await exchange.begin_stream()
        if chunks or failed:
            await exchange.events([*chunks, failed.body()] if failed else chunks)
        if failed:
            await exchange.end_stream(is_whole=False)
            return
    if group.is_slow:
        exchange.cut()
    if group.is_left:
        raise GoneError
    if asked.usage:
        await exchange.events([answers.usage_chunk()])
    await exchange.end_stream(is_whole=True)


def _chunk(
    answers: Answers, place: int, told: Happening, group: Group, client: Client, log: Log
) -> dict[str, Any] | None:
    """What an event adds to the answer.

    Raises:
        ApiError: the call ended without one.
    """
    match told:
        case Token():
            return answers.token(place, told)
        case Began():
            return answers.began(place, told)
        case Over():
            if told.error is not None:
                log.line("call_failed", call=told.id, model=group.model, error=str(told.error))
            error = of_end(told, group.model, gone=client.gone.is_set(), stopping=client.stopping)
            if error is not None:
                raise error
            return answers.over(place, told)

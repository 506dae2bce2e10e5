"""The server's routes, as an ASGI application: who may ask what, and what every answer and every error looks like."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from deltacompress._version import __version__
from deltacompress.serving.client import Client
from deltacompress.serving.http import admin, asked
from deltacompress.serving.http.errors import ApiError, draining, no_engine, too_many
from deltacompress.serving.http.exchange import Exchange, GoneError, Receive, Scope, Send
from deltacompress.serving.http.fields import Fields, parse
from deltacompress.serving.http.generate import generate
from deltacompress.serving.http.opened import Opener
from deltacompress.serving.keys import Key, owner
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Variant
from deltacompress.serving.metrics import CONTENT_TYPE, Metrics
from deltacompress.serving.rates import Rates
from deltacompress.serving.settings import Settings

Handler = Callable[[Exchange], Awaitable[None]]
_MODEL = "/v1/models/"
_GONE = 499
"""The status that the log and the metrics have of a client that went away."""


@dataclass(frozen=True, slots=True)
class Route:
    """method and what answers; door: whose key it asks for, "all" for nobody's."""

    method: str
    handler: Handler
    door: str


class App:
    """Answers requests. is_draining: no new work is taken."""

    def __init__(self, settings: Settings, client: Client, metrics: Metrics, log: Log) -> None:
        self._settings, self._client, self._metrics, self._log = settings, client, metrics, log
        self._created = int(time.time())
        self._run, self._numbers = secrets.token_hex(4), itertools.count()
        self._opener = Opener(settings, client, metrics, log)
        self._key_rates, self._model_rates = Rates(settings.key_rate), Rates(settings.model_rate)
        self.is_draining = False
        self._routes = {
            "/health": Route("GET", self._health, "all"),
            "/ready": Route("GET", self._ready, "all"),
            "/version": Route("GET", self._version, "all"),
            "/metrics": Route("GET", self._tell_metrics, "api"),
            "/v1/models": Route("GET", self._models, "api"),
            _MODEL: Route("GET", self._model, "api"),
            "/v1/completions": Route("POST", self._completions, "api"),
            "/v1/chat/completions": Route("POST", self._chat, "api"),
            "/admin/load": Route("POST", self._load, "admin"),
            "/admin/unload": Route("POST", self._unload, "admin"),
            "/admin/drain": Route("POST", self._drain, "admin"),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not served")
        exchange = Exchange(scope, receive, send, self._settings.limits)
        begun, status = time.monotonic(), _GONE
        name = _MODEL if exchange.path.startswith(_MODEL) else exchange.path
        try:
            await self._answer(exchange, self._routes.get(name))
            status = exchange.status
        except (GoneError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            route = name if name in self._routes else "unknown"
            self._metrics.answered(route, status)
            self._log.line(
                "request",
                request=exchange.request,
                method=exchange.method[:16],
                route=route,
                status=status,
                **({"key": exchange.key} if exchange.key else {}),
                seconds=round(time.monotonic() - begun, 4),
            )

    async def _answer(self, exchange: Exchange, route: Route | None) -> None:
        try:
            await self._call(exchange, route)
        except ApiError as error:
            await exchange.answer(error.status, error.body(), error.headers)
        except GoneError:
            raise
        except Exception as error:
            self._log.bug("bug", error, request=exchange.request)
            if exchange.status:  # the answer had begun
                exchange.cut()
                raise GoneError from error
            told = ApiError(500, f"an error of the server's own; the log has request {exchange.request}", code="bug")
            await exchange.answer(500, told.body())

    async def _call(self, exchange: Exchange, route: Route | None) -> None:
        if route is None:
            raise ApiError(404, f"there is no {exchange.path!r:.200}", code="unknown_url")
        if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
            told = f"{exchange.method!r:.40} is not served here, {route.method} is"
            raise ApiError(405, told, code="method_not_allowed", headers={"allow": route.method})
        exchange.key = self._checked_key(exchange, route.door)
        await route.handler(exchange)

    def _checked_key(self, exchange: Exchange, door: str) -> str:
        """Let in who may come in; the name of the key, "" where none is asked for.

        Raises:
            ApiError: the key is missing or wrong, or there is none to be had.
        """
        settings = self._settings
        if door == "admin" and settings.admin_key is None:
            raise ApiError(403, "the server was started without --admin-key-file", code="no_admin_key")
        admins = () if settings.admin_key is None else (settings.admin_key,)
        keys: tuple[Key, ...] = {"all": (), "api": settings.api_keys, "admin": admins}[door]
        if not keys:
            return ""
        scheme, _, given = exchange.header("authorization").partition(b" ")
        name = owner(keys, given.strip())
        if scheme.lower() != b"bearer" or name is None:
            told = f"a key is needed: Authorization: Bearer {'ADMIN ' if door == 'admin' else ''}KEY"
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, told, code="invalid_api_key", headers=headers)
        return name

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        self._check_takes_work()
        await exchange.answer(200, {"status": "ready"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(200, {"version": __version__})

    async def _tell_metrics(self, exchange: Exchange) -> None:
        await exchange.raw(200, self._metrics.text(), CONTENT_TYPE)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.answer(200, {"object": "list", "data": self._all_models()})

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(_MODEL)
        found = {one["id"]: one for one in self._all_models()}
        if name not in found:
            origin = await self._opener.origin(name)  # what a completion would load
            name = f"{origin.entry}@{origin.version}"
            found.setdefault(name, self._told(Variant(name, None, "zoo", 0, pin=False, origin=origin)))
        await exchange.answer(200, found[name])

    def _all_models(self) -> list[dict[str, Any]]:
        return [self._told(None), *map(self._told, self._client.state.variants)]

    def _told(self, one: Variant | None) -> dict[str, Any]:
        """A variant, or the base, as a model of OpenAI's API."""
        base = self._settings.base_name
        common = {"object": "model", "created": self._created, "owned_by": "deltacompress"}
        if one is None:
            return {"id": base, **common, "parent": None}
        its = {"identity": one.identity, "place": one.place, "bytes": one.nbytes, "pin": one.pin}
        origin = {} if one.origin is None else msgspec.structs.asdict(one.origin)
        parent = None if one.place == "zoo" else base  # whether it is of this base is seen when it is loaded
        return {"id": one.name, **common, "parent": parent, **its, **origin}

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, asked.completion)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, asked.chat)

    async def _generate(self, exchange: Exchange, read: Callable[..., asked.Asked]) -> None:
        self._check_takes_work()
        body = await self._body(exchange)
        wanted = read(body, self._settings.limits)
        self._check_takes_work()  # the body took its time
        if (seconds := self._key_rates.take(exchange.key, wanted.calls)) is not None:
            raise too_many("this key", seconds)
        number = f"{self._run}{next(self._numbers):06x}"
        await generate(exchange, wanted, self._client, self._opener, self._model_rates, number, self._log)

    async def _body(self, exchange: Exchange) -> dict[str, Any]:
        return parse(await exchange.body(), self._settings.limits.body_bytes)

    def _check_takes_work(self) -> None:
        if self._client.gone.is_set():
            raise no_engine(failed=self._client.failure is not None)
        if self.is_draining:
            raise draining()

    async def _load(self, exchange: Exchange) -> None:
        self._check_takes_work()
        await exchange.answer(200, await admin.load(await self._body(exchange), self._client))

    async def _unload(self, exchange: Exchange) -> None:
        self._check_takes_work()
        await exchange.answer(200, await admin.unload(await self._body(exchange), self._client))

    async def _drain(self, exchange: Exchange) -> None:
        Fields(await self._body(exchange)).done()
        self.is_draining = True
        self._log.line("draining", left=self._client.busy)
        await exchange.answer(200, {"draining": True, "running": self._client.busy})

"""Whose variant a model's name means: one that is listed or, where that was asked for, any entry of the zoo.

An entry is loaded when a request names it, once, as `team/bot@7`: a tag that moves serves new requests with another
version, while those that run end on theirs. The least recently used that nobody uses go when there are too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltacompress.errors import BaseMismatchError, DeltaCompressError, PairError, UnsupportedModelError
from deltacompress.serving.client import Client
from deltacompress.serving.http.errors import (
    ApiError,
    model_unavailable,
    no_engine,
    too_late,
    unknown_model,
    wrong,
)
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Load, Origin, Unload
from deltacompress.serving.metrics import Metrics
from deltacompress.serving.settings import Settings
from deltacompress.serving.worker.entries import Entries
from deltacompress.zoo.errors import CacheFullError, InvalidNameError, NotFoundError
from deltacompress.zoo.ledger import names
from deltacompress.zoo.ledger.read import need_kind

if TYPE_CHECKING:
    from deltacompress.zoo.zoo import Zoo


def _heard(loading: asyncio.Task[str]) -> None:
    """Whoever waited may have left: that it failed is in the log."""
    if not loading.cancelled():
        loading.exception()


@dataclass(slots=True, eq=False)
class _Opened:
    """One that a request named. loading: ends with the identity of what was loaded; users: requests that have it."""

    loading: asyncio.Task[str]
    users: int = 0
    leaving: asyncio.Task[None] | None = None


class Opener:
    """The variants of one server. Of one event loop."""

    def __init__(self, settings: Settings, client: Client, metrics: Metrics, log: Log) -> None:
        self._settings, self._client, self._metrics, self._log = settings, client, metrics, log
        self._opened: dict[str, _Opened] = {}  # the least recently used first
        self._known: dict[str, tuple[str, float]] = {}  # the version that a name meant, and until when that is believed
        self._zoo: Zoo | None = None

    @asynccontextmanager
    async def using(self, model: str) -> AsyncIterator[str | None]:
        """The variant that a name means, None for the base; in this block it is not unloaded to make room.

        Raises:
            ApiError: there is none, or it cannot be had.
        """
        if model == self._settings.base_name:
            yield None
        elif model not in self._opened and self._identity(model) is not None:
            yield model
        elif not self._settings.opens_zoo:
            raise unknown_model(model)
        else:
            with self._client.preparing():
                name, one = await self._open(model)
            try:
                yield name
            finally:
                one.users -= 1
                self._make_room()

    async def origin(self, model: str) -> Origin:
        """The version of an entry that a name means, which may be loaded, and need not be.

        Raises:
            ApiError: there is none, or what it is cannot be read.
        """
        if not self._settings.opens_zoo:
            raise unknown_model(model)
        try:
            async with asyncio.timeout(self._settings.limits.request_s):
                name = await self._resolved(model)
                try:
                    return await asyncio.to_thread(self._origin, name)
                except DeltaCompressError as error:
                    self._log.line("open_failed", model=model, error=str(error))
                    raise
        except TimeoutError:
            raise too_late() from None
        except DeltaCompressError as error:
            raise self._refusal(error, model) from None

    def _origin(self, name: str) -> Origin:
        assert self._zoo is not None
        need_kind(*self._zoo.show(name), "delta", "adapter")
        return Entries(self._zoo, str(self._settings.base)).origin(name)

    async def _open(self, model: str) -> tuple[str, _Opened]:
        """The variant of an entry, loaded, and used from here on."""
        try:
            async with asyncio.timeout(self._settings.limits.request_s):
                name = await self._resolved(model)
                one = await self._found(name)
                one.users += 1
                try:
                    await asyncio.shield(one.loading)  # others may wait for it, too
                except BaseException:
                    one.users -= 1
                    raise
        except TimeoutError:
            raise too_late() from None
        except DeltaCompressError as error:
            raise self._refusal(error, model) from None
        return name, one

    async def _resolved(self, model: str) -> str:
        """The version that a name means at this moment.

        Raises:
            ApiError: the zoo has none of that name.
        """
        now = asyncio.get_running_loop().time()
        if (known := self._known.get(model)) is not None and now < known[1]:
            return known[0]
        try:
            names.parse(model)
            found = await asyncio.to_thread(self._resolve, model)
            self._remember(model, found, now)
            return found
        except (InvalidNameError, NotFoundError):
            raise unknown_model(model) from None
        except DeltaCompressError as error:
            self._log.line("open_failed", model=model, error=str(error))
            raise

    def _remember(self, model: str, found: str, asked: float) -> None:
        """From when the zoo was asked, not from when it answered, so that the bound holds."""
        if len(self._known) >= self._settings.limits.opened:
            self._known = {one: known for one, known in self._known.items() if asked < known[1]}
        if len(self._known) < self._settings.limits.opened:
            self._known[model] = found, asked + self._settings.limits.name_s

    def _resolve(self, model: str) -> str:
        if self._zoo is None:
            from deltacompress.zoo.zoo import Zoo

            assert self._settings.zoo is not None
            self._zoo = Zoo.open(self._settings.zoo)
        return str(self._zoo.resolve(model))

    async def _found(self, name: str) -> _Opened:
        """What is loaded or comes; who leaves is waited for."""
        while (one := self._opened.get(name)) is not None and one.leaving is not None:
            await asyncio.wait([one.leaving])
        if one is None or self._is_another(name, one):
            one = _Opened(asyncio.create_task(self._load(name)))
            one.loading.add_done_callback(_heard)
        self._opened.pop(name, None)
        self._opened[name] = one  # the last one
        return one

    def _is_another(self, name: str, one: _Opened) -> bool:
        """Whether the admin has unloaded it meanwhile, or what is loaded under its name is something else."""
        return one.loading.done() and (
            one.loading.exception() is not None or one.loading.result() != self._identity(name)
        )

    def _identity(self, name: str) -> str | None:
        """Of the loaded variant of this name, if there is one."""
        return next((one.identity for one in self._client.state.variants if one.name == name), None)

    async def _load(self, name: str) -> str:
        try:
            await self._load_beside(name)
        except DeltaCompressError as error:
            self._log.line("open_failed", model=name, error=str(error))
            del self._opened[name]
            raise
        self._metrics.opened()
        self._log.line("opened", model=name)
        return self._identity(name) or ""

    async def _load_beside(self, name: str) -> None:
        """Load an entry; the least recently used that nobody uses go, one by one, while the disk has no room for it."""
        while True:
            try:
                return await self._client.change(Load(self._client.number(), name, name, is_entry=True))
            except CacheFullError:
                if not (idle := self._idle()):
                    raise
                await asyncio.wait([self._leave(*idle[0])])
                if self._opened.get(idle[0][0]) is idle[0][1]:  # it could not
                    raise

    def _make_room(self) -> None:
        """Unload those of whom there are too many."""
        staying = sum(one.leaving is None for one in self._opened.values())
        for name, one in self._idle()[: max(staying - self._settings.limits.opened, 0)]:
            self._leave(name, one)

    def _idle(self) -> list[tuple[str, _Opened]]:
        """Those that nobody uses, and that stay."""
        every = self._opened.items()
        return [(name, one) for name, one in every if one.leaving is None and not one.users and one.loading.done()]

    def _leave(self, name: str, one: _Opened) -> asyncio.Task[None]:
        one.leaving = asyncio.create_task(self._unload(name, one))
        return one.leaving

    async def _unload(self, name: str, one: _Opened) -> None:
        try:
            await self._client.change(Unload(self._client.number(), name))
        except DeltaCompressError as error:
            if self._identity(name) is not None:  # a row of a call that was cancelled, say: next time
                self._log.line("close_failed", model=name, error=str(error))
                one.leaving = None
                return
        del self._opened[name]
        self._log.line("closed", model=name)

    def _refusal(self, error: DeltaCompressError, model: str) -> ApiError:
        """Why an entry cannot be served; what names files is for the log alone."""
        if self._client.gone.is_set():
            return no_engine(failed=self._client.failure is not None)
        match error:
            case NotFoundError():  # no longer there, or of a kind that is not served
                return ApiError(404, f"the model {model!r:.200}: {error.what}", param="model", code="model_not_found")
            case BaseMismatchError():
                return wrong("model", f"the model {model!r:.200} was made from another base", "base_mismatch")
            case UnsupportedModelError() | PairError():
                told = f"the model {model!r:.200} cannot be served beside this base; the log has why"
                return wrong("model", told, "unsupported_model")
            case _:
                return model_unavailable(model, error)

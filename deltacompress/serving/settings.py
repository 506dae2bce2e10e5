"""What a server is started with, checked before anything is loaded. No torch here."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltacompress.arguments import size_in_bytes
from deltacompress.errors import InputError, install_hint, option, switch
from deltacompress.runtime.engine.generation_config import check_text
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS
from deltacompress.serving.keys import Key, read_key, read_keys


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for.

    body_bytes: of a request; n: answers to one prompt; prompts: of one request; stops: stop strings; logprobs:
    likeliest tokens told of each; connections: at once; waiting: events of each call that a reader may be behind;
    opened: variants that requests named; beyond that, those go that nobody uses. name_s: in which the zoo is not asked
    again which version a name means; request_s: of a whole answer; header_s, body_s: to send a request; write_s: to
    take what was sent; silent_s, step_s: in which the engine's process must report something, and end a step; all in
    seconds.
    """

    body_bytes: int = 4 * 2**20
    n: int = 16
    prompts: int = 64
    stops: int = 16
    logprobs: int = 20
    connections: int = 1024
    waiting: int = 4096
    opened: int = 1000
    name_s: float = 2.0
    request_s: float = 600.0
    header_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    silent_s: float = 30.0
    step_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One server.

    base: directory; variants: (name, source) of each; entries: (name, version) of those that come from the zoo;
    profile: file of limits that were chosen for a device and a base, which the engine's process holds against its own;
    opens_zoo: any entry of the zoo is loaded when a request names it; port: 0 takes a free one; drain_s: seconds that
    running requests have once the server is told to end; api_keys: of clients, none for no door; key_rate, model_rate:
    calls a minute of each key and of each model, None for no limit. The others as Runtime.from_base and Engine have
    them.
    """

    base: Path
    variants: tuple[tuple[str, str], ...] = ()
    zoo: str | None = None
    entries: tuple[tuple[str, str], ...] = ()
    opens_zoo: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[Key, ...] = ()
    admin_key: Key | None = None
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    tp: int = 1
    budget_bytes: int | None = None
    max_batch: int = MAX_BATCH
    max_queue: int = 1024
    step_tokens: int = STEP_TOKENS
    prefix_bytes: int = 1 << 30
    swap_bytes: int = 0
    profile: Path | None = None
    drain_s: float = 30.0
    key_rate: int | None = None
    model_rate: int | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def base_name(self) -> str:
        """The base's own name among the models."""
        return self.base.resolve().name

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            InputError: a name is there twice, a number is out of range, an open address has no key.
        """
        for one in (str(self.base), *(part for variant in self.variants for part in variant)):
            check_text(one.encode(errors="backslashreplace").decode(), one)
        names = [name for name, _ in self.variants]
        for name in names:
            if names.count(name) > 1:
                raise InputError("is given twice", where=f"the name {name}", way_out="name each variant once")
            if name == self.base_name:
                raise InputError("is the base's own name", where=f"the name {name}", way_out="give another")
        if self.opens_zoo and not self.zoo:
            raise InputError("needs a zoo", where=switch("open_zoo"), way_out=f"give {option('zoo')}")
        if not 0 <= self.port < 2**16:
            raise InputError("give a port from 1 to 65535, or 0 for a free one", where=f"{option('port')} {self.port}")
        if not 0 <= self.drain_s < math.inf:
            raise InputError("give seconds, 0 or more", where=f"{option('drain')} {self.drain_s}")
        for name in ("max_batch", "max_queue", "step_tokens", "key_rate", "model_rate"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError("at least 1", where=f"{option(name)} {number}")
        if self.swap_bytes and self.tp > 1:
            way_out = f"leave out one of it and {option('tp')}"
            raise InputError("is for one device", where=option("swap_space"), way_out=way_out)
        if self.key_rate is not None and not self.api_keys:
            raise InputError("needs keys", where=option("key_rate"), way_out=f"give {option('api_key_file')}")
        if not self.api_keys and not is_loopback(self.host):
            raise InputError(
                "others can reach this address, and no key is asked of them",
                where=f"{option('host')} {self.host}",
                way_out=f"give {option('api_key_file')}, or serve on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_LEAST_SWAP = 2**26  # of bytes: a number without a unit is a slip of the hand


def named(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """NAME=SOURCE, each as (name, source).

    Raises:
        InputError: one is not of that form.
    """
    found = []
    for one in given:
        name, separator, source = one.partition("=")
        if not (name and separator and source):
            raise InputError("is not NAME=SOURCE", where=one, way_out="such as bot=path/of/artifact")
        found.append((name, source))
    return tuple(found)


def key_of(name: str, path: Path | None) -> Key | None:
    """The key in the file that an option names, if it is given; raises as read_key."""
    return None if path is None else read_key(option(name), path)


def keys_of(name: str, path: Path | None) -> tuple[Key, ...]:
    """The keys in the file that an option names, if it is given; raises as read_keys."""
    return () if path is None else read_keys(option(name), path)


def budget_bytes(size: str | None) -> int | None:
    """Bytes of a size such as "20GB".

    Raises:
        InputError: it is none.
    """
    if size is None:
        return None
    return size_in_bytes(size, f"{option('budget')} {size}", such_as="20GB")


def prefix_bytes(size: str) -> int:
    """Bytes of a size such as "1GB"; "0" is none.

    Raises:
        InputError: it is no size.
    """
    return size_in_bytes(size, f"{option('prefix_cache')} {size}", such_as="1GB, or 0", least=0)


def swap_bytes(size: str) -> int:
    """Bytes of a size such as "8GB", or of none.

    Raises:
        InputError: it is no size, or too little for a page of most models.
    """
    where, such_as = f"{option('swap_space')} {size}", "8GB, or 0"
    found = size_in_bytes(size, where, such_as=such_as, least=0)
    return found and size_in_bytes(size, where, such_as=such_as, least=_LEAST_SWAP)


def check_extra() -> None:
    """Refuse to start without the libraries of the extra `serve`.

    Raises:
        InputError: one is missing.
    """
    try:
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise InputError(f"serving needs {error.name}: {install_hint('serve')}") from error

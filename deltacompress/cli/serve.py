"""`deltacompress serve`: base and variants behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltacompress.cli import early, named
from deltacompress.cli.console import Console, verb
from deltacompress.cli.options import BaseArgument, Device, ServingBackend, ServingDtype
from deltacompress.cli.zoo_options import ZooOption
from deltacompress.devices import check_driver

if TYPE_CHECKING:
    from deltacompress.serving.settings import Settings

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=SOURCE]...", help="Artifacts, adapters or entries of --zoo, each with a name."),
]
OpenZoo = Annotated[
    bool, typer.Option("--open-zoo", help="Load any entry of --zoo when a request names it, such as team/bot@prod.")
]
Host = Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a key.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File with the key that clients must have (mode 600, one line).")]
AdminKeyFile = Annotated[
    Path | None, typer.Option(help="File with the key of /admin (mode 600, one line); without it that is closed.")
]
Budget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Of variants on the device, such as 20GB; else all are there.")
]
MaxBatch = Annotated[int, typer.Option(help="Requests that run at once, at most.")]
MaxQueue = Annotated[int, typer.Option(help="Requests that wait, at most; more are told 429.")]
StepTokens = Annotated[int, typer.Option(help="Tokens of prompts that one step computes, at most.")]
PrefixCache = Annotated[
    str, typer.Option(metavar="SIZE", help="Device memory for prompts that others may begin with; 0: none.")
]
Drain = Annotated[float, typer.Option(help="Seconds that running requests have after a SIGTERM.")]


@verb
def serve(
    console: Console,
    base: BaseArgument,
    variants: Sources = None,
    *,
    zoo: ZooOption = None,
    open_zoo: OpenZoo = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: ApiKeyFile = None,
    admin_key_file: AdminKeyFile = None,
    device: Device = "auto",
    dtype: ServingDtype = "auto",
    backend: ServingBackend = "auto",
    budget: Budget = None,
    max_batch: MaxBatch = 64,
    max_queue: MaxQueue = 1024,
    step_tokens: StepTokens = 512,
    prefix_cache: PrefixCache = "1GiB",
    drain: Drain = 30.0,
) -> None:
    """Serve BASE and its variants over HTTP, as OpenAI's API does, until SIGTERM or Ctrl-C."""
    from deltacompress.serving import settings as given

    given.check_extra()
    settings = given.Settings(
        base=base,
        variants=given.named(variants or ()),
        zoo=zoo,
        opens_zoo=open_zoo,
        host=host,
        port=port,
        api_key=given.key_of("api_key_file", api_key_file),
        admin_key=given.key_of("admin_key_file", admin_key_file),
        device=device,
        dtype=dtype,
        backend=backend,
        budget_bytes=given.budget_bytes(budget),
        max_batch=max_batch,
        max_queue=max_queue,
        step_tokens=step_tokens,
        prefix_bytes=given.prefix_bytes(prefix_cache),
        drain_s=drain,
    )
    settings.check()
    check_driver(device)
    if open_zoo:
        early.zoo(zoo)
    early.checkpoints(base)
    settings = _found(console, settings)
    from deltacompress.serving.run import serve as run

    def ready(url: str, notes: tuple[str, ...]) -> None:
        for note in notes:
            console.note(note)
        models = [settings.base_name, *(name for name, _ in settings.variants)]
        told = f"serving {', '.join(models)} at {url}/v1"
        console.result({"url": f"{url}/v1", "models": models}, lambda: told)

    run(settings, ready)


def _found(console: Console, given: Settings) -> Settings:
    """The same, with each variant's directory, and its version of an entry if it is one; raises as early.served."""
    entries = {name: early.entry(source, given.zoo) for name, source in given.variants}
    with console.progress() as reporter:
        sources, under = named.beneath(dict(given.variants), {}, given.zoo, given.base, reporter)
        places = tuple(
            (name, str(early.served(one, given.zoo, base=given.base, over=under.get(name), reporter=reporter)))
            for name, one in sources.items()
        )
    known = tuple((name, entry) for name, entry in entries.items() if entry is not None)
    return replace(given, variants=places, entries=known)

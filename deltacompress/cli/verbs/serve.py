"""`deltacompress serve`: base and variants behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacompress.cli.given import early, named
from deltacompress.cli.given.options import BaseArgument, Device, ServingBackend, ServingDtype, Tp
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption
from deltacompress.devices import check_driver
from deltacompress.errors import InputError, option
from deltacompress.runtime.engine.policy.portions import MAX_BATCH, STEP_TOKENS

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
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with the keys that clients must have (mode 600, lines of KEY or NAME KEY).")
]
AdminKeyFile = Annotated[
    Path | None, typer.Option(help="File with the key of /admin (mode 600, one line); without it that is closed.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of variants on the device, such as 20GB.",
        show_default="the profile's; of a GPU at most 45 % of what the base leaves; on a CPU all are there",
    ),
]
MaxBatch = Annotated[
    int | None, typer.Option(help="Requests that run at once, at most.", show_default=f"{MAX_BATCH}, or the profile's")
]
MaxQueue = Annotated[int, typer.Option(help="Requests that wait, at most; more are told 429.")]
StepTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of prompts in a step in which others wait for theirs.",
        show_default=f"{STEP_TOKENS}, or the profile's",
    ),
]
ProfileIn = Annotated[
    Path | None,
    typer.Option("--profile", help="File of `bench serve --tune`: budget, max-batch and step-tokens, unless given."),
]
PrefixCache = Annotated[
    str, typer.Option(metavar="SIZE", help="Device memory for prompts that others may begin with; 0: none.")
]
SwapSpace = Annotated[
    str, typer.Option(metavar="SIZE", help="Host memory for keys and values of requests that give way; 0: none.")
]
KeyRate = Annotated[int | None, typer.Option(help="Answers a minute for each key; more are told 429.")]
ModelRate = Annotated[int | None, typer.Option(help="Answers a minute of each model; more are told 429.")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests have after a SIGTERM.")]

_TUNED = ("budget_bytes", "max_batch", "step_tokens")
"""Settings that a profile says."""


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
    tp: Tp = 1,
    budget: Budget = None,
    max_batch: MaxBatch = None,
    max_queue: MaxQueue = 1024,
    step_tokens: StepTokens = None,
    profile: ProfileIn = None,
    prefix_cache: PrefixCache = "1GiB",
    swap_space: SwapSpace = "0",
    key_rate: KeyRate = None,
    model_rate: ModelRate = None,
    drain: Drain = 30.0,
) -> None:
    """Serve BASE and its variants over HTTP, as OpenAI's API does, until SIGTERM or Ctrl-C."""
    settings = _settings(dict(locals()))
    settings.check()
    check_driver(device)
    if zoo:  # also where no variant is of it yet: --open-zoo and /admin load from it later
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


def _tuned(
    path: Path | None, tp: int, budget: int | None, max_batch: int | None, step_tokens: int | None
) -> dict[str, Any]:
    """What is given, else what the profile says, else what is usual.

    Raises:
        InputError: as read_profile; a profile, which is of one device, for several.
    """
    from deltacompress.serving.profile import read_profile

    if path is not None and tp > 1:
        raise InputError(
            f"was measured on one device, and {option('tp')} is {tp}",
            where=path,
            way_out=f"give {option('budget')}, {option('max_batch')} and {option('step_tokens')} instead",
        )
    profile = None if path is None else read_profile(path)
    said = {} if profile is None else {name: getattr(profile, name) for name in _TUNED}
    given = dict(zip(_TUNED, (budget, max_batch, step_tokens), strict=True))
    return said | {name: value for name, value in given.items() if value is not None}


_AS_THEY_ARE = ("base", "zoo", "host", "port", "device", "dtype", "backend", "tp", "max_queue",
                "key_rate", "model_rate", "profile")  # fmt: skip
"""Options that the settings have under the same name."""


def _settings(options: dict[str, Any]) -> Settings:
    """What the options say; raises what is wrong with one by itself."""
    from deltacompress.serving import settings as given

    given.check_extra()
    return given.Settings(
        variants=given.named(options["variants"] or ()),
        opens_zoo=options["open_zoo"],
        api_keys=given.keys_of("api_key_file", options["api_key_file"]),
        admin_key=given.key_of("admin_key_file", options["admin_key_file"]),
        prefix_bytes=given.prefix_bytes(options["prefix_cache"]),
        swap_bytes=given.swap_bytes(options["swap_space"]),
        drain_s=options["drain"],
        **_tuned(
            options["profile"],
            options["tp"],
            given.budget_bytes(options["budget"]),
            options["max_batch"],
            options["step_tokens"],
        ),
        **{name: options[name] for name in _AS_THEY_ARE},
    )


def _found(console: Console, given: Settings) -> Settings:
    """The same, with each variant's directory, and its version of an entry if it is one; raises as early.served."""
    entries = {name: early.entry(source, given.zoo) for name, source in given.variants}
    with console.progress() as reporter:
        asked = {name: entries[name] or source for name, source in given.variants}  # a tag may move meanwhile
        sources, under = named.beneath(asked, {}, given.zoo, given.base, reporter)
        places = tuple(
            (name, str(early.served(one, given.zoo, base=given.base, over=under.get(name), reporter=reporter)))
            for name, one in sources.items()
        )
    known = tuple((name, entry) for name, entry in entries.items() if entry is not None)
    return replace(given, variants=places, entries=known)

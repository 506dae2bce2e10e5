"""`deltacompress generate` and `deltacompress chat`: text from one variant, served beside its base."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from deltacompress.cli import interrupts
from deltacompress.cli.given import early, named
from deltacompress.cli.given.named import Over, OverOne
from deltacompress.cli.given.options import (
    ArtifactArgument,
    BaseOption,
    Bos,
    Device,
    DrawSeed,
    NewTokens,
    ServingBackend,
    ServingDtype,
    Temperature,
    TopP,
    Tp,
)
from deltacompress.cli.shown.console import Console, verb
from deltacompress.cli.zoo.options import ZooOption
from deltacompress.devices import check_driver
from deltacompress.errors import InputError

if TYPE_CHECKING:
    from deltacompress.runtime import Completion, Runtime

_MAIN = ""
"""Stands for ARTIFACT among the names of --also, none of which is empty."""
_NONE: Mapping[str, str] = MappingProxyType({})


@verb
def generate(
    console: Console,
    artifact: ArtifactArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from the input.")],
    *,
    base: BaseOption,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SOURCE", help="Another artifact or adapter for the same batch; may be repeated."),
    ] = None,
    over: Over = None,
    max_new_tokens: NewTokens = 32,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: DrawSeed = 0,
    bos: Bos = None,
    device: Device = "auto",
    dtype: ServingDtype = "auto",
    backend: ServingBackend = "auto",
    tp: Tp = 1,
    zoo: ZooOption = None,
) -> None:
    """Continue PROMPT with the variant in ARTIFACT (a packed delta, or a PEFT adapter), served beside its base.

    An adapter of a fine-tuned model goes over its delta: --over DELTA for ARTIFACT, NAME=DELTA for one of --also.
    """
    from deltacompress.runtime.engine.generation_config import Sampling, check_text

    check_text("PROMPT", prompt)
    others = named.also(also or ())
    below = named.over(over or (), others, _MAIN)
    early.sampling(max_new_tokens, stop or (), temperature, top_p, seed)
    _note_greedy(console, temperature, top_p, seed)
    check_driver(device)
    prompt = _read_prompt(may_be_empty=bool(bos)) if prompt == "-" else prompt
    runtime, name = _open(console, artifact, base, zoo, device, dtype, backend, others, below, tp)
    shows = not console.settings.json and not others

    def show(_: int, __: int, text: str) -> None:
        console.write(text)

    asked, sampling = [(one, prompt) for one in (name, *others)], Sampling(temperature, top_p, seed)
    begun = time.perf_counter()
    done, *more = runtime.complete(
        asked, max_new_tokens, stop=stop or (), on_token=show if shows else None, sampling=sampling, bos=bos
    )
    for one in (done, *more):
        if one.error is not None:
            raise one.error
    seconds = time.perf_counter() - begun
    if others:
        _show_answers(
            console, runtime, artifact, prompt, dict(zip((name, *others), (done, *more), strict=True)), seconds
        )
    else:
        _show_answer(console, runtime, artifact, prompt, done, seconds)


@verb
def chat(
    console: Console,
    artifact: ArtifactArgument,
    *,
    base: BaseOption,
    over: OverOne = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: DrawSeed = 0,
    bos: Bos = None,
    device: Device = "auto",
    dtype: ServingDtype = "auto",
    backend: ServingBackend = "auto",
    tp: Tp = 1,
    zoo: ZooOption = None,
) -> None:
    """Talk to the variant in ARTIFACT, a line at a time; an empty line or the end of the input ends it.

    Ctrl-C ends an answer, and at the prompt, or over several devices, the chat.

    The conversation goes through the model's chat template where it has one; else each line is a prompt of its own.
    """
    from deltacompress.runtime.engine.generation_config import Sampling

    early.sampling(max_new_tokens, (), temperature, top_p, seed)
    _note_greedy(console, temperature, top_p, seed)
    sampling = Sampling(temperature, top_p, seed)
    below = _NONE if over is None else {_MAIN: over}
    runtime, name = _open(console, artifact, base, zoo, device, dtype, backend, below=below, tp=tp)
    shows = not console.settings.json
    said, heard = list[dict[str, str]](), list[str]()

    def show(_: int, __: int, text: str) -> None:
        heard.append(text)
        if shows:
            console.write(text)

    interrupts.tell(at_once=False)  # here it ends an answer, and that is told
    while line := _next_line(console, shows):
        said.append({"role": "user", "content": line})
        prompt = runtime.chat_ids(name, said)
        begun = time.perf_counter()
        try:
            done = runtime.complete(
                [(name, line if prompt is None else prompt)], max_new_tokens, on_token=show, sampling=sampling, bos=bos
            )[0]
        except KeyboardInterrupt:
            if tp > 1 or not interrupts.is_ctrl_c():  # the ranks are out of step
                raise
            interrupts.forget()
            console.note("\nstopped; Ctrl-C at the prompt ends the chat")
            said.append({"role": "assistant", "content": "".join(heard)})
            heard.clear()
            continue
        if done.error is not None:
            raise done.error
        heard.clear()
        said.append({"role": "assistant", "content": done.text})
        _show_answer(console, runtime, artifact, line, done, time.perf_counter() - begun)


def _show_answer(
    console: Console, runtime: Runtime, artifact: str, prompt: str, done: Completion, seconds: float
) -> None:
    """How fast the text came, which is on the screen already; or all of it as JSON."""
    if console.settings.json:
        console.result(_data(runtime, artifact, prompt, done, seconds), str)
        return
    console.write("\n")
    console.note(_told(runtime, done, seconds))


def _show_answers(
    console: Console, runtime: Runtime, artifact: str, prompt: str, answers: Mapping[str, Completion], seconds: float
) -> None:
    """Of several variants in one batch, each after its name; as JSON the first as alone, and all of them."""
    first = next(iter(answers.values()))
    every = [
        {"name": name, "text": one.text, "tokens": list(one.tokens), "finished": one.finished}
        for name, one in answers.items()
    ]
    data = _data(runtime, artifact, prompt, first, seconds) | {"answers": every}
    if console.settings.json:
        console.result(data, str)
        return
    for name, one in answers.items():
        console.write(f"{name}: {one.text}\n")
    tokens = sum(len(one.tokens) for one in answers.values())
    console.note(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, backend {runtime.backend}")


def _note_greedy(console: Console, temperature: float, top_p: float, seed: int) -> None:
    for name, is_given in (("--top-p", top_p != 1), ("--seed", seed != 0)):
        if is_given and temperature == 0:
            console.note(f"{name}: not used, since without --temperature nothing is drawn")


def _open(
    console: Console,
    artifact: str,
    base: Path,
    zoo: str | None,
    device: str,
    dtype: str,
    backend: str,
    others: Mapping[str, str] = _NONE,
    below: Mapping[str, str] = _NONE,
    tp: int = 1,
) -> tuple[Runtime, str]:
    """The base with the variant loaded, and its name; others: more by name; below: the deltas that adapters go over."""
    with console.progress() as reporter:
        sources, under = named.beneath({_MAIN: artifact} | dict(others), below, zoo, base, reporter)
        places = {
            one: early.served(source, zoo, base=base, over=under.get(one), reporter=reporter)
            for one, source in sources.items()
        }
    with interrupts.nothing_begun():
        from deltacompress.runtime import Runtime
    runtime = Runtime.from_base(base, device=device, dtype=dtype, backend=backend, tp=tp)
    place = places.pop(_MAIN)
    own = None if place == Path(artifact) else artifact  # an entry's own name, not that of a cache
    name = runtime.load(place, own, over=under.get(_MAIN))
    named.check_own(name, places)
    for one, its in places.items():
        runtime.load(its, one, over=under.get(one))
    for note in (runtime.describe(), *runtime.notes):
        console.note(note)
    return runtime, name


def _next_line(console: Console, shows: bool) -> str:
    """What is said next; nothing where the chat is left: by an empty line, at the input's end, or by Ctrl-C."""
    try:
        return _ask(shows)
    except KeyboardInterrupt:
        if not interrupts.is_ctrl_c():
            raise
        interrupts.forget()
        console.note("")  # the terminal has written ^C after the prompt
        return ""


def _ask(shows: bool) -> str:
    if shows and sys.stdin is not None and sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return _read(whole=False).strip()


def _read(*, whole: bool) -> str:
    """All of the standard input, or the next line of it; nothing at its end.

    Raises:
        InputError: it is closed, or no UTF-8 text.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed, so no prompt can be read from it", way_out="leave it open")
    source = sys.stdin.buffer
    raw = source.read() if whole else source.readline()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start} is not UTF-8", where="standard input", way_out="give the prompt as UTF-8 text"
        ) from error


def _read_prompt(*, may_be_empty: bool) -> str:
    prompt = _read(whole=True).removesuffix("\n")
    if not prompt and not may_be_empty:
        raise InputError("standard input is empty, and so is the prompt", way_out="write some text to it, or add --bos")
    return prompt


def _told(runtime: Runtime, done: Completion, seconds: float) -> str:
    rate = len(done.tokens) / seconds
    return f"{len(done.tokens)} tokens, {rate:.1f} tokens/s, ended by {done.finished}, backend {runtime.backend}"


def _data(runtime: Runtime, artifact: str, prompt: str, done: Completion, seconds: float) -> dict[str, object]:
    return {
        "artifact": artifact,
        "prompt": prompt,
        "text": done.text,
        "tokens": list(done.tokens),
        "finished": done.finished,
        "tokens_per_second": round(len(done.tokens) / seconds, 3),
        "seconds": round(seconds, 3),
        "backend": runtime.backend,
        "device": str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "merge_rounding": runtime.merge_rounding,
        "residency": asdict(runtime.residency()),
    }

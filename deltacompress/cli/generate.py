"""`deltacompress generate` and `deltacompress chat`: text from one variant, served beside its base."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deltacompress.cli import early, interrupts
from deltacompress.cli.console import Console, verb
from deltacompress.cli.models import model
from deltacompress.cli.zoo_options import ZooOption
from deltacompress.devices import check_driver
from deltacompress.errors import InputError

if TYPE_CHECKING:
    from deltacompress.runtime import Completion, Runtime

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "reference", "triton", "cuda"]

Artifact = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="Directory of the artifact, or the name of an entry of --zoo.")
]
BaseOption = Annotated[
    Path, typer.Option(metavar="<path>", parser=model, help="Directory of the base model the delta was made from.")
]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and activations; auto: float32 on a CPU, else bfloat16.")]
BackendOption = Annotated[Backend, typer.Option(help="What computes the products of packed deltas.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the most likely token.")]
TopP = Annotated[
    float,
    typer.Option(
        help="Draw from the most likely tokens that have this probability together; above 0, at most 1 (all tokens)."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Put the bos token before the prompt.", show_default="as the tokenizer does"),
]


@verb
def generate(
    console: Console,
    artifact: Artifact,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from the input.")],
    *,
    base: BaseOption,
    max_new_tokens: NewTokens = 32,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    bos: Bos = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    zoo: ZooOption = None,
) -> None:
    """Continue PROMPT with the variant in ARTIFACT, served as base + packed delta."""
    from deltacompress.runtime.engine.generation_config import Sampling, check_text

    check_text("PROMPT", prompt)
    early.sampling(max_new_tokens, stop or (), temperature, top_p, seed)
    _note_greedy(console, temperature, top_p, seed)
    check_driver(device)
    if prompt == "-":
        prompt = _read(whole=True).removesuffix("\n")
        if not prompt and not bos:
            raise InputError(
                "standard input is empty, and so is the prompt", way_out="write some text to it, or add --bos"
            )
    runtime, name = _open(console, artifact, base, zoo, device, dtype, backend)
    shows = not console.settings.json

    def show(_: int, __: int, text: str) -> None:
        console.write(text)

    begun = time.perf_counter()
    done = runtime.complete(
        [(name, prompt)],
        max_new_tokens,
        stop=stop or (),
        on_token=show if shows else None,
        sampling=Sampling(temperature, top_p, seed),
        bos=bos,
    )[0]
    if done.error is not None:
        raise done.error
    if shows:
        console.write("\n")
        console.note(_told(runtime, done, time.perf_counter() - begun))
        return
    console.result(_data(runtime, artifact, prompt, done, time.perf_counter() - begun), str)


@verb
def chat(
    console: Console,
    artifact: Artifact,
    *,
    base: BaseOption,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    bos: Bos = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    zoo: ZooOption = None,
) -> None:
    """Talk to the variant in ARTIFACT, a line at a time; an empty line or the end of the input ends it.

    Ctrl-C ends an answer, and at the prompt the chat.

    The conversation goes through the model's chat template where it has one; else each line is a prompt of its own.
    """
    from deltacompress.runtime.engine.generation_config import Sampling

    early.sampling(max_new_tokens, (), temperature, top_p, seed)
    _note_greedy(console, temperature, top_p, seed)
    runtime, name = _open(console, artifact, base, zoo, device, dtype, backend)
    shows = not console.settings.json

    heard: list[str] = []

    def show(_: int, __: int, text: str) -> None:
        heard.append(text)
        if shows:
            console.write(text)

    said: list[dict[str, str]] = []
    interrupts.tell(at_once=False)  # here it ends an answer, and that is told
    while line := _ask(shows):
        said.append({"role": "user", "content": line})
        prompt = runtime.chat_ids(name, said)
        begun = time.perf_counter()
        try:
            done = runtime.complete(
                [(name, line if prompt is None else prompt)],
                max_new_tokens,
                on_token=show,
                sampling=Sampling(temperature, top_p, seed),
                bos=bos,
            )[0]
        except KeyboardInterrupt:
            if not interrupts.is_ctrl_c():
                raise
            interrupts.forget()
            said.append({"role": "assistant", "content": "".join(heard)})
            heard.clear()
            console.note("\nstopped; Ctrl-C at the prompt ends the chat")
            continue
        if done.error is not None:
            raise done.error
        heard.clear()
        seconds = time.perf_counter() - begun
        said.append({"role": "assistant", "content": done.text})
        if shows:
            console.write("\n")
            console.note(_told(runtime, done, seconds))
        else:
            console.result(_data(runtime, artifact, line, done, seconds), str)


def _note_greedy(console: Console, temperature: float, top_p: float, seed: int) -> None:
    for name, is_given in (("--top-p", top_p != 1), ("--seed", seed != 0)):
        if is_given and temperature == 0:
            console.note(f"{name}: not used, since without --temperature nothing is drawn")


def _open(
    console: Console, artifact: str, base: Path, zoo: str | None, device: Device, dtype: Dtype, backend: Backend
) -> tuple[Runtime, str]:
    """The base with the variant loaded, and the variant's name."""
    with console.progress() as reporter:
        place = early.artifact(artifact, zoo, base=base, reporter=reporter)
    from deltacompress.runtime import Runtime

    runtime = Runtime.from_base(base, device=device, dtype=dtype, backend=backend)
    name = runtime.load(place)
    for note in (runtime.describe(), *runtime.notes):
        console.note(note)
    return runtime, name


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
    }

"""Arguments and options that several verbs share, each with the one text that their help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deltacompress.cli.given.models import model
from deltacompress.devices import DeviceName

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "triton", "cuda"]

# Models and artifacts.
BaseArgument = Annotated[Path, typer.Argument(metavar="BASE", parser=model, help="Directory of the base model.")]
FinetunedArgument = Annotated[
    Path, typer.Argument(metavar="FINETUNED", parser=model, help="Directory of the fine-tuned model.")
]
ArtifactArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="Directory of the artifact, or the name of an entry of --zoo.")
]
BaseOption = Annotated[
    Path, typer.Option(metavar="<path>", parser=model, help="Directory of the base model the delta was made from.")
]
ReplaceCheckpoint = Annotated[
    bool, typer.Option("--force", help="Replace another checkpoint in --out, once the new one is whole.")
]

# Where to compute, and in what.
Device = Annotated[DeviceName, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]
ServingDtype = Annotated[
    DtypeName, typer.Option(help="Of weights and activations; auto: float32 on a CPU, else bfloat16.")
]
ServingBackend = Annotated[BackendName, typer.Option(help="What computes the products of packed deltas.")]
Tp = Annotated[
    int, typer.Option(metavar="N", min=1, help="Devices that base and variants are split over, a process for each.")
]
BenchDevice = Annotated[DeviceName, typer.Option(help="Where to compute.")]
BenchBackend = Annotated[BackendName, typer.Option(help="What computes the products.")]
EvalDevice = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")]
EvalBackend = Annotated[BackendName, typer.Option(help="Kernels of the runtime.")]

# What is measured.
Tasks = Annotated[str, typer.Option(help="Tasks, separated by commas: names of evals/tasks, or folders of --task-dir.")]
TaskDir = Annotated[
    Path | None, typer.Option(help="Folder with <task>/validation.jsonl (and train.jsonl), or <task>.yaml.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first samples of each task.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch, at most.")]
MakeAnew = Annotated[
    bool, typer.Option("--force", help="Make anew, and replace what --out holds of another input, once that is done.")
]

# How a text is written.
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the most likely token.")]
TopP = Annotated[
    float,
    typer.Option(
        help="Draw from the most likely tokens that have this probability together; above 0, at most 1 (all tokens)."
    ),
]
DrawSeed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Put the bos token before the prompt.", show_default="as the tokenizer does"),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Numbers of equal GPUs that share the work of one model, e.g. 0,1."),
]


def files_in(files: str) -> Any:
    """The option of a folder for files, which says how large they are."""
    told = f"Directory for {files}; a temporary one by default."
    return typer.Option(exists=True, file_okay=False, writable=True, help=told)


# A random pair of some layers.
Samples = Annotated[int, typer.Option(min=1, help="Calibration sequences.")]
BenchShape = Literal["tiny", "llama-7b", "llama-13b", "llama-70b", "qwen3-30b-a3b"]
PairShape = Annotated[
    BenchShape | None,
    typer.Option(help="Sizes of a layer.", show_default="llama-7b; on a CPU tiny"),
]
PairScratch = Annotated[Path | None, files_in("the files, 2 GB for a layer of llama-7b")]

DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Use at most this much of a GPU's memory, e.g. 26GB; slower, same bytes."),
]

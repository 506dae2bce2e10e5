"""How long a wrong path, option or name takes to be told, verb by verb: `python tools/error_seconds.py`.

The cases are those of tests/cli/test_early.py, which holds that none of them imports torch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOWHERE = "/no/such/place"


def cases(model: str, zoo: str) -> dict[str, list[str]]:
    """A name -> a command line that is wrong in one way. model: a checkpoint's directory; zoo: a zoo's.

    What stands at the paths, if anything does: `occupied_out` makes it.
    """
    pair = ["compress", model, model, "--out", "out"]
    measured = ["--base", model, "--out", "out"]
    task = ["--tasks", "demo-palindrome"]
    named = ["--zoo", zoo]
    nothing = "team/nothing"
    occupied = ["--out", "occupied"]
    local = ["--recipe", "lossless", "--out", "out"]
    compared = ["compare", model, model, *task, "--out", "out"]
    return {
        "analyze: no base": ["analyze", NOWHERE, model],
        "analyze: no fine-tuned model": ["analyze", model, NOWHERE],
        "compress: no base": ["compress", NOWHERE, model, "--recipe", "lossless", "--out", "out"],
        "compress: no recipe of that name": [*pair, "--recipe", "int2-42"],
        "compress: no calibration data": [*pair, "--recipe", "int2-24"],
        "compress: no such calibration file": [*pair, "--recipe", "int2-24", "--calibration", "nowhere.jsonl"],
        "compress: no calibration data, models of the hub": ["compress", "org/7b", "org/ft", "--recipe", "int2-24",
                                                             "--out", "out"],
        "compress: a slip in a local path": ["compress", model, "occupied/notes", *local],
        "compress: a local path that begins with a dot": ["compress", model, "./nobody/notes", *local],
        "compress: a model of the hub, and a slip": ["compress", "org/7b", NOWHERE, *local],
        "compress: out is occupied": ["compress", model, model, "--recipe", "lossless", *occupied],
        "compress: out is in a file": ["compress", model, model, "--recipe", "lossless", "--out", "file/out"],
        "compress: no gate of that name": [*pair, "--recipe", "lossless", "--gate", "strictest"],
        "compress: a gate that names no tasks": [*pair, "--recipe", "lossless", "--gate", "default"],
        "compress: tasks without a gate": [*pair, "--recipe", "lossless", "--tasks", "a"],
        "compress: no zoo": [*pair, "--recipe", "lossless", "--zoo", NOWHERE, "--name", "a/b"],
        "compress: a name that cannot be, and no zoo": [*pair, "--recipe", "lossless", "--name", "bot"],
        "compress: a zoo without a name": [*pair, "--recipe", "lossless", "--zoo", zoo],
        "inspect: no artifact": ["inspect", NOWHERE],
        "inspect: a model": ["inspect", model],
        "verify: no artifact": ["verify", NOWHERE],
        "verify: no base": ["verify", model, "--base", NOWHERE],
        "restore: no artifact": ["restore", NOWHERE, *measured],
        "restore: out is occupied": ["restore", NOWHERE, "--base", model, *occupied],
        "restore: out is in a zoo": ["restore", NOWHERE, "--base", model, "--out", f"{zoo}/out"],
        "restore: no base": ["restore", NOWHERE, "--base", NOWHERE, "--out", "out"],
        "export: no artifact": ["export", NOWHERE, "--out", "out"],
        "export: out is occupied": ["export", NOWHERE, *occupied],
        "dequantize: out is occupied": ["dequantize", model, *occupied],
        "dequantize: no model": ["dequantize", NOWHERE, "--out", "out"],
        "serve: no base": ["serve", NOWHERE],
        "serve: no artifact": ["serve", model, f"bot={NOWHERE}"],
        "serve: no name": ["serve", model, NOWHERE],
        "serve: a name twice": ["serve", model, "bot=a", "bot=b"],
        "serve: the base's own name": ["serve", model, f"{Path(model).name}=a"],
        "serve: no key on an open address": ["serve", model, "--host", "0.0.0.0"],
        "serve: no such key file": ["serve", model, "--api-key-file", NOWHERE],
        "serve: no such port": ["serve", model, "--port", "65536"],
        "serve: no size": ["serve", model, "--budget", "much"],
        "serve: a drain without an end": ["serve", model, "--drain", "inf"],
        "serve: no size of the cache": ["serve", model, "--prefix-cache", "much"],
        "serve: no size of swap space": ["serve", model, "--swap-space", "much"],
        "serve: swap space of several devices": ["serve", model, "--swap-space", "8GB", "--tp", "2"],
        "serve: no zoo to open": ["serve", model, "--open-zoo"],
        "serve: no such zoo": ["serve", model, "--open-zoo", "--zoo", NOWHERE],
        "serve: no such zoo, from which nothing is loaded yet": ["serve", model, "--zoo", NOWHERE],
        "eval: no task of that name": ["eval", NOWHERE, *measured, "--tasks", "nothing"],
        "eval: no tasks": ["eval", NOWHERE, *measured, "--tasks", ",,"],
        "eval: no artifact": ["eval", NOWHERE, *measured, *task],
        "eval: no policy of that name": ["eval", NOWHERE, *measured, *task, "--policy", "strictest"],
        "eval: a label that cannot be": ["eval", f"a b={model}", *measured, *task],
        "eval: no such backend": ["eval", NOWHERE, *measured, "--tasks", "a", "--backend", "tpu"],
        "eval: out is a file": ["eval", NOWHERE, "--base", model, *task, "--out", "file"],
        "eval: no such calibration file": ["eval", NOWHERE, *measured, *task, "--calibration", "nowhere.jsonl"],
        "gate: no report": ["gate", NOWHERE, "default"],
        "gate: another JSON file": ["gate", f"{model}/config.json", "default"],
        "gate: no policy of that name": ["gate", NOWHERE, "strictest"],
        "compare: no task of that name": ["compare", model, model, *("--tasks", "nothing"), *("--calibration", "x"),
                                          *("--out", "out")],
        "compare: no method of that name": [*compared, "--methods", "int2-42", "--calibration", "x.jsonl"],
        "compare: no such calibration file": [*compared, "--calibration", "nowhere.jsonl"],
        "compare: out is a file": ["compare", model, model, *task, "--calibration", "data.jsonl", "--out", "file"],
        "generate: no artifact": ["generate", NOWHERE, "hello", "--base", model],
        "generate: no base": ["generate", NOWHERE, "hello", "--base", NOWHERE],
        "generate: top-p out of range": ["generate", NOWHERE, "hello", "--base", model, "--top-p", "2"],
        "generate: a prompt of other bytes": ["generate", NOWHERE, "\udcff[1]", "--base", model],
        "generate: no finite temperature": ["generate", NOWHERE, "hello", "--base", model, "--temperature", "inf"],
        "chat: no artifact": ["chat", NOWHERE, "--base", model],
        "chat: top-p out of range": ["chat", NOWHERE, "--base", model, "--top-p", "0"],
        "bench layers: no recipe of that name": ["bench", "layers", "--recipe", "int2-42"],
        "bench obs: a size that cannot be": ["bench", "obs", "--size", "66"],
        "bench pairs: no data": ["bench", "pairs", str(Path(model).parent), NOWHERE, "--out", "out"],
        "bench pairs: no such task": ["bench", "pairs", str(Path(model).parent), str(Path(model).parent / "data"),
                                      "--tasks", "nothing", "--out", "out"],
        "demo: out is a file": ["demo", "--out", "file"],
        "analyze: out is a file": ["analyze", model, model, "--out", "file"],
        "bench pairs: no models": ["bench", "pairs", NOWHERE, NOWHERE, "--out", "out"],
        "zoo init: a model": ["zoo", "init", model],
        "zoo add: no directory": ["zoo", "add", NOWHERE, "a/b", *named],
        "zoo add: no zoo": ["zoo", "add", model, "a/b", "--zoo", NOWHERE],
        "zoo list: no finite ratio": ["zoo", "list", *named, "--min-ratio", "nan"],
        "zoo list: no zoo": ["zoo", "list", "--zoo", NOWHERE],
        **{
            f"zoo {verb}: no entry": ["zoo", verb, nothing, *named]
            for verb in ("show", "history", "rm", "undelete", "verify", "lineage")
        },
        "zoo tag: no entry": ["zoo", "tag", nothing, "prod", *named],
        "zoo pull: no entry": ["zoo", "pull", nothing, "out", *named],
        "zoo pull: out is occupied": ["zoo", "pull", nothing, "occupied", *named],
        "zoo push: no zoo": ["zoo", "push", nothing, NOWHERE, *named],
        "zoo diff: no entry": ["zoo", "diff", nothing, nothing, *named],
        "zoo export: no entry": ["zoo", "export", "out.tar", nothing, *named],
        "zoo import: no file": ["zoo", "import", NOWHERE, *named],
        "zoo sign: no entry": ["zoo", "sign", nothing, "--key", NOWHERE, *named],
        "zoo attest: no entry": ["zoo", "attest", nothing, NOWHERE, *named],
    }  # fmt: skip


def occupied_out(work: Path) -> None:
    """What the cases find in their working directory: a directory that is a user's own, and files."""
    (work / "occupied").mkdir()
    (work / "occupied" / "thesis.docx").write_text("years of work")
    (work / "file").write_text("")
    (work / "data.jsonl").write_text('{"text": "a"}\n')


def shipped_model(root: Path) -> str:
    """A checkpoint of the project's own."""
    return str(root / "registry" / "demo" / "base")


def _processor_seconds() -> float:
    """Of all child processes so far: unlike the clock, they do not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the seconds of each case: of the processors and of the clock, the slowest last."""
    command = [sys.executable, "-m", "deltacompress"]
    with tempfile.TemporaryDirectory() as work:
        zoo = f"{work}/zoo"
        occupied_out(Path(work))
        subprocess.run([*command, "zoo", "init", zoo, "--quiet"], check=True)
        taken = []
        for name, argv in cases(shipped_model(Path(__file__).resolve().parent.parent), zoo).items():
            begun, spent = time.perf_counter(), _processor_seconds()
            done = subprocess.run([*command, *argv], cwd=work, capture_output=True, text=True, check=False)
            seconds, used = time.perf_counter() - begun, _processor_seconds() - spent
            taken.append((used, seconds, name, done.returncode, done.stderr.strip()))
    print("processor, clock, exit code")
    for used, seconds, name, code, told in sorted(taken):
        print(f"{used:5.2f} s {seconds:5.2f} s  {code}  {name:40} {json.dumps(told, ensure_ascii=False)}")


if __name__ == "__main__":
    main()

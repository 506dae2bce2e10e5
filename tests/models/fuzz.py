"""A fuzzer of model directories: whatever their JSON says, through everything that opens a model.

    python -m tests.models.fuzz --inputs 200000

Each input is one file of a tiny base, fine-tuned model or delta with a few values, fields or bytes changed; fields and
values are those that transformers looks for. An input may be accepted, or refused by a DeltaCompressError of one line.
All else is a fault, and the exit code is 1: another exception, a file opened that is not on the checked list, a call to
the network, a pickle, a program, more than 256 MB beyond what the same without a change takes, more than a minute.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.fuzz_verbs import DECOYS, DENSE, VERBS, Models, Verb, make_models
from models.watch import Watch
from transformers import CONFIG_MAPPING, GenerationConfig
from zoo.fuzz import VALUES, change, mutate

from deltacompress.checkpoints.reader import is_side_file
from deltacompress.errors import DeltaCompressError
from deltacompress.files.canonical_json import canonical_bytes, canonical_digest
from deltacompress.files.content import content_root
from deltacompress.models import fields
from deltacompress.models.tokenizers import FILES, is_panic

MEMORY = 256 << 20
SECONDS = 60
JSON = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",
)
TYPES = ("llama", "qwen2", "gemma2", "gpt_neox", "phi3", "mixtral", "gpt2", "gemma3", "mamba", "deepseek_v3", "mistral")
NAMES: tuple[str, ...] = tuple(
    sorted(
        {
            *(name for kind in TYPES for name in fields.declared(CONFIG_MAPPING[kind])),
            *(*fields.REFUSED, *fields.LEFT_OUT, *fields.SHARED, *fields.INERT, *GenerationConfig().to_dict()),
            *("is_causal layer_types kv_sharing_modes per_layer_config sub_configs attribute_map to_dict adapters new "
              "tokenizer_file vocab_file merges_file fast_tokenizer_files init_inputs chat_template auto_map backend "
              "added_tokens_decoder extra_special_tokens additional_special_tokens sp_model_kwargs from_slow use_fast "
              "model_input_names tokenizer_class padding_side truncation_side trust_remote_code gguf_file subfolder "
              "custom_generate model_specific_special_tokens image_token name_or_path quantization_config "
              "__class__").split(),
        }
    )
)  # fmt: skip
ODD: tuple[Any, ...] = (
    *VALUES,
    *DECOYS,
    *("kernels-community/flash-attn3", "acme/repo", "evil.Model", "eager", "flash_attention_2", "sdpa", "bfloat16"),
    *("float8_e4m3fn", "save", "silu", "xielu", "PreTrainedTokenizerFast", "LlamaTokenizer", "pipeline", "{{ 1/0 }}"),
    *("{% for i in range(9) %}w{% endfor %}", "{{ messages[9].x.y }}", "/etc/passwd", "http://127.0.0.1:9/x", "left"),
    *(2, 3, 7, 16, 1000, 10**6, 10**9, 2**31, 2**63 - 1, 10**15, -7, 1e308, 1e-300, float("nan"), float("inf")),
    {"AutoConfig": "evil.C", "AutoModelForCausalLM": "acme/repo--evil.M", "AutoTokenizer": ["evil.T", None]},
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 0}, {"type": "linear", "factor": "x"},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "rope_theta": 1e4},
    {"quant_method": "gptq", "bits": 4}, {"quant_method": "deltacompress", "delta": "/etc"}, {"0": {"head_dim": 4}},
    ["full_attention"], ["sliding_attention"], ["linear_attention"], [0, 1], ["<a>", "<b>"], {"content": "<a>"},
)  # fmt: skip


@dataclass
class Findings:
    """outcomes: "verb: class" with how often; faults; most memory beyond the start (bytes) and time (s) of an input."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: int = 0
    seconds: float = 0.0


def odd(rng: random.Random) -> Any:
    """One of the odd values, to be changed at will."""
    return copy.deepcopy(rng.choice(ODD))


def spoil(rng: random.Random, name: str, raw: bytes) -> bytes:
    """Another content for a file."""
    if not name.endswith(".json") or rng.random() < 0.1:
        return mutate(rng, raw)
    data = json.loads(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(4)
        if kind == 0 or not isinstance(data, dict):
            data = change(rng, data)
        elif kind == 1 and data:
            data[rng.choice(list(data))] = odd(rng)
        elif kind == 2:
            data[rng.choice(NAMES)] = odd(rng)
        else:
            inner = rng.choice([one for one in data.values() if isinstance(one, dict)] or [data])
            inner[rng.choice([*NAMES, *inner])] = odd(rng)
    return json.dumps(data).encode()


def resealed(manifest: bytes, name: str, raw: bytes) -> bytes:
    """A delta's manifest with the hash of another side file, so that the file gets further than its hash."""
    data = json.loads(manifest)
    for record in data["files"]:
        if record["file"] == name:
            record |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return sealed(data)


def sealed(data: dict[str, Any]) -> bytes:
    """A manifest with its digest made right."""
    data.pop("digest", None)
    data["digest"] = canonical_digest(data)
    return canonical_bytes(data)


@contextmanager
def spoiled(rng: random.Random, folder: Path) -> Iterator[str]:
    """In this block one file of `folder` is another; tells which, and what it holds."""
    manifest = folder / "manifest.json"
    names = [name for name in JSON if (folder / name).is_file()]
    name = rng.choice([*["config.json"] * 6, *names, *(["manifest.json"] * 4 if manifest.is_file() else [])])
    before = {file: (folder / file).read_bytes() for file in {name, "manifest.json"} if (folder / file).is_file()}
    raw = spoil(rng, name, before[name])
    if name == "manifest.json" and rng.random() < 0.7:
        try:
            raw = sealed(change(rng, json.loads(before[name])))
        except (ValueError, TypeError, AttributeError):
            raw = mutate(rng, before[name])
    (folder / name).write_bytes(raw)
    if name != "manifest.json" and manifest.is_file():
        manifest.write_bytes(resealed(before["manifest.json"], name, raw))
    try:
        yield f"{name} {raw[:3000]!r}"
    finally:
        for file, content in before.items():
            (folder / file).write_bytes(content)


def allowed(folder: Path, name: str, verb: Verb) -> bool:
    """Whether a file of a model directory may be opened."""
    if name in DECOYS:  # transformers looks at what the base's own config names, before anyone is asked
        return not verb.own and name.startswith("config.")
    return name in ("model.safetensors", "manifest.json", *FILES) or name.startswith("delta-") or is_side_file(name)


class Late(BaseException):
    """A minute is over."""


def _late(*_: object) -> None:
    raise Late


def one(found: Findings, what: str, verb: Verb, models: Models, told: str) -> None:
    """Run one input and see what it did."""
    folders = (models.base, models.finetuned, models.delta)
    faults, begun, before = [], time.monotonic(), _resident(reset=True)
    watch = Watch(*folders, ours=[models.scratch, models.data, content_root()])
    signal.alarm(SECONDS)
    with watch:
        try:
            verb.run(models)
            outcome = "accepted"
        except DeltaCompressError as error:
            outcome = type(error).__name__
            if (
                "\n" in str(error)
                or len(str(error)) > 1200
                or (not str(error).isascii() and not str(error).isprintable())
            ):
                faults.append(f"a message of several lines or without end: {str(error)[:300]!a}")
        except Late:
            outcome = "FAULT"
            faults.append(f"more than {SECONDS} s")
        except BaseException as error:  # what the fuzzer looks for
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            outcome = f"transformers' {type(error).__name__}"
            if verb.own or is_panic(error):
                outcome = "FAULT"
                faults.append(f"{type(error).__name__}: {error!s:.300}")
    signal.alarm(0)
    taken, seconds = _resident() - before, time.monotonic() - begun
    found.memory, found.seconds = max(found.memory, taken), max(found.seconds, seconds)
    if taken > MEMORY:
        faults.append(f"{taken >> 20} MiB")
    for folder, names in watch.opened.items():
        faults += [f"opened {folder.name}/{name}" for name in names if not allowed(folder, name, verb)]
    faults += [f"opened {name}" for name in watch.elsewhere if not name.endswith((".py", ".pyc", ".so", ".json.lock"))]
    faults += [f"{event} {arguments}" for event, arguments in watch.deeds]
    found.outcomes[f"{what}: {'FAULT' if faults else outcome}"] += 1
    found.faults += [f"{what}: {fault}: {told}" for fault in faults]


def _resident(*, reset: bool = False) -> int:
    """Most resident memory since the last reset, or now with one, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def fuzz(
    inputs: int, seed: int, verbs: list[str], architectures: list[str], root: Path, *, log: Path | None = None
) -> Findings:
    """Run so many inputs. log: where each input is written before it runs, for what kills the process."""
    rng, found = random.Random(seed), Findings()
    made = {architecture: make_models(root / architecture, architecture) for architecture in architectures}
    choices = [
        (verb, architecture)
        for verb in verbs
        for architecture in made
        if architecture in DENSE or not VERBS[verb].dense
    ]
    signal.signal(signal.SIGALRM, _late)
    for verb, architecture in choices:  # once as they are: this must work, and imports what is needed
        VERBS[verb].run(made[architecture])
    for _ in range(inputs):
        what, architecture = rng.choice(choices)
        verb, models = VERBS[what], made[architecture]
        with spoiled(rng, getattr(models, verb.spoils)) as told:
            if log is not None:
                log.write_text(f"{what} {architecture} {told}")
            one(found, what, verb, models, f"{architecture} {told}")
    return found


def main() -> int:
    """Fuzz, print the figures; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--log", type=Path, default=None)
    options = parser.parse_args()
    begun = time.monotonic()
    from models.fuzz_verbs import ARCHITECTURES

    with tempfile.TemporaryDirectory() as root:
        found = fuzz(
            options.inputs, options.seed, options.verbs.split(","), list(ARCHITECTURES), Path(root), log=options.log
        )
    for name, count in sorted(found.outcomes.items()):
        print(f"{count:>10,}  {name}")
    for fault in found.faults[:40]:
        print("FAULT", fault)
    print(
        f"inputs {found.outcomes.total():,}, seed {options.seed}, faults {len(found.faults)}, most memory of one "
        f"{found.memory / 2**20:.0f} MiB of {MEMORY >> 20}, longest {found.seconds:.1f} s, "
        f"{time.monotonic() - begun:.0f} s in all"
    )
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())

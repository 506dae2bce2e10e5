"""Every way in which this project opens a model, each on a pair and a delta that a test has spoiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from pairs import Pair

from deltacompress.artifact.restoration import restore
from deltacompress.compression.driver import compress
from deltacompress.evaluation import evaluate
from deltacompress.runtime import DeltaConfig, Runtime

TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }} w9{% endfor %}"


@dataclass(frozen=True)
class Case:
    """A base, a model fine-tuned from it, a delta of the two, and a place to write to."""

    base: Path
    finetuned: Path
    delta: Path
    data: Path
    scratch: Path
    notes: list[str] = field(default_factory=list)

    def phase(self, name: str, total: int | None = None) -> None:
        """As a Reporter."""

    def step(self, label: str, *, loss: float | None = None, memory_bytes: int | None = None) -> None:
        """As a Reporter."""

    def note(self, message: str) -> None:
        """As a Reporter."""
        self.notes.append(message)


def make_case(pair: Pair, root: Path) -> Case:
    """Copies of a pair, and a delta that keeps every bit of it, config.json included."""
    base, finetuned = root / "base", root / "finetuned"
    shutil.copytree(pair.base, base)
    shutil.copytree(pair.finetuned, finetuned)
    for folder in (base, finetuned):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    (root / "scratch").mkdir()
    compress(base, finetuned, recipe="lossless", out=root / "delta", device="cpu")
    return Case(base, finetuned, root / "delta", pair.data, root / "scratch")


def spoiled(case: Case, spoil: Callable[[Path], None], which: str) -> Case:
    """Do something to one of the model directories; to a delta through the model that it is made from."""
    if which != "delta":
        spoil(getattr(case, which))
        return case
    source = case.scratch / "source"
    shutil.copytree(case.finetuned, source)
    spoil(source)
    shutil.rmtree(case.delta)
    compress(case.base, source, recipe="lossless", out=case.delta, device="cpu")
    for file in source.iterdir():  # what lies beside a delta without belonging to it
        if not (case.delta / file.name).exists() and file.name != "model.safetensors":
            shutil.copy(file, case.delta)
    shutil.rmtree(source)
    return case


def calibration(case: Case) -> None:
    """compress, with a recipe that walks through the model."""
    options: dict[str, Any] = {"calibration": case.data, "samples": 2, "seq_len": 8, "device": "cpu"}
    compress(case.base, case.finetuned, recipe="int4-24", out=case.scratch / "out", reporter=case, **options)


def generate(case: Case) -> list[str]:
    """generate: a base, and a variant beside it."""
    runtime = Runtime.from_base(case.base, device="cpu")
    runtime.load(case.delta, "variant")
    case.notes.extend(runtime.notes)
    return runtime.generate([(None, "w1 w2"), ("variant", "w1 w2")], 3)


def chat(case: Case) -> list[int] | None:
    """chat: the tokenizer's own template."""
    runtime = Runtime.from_base(case.base, device="cpu")
    runtime.load(case.delta, "variant")
    return runtime.chat_ids("variant", [{"role": "user", "content": "w1 w2"}])


def evaluation(case: Case) -> dict[str, float]:
    """eval: the reference, the base, the delta, and what the delta restores to, as compare does it."""
    tasks = case.scratch / "tasks"
    (tasks / "echo").mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": " w3", "choices": [" w3", " w4"]} for i in range(4)]
    (tasks / "echo" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    restored = restore(case.delta, base=case.base, out=case.scratch / "restored")
    report = evaluate(
        {"delta": case.delta},
        base=case.base,
        finetuned=case.finetuned,
        others={"restored": restored},
        with_base=True,
        tasks=["echo"],
        task_dir=tasks,
        out=case.scratch / "report",
        policy=None,
        reporter=case,
    )
    return {score.subject: score.fidelity.kl for score in report.scores if score.fidelity is not None}


def plug_in(case: Case) -> torch.Tensor:
    """The quantizer: transformers loads the base itself."""
    config = DeltaConfig(delta=case.delta)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case.base, quantization_config=config, dtype=torch.float32
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[5, 6, 7]])).logits
    return logits


ROOMS: dict[str, Callable[[Case], Any]] = {
    "calibration": calibration,
    "generate": generate,
    "chat": chat,
    "evaluation": evaluation,
    "plug-in": plug_in,
}

"""Trains the demo pair from nothing: the base on generated text, then one full fine-tune per task.

`PYTHONPATH=tools python -m demo_pair.train --out registry/demo` rewrites everything the folder holds: checkpoints,
tokenizer, task files and scores. Text and task files are the same bytes on every machine. Weights are not: other
devices and versions add numbers in another order, so a retrained pair scores alike without being equal. A fine-tune
starts from the base as it was saved in bf16, so that the delta is exactly fine-tuned minus base.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deltacompress.demo.score import IGNORED, encode, score_checkpoint
from deltacompress.models.tokenizers import load_tokenizer
from demo_pair.corpus import documents
from demo_pair.data import TASKS, stream, write_task
from demo_pair.tokenizer import BOS_ID, EOS_ID, MAX_TOKENS, VOCABULARY, train_tokenizer

ROW_TOKENS = 256
LOG_EVERY = 100

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids, attention mask and labels, int64 [rows, tokens] each; label -100 carries no loss."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how hard one model is trained: AdamW, linear warm-up, cosine decay to a tenth."""

    steps: int
    rows: int
    lr: float
    warmup: int = 50
    weight_decay: float = 0.05


BASE = Plan(steps=2500, rows=64, lr=3e-3)
BASE_DOCUMENTS = 300_000
TOKENIZER_DOCUMENTS = 20_000
FINETUNES = {"palindrome": Plan(steps=1000, rows=128, lr=2e-4), "majority": Plan(steps=130, rows=32, lr=3e-4)}
"""Few enough steps that a fine-tune is good, not perfect: what compression loses must show in its score."""


def pad(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Right-padded ids, attention mask and labels; what pads is masked, so any id will do."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    return ids, (torch.arange(longest) < lengths[:, None]).long(), labels


def new_model() -> LlamaForCausalLM:
    """A fresh Llama of 1.15 M parameters; every in_features is a multiple of 128, head and embedding are untied."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=False,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
    )


def text_batches(tokenizer: PreTrainedTokenizerFast, count: int, plan: Plan, seed: int) -> Iterator[Batch]:
    """Endless batches of packed rows over `count` documents, in a new order each epoch."""
    encoded = tokenizer(list(islice(documents(seed), count)), add_special_tokens=False)["input_ids"]
    flat = torch.tensor([token for ids in encoded for token in (BOS_ID, *ids, EOS_ID)])
    rows = flat[: flat.numel() // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for picked in torch.randperm(rows.shape[0], generator=generator).split(plan.rows):
            ids = rows[picked]
            yield ids, torch.ones_like(ids), ids


def task_batches(tokenizer: PreTrainedTokenizerFast, task: str, plan: Plan, seed: int) -> Iterator[Batch]:
    """Endless batches of fresh training samples, right-padded; only the completion carries loss."""
    samples = stream(task, "train", seed)
    while True:
        yield pad([encode(tokenizer, s.prompt, s.completion) for s in islice(samples, plan.rows)])


def train(model: LlamaForCausalLM, batches: Iterator[Batch], plan: Plan, device: torch.device, name: str) -> None:
    """Train `model` in place on `device`, fp32 weights under bf16 autocast; prints the loss as it goes."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(plan))
    started, total = time.monotonic(), torch.zeros((), device=device)
    for step, batch in enumerate(islice(batches, plan.steps), start=1):
        ids, attention, labels = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if step % LOG_EVERY == 0 or step == plan.steps:
            mean = total.item() / (step % LOG_EVERY or LOG_EVERY)
            print(f"{name} step {step}/{plan.steps} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)
            total.zero_()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a plain Hugging Face checkpoint: config and bf16 safetensors."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes its files readable by their owner only


def relative_delta(base: Path, finetuned: Path) -> float:
    """||w_ft - w_base|| / ||w_base|| (Frobenius) over the linear weights of the decoder layers."""
    olds, news = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (base, finetuned)
    )
    names = [name for name in olds if name.endswith("_proj.weight")]
    moved = sum(float((news[name] - olds[name]).square().sum()) for name in names)
    return math.sqrt(moved / sum(float(olds[name].square().sum()) for name in names))


def train_base(out: Path, device: torch.device, seed: int, scale: float) -> None:
    """Train tokenizer and base from nothing and save them in `out`/base."""
    torch.manual_seed(seed)
    plan = _scaled(BASE, scale)
    tokenizer = train_tokenizer(islice(documents(seed), TOKENIZER_DOCUMENTS))
    model = new_model()
    train(model, text_batches(tokenizer, BASE_DOCUMENTS, plan, seed), plan, device, "base")
    save(model, out / "base")
    tokenizer.save_pretrained(out / "base")


def finetune(out: Path, task: str, device: torch.device, seed: int, scale: float) -> None:
    """Fine-tune all parameters of `out`/base on a task and save the result in `out`/<task>."""
    plan = _scaled(FINETUNES[task], scale)
    tokenizer = load_tokenizer(out / "base")
    model = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    train(model, task_batches(tokenizer, task, plan, seed), plan, device, task)
    save(model, out / task)
    for file in (out / "base").glob("tokenizer*"):
        shutil.copy(file, out / task)  # not saved anew: a loaded tokenizer would write where it was loaded from


def measure(out: Path) -> dict[str, object]:
    """Scores of base and fine-tunes on the validation files, and how far each fine-tune moved from the base."""
    scores: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ("base", *TASKS)}
    for task in TASKS:
        validation = out / "data" / task / "validation.jsonl"
        for name in ("base", task):
            score = score_checkpoint(out / name, validation)
            scores[name][task] = {
                "accuracy": round(score.accuracy, 4),
                "loss": round(score.loss, 5),
                "samples": score.samples,
            }
    deltas = {task: round(relative_delta(out / "base", out / task), 4) for task in TASKS}
    return {"scores": scores, "relative_delta": deltas}


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="PYTHONPATH=tools python -m demo_pair.train", description="Train the demo pair."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to (re)write, e.g. registry/demo")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="multiply all step counts, e.g. 0.01 to try it")
    parser.add_argument(
        "--keep",
        nargs="*",
        choices=("base", *TASKS),
        default=(),
        help="checkpoints already in --out to leave as they are",
    )
    options = parser.parse_args()
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if options.device == "auto" else options.device)
    if "base" not in options.keep:
        train_base(options.out, device, options.seed, options.steps_scale)
    for task in TASKS:
        write_task(options.out / "data" / task, task, options.seed)
        if task not in options.keep:
            finetune(options.out, task, device, options.seed, options.steps_scale)
    command = f"PYTHONPATH=tools python -m demo_pair.train --out registry/demo --seed {options.seed}"
    if options.steps_scale != 1.0:
        command += f" --steps-scale {options.steps_scale}"
    text = json.dumps({"command": command, "seed": options.seed, **measure(options.out)}, indent=2) + "\n"
    (options.out / "scores.json").write_text(text, encoding="utf-8")
    print(text, end="")


def _schedule(plan: Plan) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < plan.warmup:
            return (step + 1) / plan.warmup
        done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))

    return factor


def _scaled(plan: Plan, scale: float) -> Plan:
    return Plan(max(1, round(plan.steps * scale)), plan.rows, plan.lr, plan.warmup, plan.weight_decay)


if __name__ == "__main__":
    main()

"""Reports made by hand, for the tests of what reads them."""

from __future__ import annotations

from typing import Any

from deltacompress.evaluation.report.data import Report


def score(task: str, subject: str, value: float, **more: Any) -> dict[str, Any]:
    return {"task": task, "subject": subject, "value": value, "stderr": 0.01, "samples": 500} | more


def paired(drop: float, upper: float, **more: Any) -> dict[str, Any]:
    return {
        "drop": drop, "stderr": 0.005, "low": drop - 0.01, "high": drop + 0.01, "upper": upper, "p_value": 0.2,
        "method": "mcnemar", "gained": 3, "lost": 5, "recovery": 0.99, "same_answers": 480, "noninferior": True,
    } | more  # fmt: skip


def fidelity(kl: float) -> dict[str, Any]:
    return {
        "tokens": 900, "kl": kl, "kl_low": kl * 0.9, "kl_high": kl * 1.1, "top1": 0.98, "perplexity_ratio": 1.01,
        "loss": 0.26, "reference_loss": 0.25,
    }  # fmt: skip


def answers(lost: float, upper: float, right: float | None = 0.3) -> dict[str, Any]:
    return {"lost": lost, "upper": upper, "right": right}


def subject(label: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "role": role,
        "source": label,
        "identity": "a" * 64,
        "bytes": 30_000_000,
        "seconds": 2.0,
    } | more


def task(name: str, kind: str = "generate") -> dict[str, Any]:
    return {
        "name": name, "description": "", "kind": kind, "metric": "exact_match", "higher_is_better": True,
        "samples": 500, "few_shot": 0, "source": f"{name}/validation.jsonl", "data_sha256": "b" * 64,
    }  # fmt: skip


def report(
    *, kl: float = 0.001, drop: float = 0.004, upper: float = 0.012, kind: str = "generate", **more: Any
) -> Report:
    """A fine-tuned model, a delta and a checkpoint on one task named sql."""
    delta = subject("int2", "delta", bytes=3_000_000, ratio=10.0, recipe="int2-24", manifest_digest="c" * 64,
                    identity="c" * 64, linear_bits_per_weight=1.3, calibration="train.jsonl",
                    layers=[{"layer": "layer 0", "loss": 0.01, "bits_per_weight": 1.3},
                            {"layer": "head", "loss": None, "bits_per_weight": 2.0}])  # fmt: skip
    data: dict[str, Any] = {
        "created": "2026-01-01T00:00:00+00:00",
        "base": "base",
        "base_sha256": "d" * 64,
        "reference": "finetuned",
        "settings": {
            "limit": None, "seed": 0, "batch_size": 64, "confidence": 0.95, "margin": 0.02, "dtype": "float32",
            "device": "cpu", "runtime": "reference", "threads": 2,
        },
        "subjects": [subject("finetuned", "finetuned"), delta, subject("sparse", "checkpoint", bytes=8_000_000)],
        "tasks": [task("sql", kind)],
        "scores": [
            score("sql", "finetuned", 0.33),
            score("sql", "int2", 0.33 - drop, paired=paired(drop, upper), fidelity=fidelity(kl)),
            score("sql", "sparse", 0.16, paired=paired(0.17, 0.19), fidelity=fidelity(0.2)),
        ],
        "agreement": [{"task": "sql", "first": "int2", "second": "sparse", "same": 300, "samples": 500}],
        "overlap": [{"task": "sql", "subject": "int2", "verdict": "disjoint", "overlapping": 0, "told": "none seen",
                     "forced": False}],
        "disagreements": [{"task": "sql", "subject": "int2", "doc_id": 7, "doc_hash": "e" * 64, "prompt": "a?",
                           "target": "b", "reference_answer": "b", "answer": "c", "reference_right": True,
                           "right": False}],
        "tools": {"deltacompress": "0.1.0"},
    }  # fmt: skip
    return Report.model_validate(data | more)

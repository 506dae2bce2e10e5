"""Runs lm-eval: our tasks become its tasks, and what it logs becomes one row per sample."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from deltacompress.errors import InputError
from deltacompress.evaluation.scoring.lm_eval_version import require_lm_eval
from deltacompress.evaluation.scoring.panel import Panel
from deltacompress.evaluation.scoring.statistics import mean_stderr
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import LocalTask, SuiteTask, Task
from deltacompress.evaluation.tasks.records import Sample


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One subject's answer to one sample.

    doc_id, doc_hash: join rows of different subjects. value: what the metric gives for the sample, more is better.
    answer: the text written, or the choice that the metric takes. logprobs: of the choices, in nats; empty where there
    are none.
    """

    doc_id: int
    doc_hash: str
    prompt: str
    target: str
    answer: str
    value: float
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskRun:
    """What lm-eval found for one subject on one task: its score and standard error, and the samples."""

    metric: str
    value: float
    stderr: float
    rows: tuple[SampleRow, ...]


def run_tasks(
    panel: Panel, label: str, encoder: Encoder, tasks: Sequence[Task], *, limit: int | None, seed: int
) -> dict[str, TaskRun]:
    """Evaluate one subject on every task, in the order given.

    Raises:
        InputError: lm-eval is missing, a suite's data cannot be had, or its metric cannot be compared: less is better,
            or it gives no number per sample.
    """
    require_lm_eval()
    with _quiet():
        from lm_eval.evaluator import evaluate
        from lm_eval.tasks import TaskManager

        from deltacompress.evaluation.scoring.adapter import PanelLM

        local = [task.name for task in tasks if isinstance(task, LocalTask)]
        lm = PanelLM(panel, label, encoder, local=local)
        made = [
            _local(task, encoder, seed) if isinstance(task, LocalTask) else _suite(_library(TaskManager), task, seed)
            for task in tasks
        ]
        runs: dict[str, TaskRun] = {}
        for task, one in zip(tasks, made, strict=True):
            few = {"bootstrap_iters": 0} if isinstance(task, LocalTask) else {"limit": limit, "bootstrap_iters": 1000}
            runs[task.name] = _read(evaluate(lm, {"tasks": {task.name: one}}, **few), task)
    return runs


@cache
def _library(of: Callable[[], Any]) -> Any:
    """lm-eval's own tasks, once for all subjects: indexing them takes seconds, and local tasks do not need it."""
    return of()


def _suite(manager: Any, task: SuiteTask, seed: int) -> Any:
    """A task of lm-eval's own library.

    Raises:
        InputError: lm-eval does not know it, its data cannot be had, or less of its metric is better.
    """
    if task.spec.suite not in manager.all_tasks:  # lm-eval would take it for a file, and run the code that it names
        raise InputError(
            f"lm-eval has no task named {task.spec.suite}", where=f"task {task.name}", way_out="see `lm-eval ls tasks`"
        )
    try:
        loaded = manager.load([task.spec.suite])["tasks"]
    except (OSError, ValueError, KeyError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"lm-eval cannot load {task.spec.suite} ({told[:160]}); its data comes from the hub: it needs "
            "the network once",
            where=f"task {task.name}",
            way_out="without one, use a local task",
        ) from error
    if len(loaded) != 1:
        raise InputError(
            f"{task.spec.suite} is a group of {len(loaded)} tasks",
            where=f"task {task.name}",
            way_out="name one of them",
        )
    (found,) = loaded.values()
    better = found.higher_is_better()
    if not better.get(task.spec.metric, True):
        there = ", ".join(name for name, more in better.items() if more) or "none"
        raise InputError(
            f"less of {task.spec.metric} is better, which drops and gates are not made for",
            where=f"task {task.name}",
            way_out=f"name a metric of which more is better (it has {there})",
        )
    if found.get_config("num_fewshot") != 0:
        found.set_config(key="num_fewshot", value=task.spec.few_shot)
    found.set_fewshot_seed(seed)
    return found


def _local(task: LocalTask, encoder: Encoder, seed: int) -> Any:
    """A ConfigurableTask of lm-eval over samples that are already read: nothing is fetched, and no YAML run."""
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    spec, choose = task.spec, task.spec.kind == "choose"
    splits = DatasetDict({"validation": _dataset(Dataset, task.samples)})
    if task.examples:
        splits["train"] = _dataset(Dataset, task.examples)
    config: dict[str, Any] = {
        "task": spec.task,
        "custom_dataset": lambda **_: splits,
        "test_split": "validation",
        "fewshot_split": "train" if task.examples else None,
        "num_fewshot": spec.few_shot,
        "output_type": "multiple_choice" if choose else "generate_until",
        "doc_to_text": lambda doc: doc["prompt"],
        "target_delimiter": "",
        "metadata": {"version": 1},
    }
    if choose:
        config["doc_to_choice"] = lambda doc: doc["choices"]
        config["doc_to_target"] = lambda doc: doc["choices"].index(doc["completion"])
        config["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    else:
        longest = max(len(encoder.ids(sample.completion)) for sample in task.samples) + 1
        limit = spec.max_new_tokens or longest
        config["doc_to_target"] = lambda doc: doc["completion"]
        config["generation_kwargs"] = {"until": list(spec.stop), "max_gen_toks": limit, "do_sample": False}
        config["process_results"] = lambda doc, results: {
            "exact_match": float(_matches(task, encoder, doc["completion"], results[0]))
        }
        config["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    made = ConfigurableTask(config=config)
    made.set_fewshot_seed(seed)
    return made


def _dataset(maker: Any, samples: Sequence[Sample]) -> Any:
    columns: dict[str, list[Any]] = {
        "prompt": [sample.prompt for sample in samples],
        "completion": [sample.completion for sample in samples],
    }
    if samples[0].choices:
        columns["choices"] = [list(sample.choices) for sample in samples]
    return maker.from_dict(columns)


def _matches(task: LocalTask, encoder: Encoder, gold: str, answer: Any) -> bool:
    """Whether an answer is the right one: the same tokens and then the end, or only the same text."""
    if task.spec.match == "text":
        return str(answer).strip() == gold.strip()
    return bool(answer.ids == (*encoder.ids(gold), encoder.eos))


def _read(found: Any, task: Task) -> TaskRun:
    """Pick a task's score and samples out of lm-eval's results."""
    ((name, logged),) = found["samples"].items()
    if isinstance(task, SuiteTask):
        metric, filtered = task.spec.metric, task.spec.filter
    else:
        metric, filtered = "acc" if task.spec.kind == "choose" else "exact_match", "none"
    logged = [sample for sample in logged if sample["filter"] == filtered]
    results = found["results"][name]
    if f"{metric},{filtered}" not in results or not logged:
        there = ", ".join(key for key in results if "," in key and "stderr" not in key)
        raise InputError(
            f"lm-eval gives no metric {metric} with filter {filtered}; it gives {there}", where=f"task {task.name}"
        )
    if not _is_number(logged[0][metric]):
        there = ", ".join(one for one in logged[0]["metrics"] if _is_number(logged[0][one])) or "none"
        raise InputError(
            f"lm-eval gives no number per sample for {metric}, so models cannot be compared by it",
            where=f"task {task.name}",
            way_out=f"name a metric that has one (it has {there})",
        )
    delimiter = len(found["configs"][name].get("target_delimiter", " "))
    rows = tuple(_row(sample, metric, delimiter) for sample in logged)
    stderr = results.get(f"{metric}_stderr,{filtered}")
    if not _is_number(stderr) or not math.isfinite(stderr):
        stderr = mean_stderr(np.array([row.value for row in rows]))[1]
    return TaskRun(metric, float(results[f"{metric},{filtered}"]), float(stderr), rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _row(sample: dict[str, Any], metric: str, delimiter: int) -> SampleRow:
    """One logged sample; delimiter: characters that lm-eval puts before each choice."""
    answers = sample["filtered_resps"]
    prompt = str(sample["arguments"][0][0])
    if isinstance(answers[0], tuple | list):  # choices: (logprob, greedy) each
        logprobs = tuple(float(one[0]) for one in answers)
        picked = _choice(metric, logprobs, [str(one[1])[delimiter:] for one in sample["arguments"]])
        answer = str(sample["arguments"][picked][1])
        target = sample["target"]
        if isinstance(target, int) and 0 <= target < len(sample["arguments"]):
            target = sample["arguments"][target][1]
    else:
        logprobs, answer, target = (), str(answers[0]), sample["target"]
    return SampleRow(
        int(sample["doc_id"]), str(sample["doc_hash"]), prompt, str(target), answer, float(sample[metric]), logprobs
    )


def _choice(metric: str, logprobs: Sequence[float], choices: Sequence[str]) -> int:
    """The choice that a metric takes: acc_norm divides by the characters of each, acc_bytes by its bytes."""
    lengths = {"acc_norm": [len(one) for one in choices], "acc_bytes": [len(one.encode()) for one in choices]}
    return int(np.argmax(np.array(logprobs) / np.array(lengths.get(metric, 1))))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval logs and warns about its insides on stderr; our own progress and errors say what matters."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from lm_eval.api import task

            bar, task.tqdm = task.tqdm, lambda items, **_: items  # it has no switch
            try:
                yield
            finally:
                task.tqdm = bar
    finally:
        logging.disable(before)

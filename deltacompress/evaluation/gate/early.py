"""What a gate would fail whatever is compressed, told from the tasks alone, before hours of compressing."""

from __future__ import annotations

from collections.abc import Sequence

from deltacompress.errors import InputError, option
from deltacompress.evaluation.gate.policy import Policy
from deltacompress.evaluation.scoring.statistics import FEWEST
from deltacompress.evaluation.tasks.load import LocalTask, Task


def tasks_for(policy: Policy, given: Sequence[str]) -> list[str]:
    """Names of the tasks to measure for a policy: those that are given, else those that it requires.

    Raises:
        InputError: neither names one.
    """
    names = list(given) or list(policy.require_tasks)
    if not names:
        raise InputError(f"policy {policy.name} requires no tasks by name, so say what to measure: {option('tasks')}")
    return names


def refuse_hopeless(policy: Policy, tasks: Sequence[Task], limit: int | None) -> None:
    """Make sure that the policy can pass on these tasks; `limit` is the most samples of each that are measured.

    How many samples a task of lm-eval's library has is known only when lm-eval has fetched it, so of those only `limit`
    is held against the policy.

    Raises:
        InputError: a task that the policy requires, or wants a score of, is not measured; or a task has fewer samples
            than the policy asks for, or than a bootstrap needs.
    """
    names = [task.name for task in tasks]
    for key, wanted in (("require_tasks", policy.require_tasks), ("min_score", policy.min_score)):
        for name in wanted:
            if name not in names:
                raise InputError(
                    f"{key}: {name} is not measured, only {', '.join(names)}",
                    where=f"policy {policy.name}",
                    way_out=f"add it to {option('tasks')}",
                )
    probable = policy.drop is not None and policy.drop.bound == "probability"
    bounded = policy.kl is not None or policy.min_top1 is not None or probable
    fewest = max(policy.min_samples, FEWEST if bounded else 1)
    for task in tasks:
        samples = len(task.samples) if isinstance(task, LocalTask) else limit
        if samples is not None and samples < fewest:
            where = f" (of {task.path})" if isinstance(task, LocalTask) else ""
            more = f"raise {option('limit')}, give more samples" if samples == limit else "give more samples"
            why = "" if fewest == policy.min_samples else "to bound its kl, min_top1 or probability, "
            raise InputError(
                f"{why}at least {fewest} samples of each task are needed, but {samples} of {task.name}{where} "
                "would be measured",
                where=f"policy {policy.name}",
                way_out=f"{more}, or choose another {option('gate')}",
            )

"""Subjects that share a scorer answer together: asked for one, the others answer too, in the same batches.

lm-eval evaluates one model at a time and knows of no variants. So the first subject's run computes the answers of all
subjects of its panel, and the runs of the others find theirs waiting. What the fine-tuned model wrote (where it takes
no part: the first variant) is handed to the variants as a draft.

A fine-tuned model may have tokens that its base has not: whoever lacks one is not asked a question that holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from deltacompress.errors import InputError
from deltacompress.evaluation.scoring.scorer import Scorer
from deltacompress.evaluation.scoring.serving import Prompt, Row
from deltacompress.evaluation.scoring.store import AnswerStore, key_of
from deltacompress.evaluation.tasks.encoding import Encoder
from deltacompress.evaluation.tasks.load import LocalTask, Task
from deltacompress.numerics.likelihood import LogLikelihood
from deltacompress.reporter import Reporter

CHUNK = 256
"""Answers between two moments at which they are kept and progress is told; at least a few batches of them."""
_BATCHES = 4

Ids = tuple[int, ...]


@dataclass
class Panel:
    """A scorer and the subjects it answers for.

    variants: label of a subject -> name of its variant in the scorer. stores: label -> its answers. seconds: spent in
    the scorer so far, by all subjects together. drafts: the answers of the fine-tuned model.
    """

    scorer: Scorer
    variants: dict[str, str | None]
    stores: dict[str, AnswerStore]
    reporter: Reporter
    eos: int
    drafts: AnswerStore | None = None
    seconds: float = field(default=0.0, init=False)

    def lacks(self, label: str, rows: Iterable[Iterable[int]]) -> int | None:
        """A token id in these rows that the model of a subject does not have; None if it has all of them."""
        size = self.scorer.vocabulary(self.variants[label])
        return next((token for row in rows if (token := max(row, default=0)) >= size), None)

    def answerable(self, label: str, tasks: Sequence[Task], encoder: Encoder) -> list[Task]:
        """The tasks without the local ones that hold a token which the model of a subject does not have; told."""
        if max(encoder.tokenizer.get_vocab().values()) < self.scorer.vocabulary(self.variants[label]):
            return list(tasks)
        found: list[Task] = []
        for task in tasks:
            lacked = self.lacks(label, map(encoder.ids, _texts(task))) if isinstance(task, LocalTask) else None
            if lacked is None:
                found.append(task)
            else:
                token = encoder.tokenizer.convert_ids_to_tokens(lacked)
                self.reporter.note(f"{label} is left out of {task.name}: its vocabulary has no {token!r}")
        return found

    def only(self, labels: Collection[str]) -> Panel:
        """The same panel without the other subjects; its seconds count from 0."""
        variants = {label: variant for label, variant in self.variants.items() if label in labels}
        return replace(self, variants=variants, stores={label: self.stores[label] for label in variants})

    def loglikelihood(self, label: str, pairs: Sequence[tuple[Ids, Ids]]) -> list[LogLikelihood]:
        """Score (context, continuation) pairs for the subject `label`."""

        def score(asked: list[tuple[str, tuple[Ids, Ids]]]) -> list[Any]:
            rows = [Row(self.variants[who], *pair) for who, pair in asked]
            return list(self.scorer.loglikelihood(rows))

        kept = self._answers("loglikelihood", label, list(pairs), score)
        return [LogLikelihood(*one) for one in kept]

    def generate(self, label: str, prompts: Sequence[tuple[Ids, int]]) -> list[Ids]:
        """Go on greedily from (context, max_new_tokens) for the subject `label`."""

        def write(asked: list[tuple[str, tuple[Ids, int]]]) -> list[Any]:
            rows = [
                Prompt(self.variants[who], *question, self._draft(who, key_of("generate", question)))
                for who, question in asked
            ]
            return [list(ids) for ids in self.scorer.generate(rows, eos=self.eos)]

        leader = None if self.drafts is not None else self._leader()
        return [tuple(ids) for ids in self._answers("generate", label, list(prompts), write, leader)]

    def _leader(self) -> str | None:
        """The variant that answers before the others, if there are others."""
        variants = [who for who, variant in self.variants.items() if variant is not None]
        return variants[0] if len(variants) > 1 else None

    def _draft(self, who: str, key: str) -> Ids:
        """What a like model answered, up to a token that this one does not have; the base is like none of them."""
        leader = self._leader()
        drafts = self.drafts if self.drafts is not None or leader is None else self.stores[leader]
        if self.variants[who] is None or drafts is None or key not in drafts:
            return ()
        size = self.scorer.vocabulary(self.variants[who])
        return tuple(takewhile(lambda token: token < size, drafts[key]))

    def _answers(
        self,
        kind: str,
        label: str,
        questions: list[Any],
        answer: Callable[[list[tuple[str, Any]]], list[Any]],
        leader: str | None = None,
    ) -> list[Any]:
        if (lacked := self.lacks(label, map(_ids, questions))) is not None:
            raise InputError(
                f"its vocabulary has no token {lacked}, and a sample holds it",
                where=label,
                way_out=f"leave {label} out",
            )
        keys = [key_of(kind, question) for question in questions]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        # The longest first, and choices of one question next to each other; then the same question for every subject.
        order = sorted(first.values(), key=lambda index: (-len(questions[index][0]), questions[index][0]))
        missing = [
            (who, index)
            for index in order
            for who in self.variants
            if keys[index] not in self.stores[who] and self.lacks(who, [_ids(questions[index])]) is None
        ]
        size = max(CHUNK, _BATCHES * self.scorer.batch_size)
        if missing:
            self.reporter.phase(f"{kind}: {', '.join(self.variants)}", -(-len(missing) // size))
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            first_wave = [item for item in chunk if item[0] == leader]
            for wave in filter(None, (first_wave, [item for item in chunk if item[0] != leader])):
                began = time.monotonic()
                found = answer([(who, questions[index]) for who, index in wave])
                self.seconds += time.monotonic() - began
                for who in self.variants:
                    mine = [(keys[i], a) for (owner, i), a in zip(wave, found, strict=True) if owner == who]
                    self.stores[who].add(mine)
            self.reporter.step(f"{min(start + size, len(missing))} of {len(missing)} answers")
        return [self.stores[label][key] for key in keys]


def _ids(question: tuple[Ids, Ids | int]) -> Ids:
    """The token ids of a question: (context, continuation), or (context, max_new_tokens)."""
    context, rest = question
    return context if isinstance(rest, int) else (*context, *rest)


def _texts(task: LocalTask) -> Iterable[str]:
    """Every text of a task that a model reads or is scored on."""
    for sample in (*task.samples, *task.examples):
        yield from (sample.prompt, sample.completion, *sample.choices)

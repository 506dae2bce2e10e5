"""Chat templates in their own processes: what they write is transformers' own, and none of them takes what it likes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pairs import write_tokenizer
from serving.harness import eventually
from transformers import PreTrainedTokenizerBase

from deltacompress.errors import CheckpointError
from deltacompress.models.chat import rendering
from deltacompress.models.chat.places import TemplateBusyError
from deltacompress.models.chat.rendering import IDLE, Renderer
from deltacompress.models.tokenizers import failing_tokenizer, load_tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " be  brief\n"},
    {"role": "user", "content": "ünïcode ✓ <s> 'quoted' 😀", "name": "Ada"},
    {"role": "assistant", "content": None},
]
TEMPLATES = (
    (
        "{{ bos_token }}{% for m in messages %}\n  {{ loop.index }}{{ m.role }}: {{ m.content | trim }}{{ "
        "eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "{{ messages | tojson }}{{ messages | length }}{{ tools is none }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}",
    "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}",
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OVER = (
    ENDLESS,
    "{{ (10 ** 8) ** (10 ** 6) }}",  # one operation, which nothing in the process could interrupt
    "{{ 'a' * 10 ** 10 }}",
    "{% set n = namespace(s='a' * 9) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = 17 * 2 ** 20 %}{{ 'a' * n }}",  # by a name: a constant would be computed when it is compiled
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    write_tokenizer(where := tmp_path_factory.mktemp("tokenizer"))
    return load_tokenizer(where)


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer(0.2)
    yield made
    made._end()


def children(renderer: Renderer) -> list[psutil.Process]:
    assert renderer._process is not None
    return psutil.Process(renderer._process.pid).children()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written_is_transformers_own(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, template: str, *, goes_on: bool
) -> None:
    tokenizer.chat_template = template
    wanted = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=goes_on)
    assert renderer.render(tokenizer, TALK, goes_on=goes_on) == wanted != ""
    assert renderer.render(tokenizer, TALK, goes_on=goes_on) == wanted  # by the same worker


def test_of_templates_by_name_it_is_the_default(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = {"rag": "rag", "default": "usual"}
    assert renderer.render(tokenizer, TALK, goes_on=True) == "usual"


@pytest.mark.parametrize("template", OVER)
def test_a_template_over_its_limits_is_refused(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    """Others are written meanwhile, and afterwards so is this one for who asks for less of it."""
    tokenizer.chat_template = "{% if messages | length > 1 %}" + template + "{% endif %}short"
    with failing_tokenizer(tokenizer), pytest.raises(CheckpointError) as raised:
        renderer.render(tokenizer, TALK, goes_on=True)
    assert raised.value.what.startswith("the chat template takes more than it may for this conversation: ")
    assert raised.value.what.endswith(": 0.2 seconds of computing, 512 MiB of memory, 16 MiB of text")
    assert raised.value.where == tokenizer.name_or_path
    eventually(lambda: len(children(renderer)) == len(renderer._idle))
    if "10 **" not in template:  # numbers are computed when a template is compiled
        assert renderer.render(tokenizer, TALK[:1], goes_on=True) == "short"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "fails (roles must alternate)"),
        ("{{ 1 / 0 }}", "fails (ZeroDivisionError: division by zero)"),
        ("{% for", "fails (unexpected 'end of template')"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (RecursionError"),
        ("{{ messages.append(1) }}", "fails (access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "fails (access to attribute '__class__'"),
    ],
)
def test_what_a_template_raises_is_told(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, template: str, words: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError) as raised, failing_tokenizer(tokenizer):
        renderer.render(tokenizer, TALK, goes_on=True)
    assert words in raised.value.what


def test_many_at_once_each_get_their_own(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATES[0]

    def ask(number: int) -> bool:
        text = renderer.render(tokenizer, [{"role": "user", "content": f"<{number}>"}] * 50, goes_on=True)
        return text.count(f"<{number}>") == 50

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(200)))
    assert len(renderer._idle) <= IDLE


@contextmanager
def hanging(renderer: Renderer, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[list[Exception]]:
    """So many ask for what never ends; those that were answered."""
    tokenizer.chat_template = ENDLESS
    answered: list[Exception] = []

    def hang() -> None:
        with pytest.raises((CheckpointError, TemplateBusyError)) as raised:
            renderer.render(tokenizer, TALK, goes_on=True)
        answered.append(raised.value)

    threads = [threading.Thread(target=hang) for _ in range(count)]
    for thread in threads:
        thread.start()
    places = renderer._places
    eventually(lambda: len(answered) + places._taken.total() + len(places._waiting) == count)
    yield answered
    for thread in threads:
        thread.join()


def test_others_are_written_while_one_template_computes(renderer: Renderer, tmp_path: Path) -> None:
    """However many ask for it: all of these take their turns behind others' first."""
    made = []
    for template in (ENDLESS, "short"):
        write_tokenizer(where := tmp_path / str(len(made)))
        made.append(load_tokenizer(where))
        made[-1].chat_template = template
    with hanging(renderer, made[0], 2 * rendering.AT_ONCE) as answered:
        assert renderer.render(made[1], TALK, goes_on=True) == "short"
        assert answered == []
    assert [type(one) for one in answered] == [CheckpointError] * 2 * rendering.AT_ONCE
    assert (renderer._places._taken, renderer._places._waiting) == ({}, [])


def test_nobody_waits_without_an_end(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "WAITS", 0.3)
    made = Renderer(1.0)
    with hanging(made, tokenizer, 5) as answered:
        eventually(lambda: len(answered) == 3)
        assert {type(one) for one in answered} == {TemplateBusyError}
    assert len(answered) == 5
    tokenizer.chat_template = "short"
    assert made.render(tokenizer, TALK, goes_on=True) == "short"
    made._end()


def test_few_workers_stay(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
    for number in range(3 * IDLE):
        tokenizer.chat_template = f"template {number}"
        assert renderer.render(tokenizer, TALK, goes_on=True) == f"template {number}"
    assert list(renderer._idle) == [f"template {number}" for number in range(2 * IDLE, 3 * IDLE)]
    eventually(lambda: len(children(renderer)) == IDLE)


def test_processes_that_were_killed_are_started_again(tokenizer: PreTrainedTokenizerBase) -> None:
    made = Renderer()
    tokenizer.chat_template = "short"
    assert made.render(tokenizer, TALK, goes_on=True) == "short"
    (worker,) = children(made)
    assert made._process is not None
    made._process.kill()
    made._process.wait()
    tokenizer.chat_template = "other"
    assert made.render(tokenizer, TALK, goes_on=True) == "other"
    made._end()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running()
    assert made._process is None


def test_a_worker_that_is_kept_from_answering_is_given_up(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Renderer()
    tokenizer.chat_template = "short"
    made.render(tokenizer, TALK, goes_on=True)
    (worker,) = children(made)
    worker.suspend()
    made._idle["short"].settimeout(0.2)
    with pytest.raises(CheckpointError, match="more than it may"):
        made.render(tokenizer, TALK, goes_on=True)
    worker.kill()
    assert made.render(tokenizer, TALK, goes_on=True) == "short"
    made._end()

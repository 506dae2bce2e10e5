"""Calibration tokens: against a naive reading of the same file, and every bad input as one clear line."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deltacompress.calibration.data import CalibrationTokens, ids_sha256, load_calibration, load_tokenizer
from deltacompress.calibration.packing import encode_records, pack
from deltacompress.calibration.records import Record
from deltacompress.calibration.sources import local_file, open_source
from deltacompress.errors import CalibrationError, CheckpointError, InputError

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'thief' %}{{ raise_exception('no thieves') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if m.name is defined %} ({{ m.name }}){% endif %}{{ '\\n' }}"
    "{% endfor %}{{ eos_token }}"
)
WORDS = ["oak", "ash", "elm", "fir", "yew", "alder", "birch", "cedar", "été", "7", "42", "the", "a", "of"]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 12))) + "."


def text_records(count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [{"text": sentence(rng), "id": i} for i in range(count)]


def task_records(count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(2)
    return [{"prompt": sentence(rng), "completion": " " + rng.choice(WORDS), "text": "decoy"} for _ in range(count)]


def chat_records(count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(3)
    user: list[dict[str, str]] = [{"role": "user", "content": sentence(rng), "name": "Ada"} for _ in range(count)]
    return [{"messages": [m, {"role": "assistant", "content": sentence(rng)}]} for m in user]


RECORDS = {"text": text_records, "prompt+completion": task_records, "messages": chat_records}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer files: byte-level BPE, <s> = 0, </s> = 1, context of 512, a chat template."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([r["text"] for r in text_records(200)], trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=512, chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def tokenizer(tokenizer_dir: Path) -> Any:
    return load_tokenizer(tokenizer_dir)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def load(source: Path | str, tokenizer: Any, **kwargs: Any) -> CalibrationTokens:
    return load_calibration(source, tokenizer, **{"samples": 4, "seq_len": 16, "seed": 0, **kwargs})


# --- against a naive implementation ------------------------------------------------------------------------------


def naive(path: Path, tokenizer_dir: Path, samples: int, seq_len: int, seed: int) -> tuple[list[list[int]], int]:
    """The same rows with the Rust tokenizer alone, one record at a time, all of them."""
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    generator = np.random.PCG64(seed)
    keys = [int(generator.random_raw()) for _ in rows]
    stream: list[int] = []
    ends: list[int] = []
    for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0]):
        if "prompt" in row:
            stream += [0, *ids(row["prompt"]), *ids(row["completion"]), 1]
        elif "messages" in row:
            lines = [
                f"{m['role']}: {m['content']}" + (f" ({m['name']})" if "name" in m else "") + "\n"
                for m in row["messages"]
            ]
            stream += ids("<s>" + "".join(lines) + "</s>")
        else:
            stream += [0, *ids(row["text"]), 1]
        ends.append(len(stream))
    used = 1 + sum(end < samples * seq_len for end in ends)
    return [stream[i * seq_len : (i + 1) * seq_len] for i in range(samples)], used


@pytest.mark.parametrize("record_format", list(RECORDS))
@pytest.mark.parametrize(("samples", "seq_len", "seed"), [(1, 1, 0), (7, 13, 0), (20, 16, 5)])
def test_rows_are_those_of_a_naive_implementation(
    tmp_path: Path, tokenizer_dir: Path, record_format: str, samples: int, seq_len: int, seed: int
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", RECORDS[record_format]())
    got = load_calibration(path, load_tokenizer(tokenizer_dir), samples=samples, seq_len=seq_len, seed=seed)
    rows, used = naive(path, tokenizer_dir, samples, seq_len, seed)
    assert got.ids.tolist() == rows
    assert got.ids.dtype == torch.int64
    assert got.ids.is_contiguous()
    assert (got.format, got.records, got.tokens, got.seed) == (record_format, used, samples * seq_len, seed)
    assert got.source == "train.jsonl"


def test_batches_of_the_tokenizer_do_not_show(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", text_records())
    monkeypatch.setattr("deltacompress.calibration.packing._BATCH_CHARS", 50)
    got = load_calibration(path, load_tokenizer(tokenizer_dir), samples=30, seq_len=16, seed=3)
    assert (got.ids.tolist(), got.records) == naive(path, tokenizer_dir, 30, 16, 3)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5)), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_pack_is_the_head_of_the_joined_records(encoded: list[list[int]], needed: int) -> None:
    pulled = 0

    def source() -> Iterator[list[int]]:
        nonlocal pulled
        for ids in encoded:
            pulled += 1
            yield ids

    stream, records = pack(source(), needed)
    joined = [token for ids in encoded for token in ids]
    assert stream == joined[:needed]
    # No record is pulled that the rows do not need, and only those that gave a token are counted.
    sizes = [sum(map(len, encoded[:n])) for n in range(len(encoded) + 1)]
    assert pulled == next((n for n, size in enumerate(sizes) if size >= needed), len(encoded))
    assert records == sum(bool(ids) for ids in encoded[:pulled])


# --- determinism -------------------------------------------------------------------------------------------------


def test_seed_alone_decides_the_order(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", text_records())
    first = load(path, tokenizer, seed=0)
    np.random.seed(99)
    torch.manual_seed(99)
    random.seed(99)
    states = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate())
    again = load(path, tokenizer, seed=0)
    assert states == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate())
    assert again.sha256 == first.sha256
    assert torch.equal(again.ids, first.ids)
    other = load(path, tokenizer, seed=1)
    assert other.sha256 != first.sha256


def test_the_order_never_changes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"text": str(i)} for i in range(8)])
    source = open_source(str(path))
    assert [r.fields["text"] for r in source.shuffled(0)] == list("32160745"), (
        "recorded hashes of every run depend on it"
    )
    assert sorted(r.fields["text"] for r in source.shuffled(1)) == list("01234567")


@pytest.mark.parametrize("records", [text_records(), task_records(), chat_records()])
def test_records_in_memory_are_those_of_a_file(tmp_path: Path, tokenizer: Any, records: list[dict[str, Any]]) -> None:
    file = load(write_jsonl(tmp_path / "train.jsonl", records), tokenizer)
    given = load_calibration(records, tokenizer, samples=len(file.ids), seq_len=file.ids.shape[1], seed=file.seed)
    assert torch.equal(given.ids, file.ids)
    assert (given.sha256, given.records, given.format) == (file.sha256, file.records, file.format)
    assert given.source == "records in memory"
    if set(records[0]) == {"text"}:
        texts = [record["text"] for record in records]
        assert load_calibration(texts, tokenizer, samples=len(file.ids), seq_len=file.ids.shape[1],
                                seed=file.seed).sha256 == file.sha256  # fmt: skip


@pytest.mark.parametrize("text", ["x" * 900, "a/b " * 300, "x" * 900 + ".txt"])
def test_a_text_in_the_place_of_a_file_is_not_repeated(text: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        local_file(text)
    assert str(caught.value).startswith(f"{text[:40]}... ({len(text)} characters): ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "records in memory: holds no records"),
        (["a b", 5], "records in memory: record 2: is a int, not a JSON object"),
        (["a b", {"prompt": "x"}], "records in memory: record 2: field `text` is missing"),
        (["  "], "records in memory: all of its records are blank"),
        (["a b"], "records in memory: holds"),
    ],
)
def test_wrong_records_in_memory(tokenizer: Any, given: list[Any], told: str) -> None:
    with pytest.raises(CalibrationError, match=told):
        load_calibration(given, tokenizer, samples=1000, seq_len=16, seed=0)


def test_sha256_covers_ids_and_shape() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 2**40]])
    assert ids_sha256(ids) == hashlib.sha256(struct.pack("<8q", 2, 3, 1, 2, 3, 4, 5, 2**40)).hexdigest()
    assert ids_sha256(ids) != ids_sha256(ids.reshape(3, 2))


# --- formats and sources -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("record_format", list(RECORDS))
def test_every_container_gives_the_same_tokens(tmp_path: Path, tokenizer: Any, record_format: str) -> None:
    records = RECORDS[record_format]()
    want = load(write_jsonl(tmp_path / "a.jsonl", records), tokenizer)
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1), encoding="utf-8-sig")
    write_jsonl(tmp_path / "lines.json", records)
    (tmp_path / "crlf.JSONL").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r, ensure_ascii=False).encode() for r in records)
    )
    write_parquet(tmp_path / "a.parquet", records)
    for name in ("a.json", "lines.json", "crlf.JSONL", "a.parquet"):
        got = load(tmp_path / name, tokenizer)
        assert (got.sha256, got.format, got.source) == (want.sha256, want.format, name)


def test_blank_records_are_skipped(tmp_path: Path, tokenizer: Any) -> None:
    records = text_records()
    blanks = [{"text": ""}, {"text": " \n"}]
    want = load(write_jsonl(tmp_path / "a.jsonl", records), tokenizer)
    padded = [blanks[0], *records[:20], *blanks, *records[20:]]
    assert load(write_jsonl(tmp_path / "b.jsonl", padded), tokenizer).sha256 == want.sha256
    assert load(write_parquet(tmp_path / "b.parquet", padded), tokenizer).sha256 == want.sha256


def texts(path: Path) -> list[str]:
    return sorted(record.fields["text"] for record in open_source(str(path)).shuffled(0))


def test_txt_holds_paragraphs_or_else_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo\r\n \t\r\n\r\nthree\n\nfour\n\n")
    assert texts(path) == ["four", "one\ntwo", "three"]
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert texts(path) == ["one", "three", "two"]


def test_prompt_is_cut_from_the_left(tokenizer: Any) -> None:
    record = Record("r", {"prompt": "oak ash elm fir yew oak ash", "completion": " alder 7"})

    def encode(limit: int | None) -> list[int]:
        (ids,) = encode_records([record], "prompt+completion", tokenizer, max_record_tokens=limit)
        return ids

    prompt = tokenizer(record.fields["prompt"], add_special_tokens=False)["input_ids"]
    completion = tokenizer(record.fields["completion"], add_special_tokens=False)["input_ids"]
    whole = [0, *prompt, *completion, 1]
    assert encode(None) == encode(len(whole)) == whole
    assert encode(len(whole) - 2) == [0, *prompt[2:], *completion, 1]
    assert encode(len(completion) + 2) == [0, *completion, 1]
    assert encode(len(completion)) == [0, *completion[:-1]]


def test_records_are_cut_to_the_models_context(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"prompt": "oak " * 600 + str(i), "completion": " 7"} for i in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    ids = load(path, tokenizer, samples=3, seq_len=512).ids
    assert ids[:, 0].tolist() == [0, 0, 0]
    assert ids[:, -1].tolist() == [1, 1, 1]
    ids = load(path, tokenizer, samples=3, seq_len=64, max_positions=64).ids
    assert ids[:, 0].tolist() == [0, 0, 0]
    assert ids[:, -1].tolist() == [1, 1, 1]


def test_long_text_is_not_cut_and_not_warned_about(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "oak " * 2000}])
    got = load(path, tokenizer, samples=2, seq_len=700)
    assert got.records == 1
    assert (got.ids == 1).sum() == 0


def test_bos_and_eos_only_where_the_tokenizer_has_them(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(tokenizer_dir / "tokenizer.json", tmp_path / "bare")
    bare = load_tokenizer(tmp_path / "bare")
    got = load(write_jsonl(tmp_path / "a.jsonl", text_records()), bare)
    assert not torch.isin(got.ids, torch.tensor([0, 1])).any()


# --- the hub, without a network ----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Serve a list of rows, or raise an exception, in place of the hub; returns the calls made."""
    import datasets

    def serve(answer: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def load_dataset(path: str, **kwargs: Any) -> Any:
            calls.append({"path": path, **kwargs})
            if isinstance(answer, Exception):
                raise answer
            return datasets.Dataset.from_list(answer).to_iterable_dataset(num_shards=min(3, len(answer)))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr("socket.getaddrinfo", lambda *args: [])
        return calls

    return serve


def test_hub_dataset(hub: Callable[[Any], list[dict[str, Any]]], tokenizer: Any) -> None:
    records = text_records()
    calls = hub(records)
    got = load("team/woods:english@v1.0", tokenizer, split="validation")
    asked = {"path": "team/woods", "name": "english", "revision": "v1.0", "split": "validation", "streaming": True}
    assert calls == [asked]
    assert (got.source, got.format) == ("team/woods:english@v1.0", "text")
    assert load("team/woods:english@v1.0", tokenizer, split="validation").sha256 == got.sha256
    assert load("team/woods", tokenizer, seed=1).sha256 != got.sha256
    assert calls[-1] == {"path": "team/woods", "name": None, "revision": None, "split": "train", "streaming": True}
    seen = [r.fields["text"] for r in open_source("woods").shuffled(4)]
    assert sorted(seen) == sorted(r["text"] for r in records)
    assert seen != [r["text"] for r in records]


def test_hub_conversations_lose_the_nulls_of_columnar_storage(
    hub: Callable[[Any], list[dict[str, Any]]], tokenizer: Any
) -> None:
    hub(chat_records())
    assert load("team/chats", tokenizer, samples=20).format == "messages"
    assert all("name" not in answer and None not in answer.values() for answer in answers("team/chats"))


def test_conversations_in_a_parquet_file_lose_them_too(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "chats.parquet", chat_records())
    assert answers(path) == [record["messages"][1] for record in chat_records()]


def answers(source: str | Path) -> list[dict[str, Any]]:
    """The second messages of a source, in the order of its file; a template may print every key that is there."""
    records = {record.where: record.fields["messages"] for record in open_source(source).shuffled(0)}
    assert all(messages[0]["name"] == "Ada" for messages in records.values())
    ordered = sorted(records, key=lambda where: int(where.rpartition(" ")[2]))
    return [records[where][1] for where in ordered]


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (ConnectionError("Couldn't reach the Hub"), ["no network", "pass a local .jsonl"]),
        (TimeoutError(), ["no network", "pass a local .jsonl"]),
        (
            ValueError("Unknown split 'train'.\nShould be one of ['test']"),
            ["cannot be loaded", "Unknown split 'train'."],
        ),
        (RuntimeError("Dataset scripts are no longer supported"), ["scripts are no longer supported"]),
        ([{"label": 1}], ["record 1", "'label'"]),
        ([{"text": "oak"}, {"text": None}], ["record", "`text` is a null"]),
    ],
)
def test_hub_failures(
    hub: Callable[[Any], list[dict[str, Any]]], tokenizer: Any, answer: Any, fragments: list[str]
) -> None:
    hub(answer)
    assert_one_line(lambda: load("team/woods", tokenizer), ["team/woods", *fragments])


def test_without_a_network_it_fails_at_once_and_logs_nothing(
    hub: Callable[[Any], list[dict[str, Any]]],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client would retry for half a minute, with two lines in the log each time."""
    calls = hub(text_records())

    def no_such_host(*args: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_such_host)
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    assert_one_line(lambda: load("team/woods", tokenizer), ["team/woods", "no network", "pass a local .jsonl"])
    assert not calls
    monkeypatch.setenv("https_proxy", "http://proxy:3128")  # looks names up itself
    load("team/woods", tokenizer)
    assert calls


def test_what_the_hub_libraries_log_is_not_shown(
    hub: Callable[[Any], list[dict[str, Any]]], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    hub([])
    logger = logging.getLogger("huggingface_hub.utils._http")
    seen: list[logging.LogRecord] = []
    monkeypatch.setattr(logger, "handle", seen.append)
    before = logging.getLogger("huggingface_hub").level

    def noisy(*args: Any, **kwargs: Any) -> Any:
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", noisy)
    assert_one_line(lambda: load("team/woods", tokenizer), ["no network"])
    assert not seen
    assert logging.getLogger("huggingface_hub").level == before


# --- bad input ---------------------------------------------------------------------------------------------------


def assert_one_line(
    action: Callable[[], object], fragments: list[str], kind: type[InputError] = CalibrationError
) -> None:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert caught.value.exit_code == 2


GOOD = b'{"text": "oak"}\n'
BAD_FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "empty": ("a.jsonl", b"", ["a.jsonl", "no records"]),
    "blank lines": ("a.jsonl", b"\n \n", ["no records"]),
    "blank records": ("a.jsonl", b'{"text": " "}\n', ["blank"]),
    "empty json": ("a.json", b"", ["no records"]),
    "empty array": ("a.json", b"[]", ["no records"]),
    "empty txt": ("a.txt", b" \n\n", ["is empty"]),
    "empty parquet": ("a.parquet", b"", ["not a readable parquet"]),
    "not parquet": ("a.parquet", b"PAR1 but no more" * 9, ["not a readable parquet"]),
    "bad json line": ("a.jsonl", GOOD + b"\n{oak}\n" + GOOD, ["line 3", "not valid JSON"]),
    "cut line": ("a.jsonl", GOOD + b'{"text": "oa', ["line 2", "not valid JSON"]),
    "deep json": ("a.jsonl", GOOD + b"[" * 200_000, ["line 2", "not valid JSON"]),
    "bad json array": ("a.json", b'[{"text": "oak"},\n oak]', ["not valid JSON", "line 2"]),
    "pretty-printed object": ("a.json", b'{\n "text": "oak"}', ["line 1", "one JSON object"]),
    "not an object": ("a.jsonl", GOOD + b'["oak"]\n', ["line 2", "is a list"]),
    "no usable field": ("a.jsonl", b'{"prompt": "oak", "label": 1}\n', ["line 1", "`completion`", "'label', 'prompt'"]),
    "other fields later": ("a.jsonl", GOOD + b'{"body": "oak"}\n', ["line 2", "`text` is missing", "'body'"]),
    "no fields": ("a.jsonl", b"{}\n", ["line 1", "no field at all"]),
    "number": ("a.jsonl", GOOD * 3 + b'{"text": 7}\n', ["line 4", "`text` is a int"]),
    "null": ("a.jsonl", GOOD + b'{"text": null}\n', ["line 2", "`text` is a null"]),
    "completion is a list": (
        "a.jsonl",
        b'{"prompt": "oak", "completion": ["a"]}\n',
        ["line 1", "`completion` is a list"],
    ),
    "half a surrogate pair": ("a.jsonl", GOOD + b'{"text": "oak \\ud800"}\n', ["line 2", "surrogate"]),
    "latin-1 line": ("a.jsonl", GOOD + b'{"text": "\xe9t\xe9"}\n', ["line 2", "UTF-8"]),
    "latin-1 txt": ("a.txt", b"oak \xe9", ["byte 4", "UTF-8"]),
    "latin-1 array": ("a.json", b'[{"text": "\xe9"}]', ["UTF-8"]),
    "messages is text": ("a.jsonl", b'{"messages": "hi"}\n', ["line 1", "`messages` is a str"]),
    "message without role": ("a.jsonl", b'{"messages": [{"content": "hi"}]}\n', ["line 1", "message 0", "`role`"]),
    "rejected by the template": ("a.jsonl", b'{"messages": [{"role": "thief"}]}\n', ["line 1", "no thieves"]),
    "surrogate in a message": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}\n',
        ["line 1", "surrogate"],
    ),
    "unsupported suffix": ("a.csv", b"text\noak\n", ["'.csv'", ".jsonl, .json, .parquet or .txt"]),
}


@pytest.mark.parametrize(("name", "content", "fragments"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_bad_file(tmp_path: Path, tokenizer: Any, name: str, content: bytes, fragments: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert_one_line(lambda: load(path, tokenizer, samples=1, seq_len=1), [str(path), *fragments])


def test_bad_parquet_columns(tmp_path: Path, tokenizer: Any) -> None:
    assert_one_line(
        lambda: load(write_parquet(tmp_path / "a.parquet", [{"body": "oak"}]), tokenizer), ["needs `text`", "'body'"]
    )
    rows = [{"text": "oak"}, {"text": None}]
    assert_one_line(lambda: load(write_parquet(tmp_path / "b.parquet", rows), tokenizer), ["record 2", "is a null"])
    rows = [{"text": 1}]
    assert_one_line(lambda: load(write_parquet(tmp_path / "c.parquet", rows), tokenizer), ["record 1", "is a int"])


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "data/nowhere.txt", "nowhere.csv", "/a/b/c/nowhere", "../x", "a b"]
)
def test_missing_file_never_asks_the_hub(
    source: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deltacompress.calibration.sources.open_hub", lambda *_: pytest.fail("asked the hub"))
    assert_one_line(lambda: load(source, tokenizer), [source, "no such file"])


def test_directory_split_and_permission(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_line(lambda: load(tmp_path, tokenizer), [str(tmp_path), "is a directory"])
    path = write_jsonl(tmp_path / "a.jsonl", text_records())
    assert_one_line(lambda: load(path, tokenizer, split="test"), ["'test'", "local file"])

    assert_one_line(lambda: load("a" * 5000 + ".jsonl", tokenizer), ["cannot be read"])

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert_one_line(lambda: load(path, tokenizer), [str(path), "Permission denied"])


def test_too_few_tokens_names_both_numbers_and_the_way_out(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "oak ash"}] * 10)
    have = 10 * (2 + len(tokenizer("oak ash", add_special_tokens=False)["input_ids"]))
    load(path, tokenizer, samples=have, seq_len=1)
    assert_one_line(
        lambda: load(path, tokenizer, samples=256, seq_len=16),
        [f"{have} tokens", "4096", f"samples {have // 16} or fewer", "seq_len", "more data"],
    )
    assert_one_line(
        lambda: load(path, tokenizer, samples=2, seq_len=256), [f"{have} tokens", "512", "seq_len 256", "more data"]
    )


@pytest.mark.parametrize(
    ("kwargs", "option"),
    [({"samples": 0}, "samples 0"), ({"seq_len": -1}, "seq_len -1"), ({"seed": -1}, "seed -1")],
)
def test_counts_out_of_range(tokenizer: Any, kwargs: dict[str, int], option: str) -> None:
    assert_one_line(lambda: load("unread.jsonl", tokenizer, **kwargs), [option, "at least"])


def test_rows_longer_than_the_context(tokenizer: Any) -> None:
    assert_one_line(
        lambda: load("unread.jsonl", tokenizer, seq_len=65, max_positions=64), ["seq_len 65", "64 positions"]
    )


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "a.jsonl", chat_records())
    assert_one_line(lambda: load(path, tokenizer), [str(path), "no chat template", "`text`"])


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_load_tokenizer(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 1, 512)


def test_lone_tokenizer_json_takes_special_tokens_from_the_model(tmp_path: Path, tokenizer_dir: Path) -> None:
    shutil.copy(tokenizer_dir / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 5]}), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 10**6}), encoding="utf-8")
    assert_one_line(lambda: load_tokenizer(tmp_path), ["config.json", "bos_token_id 1000000"], CheckpointError)


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path, tokenizer_dir: Path) -> None:
    assert_one_line(lambda: load_tokenizer(tmp_path / "nowhere"), ["nowhere", "not a directory"], CheckpointError)
    assert_one_line(lambda: load_tokenizer(tmp_path), [str(tmp_path), "no tokenizer"], CheckpointError)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    assert_one_line(lambda: load_tokenizer(tmp_path), [str(tmp_path), "cannot be loaded"], CheckpointError)
    shutil.copy(tokenizer_dir / "tokenizer_config.json", tmp_path)
    assert_one_line(lambda: load_tokenizer(tmp_path), [str(tmp_path), "cannot be loaded"], CheckpointError)


def test_code_in_the_checkpoint_is_never_run(tmp_path: Path, tokenizer_dir: Path) -> None:
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n", encoding="utf-8")
    assert_one_line(lambda: load_tokenizer(tmp_path), [str(tmp_path), "cannot be loaded"], CheckpointError)
    assert not marker.exists()

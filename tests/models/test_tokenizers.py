"""The door of tokenizers: the same ids as plain transformers gives, and nothing of what the files could name else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from models.watch import Watch
from pairs import WORDS, write_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deltacompress.errors import CheckpointError, InputError
from deltacompress.models import tokenizers
from deltacompress.models.tokenizers import FILES, failing_tokenizer, load_tokenizer
from deltacompress.runtime.engine.tokenizers import Tokenizers

TEXT = "w1 w2 <s> w3 </s>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word-level tokenizer, as transformers saves it."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def settings(folder: Path, **fields: Any) -> Path:
    """Add fields to tokenizer_config.json; None takes one away."""
    file = folder / "tokenizer_config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({name: value for name, value in (known | fields).items() if value is not None}))
    return folder


def same(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """Opened by the door, and alike to what plain transformers makes of it."""
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in (TEXT, "w5", "", "Ünknown 🙂"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert ours.padding_side == theirs.padding_side
    assert ours.name_or_path == str(folder)
    return ours


def byte_level(folder: Path) -> Path:
    """What Llama 3, Qwen and GPT-2 have, with vocab.json and merges.txt beside."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    )
    core.save(str(folder / "tokenizer.json"))
    core.model.save(str(folder))
    token = {"content": "<|end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    fields = {
        "eos_token": {"__type": "AddedToken"} | token,
        "bos_token": "<|end|>",
        "added_tokens_decoder": {"0": token | {"special": True}},
    }
    return settings(folder, tokenizer_class="PreTrainedTokenizerFast", model_max_length=10**30, **fields)


def test_as_saved(folder: Path) -> None:
    same(folder)


def test_byte_level(tmp_path: Path) -> None:
    same(byte_level(tmp_path))


@pytest.mark.parametrize(
    "names",
    [
        ("gpt2", "GPT2Tokenizer"), ("llama", "LlamaTokenizerFast"), ("qwen2", "Qwen2Tokenizer"),
        ("phi3", "LlamaTokenizer"), ("mistral", None), ("gpt_neox", "GPTNeoXTokenizerFast"), (None, "SomeTokenizer"),
    ],
)  # fmt: skip
def test_the_class_is_the_one_that_transformers_takes(tmp_path: Path, names: tuple[str | None, str | None]) -> None:
    model_type, kind = names
    settings(byte_level(tmp_path), tokenizer_class=kind)
    fields = {"model_type": model_type, "transformers_version": "4.40.0", "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value}))
    same(tmp_path)


def test_vocabulary_without_tokenizer_json(tmp_path: Path) -> None:
    settings(byte_level(tmp_path), tokenizer_class="GPT2Tokenizer", added_tokens_decoder=None)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 300}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<a>", "<b>"]}))
    assert {"<new>", "<a>", "<b>"} <= same(tmp_path).get_vocab().keys()


def test_settings_that_matter_pass(folder: Path) -> None:
    token = {"__type": "AddedToken", "content": "<image>", "lstrip": True, "normalized": False, "rstrip": False}
    settings(
        folder,
        image_token=token | {"single_word": False},
        extra_special_tokens={"audio_token": "<audio>"},
        padding_side="left",
        clean_up_tokenization_spaces=True,
        add_prefix_space=True,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=512,
        chat_template="{{ messages[0].content }}",
        legacy=False,
        pad_token=None,
    )
    assert {"<image>", "<audio>"} <= same(folder).get_vocab().keys()
    settings(folder, chat_template=[{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}])
    assert same(folder).chat_template == {"default": "a", "tools": "b"}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert same(folder).chat_template == "{{ messages[0].content }}!"


FILE_FIELDS = (
    "tokenizer_file vocab_file merges_file spm_file added_tokens_file special_tokens_map_file chat_template_file "
    "gguf_file name_or_path subfolder cache_dir normalizer_file emoji_file"
).split()


@pytest.mark.parametrize("holder", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("field", FILE_FIELDS)
def test_no_field_names_a_file(folder: Path, tmp_path_factory: pytest.TempPathFactory, field: str, holder: str) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_tokenizer(elsewhere, ["evil"])
    wanted = load_tokenizer(folder).get_vocab()
    settings(folder, added_tokens_decoder=None)
    file = folder / holder
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | {field: str(elsewhere / "tokenizer.json")}))
    with Watch(folder, elsewhere) as seen:
        assert load_tokenizer(folder).get_vocab() == wanted
    assert seen.opened[elsewhere] == set()
    assert seen.opened[folder] <= {*FILES, "config.json"}


def test_other_files_are_not_opened(folder: Path) -> None:
    """Every name that transformers looks for in a tokenizer's folder."""
    settings(
        folder,
        fast_tokenizer_files=["tokenizer.1.0.0.json"],
        init_inputs=["x"],
        processor_class="Evil",
        trust_remote_code=True,
        from_slow=True,
        added_tokens_decoder=None,
    )
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.1.0.0.json", "tekken.json", "evil.py", "additional_chat_templates/evil.jinja", "x.model"):
        (folder / name).write_text("{{ 1 }}")
    with Watch(folder, folder / "additional_chat_templates") as seen:
        tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    assert seen.opened[folder] <= {*FILES, "config.json"}
    assert seen.opened[folder / "additional_chat_templates"] == set()
    assert (seen.elsewhere, seen.deeds) == (set(), [])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokenizer_class": 5}, "tokenizer_class 5 cannot be loaded: it names no tokenizer"),
        ({"tokenizer_class": "pipeline"}, "tokenizer_class 'pipeline' cannot be loaded"),
        ({"tokenizer_class": "AutoTokenizer"}, "tokenizer_class 'AutoTokenizer' cannot be loaded"),
        ({"tokenizer_class": "../x.Tokenizer"}, "cannot be loaded: it names no tokenizer"),
        (
            {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["my.MyTokenizer", None]}},
            "tokenizer_class MyTokenizer cannot be loaded: transformers does not have it, and code that comes with",
        ),
        ({"model_max_length": "x"}, "says model_max_length 'x', not a whole number above 0; mend it"),
        ({"model_max_length": True}, "says model_max_length True"),
        ({"padding_side": 5}, "says padding_side 5, not text"),
        ({"padding_side": "up"}, "cannot be loaded: Padding side"),
        ({"legacy": "yes"}, "says legacy 'yes', not true or false"),
        ({"bos_token": 5}, "says bos_token 5, not text"),
        ({"bos_token": {"content": "<s>", "__type": "Evil"}}, "says bos_token"),
        ({"bos_token": {"content": "<s>", "lstrip": "no"}}, "says bos_token"),
        ({"additional_special_tokens": [5]}, "says additional_special_tokens 5, not text"),
        ({"extra_special_tokens": "<a>"}, "says extra_special_tokens '<a>', not an object"),
        ({"added_tokens_decoder": []}, "says added_tokens_decoder \\[\\], not an object"),
        ({"added_tokens_decoder": {"x": "<a>"}}, "the tokenizer cannot be loaded"),
        ({"chat_template": 5}, "says chat_template 5, not text"),
        ({"chat_template": [5]}, "says chat_template 5, not an object"),
        ({"chat_template": [{"name": "x"}]}, "says chat_template None, not text"),
        ({"model_input_names": [5]}, "says model_input_names 5, not text"),
    ],
)
def test_settings_of_the_wrong_kind(folder: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        load_tokenizer(settings(folder, **fields))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_for_a_class_that_transformers_has_is_left_out(folder: Path) -> None:
    settings(folder, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert load_tokenizer(folder).bos_token == "<s>"


@pytest.mark.parametrize(
    ("name", "raw", "told"),
    [
        ("tokenizer.json", b" " * 100, "100 bytes, more than the 50 it may have"),
        ("chat_template.jinja", b"x" * 100, "100 bytes, more than the 50 it may have"),
        ("tokenizer.json", b"{", "the tokenizer cannot be loaded"),
        ("tokenizer.json", b"[" * 10_000, "the tokenizer cannot be loaded"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("special_tokens_map.json", b'{"bos_token": 1}', "says bos_token 1, not text"),
        ("added_tokens.json", b'{"<a>": "x"}', "says the number of a token 'x', not a whole number"),
        ("config.json", b'{"model_type": 5}', "says model_type 5, not text"),
        ("config.json", b'{"tokenizer_class": "os"}', "config.json: tokenizer_class 'os' cannot be loaded"),
    ],
)
def test_files_of_the_wrong_kind(
    folder: Path, name: str, raw: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "more than" in told:
        monkeypatch.setattr(tokenizers, "MAX_VOCABULARY_BYTES", 50)
        monkeypatch.setattr(tokenizers, "MAX_TEMPLATE_BYTES", 50)
        (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=told) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("ids", [{"bos_token_id": "x"}, {"eos_token_id": [True]}, {"bos_token_id": {}}])
def test_special_tokens_of_a_lone_tokenizer_json(folder: Path, ids: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": []}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", None)
    (folder / "config.json").write_text(json.dumps(ids))
    with pytest.raises(CheckpointError, match=rf"says {next(iter(ids))} .*, not a whole number"):
        load_tokenizer(folder)


# --- in use --------------------------------------------------------------------------------------------------------


CONTENT = [{"role": "user", "content": "w1"}]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for", "unexpected 'end of template'"),
        ("{{ messages[5].content.x }}", "has no element 5"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|access to attribute"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe|access to attribute"),
    ],
)
def test_a_template_is_a_program_in_a_sandbox(folder: Path, template: str, told: str) -> None:
    """What it may not do is one line; what it can do (compute, for as long as it likes) docs/security.md says."""
    opened = Tokenizers(settings(folder, chat_template=template))
    with pytest.raises(CheckpointError, match=f"{folder}: the tokenizer or its chat template fails .*({told})"):
        opened.chat(None, CONTENT)


def test_a_template_sees_the_conversation_and_no_more(folder: Path) -> None:
    opened = Tokenizers(settings(folder, chat_template="{% for m in messages %}{{ m.role }} w1 {% endfor %}w2"))
    tokenizer = load_tokenizer(folder)
    assert opened.chat(None, CONTENT) == tokenizer.encode("user w1 w2", add_special_tokens=False)


class PanicException(BaseException):
    """As Rust libraries raise it."""


@pytest.mark.parametrize("error", [Exception("bare"), PanicException("index out of bounds")])
def test_a_tokenizer_that_fails(folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    tokenizer = load_tokenizer(folder)
    told = rf"{folder}: the tokenizer or its chat template fails \({error}\)"
    with pytest.raises(CheckpointError, match=told), failing_tokenizer(tokenizer):
        fail()
    with pytest.raises(KeyboardInterrupt), failing_tokenizer(tokenizer):
        raise KeyboardInterrupt
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=rf"{folder}: the tokenizer cannot be loaded: {error}; save it there"):
        load_tokenizer(folder)


def test_the_runtime_says_how_to_do_without(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer .*or give token ids instead of text"):
        Tokenizers(tmp_path).encode(None, "w1", bos=None)
    with pytest.raises(InputError, match=r"holds no tokenizer .*or ask for logits, which need none"):
        Tokenizers(tmp_path).decoder(None)([1])


@pytest.mark.parametrize("chats", [False, True])
def test_of_a_text_far_over_the_context_little_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, chats: bool
) -> None:
    write_tokenizer(tmp_path)
    opened = Tokenizers(settings(tmp_path, chat_template="{{ messages[0].content }}"))
    tokenizer = opened._get(None)
    encode, seen = tokenizer.encode, []

    def counted(text: str, **given: Any) -> Any:
        seen.append(len(text))
        return encode(text, **given)

    monkeypatch.setattr(tokenizer, "encode", counted)

    def ids(text: str) -> list[int] | None:
        if chats:
            return opened.chat(None, [{"role": "user", "content": text}], 64)
        return opened.encode(None, text, bos=False, context=64)

    with pytest.raises(InputError, match=r"^the first 8192 of 1200000 characters are more tokens than .* 64 takes"):
        ids("w1 " * 400_000)
    assert sum(seen) < 20_000
    for few in ("w1 " * 70, "w1" + " " * 10_000 + "w2"):  # the one a little over it, the other of long tokens
        assert ids(few) == encode(few, add_special_tokens=False)

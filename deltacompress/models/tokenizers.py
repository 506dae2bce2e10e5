"""The one door for tokenizers: the files of a directory that a tokenizer is made of, and the settings it may have.

tokenizer_config.json and special_tokens_map.json can name classes, code and other files; transformers 5.23 opens a
`tokenizer_file` from the latter wherever it lies. What reaches the library are the settings listed here, with values of
their own kind, beside the vocabulary files as they are, staged in a directory of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deltacompress.checkpoints.side_files import (
    ADDED_TOKENS,
    CHAT_TEMPLATES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
)
from deltacompress.errors import CheckpointError, DeltaCompressError, first_line
from deltacompress.files.places import CONFIG
from deltacompress.models import fields
from deltacompress.models.folder import holds, read_file, read_json, staged
from deltacompress.models.quiet import quiet

_VOCABULARIES = (
    *(TOKENIZER, *VOCABULARY, "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "tiktoken.model", "tokenizer.tiktoken"),
)
"""Files that are staged byte for byte; the library parses them as data."""
FILES = (*_VOCABULARIES, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, *CHAT_TEMPLATES)
"""Every file of a directory that opening its tokenizer reads, beside config.json."""
_SUFFICIENT = (TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "vocab.json", "vocab.txt")

MAX_VOCABULARY_BYTES = 64 << 20
"""Of a vocabulary file: twice the largest public one, of 262,144 tokens and their merges."""
MAX_TEMPLATE_BYTES = 1 << 20

_CLASS = re.compile(r"(?!Auto)[A-Z][A-Za-z0-9_]{0,60}(Tokenizer|TokenizerFast|Backend)")
_TOKEN = re.compile(r"[a-z0-9_]{1,60}_token")
_TOKEN_KEYS = frozenset(("__type", "content", "lstrip", "normalized", "rstrip", "single_word", "special"))
_WANTED = {
    (int, float): "a whole number above 0",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    dict: "an object",
    list: "a list",
}
_PLAIN: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model_max_length", "max_len"), (int, float)),
    **dict.fromkeys(("extra_ids", "offset", "unk_id"), int),
    **dict.fromkeys(
        (
            "add_bos_token add_eos_token add_prefix_space clean_up_tokenization_spaces do_lower_case fix_mistral_regex "
            "keep_accents legacy lowercase remove_space spaces_between_special_tokens split_special_tokens "
            "strip_accents tokenize_chinese_chars trim_offsets use_default_system_prompt"
        ).split(),
        bool,
    ),
    **dict.fromkeys(("errors", "padding_side", "truncation_side"), str),
}
"""Settings that are a number, a switch or a word, with what they must be."""


def load_tokenizer(checkpoint_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory or artifact; nothing is fetched, and code in the directory is never run.

    A lone tokenizer.json does not say which tokens are bos and eos; then config.json of the model does.

    Raises:
        CheckpointError: no directory, no tokenizer files in it, or files that transformers cannot load.
    """
    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        raise CheckpointError(
            "is not a directory", where=directory, way_out="pass a checkpoint that holds its tokenizer"
        )
    files = dict(_checked(directory))
    if not any(name in files for name in _SUFFICIENT):
        raise CheckpointError(
            "holds no tokenizer (no tokenizer.json or tokenizer_config.json)", where=directory, way_out="add it"
        )
    model = _model(directory)  # has a say in which class the library takes
    try:
        with quiet(), staged({**files, CONFIG: json.dumps(model).encode()}) as folder:
            if TOKENIZER_CONFIG in files or TOKENIZER not in files:
                tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            else:
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):  # the Rust tokenizers raise bare Exception
            raise
        raise CheckpointError(
            f"the tokenizer cannot be loaded: {first_line(error)}", where=directory, way_out="save it there again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CheckpointError(
            f"holds a {type(tokenizer).__name__}, not a text tokenizer",
            where=directory,
            way_out="save the model's there",
        )
    tokenizer.name_or_path = str(directory)
    if TOKENIZER_CONFIG not in files and TOKENIZER in files:
        _take_special_tokens(tokenizer, directory)
    return tokenizer


def _take_special_tokens(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    raw, file = read_json(directory, CONFIG) or {}, directory / CONFIG
    for role in ("bos", "eos"):
        ids = raw.get(f"{role}_token_id")
        listed = ids if isinstance(ids, list) else [ids]  # of several ends of text the first is the model's own
        if not listed or listed[0] is None:
            continue
        number = _of_type(f"{role}_token_id", listed[0], int, file)
        token = tokenizer.convert_ids_to_tokens(number) if 0 <= number < len(tokenizer) else None
        if token is None:
            raise CheckpointError(
                f"{role}_token_id {listed[0]} is not in {TOKENIZER}", where=file, way_out=f"add {TOKENIZER_CONFIG}"
            )
        setattr(tokenizer, f"{role}_token", token)


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a tokenizer in a directory (settings alone are none)."""
    return any(holds(directory, name) for name in _SUFFICIENT if name != TOKENIZER_CONFIG)


@contextmanager
def failing_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Name the directory where a tokenizer fails in use: its rules, and its chat template, came from elsewhere.

    Raises:
        CheckpointError: says what it raised.
        DeltaCompressError: as it was raised.
    """
    try:
        yield
    except DeltaCompressError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise CheckpointError(
            f"the tokenizer or its chat template fails ({first_line(error)})",
            where=tokenizer.name_or_path,
            way_out="save the one that the model was trained with there",
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a Rust library: pyo3 hides them from `except Exception`."""
    return type(error).__name__ == "PanicException"


def _checked(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Names of the tokenizer's files, and what of them is staged."""
    for name in _VOCABULARIES:
        if (raw := read_file(directory, name, at_most=MAX_VOCABULARY_BYTES)) is not None:
            yield name, raw
    for name in CHAT_TEMPLATES:
        if (raw := read_file(directory, name, at_most=MAX_TEMPLATE_BYTES)) is not None:
            yield name, raw
    for name, keep in ((TOKENIZER_CONFIG, _settings), (SPECIAL_TOKENS, _special), (ADDED_TOKENS, _added)):
        if (found := read_json(directory, name)) is not None:
            yield name, json.dumps(dict(keep(found, directory / name))).encode()


def _model(directory: Path) -> dict[str, Any]:
    """What of config.json has a say in which class of tokenizer the library takes, and which tokens are bos and eos."""
    raw = read_json(directory, CONFIG) or {}
    file, names = directory / CONFIG, ("model_type", "transformers_version", "tokenizer_class")
    found = {name: _of_type(name, raw[name], str, file) for name in names if raw.get(name) is not None}
    if "tokenizer_class" in found:
        _class(found["tokenizer_class"], file, has_code="auto_map" in raw)
    return found


def _class(name: Any, file: Path, *, has_code: bool) -> str:
    """The name of a class of tokenizers; the library knows a common one for all that have a tokenizer.json.

    has_code: whether the checkpoint brings code of its own, which may be that of a class that the library lacks.
    """
    if not (isinstance(name, str) and _CLASS.fullmatch(name)):
        told = f"tokenizer_class {name!r:.60} cannot be loaded: it names no tokenizer"
        raise CheckpointError(told, where=file, way_out="save the tokenizer there again")
    base = name.removesuffix("Fast")
    if has_code and not any(hasattr(transformers, one) for one in (name, base, f"{base}Fast")):
        raise CheckpointError(
            f"tokenizer_class {name} cannot be loaded: transformers does not have it, and {fields.CODE}",
            where=file,
            way_out="save a tokenizer of a class of transformers there",
        )
    return name


def _settings(raw: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """The settings in tokenizer_config.json that are known here."""
    for name, value in raw.items():
        if value is None:
            continue
        if name == "tokenizer_class":
            yield name, _class(value, file, has_code="auto_map" in raw)
        elif name in _PLAIN:
            yield name, _of_type(name, value, _PLAIN[name], file)
        elif name == "chat_template":
            yield name, _template(value, file)
        elif name == "added_tokens_decoder":
            yield name, {number: _token(name, one, file) for number, one in _of_type(name, value, dict, file).items()}
        elif name == "model_input_names":
            yield name, [_of_type(name, one, str, file) for one in _of_type(name, value, list, file)]
        else:
            yield from _tokens(name, value, file)


def _special(raw: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """The tokens in special_tokens_map.json."""
    for name, value in raw.items():
        if value is not None:
            yield from _tokens(name, value, file)


def _added(raw: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """The numbers in added_tokens.json."""
    for token, number in raw.items():
        yield token, _of_type("the number of a token", number, int, file)


def _tokens(name: str, value: Any, file: Path) -> Iterator[tuple[str, Any]]:
    """A field that names one special token or several; nothing for any other."""
    if _TOKEN.fullmatch(name):
        yield name, _token(name, value, file)
    elif name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(value, list):
            yield name, [_token(name, one, file) for one in value]
        else:
            named = _of_type(name, value, dict, file).items()
            yield name, {key: _token(name, one, file) for key, one in named if _TOKEN.fullmatch(key)}


def _token(name: str, value: Any, file: Path) -> Any:
    """A token: its text, or its text and how it is matched."""
    if isinstance(value, dict) and value.keys() <= _TOKEN_KEYS and isinstance(value.get("content"), str):
        matched = {key for key in value if key not in ("content", "__type")}
        if all(isinstance(value[key], bool) for key in matched) and value.get("__type", "AddedToken") == "AddedToken":
            return value
    return _of_type(name, value, str, file)


def _template(value: Any, file: Path) -> Any:
    """A chat template, or several by name."""
    name = "chat_template"
    if not isinstance(value, list):
        return _of_type(name, value, str, file)
    named = [_of_type(name, one, dict, file) for one in value]
    return [{key: _of_type(name, one.get(key), str, file) for key in ("name", "template")} for one in named]


def _of_type(name: str, value: Any, kind: type | tuple[type, ...], file: Path) -> Any:
    if isinstance(value, kind) and (isinstance(value, bool) == (kind is bool)):
        return value
    wanted = _WANTED[kind]
    raise CheckpointError(
        f"says {name} {value!r:.60}, not {wanted}", where=file, way_out="mend it, or save the tokenizer there again"
    )

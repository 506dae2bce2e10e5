"""The strict pre-parse: accepts what the safetensors library writes, and refuses every other reading of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from deltacompress.checkpoints.header import (
    ITEMSIZE,
    MAX_RANK,
    load_json_object,
    parse_header,
    read_header,
)
from deltacompress.checkpoints.names import MAX_NAME, is_tensor_name
from deltacompress.checkpoints.weight_files import find_weights
from deltacompress.errors import CheckpointError
from deltacompress.files.json_limits import MAX_DEPTH

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [30, 31]},
    "d": {"dtype": "F16", "shape": [0, 7], "data_offsets": [31, 31]},
}
DATA = 31


def pack(header: object, data: int = DATA) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def parse(header: object, data: int = DATA) -> Any:
    raw = pack(header, 0)[8:]
    return parse_header(raw, 8 + len(raw) + data, "file.safetensors")


def with_(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD.get(name, {}), **fields}}


def assert_one_line(error: Exception) -> None:
    assert "\n" not in str(error)


def test_accepts_a_legal_header() -> None:
    header = parse(GOOD)
    start = 8 + len(json.dumps(GOOD))
    assert list(header.tensors) == ["a", "b", "c", "d"]
    assert (header.tensors["b"].begin, header.tensors["b"].end) == (start + 24, start + 30)
    assert header.tensors["a"].info.shape == (2, 3)
    assert header.tensors["c"].info.numel == 1
    assert header.metadata == {"format": "pt"}


def test_agrees_with_the_library_on_every_dtype(tmp_path: Path) -> None:
    from deltacompress.checkpoints.dtypes import DTYPES

    assert set(DTYPES) == set(ITEMSIZE)
    tensors = {name: torch.zeros(3, 5, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: span.info.dtype for name, span in header.tensors.items()} == {name: name for name in tensors}
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for name, span in header.tensors.items():
            assert list(span.info.shape) == file.get_slice(name).get_shape()
            assert span.info.nbytes == tensors[name].nbytes == 15 * ITEMSIZE[name]


BAD = {
    "not an object": [1],
    "empty name": {"": GOOD["c"]},
    "control character": {"a\nb": GOOD["c"]},
    "lone surrogate": b'{"\\ud800": {"dtype": "U8", "shape": [31], "data_offsets": [0, 31]}}',
    "long name": {"x" * (MAX_NAME + 1): GOOD["c"]},
    "entry is no object": with_("a") | {"a": 3},
    "extra field": with_("a", strides=[3, 1]),
    "missing field": {**GOOD, "a": {"dtype": "F32", "shape": [2, 3]}},
    "unknown dtype": with_("a", dtype="F31"),
    "sub-byte dtype": with_("a", dtype="F4"),
    "dtype is no text": with_("a", dtype=["F32"]),
    "negative size": with_("a", shape=[-2, -3]),
    "float size": with_("a", shape=[2.0, 3]),
    "NaN size": with_("a", shape=[float("nan")]),
    "boolean size": with_("c", shape=[True]),
    "shape is no list": with_("a", shape="23"),
    "rank": with_("c", shape=[1] * (MAX_RANK + 1)),
    "wrong product": with_("a", shape=[2, 4]),
    "overflowing empty": with_("d", shape=[0, 2**62]),
    "over the cap of elements": with_("d", shape=[0, 2**48 + 1]),
    "overflowing": with_("a", shape=[2**40, 2**40]),
    "huge number": with_("d", shape=[0, 10**4000]),
    "three offsets": with_("a", data_offsets=[0, 12, 24]),
    "negative offset": with_("a", data_offsets=[-24, 0]),
    "swapped offsets": with_("a", data_offsets=[24, 0]),
    "overlap": with_("b", data_offsets=[20, 26]),
    "hole": with_("b", data_offsets=[25, 31]),
    "metadata is no map": {**GOOD, "__metadata__": [1]},
    "metadata is no text": {**GOOD, "__metadata__": {"n": 1}},
    "duplicate tensor": json.dumps(GOOD)[:-1].encode() + b', "a": ' + json.dumps(GOOD["a"]).encode() + b"}",
    "duplicate field": b'{"a": {"dtype": "U8", "shape": [31], "shape": [31], "data_offsets": [0, 31]}}',
    "deep nesting": b'{"a":' + b"[" * 200_000,
    "endless number": b'{"a": 1' + b"0" * 10_000 + b"}",
    "not UTF-8": b'{"\xff": 1}',
    "leading space": b" " + json.dumps(GOOD).encode(),
    "text after the object": json.dumps(GOOD).encode() + b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(BAD[case])
    message = str(caught.value)
    assert message.startswith("file.safetensors: ")
    assert "\n" not in message
    assert message.isascii()
    assert len(message) < 500
    way_out = (" get it again", "; copy or download it again", "; rename it")
    assert message.endswith(way_out) or "readable are" in message


def test_trailing_padding_is_allowed() -> None:
    assert parse(json.dumps(GOOD).encode() + b"   ").tensors.keys() == {"a", "b", "c", "d"}


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.checkpoints.header.MAX_TENSORS", 3)
    with pytest.raises(CheckpointError, match="4 tensors"):
        parse(GOOD)


@pytest.mark.parametrize(("missing", "said"), [(1, "1 of"), (31, "31 of"), (-2, "2 bytes follow")])
def test_length_of_the_data(missing: int, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(GOOD, DATA - missing)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole, path = pack(GOOD), tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_header(path)
    path.write_bytes(whole)
    assert len(read_header(path).tensors) == 4


def test_header_length_is_capped_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="cap"):
        read_header(path)
    path.write_bytes((2**64 - 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        read_header(path)


def test_lfs_pointer_and_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(path)


def reference(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """What the safetensors library reads, None where it refuses."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no iterator there)
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError):
        return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_file_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(pack(GOOD))
    at = data.draw(st.integers(0, len(whole) - DATA - 1))
    match data.draw(st.sampled_from(["flip", "set", "delete", "insert", "swap"])):
        case "flip":
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
        case "set":
            whole[at] = data.draw(st.sampled_from(b'0123456789-,:.{}[]" eE\\\x00\xff'))
        case "delete":
            del whole[at]
        case "insert":
            whole.insert(at, data.draw(st.sampled_from(b'0123456789-,:.{}[]" eE\\\x00\xff')))
        case "swap":
            other = data.draw(st.integers(0, len(whole) - DATA - 1))
            whole[at], whole[other] = whole[other], whole[at]
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(whole)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert_one_line(error)
        return
    ours = {name: (span.info.dtype, list(span.info.shape)) for name, span in header.tensors.items()}
    assert ours == reference(path)
    position = len(whole) - DATA
    for span in header.tensors.values():
        assert span.begin == position
        position = span.end
    assert position == len(whole)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from(["dtype", "shape", "data_offsets", "entry", "metadata"]), value=json_values)
@example(field="shape", value=[3, 2])
def test_any_json_in_any_field_raises_only_the_documented_error(field: str, value: Any) -> None:
    header = json.loads(json.dumps(GOOD))
    if field == "entry":
        header["a"] = value
    elif field == "metadata":
        header["__metadata__"] = value
    else:
        header["a"][field] = value
    try:
        parsed = parse(header)
    except CheckpointError as error:
        assert_one_line(error)
        return
    assert parsed.tensors["a"].info.nbytes == 24


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_raise_only_the_documented_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        read_header(path)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8).filter(is_tensor_name),
        st.tuples(st.sampled_from(["F32", "BF16", "U8", "I64"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_whatever_the_library_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, plan: dict[str, tuple[str, list[int]]]
) -> None:
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
    path = tmp_path_factory.getbasetemp() / "ok.safetensors"
    path.write_bytes(save({name: torch.zeros(shape, dtype=types[dtype]) for name, (dtype, shape) in plan.items()}))
    header = read_header(path)
    assert {name: (span.info.dtype, list(span.info.shape)) for name, span in header.tensors.items()} == plan


# --- the index over the shards


def shards(root: Path, weight_map: object | None = None, **extra: object) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, root / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, root / "model-00002-of-00002.safetensors")
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = {"weight_map": {"a": one, "b": one, "c": two} if weight_map is None else weight_map, **extra}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_index_and_shards_agree(tmp_path: Path) -> None:
    shards(tmp_path, metadata={"total_size": 36})
    spans, files = find_weights(tmp_path)
    assert {name: path.name for name, (path, _) in spans.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert [file.name for file in files] == ["model.safetensors.index.json", ONE, TWO]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, "tensor 'd' is not in it"),
        ({"a": ONE, "b": TWO, "c": TWO}, "'b' is not in it"),
        ({"a": ONE, "c": TWO}, "tensor b is in this shard but not in"),
        ({"a": ONE, "b": ONE}, f"does not name {TWO}"),
        ({"a": ONE, "b": ONE, "c": "model-00003-of-00003.safetensors"}, "1 of 2 shards missing"),
        ({"a": ONE, "b": ONE, "c": "../x.safetensors"}, "plain"),
        ({"a": ONE, "b": ONE, "c": "/etc/x.safetensors"}, "plain"),
        ({"a": ONE, "b": ONE, "c": "..\\x.safetensors"}, "plain"),
        ({"a": ONE, "b": ONE, "c": "sub/x.safetensors"}, "plain"),
        ({"a": ONE, "b": ONE, "c": "x.safetensors\n"}, "plain"),
        ({"a": ONE, "b": ONE, "c": "pytorch_model.bin"}, "plain"),
        ({"a": ONE, "b": ONE, "c": 3}, "plain"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_index_that_disagrees(tmp_path: Path, weight_map: object, said: str) -> None:
    (tmp_path.parent / "x.safetensors").write_bytes(save({"c": torch.ones(4)}))  # bait for the traversal
    shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=said) as caught:
        find_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"c": torch.ones(4), "a": torch.zeros(2)}, tmp_path / TWO)
    with pytest.raises(CheckpointError, match=f"tensor a is also in {ONE}"):
        find_weights(tmp_path)


def test_a_single_file_beside_an_index_that_does_not_name_it(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({"a": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"does not name model\.safetensors"):
        find_weights(tmp_path)


def test_an_unrelated_safetensors_file_is_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "consolidated-00001-of-00002.safetensors").write_bytes(save({"z": torch.ones(2)}))
    assert "z" not in find_weights(tmp_path)[0]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"weight_map": {"a": "x", "a": "y"}}', '{"weight_map": 1}'])
def test_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        find_weights(tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", "pickled weights"),
        ("consolidated.00.pth", "pickled weights"),
        ("model.pt", "pickled weights"),
        ("adapter_model.safetensors", "PEFT adapter"),
        ("weights.safetensors", r"found weights\.safetensors"),
        ("notes.txt", "no weights"),
    ],
)
def test_directory_without_the_right_weights(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=said):
        find_weights(tmp_path)


def test_single_file_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match="holds no tensors"):
        find_weights(tmp_path)


def test_little_bytes_cannot_ask_for_much_memory() -> None:
    with pytest.raises(CheckpointError, match="more values than any such file"):
        load_json_object(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}", "f.json")


def test_json_has_a_most_of_depth() -> None:
    for depth, told in ((MAX_DEPTH, None), (MAX_DEPTH + 1, f"nested deeper than {MAX_DEPTH} levels")):
        raw = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        if told is None:
            assert load_json_object(raw, "here").keys() == {"a"}
        else:
            with pytest.raises(CheckpointError, match=f"here: {told}"):
                load_json_object(raw, "here")

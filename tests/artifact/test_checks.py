"""What a manifest's fields owe each other: a writer may declare anything, a reader believes what adds up."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import HASH, PART, plain, record, sealed

from deltacompress.artifact.manifest import parse_manifest
from deltacompress.checkpoints.side_files import MAX_SIDE_FILE_BYTES
from deltacompress.errors import FormatError

BIG = 1 << 50


def whole(*tensors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A manifest with these tensors, of a model that is large enough for them."""
    made = plain(tensors=list(tensors), **{"scope": "delta"} | fields)
    return made | {"finetuned": made["finetuned"] | {"bytes": BIG}}


def part(name: str, *shape: int, dtype: str = "U8", size: int = 1 << 20) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": size, "sha256": HASH}


def packed(rows: int = 4, columns: int = 8, **fields: Any) -> dict[str, Any]:
    """A tensor of dense int4 codes in the storage layout, `rows` of them stored."""
    params = {"rows": rows, "columns": columns, "bits": 4, "sparsity": "dense", "group_size": columns, "grid": "minmax"}
    parts = [
        part("scales", rows, 1, dtype="BF16"),
        part("symbols", rows, columns // 2),
        part("zeros", rows, 1),
    ]
    made = {"status": "coded", "codec": "rtn", "format": "packed", "params": params, "shape": [4, 8], "parts": parts}
    return record("a", **(made | fields))


def with_parts(tensor: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    return tensor | {"parts": sorted([*tensor["parts"], *more], key=lambda one: one["name"])}


def identical(**fields: Any) -> dict[str, Any]:
    return record("a", **({"status": "identical", "format": "none", "params": {}, "parts": []} | fields))


def exact(shape: list[int], size: int, **fields: Any) -> dict[str, Any]:
    count = 1
    for one in shape:
        count *= one
    return record("a", **({"dtype": "U8", "shape": shape, "parts": [part("planes", 1, count, size=size)]} | fields))


def low_rank(rank: object = 3, **fields: Any) -> dict[str, Any]:
    """A tensor of 4 x 8 as two factors; of another rank where it is no number."""
    size = rank if isinstance(rank, int) else 3
    parts = [part("left", 4, size, dtype="F16"), part("right", size, 8, dtype="F16")]
    made = {"status": "coded", "codec": "low-rank", "format": "low_rank", "params": {"rank": rank}, "shape": [4, 8]}
    return record("a", **(made | {"parts": parts} | fields))


ADDED = {"status": "added", "base_name": None, "base_sha256": None}
GROWN = {"shape": [6, 8], "base_rows": 4}
FITTING = {
    "exact": record("a"),
    "added": record("a", **ADDED),
    "identical": identical(),
    "skip, of a larger base": identical(status="coded", codec="skip", base_rows=2),
    "packed": packed(),
    "packed, one row of it": with_parts(packed(rows=1), part("row_mask", 1)),
    "packed, no row of it": with_parts(packed(rows=0), part("row_mask", 1)),
    "a vector": packed(rows=1, shape=[8]),
    "a vector of nothing but zeros": with_parts(packed(rows=0, shape=[8]), part("row_mask", 1)),
    "more dimensions": packed(rows=4, shape=[4, 2, 4]),
    "rows more than the base": with_parts(packed(**GROWN), part("added_rows", 2, 8, dtype="BF16")),
    "low rank": low_rank(),
    "of rank 1": low_rank(1),
    "of full rank": low_rank(4),
    "low rank, more dimensions": low_rank(shape=[4, 2, 4]),
    "low rank, rows more than the base": with_parts(low_rank(**GROWN), part("added_rows", 2, 8, dtype="BF16")),
    "low rank, a vector": low_rank(
        1, shape=[8], parts=[part("left", 1, 1, dtype="F16"), part("right", 1, 8, dtype="F16")]
    ),
    "a longer vector": with_parts(packed(rows=1, shape=[9], base_rows=8), part("added_rows", 1, dtype="BF16")),
    "a scalar": record("a", shape=[], parts=[PART | {"shape": [2, 1]}]),
    "nothing": record("a", shape=[0, 7], parts=[PART | {"shape": [2, 0]}]),
    "as many zeros as a stream can hold": exact([(80 - 56) << 15], 80),
    "as many values without a base as may be": exact([(1 << 28) + 20_000 * 4096], 20_000, **ADDED),
    "as many beyond the base's rows": exact([1 + (1 << 28) + 20_000 * 4096], 20_000, base_rows=1),
}


@pytest.mark.parametrize("tensor", FITTING.values(), ids=list(FITTING))
def test_what_adds_up(tensor: dict[str, Any]) -> None:
    parse_manifest(sealed(whole(tensor)), "here")


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a name of two words": (record("a b"), "is no tensor name"),
    "a name with an escape": (record("a\x1b[31m"), r"a\x1b[31m: is no tensor name"),
    "a base's name with an escape": (record("a", base_name="b\x1b"), r"a: base_name 'b\x1b' is no tensor name"),
    "a loss below 0": (packed(loss=-5.0), "a: loss -5.0 is below 0"),
    "a damping below 0": (packed(damp_fraction=-1.0), "a: damp_fraction -1.0 is below 0"),
    "a name in two spellings": (record("e\u0301"), "is no tensor name"),
    "larger than any tensor": (exact([(1 << 48) + 1], 1 << 40), "larger than any tensor"),
    "a zero and a huge side": (exact([0, 1 << 49], 80), "larger than any tensor"),
    "a huge part": (exact([8], 80, parts=[part("planes", 1 << 24, 1 << 25)]), "of part planes is larger than any"),
    "exact, identical": (record("a", status="identical"), "status identical, format exact"),
    "exact, coded": (record("a", status="coded"), "status coded, format exact"),
    "packed, exact": (packed(status="exact"), "status exact, format packed"),
    "packed, added": (packed(**ADDED), "status added, format packed"),
    "none, added": (identical(**ADDED), "status added, format none"),
    "none, with parts": (identical(parts=[PART]), "status identical, format none"),
    "a base without a hash": (record("a", base_sha256=None), "base_name, base_rows and base_sha256"),
    "a hash without a base": (record("a", base_name=None), "base_name, base_rows and base_sha256"),
    "rows without a base": (record("a", **(ADDED | {"base_rows": 1})), "base_name, base_rows and base_sha256"),
    "added, with a base": (record("a", status="added"), "status added with base a, scope delta"),
    "exact, without a base": (record("a", base_name=None, base_sha256=None), "status exact with base None"),
    "coded, without a base": (packed(base_name=None, base_sha256=None), "status coded with base None"),
    "identical, without a base": (identical(base_name=None, base_sha256=None), "with base None"),
    "more rows of the base than there are": (record("a", base_rows=3), "3 rows of the base for shape [2, 3]"),
    "rows of a scalar": (record("a", shape=[], base_rows=0), "0 rows of the base for shape []"),
    "skipped, of a smaller base": (identical(status="coded", base_rows=1), "the base has 1 rows of it"),
    "exact, another part": (record("a", parts=[PART | {"name": "symbols"}]), "one part, planes, U8 [2, 6]"),
    "exact, another shape": (record("a", parts=[PART | {"shape": [2, 5]}]), "one part, planes, U8 [2, 6]"),
    "exact, turned": (record("a", parts=[PART | {"shape": [6, 2]}]), "one part, planes, U8 [2, 6]"),
    "exact, another dtype": (record("a", parts=[PART | {"dtype": "I8"}]), "one part, planes, U8 [2, 6]"),
    "exact, no part": (record("a", parts=[]), "one part, planes, U8 [2, 6]"),
    "exact, a part more": (record("a", parts=[PART, PART | {"name": "row_mask"}]), "one part, planes"),
    "more zeros than a stream can hold": (exact([((80 - 56) << 15) + 1], 80), "80 bytes of zstd cannot hold U8"),
    "a stream shorter than its header": (exact([0], 55), "55 bytes of zstd cannot hold U8 [1, 0]"),
    "more values without a base than may be": (
        exact([(1 << 28) + 20_000 * 4096 + 1], 20_000, **ADDED),
        "values that no base has in 20000 bytes",
    ),
    "more beyond the base's rows": (
        exact([2 + (1 << 28) + 20_000 * 4096], 20_000, base_rows=1),
        "values that no base has in 20000 bytes",
    ),
    "packed, bad parameters": (packed(params={"rows": 4}), "bad parameters of the packed format"),
    "packed, a parameter more": (packed(params=packed()["params"] | {"x": 1}), "out of range"),
    "packed, a number spelled otherwise": (packed(params=packed()["params"] | {"bits": 4.0}), "out of range"),
    "packed, no columns": (packed(columns=0), "out of range"),
    "packed, a group that leaves 64 bits": (packed(params=packed()["params"] | {"group_size": 1 << 60}), "range"),
    "packed, a row less": (packed(rows=3), "3 x 8 are stored of [4, 8]"),
    "packed, a row more": (packed(rows=5), "5 x 8 are stored of [4, 8]"),
    "packed, other columns": (packed(columns=16), "4 x 16 are stored of [4, 8]"),
    "packed, fewer columns": (packed(columns=4), "4 x 4 are stored of [4, 8]"),
    "packed, rows for the base": (packed(base_rows=3), "4 x 8 are stored of [4, 8], base rows 3"),
    "packed, all rows and a mask": (with_parts(packed(), part("row_mask", 1)), "4 x 8 are stored of [4, 8]"),
    "packed, a long mask": (with_parts(packed(rows=1), part("row_mask", 2)), "1 x 8 are stored of [4, 8]"),
    "packed, a mask of another dtype": (with_parts(packed(rows=1), part("row_mask", 1, dtype="I8")), "are stored"),
    "packed, rows added to nothing": (with_parts(packed(), part("added_rows", 2, 8)), "should be absent"),
    "packed, no rows added": (packed(**GROWN), "added_rows should be [2, 8]"),
    "packed, a row too many": (with_parts(packed(**GROWN), part("added_rows", 3, 8, dtype="BF16")), "be [2, 8]"),
    "packed, rows of another dtype": (with_parts(packed(**GROWN), part("added_rows", 2, 8, dtype="F16")), "[2, 8]"),
    "packed, a part more": (with_parts(packed(), part("pattern", 4, 1)), "part pattern is missing or does not belong"),
    "packed, a part less": (packed(parts=packed()["parts"][1:]), "part scales is missing or does not belong"),
    "low rank, exact": (low_rank(status="exact"), "status exact, format low_rank"),
    "low rank, added": (low_rank(**ADDED), "status added, format low_rank"),
    "low rank, without a base": (low_rank(base_name=None, base_sha256=None), "status coded with base None"),
    "low rank, no rank": (low_rank(params={}), "parameters {}, not a rank of a matrix of 4 x 8"),
    "low rank, a parameter more": (low_rank(params={"rank": 3, "x": 1}), "not a rank of a matrix"),
    "low rank, rank 0": (low_rank(0), "parameters {'rank': 0}, not a rank"),
    "low rank, below 0": (low_rank(-1, parts=low_rank()["parts"]), "parameters {'rank': -1}, not a rank"),
    "low rank, more than full": (low_rank(5), "parameters {'rank': 5}, not a rank of a matrix of 4 x 8"),
    "low rank, half a rank": (low_rank(2.5), "parameters {'rank': 2.5}, not a rank"),
    "low rank, a whole rank as a float": (low_rank(3.0), "parameters {'rank': 3.0}, not a rank"),
    "low rank, a word": (low_rank("3"), "parameters {'rank': '3'}, not a rank"),
    "low rank, of another rank": (low_rank(params={"rank": 2}), "these parts: left [4, 2], right [2, 8]"),
    "low rank, of fewer rows": (low_rank(base_rows=3), "these parts: added_rows [1, 8], left [3, 3], right [3, 8]"),
    "low rank, turned": (
        low_rank(parts=[part("left", 3, 4, dtype="F16"), part("right", 8, 3, dtype="F16")]),
        "these parts: left [4, 3], right [3, 8]",
    ),
    "low rank, another dtype": (
        low_rank(parts=[part("left", 4, 3, dtype="BF16"), part("right", 3, 8, dtype="F16")]),
        "these parts: left [4, 3]",
    ),
    "low rank, one factor": (low_rank(parts=low_rank()["parts"][:1]), "these parts: left [4, 3], right [3, 8]"),
    "low rank, a part more": (with_parts(low_rank(), part("row_mask", 1)), "these parts: left [4, 3], right [3, 8]"),
    "low rank, a part twice": (with_parts(low_rank(), low_rank()["parts"][0]), "these parts: left [4, 3]"),
    "low rank, no rows added": (low_rank(**GROWN), "these parts: added_rows [2, 8], left [4, 3]"),
    "low rank, rows of another dtype": (
        with_parts(low_rank(**GROWN), part("added_rows", 2, 8, dtype="F16")),
        "these parts: added_rows [2, 8]",
    ),
    "packed, the serving layout": (
        packed(parts=[part("codes", 4, 4), *(one for one in packed()["parts"] if one["name"] != "symbols")]),
        "part codes is missing or does not belong",
    ),
}


@pytest.mark.parametrize(("tensor", "told"), CONTRADICTIONS.values(), ids=list(CONTRADICTIONS))
def test_contradictions_of_a_tensor(tensor: dict[str, Any], told: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_manifest(sealed(whole(tensor)), "here")
    assert str(caught.value).startswith("here: ")
    assert told in str(caught.value)
    assert str(caught.value).isprintable()
    assert str(caught.value).endswith(("; copy the artifact again", "; compress again"))


@pytest.mark.parametrize(("bits", "sparsity", "name", "most"), [
    (4, "2:4", "nonzero", 4 * 4 * 4 // 8),
    (8, "2:4", "nonzero", 4 * 4),
    (3, "2:4", "nonzero", 4 * 4 * 4 // 8),
    (4, "unstructured:0.5", "codes", 4 * 4),
    (3, "unstructured:0.5", "codes", 4 * 3),
    (16, "unstructured:0.5", "values", 4 * 8),
])  # fmt: skip
def test_parts_of_a_free_length_have_a_most(bits: int, sparsity: str, name: str, most: int) -> None:
    params = packed()["params"] | {"bits": bits, "sparsity": sparsity}
    grid = [part("scales", 4, 1, dtype="BF16"), part("zeros", 4, 1)] if bits != 16 else []
    mask = part("groups" if sparsity == "2:4" else "pattern", 4, 1)
    for length in (0, most, most + 1):
        free = part(name, length, dtype="BF16" if bits == 16 else "U8")
        tensor = packed(params=params, parts=sorted([*grid, mask, free], key=lambda one: one["name"]))
        if length <= most:
            parse_manifest(sealed(whole(tensor)), "here")
        else:
            with pytest.raises(FormatError, match=rf"part {name} is .* \[{most + 1}\], expected"):
                parse_manifest(sealed(whole(tensor)), "here")


def alias(name: str, **fields: Any) -> dict[str, Any]:
    """A tensor that is stored as `a`, the record of the examples."""
    return record(name, **(ADDED | {"status": "alias", "format": "none", "parts": [], "alias_of": "a"} | fields))


@pytest.mark.parametrize(
    "tensors",
    [
        (record("a"), alias("b", sha256="1" + HASH[1:])),
        (record("a"), alias("b", shape=[3, 2])),
        (record("a"), alias("b", dtype="F16")),
        (record("a"), alias("b"), alias("c", alias_of="b")),
        (record("a"), alias("b", alias_of="b")),
        (record("a"), alias("b", alias_of="z")),
        (record("a"), alias("b", alias_of=None)),
        (record("a"), record("b", alias_of="a")),
    ],
    ids=["hash", "shape", "dtype", "of an alias", "of itself", "of nothing", "of none", "with parts"],
)
def test_an_alias_is_the_tensor_that_holds_its_bytes(tensors: tuple[dict[str, Any], ...]) -> None:
    parse_manifest(sealed(whole(record("a"), alias("b"))), "here")
    with pytest.raises(FormatError, match="is no fitting alias of"):
        parse_manifest(sealed(whole(*tensors)), "here")


def test_whole_models_have_no_base() -> None:
    for tensor in (packed(base_name=None, base_sha256=None), record("a", base_name=None, base_sha256=None)):
        parse_manifest(sealed(whole(tensor, scope="full")), "here")
    for tensor in (packed(), record("a"), identical()):
        with pytest.raises(FormatError, match="with base a, scope full"):
            parse_manifest(sealed(whole(tensor, scope="full")), "here")


def test_tensors_are_those_of_the_model() -> None:
    """One less would be restored to a model that lacks it."""
    made = plain()
    for change, told in (
        ({"tensors": 3}, "lists 2 tensors, the fine-tuned model has 3"),
        ({"tensors": 1}, "lists 2 tensors, the fine-tuned model has 1"),
        ({"bytes": 23}, "its tensors take 24 bytes, the fine-tuned model 23"),
    ):
        with pytest.raises(FormatError, match=told):
            parse_manifest(sealed(made | {"finetuned": made["finetuned"] | change}), "here")


def test_what_another_tensor_holds_costs_nothing() -> None:
    size = (1 << 28) + 20_000 * 4096
    own = exact([size], 20_000, **ADDED)
    alias = own | {"name": "b", "status": "alias", "format": "none", "alias_of": "a", "parts": []}
    parse_manifest(sealed(whole(own, alias)), "here")


@pytest.mark.parametrize("name", ["weights.bin", "modeling.py", "notes.md", "delta.json", "model.safetensors"])
def test_an_artifact_holds_no_other_files(name: str) -> None:
    file = {"file": name, "bytes": 1, "sha256": HASH}
    with pytest.raises(FormatError, match=f"{name} is no config or tokenizer file"):
        parse_manifest(sealed(plain(files=[file])), "here")


def test_side_files_have_a_most() -> None:
    file = {"file": "tokenizer.json", "bytes": MAX_SIDE_FILE_BYTES, "sha256": HASH}
    parse_manifest(sealed(plain(files=[file])), "here")
    with pytest.raises(FormatError, match=f"tokenizer.json has {MAX_SIDE_FILE_BYTES + 1} bytes, as no such file has"):
        parse_manifest(sealed(plain(files=[file | {"bytes": MAX_SIDE_FILE_BYTES + 1}])), "here")


def test_what_takes_too_much_once_it_is_parsed() -> None:
    with pytest.raises(FormatError, match="holds more values than any manifest does"):
        parse_manifest(b'{"a":[' + b"[]," * 1_200_000 + b"1]}", "here")
    deep: Any = ["]" * 70, '\\"][']
    for level in range(2, 64):  # of 64: the manifest is the first, its recipe the second
        parse_manifest(sealed(plain(recipe={"a": deep})), "here")
        deep = {"a[": deep} if level % 2 else [deep]
    with pytest.raises(FormatError, match="nested deeper than 64 levels, as no recipe is"):
        parse_manifest(sealed(plain(recipe={"a": deep})), "here")
    for field, most in (("tools", 64), ("params", 64)):
        many = {f"k{i}": "1" for i in range(most + 1)}
        data = plain(tools=many) if field == "tools" else plain(tensors=[record("a", params=many)])
        with pytest.raises(FormatError, match=rf"{field}: Value error, {most + 1} keys, more than {most}"):
            parse_manifest(sealed(data), "here")

"""docs/formats.md is executed: its examples against the package, and its reader against both."""

from __future__ import annotations

import json
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from pairs import Pair
from pydantic import BaseModel
from safetensors.torch import save_file

from deltacompress import lossless
from deltacompress.artifact import manifest, records
from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.records import (
    CalibrationRecord,
    FileRecord,
    FrameRecord,
    Manifest,
    ModelRecord,
    PartRecord,
    TensorRecord,
)
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.header import MAX_NUMEL, read_header
from deltacompress.checkpoints.names import MAX_NAME
from deltacompress.checkpoints.reader import tensor_bytes
from deltacompress.checkpoints.side_files import MAX_SIDE_FILE_BYTES
from deltacompress.checkpoints.weight_files import content_hash
from deltacompress.cli.shown.failures import in_json
from deltacompress.codecs.encoded import restore_tensor
from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.spec import AGAIN
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.driver import compress
from deltacompress.errors import FormatError
from deltacompress.files.json_limits import MAX_DEPTH
from deltacompress.lossless import stream

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "formats.md").read_text(encoding="utf-8")


def blocks(tag: str) -> list[str]:
    found = re.findall(rf"^```{tag}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/formats.md has no block {tag!r}"
    return found


EXAMPLES = [json.loads(block) for block in blocks("json example")]
TENSORS = [json.loads(block) for block in blocks("json tensor")]


def parse(text: str) -> torch.Tensor:
    """ "U8 2x1 4c 49" -> tensor."""
    dtype, shape, *hexes = text.split()
    raw = bytearray.fromhex("".join(hexes))
    return torch.frombuffer(raw, dtype=DTYPES[dtype]).reshape([int(size) for size in shape.split("x")])


def as_bytes(parts: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(tensor_bytes(part)) for name, part in parts.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert found[name].dtype == part.dtype, name
        assert found[name].shape == part.shape, name
        assert as_bytes({name: found[name]}) == as_bytes({name: part}), name


@pytest.fixture(scope="module")
def reader() -> Any:
    (source,) = blocks("python reader")
    module = types.ModuleType("reader")
    exec(compile(source, "docs/formats.md", "exec"), module.__dict__)  # noqa: S102 - what the document says, run
    return module


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['params']['sparsity']}-{e['params']['bits']}")
def test_packed_examples(example: dict[str, Any], reader: Any) -> None:
    spec = packed.PackedSpec.from_json(example["params"], "example")
    serving = {name: parse(part) for name, part in example["serving"].items()}
    storage = {name: parse(part) for name, part in example.get("storage", example["serving"]).items()}
    values = torch.tensor(example["values"], dtype=torch.float32)
    assert spec.to_json() == example["params"]
    assert torch.equal(packed.decode(spec, serving), values)
    assert_same(packed.to_storage(spec, serving), storage)
    assert_same(packed.to_serving(spec, storage, "example"), serving)
    for layout in (serving, storage):
        assert torch.equal(torch.from_numpy(reader.decode_packed(example["params"], as_bytes(layout))), values)


@pytest.mark.parametrize("example", TENSORS, ids=lambda e: e["format"])
def test_tensor_examples(example: dict[str, Any], reader: Any) -> None:
    base, wanted = parse(example["base"]), parse(example["restored"])
    parts = {name: parse(part) for name, part in example["parts"].items()}
    like = torch.empty(example["shape"], dtype=DTYPES[example["dtype"]], device="meta")
    found = restore_tensor(example["format"], example["params"], parts, base, like, "example")
    assert_same({"tensor": found}, {"tensor": wanted})
    dtype, shape, params = example["dtype"], tuple(example["shape"]), example["params"]
    if example["format"] != "exact":
        raw = reader.restore_lossy(dtype, shape, example["format"], params, as_bytes(parts), base.numpy())
    else:
        raw = reader.restore_exact(dtype, shape, params, as_bytes(parts), reader.from_f32(dtype, base.numpy()))
    assert raw == bytes(tensor_bytes(wanted))


def test_stream_example(reader: Any) -> None:
    (block,) = blocks("hex stream")
    stream = bytes.fromhex("".join(block.split()))
    assert lossless.encode(bytes.fromhex("0b10"), "none") == stream
    assert reader.decode_stream(stream) == bytes.fromhex("0b10")


def test_blake3_example() -> None:
    assert f"`{blake3(b'abc').hexdigest()}`" in TEXT


def test_content_hash_example() -> None:
    (block,) = blocks("json content_hash")
    example = json.loads(block)
    entries = [(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in example["tensors"]]
    assert content_hash(entries) == example["content_hash"]


@pytest.mark.parametrize(
    "model", [Manifest, ModelRecord, CalibrationRecord, TensorRecord, PartRecord, FileRecord, FrameRecord]
)
def test_every_field_is_documented(model: type[BaseModel]) -> None:
    assert [name for name in model.model_fields if f"`{name}`" not in TEXT] == []


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Two small checkpoints with every fate: changed, unchanged, grown, added, integer, tied."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    base = {
        "model.embed_tokens.weight": random(11, 24),
        "aux.word_embeddings.weight": random(7, 16),
        "a.weight": random(6, 24).half(),
        "b.weight": random(5, 22),
        "c.weight": random(3, 20),
        "norm.weight": random(24),
        "steps": torch.arange(5),
    }
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    embedding = base["model.embed_tokens.weight"].clone()
    embedding[4] += random(24, scale=0.1)
    tuned["model.embed_tokens.weight"] = torch.cat([embedding, random(2, 24)]).bfloat16()
    base["model.embed_tokens.weight"][:] = base["model.embed_tokens.weight"].bfloat16()
    tuned["aux.word_embeddings.weight"] = torch.cat(
        [base["aux.word_embeddings.weight"], random(1, 16)]
    )  # frozen, grown
    tuned["lm_head.weight"] = tuned["model.embed_tokens.weight"].clone()
    for name in ("a.weight", "b.weight"):
        tuned[name] = (base[name].float() + random(*base[name].shape, scale=0.1)).bfloat16()
    tuned["norm.weight"] = base["norm.weight"] * 1.01
    tuned["steps"] = torch.arange(5) + 1
    tuned["extra"] = random(4).half()
    for name, tensors in (("base", base), ("finetuned", tuned)):
        (folder / name).mkdir()
        config = {"model_type": "llama", "tie_word_embeddings": True}
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors")
    return folder / "base", folder / "finetuned"


def recipe(scope: str, **quantizing: Any) -> Recipe:
    return lossy(scope, "rtn", **quantizing)


def lossy(scope: str, codec: str, **settings: Any) -> Recipe:
    rules = [{"name": "*.weight", "codec": codec} | settings, {"codec": "exact"}]
    rules.insert(0, {"name": "norm*", "codec": "exact"})
    return Recipe.parse({"name": "test", "scope": scope, "rules": rules})


WAYS: dict[str, Callable[[], Recipe]] = {
    "2-bit 2:4": lambda: recipe("delta", bits=2, sparsity="2:4"),
    "3-bit 2:4 symmetric": lambda: recipe("delta", bits=3, sparsity="2:4", grid="symmetric"),
    "4-bit dense": lambda: recipe("delta", bits=4),
    "3-bit dense midrise": lambda: recipe("delta", bits=3, grid="midrise"),
    "2-bit dense masked": lambda: recipe("delta", bits=2, grid="symmetric", step=2.0),
    "sign 2:4": lambda: recipe("delta", bits=1, sparsity="2:4", grid="midrise"),
    "8-bit 4:8": lambda: recipe("delta", bits=8, sparsity="4:8"),
    "16-bit 2:4": lambda: recipe("delta", bits=16, sparsity="2:4"),
    "unstructured": lambda: recipe("delta", bits=4, sparsity="unstructured:0.5"),
    "full 2-bit 2:4": lambda: recipe("full", bits=2, sparsity="2:4"),
    "low rank": lambda: lossy("delta", "low-rank", rank=3),
    "full low rank": lambda: lossy("full", "low-rank", rank=1),
    "lossless": lambda: Recipe.parse({"name": "lossless", "rules": [{"codec": "exact"}]}),
}


@pytest.fixture(scope="module")
def pair_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("way", WAYS)
def test_the_documented_reader_restores_artifacts(
    way: str, codec: str, reader: Any, pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The reader checks every tensor against its recorded hash, so it gets the very bytes that `restore` gives."""
    base, finetuned = pair_dirs
    out = tmp_path / "delta"
    compress(base, finetuned, recipe=WAYS[way](), out=out, lossless=codec)
    restored = reader.restore(out, reader.read_safetensors(base / "model.safetensors"))
    assert restored.keys() == read_header(finetuned / "model.safetensors").tensors.keys()
    status = {name: record.status for name, record in load_delta(out).tensors.items()}
    full = WAYS[way]().scope == "full"
    assert status["lm_head.weight"] == "alias"
    assert status["c.weight"] == ("coded" if full else "identical")
    assert status["extra"] == ("exact" if full else "added")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_documented_reader_reads_side_files(
    codec: str, reader: Any, pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    finetuned = shutil.copytree(pair_dirs[1], tmp_path / "finetuned")
    written = {"config.json", "tokenizer.json", "vocab.txt", "merges.txt"}
    (finetuned / "tokenizer.json").write_text(json.dumps({f"token {i}": i for i in range(500)}))
    (finetuned / "vocab.txt").write_text("word\n" * 819 + "x\n")  # 4,097 bytes
    (finetuned / "merges.txt").write_text("word\n" * 819 + "\n")  # 4,096 bytes
    compress(pair_dirs[0], finetuned, recipe=WAYS["lossless"](), out=tmp_path / "delta", lossless=codec)
    assert reader.read_side_files(tmp_path / "delta") == {name: (finetuned / name).read_bytes() for name in written}
    framed = {"tokenizer.json", "vocab.txt"} if codec != "none" else set()
    lying = {path.name for path in (tmp_path / "delta").iterdir() if path.suffix != ".safetensors"}
    assert lying - {"manifest.json"} == {f"{name}.zst" if name in framed else name for name in written}


@pytest.mark.parametrize("recipe", ["int4-24", "int2"])
def test_the_documented_reader_turns_what_lies_as_in_by_out(
    recipe: str, reader: Any, make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = make_pair("gpt2")
    pair.compress(tmp_path / "delta", recipe=recipe)
    turned = [record for record in load_delta(tmp_path / "delta").tensors.values() if "transposed" in record.params]
    assert len(turned) == 8
    restored = reader.restore(tmp_path / "delta", reader.read_safetensors(pair.base / "model.safetensors"))
    assert restored.keys() == read_header(pair.finetuned / "model.safetensors").tensors.keys()


BOUNDS = (
    f"A manifest has at most {manifest.MAX_MANIFEST_BYTES >> 20} MiB, nests at most {MAX_DEPTH} deep",
    f"would take at most {manifest._MAX_MEMORY >> 20} MiB once it is parsed",
    f"`params` and `tools` have at most {records._MAX_KEYS} keys each",
    f"has more than 2^{MAX_NUMEL.bit_length() - 1} elements",
    f"its bytes less the {stream.HEADER_BYTES} of the stream's header",
    f"at most {stream.FEW_CHUNKS} chunks, and one more for each {stream.LEAST_CHUNK_BYTES >> 10} KiB",
    f"at most {MAX_SIDE_FILE_BYTES >> 20} MiB",
    f"at most {MAX_NAME} of them",
)


@pytest.mark.parametrize("told", BOUNDS)
def test_bounds_are_those_that_are_documented(told: str) -> None:
    """Neither can be moved without the other."""
    section = TEXT.partition("\n## Bounds\n")[2].partition("\n## ")[0]
    assert told in " ".join(section.split())


def test_bounds_of_the_codecs_are_those_that_are_documented() -> None:
    most = {"zstd": 2**15, "gdeflate": 1032, "ans": 2**18}
    assert most == stream.MOST_RAW_PER_BYTE
    section = " ".join(TEXT.partition("\n## Bounds\n")[2].split())
    assert "at most 2^15 (`zstd`), 1032 (`gdeflate`) or 2^18 (`ans`) raw bytes each" in section


def test_an_error_under_json_is_as_documented() -> None:
    (block,) = blocks("json error")
    error = FormatError("not an artifact's manifest (no JSON object)", where="delta/manifest.json", way_out=AGAIN)
    assert json.loads(in_json(error)) == json.loads(block)

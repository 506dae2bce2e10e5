"""Low rank against numpy's spectrum, a sum by hand in the documented order; whole, in pieces, and damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save_file

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints import rows as checkpoint_rows
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs import low_rank
from deltacompress.codecs.encoded import Encoded, check_pieces, restore_pieces, restore_tensor
from deltacompress.codecs.formats import low_rank as low_rank_format
from deltacompress.codecs.formats.pieces import PartInMemory
from deltacompress.codecs.recipe import Recipe
from deltacompress.codecs.settings import LowRankSettings
from deltacompress.compression.driver import compress
from deltacompress.errors import CheckpointError, FormatError, RecipeError

if TYPE_CHECKING:
    from pairs import Pair


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def factors(rows: int, rank: int, columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"left": normal(rows, rank, seed=seed).half(), "right": normal(rank, columns, seed=seed + 1).half()}


def by_hand(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """As docs/formats.md says, number by number."""
    left, right = (parts[name].numpy().astype(np.float32) for name in ("left", "right"))
    out = np.zeros((len(left), right.shape[1]), np.float32)
    for i, j in np.ndindex(*out.shape):
        for k in range(len(right)):
            out[i, j] = np.float32(out[i, j] + np.float32(left[i, k] * right[k, j]))
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_low_rank_is_the_truncated_svd(shape: tuple[int, int]) -> None:
    delta = normal(*shape, seed=1) * 0.01
    spectrum = np.linalg.eigvalsh((delta.double() @ delta.double().T).numpy())[::-1]  # squared singular values
    for rank in (1, 5, min(shape)):
        left, right = low_rank.factors(delta, rank)
        assert (left.dtype, left.shape, right.shape) == (torch.float16, (shape[0], rank), (rank, shape[1]))
        error = float((delta.double() - left.double() @ right.double()).square().sum())
        assert error == pytest.approx(float(spectrum[rank:].sum()), rel=1e-2, abs=1e-5 * float(spectrum.sum()))
        encoded = low_rank.encode_elements(InMemory(delta), None, LowRankSettings(rank=rank), "t")
        assert (encoded.format, encoded.params) == ("low_rank", {"rank": rank})
        assert torch.equal(encoded.parts["left"], left)
        assert torch.equal(encoded.parts["right"], right)
        assert encoded.loss == pytest.approx(error / float(delta.double().square().sum()), rel=1e-4, abs=1e-9)


def test_of_the_delta_over_the_rows_that_both_have() -> None:
    base, delta = normal(6, 9), 0.1 * normal(6, 9, seed=1)
    whole = torch.cat([base + delta, normal(2, 9, seed=2)])
    encoded = low_rank.encode_elements(InMemory(whole), InMemory(base), LowRankSettings(rank=6), "t")
    parts = encoded.parts | {"added_rows": whole[6:]}
    found = restore_tensor("low_rank", encoded.params, parts, base, meta(8, 9), "t")
    torch.testing.assert_close(found, whole, atol=1e-3, rtol=0)
    assert torch.equal(found[6:], whole[6:])
    assert encoded.loss is not None
    assert encoded.loss < 1e-5


def test_no_delta_has_no_loss() -> None:
    base = normal(6, 9)
    encoded = low_rank.encode_elements(InMemory(base), InMemory(base), LowRankSettings(rank=2), "t")
    assert encoded.loss == 0.0
    assert torch.equal(restore_tensor("low_rank", encoded.params, encoded.parts, base, meta(6, 9), "t"), base)


def test_what_fp16_cannot_hold_is_told() -> None:
    with pytest.raises(CheckpointError, match="tensor t: its difference from the base's is beyond fp16") as caught:
        low_rank.encode_elements(InMemory(torch.full((4, 4), 1e12)), None, LowRankSettings(rank=1), "t")
    assert "another codec" in str(caught.value)


def test_terms_are_added_in_order() -> None:
    parts = factors(9, 33, 14)
    delta = restore_tensor("low_rank", {"rank": 33}, parts, None, meta(9, 14), "t")
    assert torch.equal(delta, by_hand(parts))
    assert not torch.equal(delta, by_hand({"left": parts["left"].flip(1), "right": parts["right"].flip(0)}))


@pytest.mark.parametrize("in_cache", [1, 30, 1 << 16])
def test_what_a_cache_holds_changes_nothing(in_cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_format, "_IN_CACHE", in_cache)
    parts = factors(9, 7, 14)
    assert torch.equal(restore_tensor("low_rank", {"rank": 7}, parts, None, meta(9, 14), "t"), by_hand(parts))


class Part(PartInMemory):
    """A part in memory that is not read beyond its end, and in small pieces only."""

    def read(self, begin: int, end: int) -> bytearray:
        assert 0 <= begin < end <= self.nbytes
        return super().read(begin, end)


def in_pieces(params: Any, parts: dict[str, torch.Tensor], base: Any, like: torch.Tensor) -> torch.Tensor:
    sources = {name: Part(part) for name, part in parts.items()}
    rows = None if base is None else InMemory(base)
    found = list(restore_pieces("low_rank", params, sources, rows, like, "t", storage=True))
    assert all(piece.dim() == 1 and piece.dtype == like.dtype for piece in found)
    assert all(len(piece) <= checkpoint_rows.PIECE for piece in found)
    return torch.cat(found).reshape(like.shape)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_pieces(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 60))
    rank, added = data.draw(st.integers(1, min(rows, columns))), data.draw(st.integers(0, 4))
    parts = factors(rows, rank, columns, seed=data.draw(st.integers(0, 99)))
    base = normal(rows, columns, seed=7) if added or data.draw(st.booleans()) else None
    if added:
        parts["added_rows"] = normal(added, columns, seed=8).bfloat16()
    like = meta(rows + added, columns, dtype=torch.bfloat16)
    wanted = restore_tensor("low_rank", {"rank": rank}, parts, base, like, "t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_rows, "PIECE", data.draw(st.sampled_from([24, 25, 100])))
        found = in_pieces({"rank": rank}, parts, base, like)
        check_pieces("low_rank", {"rank": rank}, {n: Part(p) for n, p in parts.items()}, rows, "t", storage=True)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("shape", [(12,), (3, 2, 4)])
def test_vectors_and_more_dimensions(shape: tuple[int, ...]) -> None:
    tensor = normal(*shape)
    encoded = low_rank.encode_elements(InMemory(tensor), None, LowRankSettings(rank=1 if len(shape) == 1 else 3), "t")
    found = restore_tensor("low_rank", encoded.params, encoded.parts, None, meta(*shape), "t")
    torch.testing.assert_close(found, tensor, atol=5e-3, rtol=0)
    assert torch.equal(in_pieces(encoded.params, encoded.parts, None, meta(*shape)), found)


WRONG: dict[str, dict[str, Any]] = {
    "no left": {"left": None},
    "no right": {"right": None},
    "left of another rank": {"left": torch.zeros(5, 3).half()},
    "right of another rank": {"right": torch.zeros(3, 7).half()},
    "other rows": {"left": torch.zeros(4, 2).half()},
    "other columns": {"right": torch.zeros(2, 8).half()},
    "turned": {"left": torch.zeros(2, 5).half()},
    "another dtype": {"left": torch.zeros(5, 2).bfloat16()},
    "a part more": {"row_mask": torch.zeros(1, dtype=torch.uint8)},
    "NaN": {"left": torch.full((5, 2), torch.nan).half()},
    "Inf": {"right": torch.full((2, 7), torch.inf).half()},
    "added rows of another dtype": {"added_rows": torch.zeros(1, 7)},
    "an added row more": {"added_rows": torch.zeros(2, 7).bfloat16()},
    "no added row": {"added_rows": None},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_parts_that_do_not_fit(wrong: dict[str, Any]) -> None:
    parts: dict[str, Any] = factors(5, 2, 7) | {"added_rows": torch.zeros(1, 7).bfloat16()}
    base, like = normal(5, 7), meta(6, 7, dtype=torch.bfloat16)
    restore_tensor("low_rank", {"rank": 2}, parts, base, like, "t")
    changed = {name: part for name, part in (parts | wrong).items() if part is not None}
    with pytest.raises(FormatError, match=r"^t: "):
        restore_tensor("low_rank", {"rank": 2}, changed, base, like, "t")


@pytest.mark.parametrize("params", [{}, {"rank": 3}, {"rank": "2"}, {"rank": 0}])
def test_a_rank_that_does_not_fit(params: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^t: rank .* of 5 x 7 needs a part left F16"):
        restore_tensor("low_rank", params, factors(5, 2, 7), None, meta(5, 7), "t")


@pytest.mark.parametrize("name", ["left", "right"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_none(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_rows, "PIECE", 16)
    parts = factors(5, 2, 7)
    parts[name].view(-1)[-1] = value
    sources = {key: Part(part) for key, part in parts.items()}
    told = f"^t: part {name} holds NaN or Inf"
    with pytest.raises(FormatError, match=told):
        restore_tensor("low_rank", {"rank": 2}, parts, None, meta(5, 7), "t")
    with pytest.raises(FormatError, match=told):
        in_pieces({"rank": 2}, parts, None, meta(5, 7))
    with pytest.raises(FormatError, match=told):
        check_pieces("low_rank", {"rank": 2}, sources, 5, "t", storage=False)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "full", None])
def test_ranks_that_are_none(rank: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        LowRankSettings(rank=rank)
    assert caught.value.errors()[0]["loc"] == ("rank",)
    with pytest.raises(RecipeError, match="rank"):
        Recipe.parse({"name": "n", "rules": [{"codec": "low-rank", "rank": rank}]})


@pytest.mark.parametrize(("shape", "most"), [((5, 9), 5), ((9, 5), 5), ((1, 9), 1)])
def test_no_rank_beyond_the_matrix(shape: tuple[int, int], most: int) -> None:
    LowRankSettings(rank=most).check_shape(*shape, "t")
    with pytest.raises(RecipeError, match=rf"t: rank {most + 1} of a matrix of .*; choose at most {most}"):
        LowRankSettings(rank=most + 1).check_shape(*shape, "t")


def lossy(rank: int, **more: Any) -> Recipe:
    rules = [{"kind": ["linear", "head", "embedding"], "codec": "low-rank", "rank": rank}, {"codec": "exact"}]
    return Recipe.parse({"name": "thin", "rules": rules} | more)


@pytest.mark.parametrize("lossless", ["none", "zstd"])
@pytest.mark.parametrize("scope", ["delta", "full"])
def test_artifacts_hold_it(pair: Pair, tmp_path: Path, lossless: str, scope: str) -> None:
    result = pair.compress(tmp_path / "out", recipe=lossy(4, scope=scope), lossless=lossless, calibration=None)
    assert result.summary["recipe"] == "thin"
    verify(tmp_path / "out")
    delta = verify(tmp_path / "out", base=pair.base)
    row = next(one for one in delta.summary()["tensors"] if one["name"] == "lm_head.weight")
    assert row["codec"] == "low-rank rank 4"
    restored = Checkpoint.open(restore(tmp_path / "out", base=pair.base, out=tmp_path / "restored"))
    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    name = "model.layers.1.mlp.up_proj.weight"
    before = base.read(name).double() if scope == "delta" else 0
    left, values, right = np.linalg.svd((finetuned.read(name).double() - before).numpy(), full_matrices=False)
    best = torch.from_numpy((left[:, :4] * values[:4]) @ right[:4])
    torch.testing.assert_close(restored.read(name).double() - before, best, atol=3e-3, rtol=2**-7)


def test_a_rank_that_one_tensor_cannot_have(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"weight: rank 33 of a matrix of \d+ x \d+; choose at most"):
        pair.compress(tmp_path / "out", recipe=lossy(33), calibration=None)
    assert not list(tmp_path.iterdir())


def test_the_rank_to_choose_suits_all_tensors(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^recipe thin: .*: rank 1000000000 of .*; choose at most \d+$") as caught:
        pair.compress(tmp_path / "out", recipe=lossy(10**9), calibration=None)
    most = int(str(caught.value).split()[-1])
    with pytest.raises(RecipeError, match=rf"choose at most {most}$"):
        pair.compress(tmp_path / "out", recipe=lossy(most + 1), calibration=None)
    pair.compress(tmp_path / "out", recipe=lossy(most), calibration=None)


def test_the_rank_is_that_of_the_rows_that_both_have(tmp_path: Path) -> None:
    for side, rows in (("base", 3), ("finetuned", 5)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "config.json").write_text('{"model_type": "llama"}')
        save_file({"model.embed_tokens.weight": normal(rows, 16)}, tmp_path / side / "model.safetensors")

    def run(rank: int, scope: str) -> Path:
        recipe = Recipe.parse({"name": "n", "scope": scope, "rules": [{"codec": "low-rank", "rank": rank}]})
        out = tmp_path / f"{scope}-{rank}"
        return compress(tmp_path / "base", tmp_path / "finetuned", recipe=recipe, out=out, device="cpu").out

    with pytest.raises(RecipeError, match=r"rank 4 of a matrix of 3 x 16; choose at most 3"):
        run(4, "delta")
    for rank, scope in ((3, "delta"), (5, "full")):
        verify(run(rank, scope), base=tmp_path / "base")


def test_its_parts_are_what_the_manifest_says(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "out", recipe=lossy(3), lossless="none", calibration=None)
    delta = load_delta(tmp_path / "out")
    for record in delta.manifest.tensors:
        if record.codec == "low-rank":
            rows, columns = record.shape
            found = [(part.name, part.dtype, part.shape, part.bytes) for part in record.parts]
            assert found == [("left", "F16", (rows, 3), 6 * rows), ("right", "F16", (3, columns), 6 * columns)]
            assert Encoded(record.format, dict(record.params), delta.parts(record.name)).params == {"rank": 3}

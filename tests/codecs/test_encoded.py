"""restore_tensor: what every reader calls. Wrong parts are FormatErrors, whatever is wrong with them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from deltacompress.artifact.records import TensorRecord
from deltacompress.checkpoints.rows import InMemory
from deltacompress.codecs import rtn
from deltacompress.codecs.encoded import DECODERS, Encoded, restore_pieces, restore_tensor
from deltacompress.codecs.formats import exact, packed
from deltacompress.codecs.formats.table import FORMATS
from deltacompress.codecs.settings import RtnSettings
from deltacompress.errors import FormatError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def restore(encoded: Encoded, base: torch.Tensor | None, like: torch.Tensor, **changed: Any) -> torch.Tensor:
    parts = {name: part for name, part in (encoded.parts | changed).items() if part is not None}
    return restore_tensor(encoded.format, encoded.params, parts, base, like, "t")


@pytest.fixture
def sparse_rows() -> Encoded:
    """Rows 1 and 4 of six are stored."""
    delta = torch.zeros(6, 8)
    delta[[1, 4]] = normal(2, 8)
    return rtn.encode(delta, RtnSettings(bits=4), "t")


def test_base_and_delta_are_added_in_float32_and_then_rounded_once() -> None:
    base, delta = normal(6, 8).bfloat16().float(), 1e-3 * normal(6, 8, seed=1)
    encoded = rtn.encode(delta, RtnSettings(bits=8), "t")
    decoded = restore(encoded, None, meta(6, 8, dtype=torch.float32))
    assert torch.equal(restore(encoded, base, meta(6, 8)), (base + decoded).bfloat16())
    assert torch.equal(restore(encoded, base, meta(6, 8, dtype=torch.float16)), (base + decoded).half())


def test_the_base_is_left_as_it_was(sparse_rows: Encoded) -> None:
    base = normal(6, 8)
    before = base.clone()
    restore(sparse_rows, base, meta(6, 8))
    assert torch.equal(base, before)


@pytest.mark.parametrize("changed", ["some", "all"])
def test_added_rows_follow_as_they_are(changed: str, sparse_rows: Encoded) -> None:
    encoded = sparse_rows if changed == "some" else rtn.encode(normal(6, 8), RtnSettings(bits=4), "t")
    base, added = normal(6, 8, seed=2), normal(3, 8, seed=3).bfloat16()
    restored = restore(encoded, base, meta(9, 8), added_rows=added)
    assert torch.equal(restored[6:], added)
    assert torch.equal(restored[:6], restore(encoded, base, meta(6, 8)))


def test_a_vector_may_grow_too() -> None:
    encoded, base = rtn.encode(normal(5), RtnSettings(bits=8), "t"), normal(5, seed=1)
    added = normal(2, seed=2).bfloat16()
    restored = restore(encoded, base, meta(7), added_rows=added)
    assert torch.equal(restored, torch.cat([restore(encoded, base, meta(5)), added]))


def test_no_parts_means_the_base() -> None:
    base = normal(6, 8)
    nothing = Encoded("none", {}, {})
    assert torch.equal(restore(nothing, base, meta(6, 8)), base.bfloat16())
    for wrong in (None, normal(5, 8)):
        with pytest.raises(FormatError, match=r"^t: stored without parts"):
            restore(nothing, wrong, meta(6, 8))


def test_exact_tensors_come_through() -> None:
    finetuned, base = normal(3, 4).bfloat16(), normal(3, 4, seed=1)
    params, parts = exact.encode(InMemory(finetuned), InMemory(base))
    assert torch.equal(restore(Encoded("exact", params, parts), base, meta(3, 4)), finetuned)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^t: unknown format 'jpeg'"):
        restore_tensor("jpeg", {}, {}, None, meta(2, 2), "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": None}, "part codes is missing"),
        ({"scales": None}, "part scales is missing"),
        ({"zeros": None}, "part zeros is missing"),
        ({"pattern": torch.zeros(2, 1).byte()}, "part pattern .* does not belong"),
        ({"codes": torch.zeros(2, 3).byte()}, "part codes is"),
        ({"codes": torch.zeros(3, 4).byte()}, "part codes is"),
        ({"codes": torch.zeros(2, 4).char()}, "part codes is"),
        ({"scales": torch.zeros(2, 2).bfloat16()}, "part scales is"),
        ({"scales": torch.zeros(2, 1)}, "part scales is"),
        ({"zeros": torch.zeros(1, 1).byte()}, "part zeros is"),
        ({"row_mask": None}, "decodes to"),
        ({"row_mask": torch.tensor([0b00010110]).byte()}, "row_mask names 3 rows, 2 are stored"),
        ({"row_mask": torch.tensor([0b10000010]).byte()}, "row_mask names 1 rows, 2 are stored"),
        ({"row_mask": torch.tensor([0b00010010, 0]).byte()}, "do not decode"),
        ({"row_mask": torch.zeros(0).byte()}, "do not decode"),
        ({"row_mask": torch.tensor([[0b00010010]]).byte()}, "do not decode"),
        ({"added_rows": normal(1, 8).bfloat16()}, "decodes to"),
        ({"added_rows": normal(1, 7).bfloat16()}, "added_rows"),
        ({"added_rows": normal(8).bfloat16()}, "added_rows"),
        ({"added_rows": normal(0, 8)}, "added_rows"),
    ],
)
def test_parts_that_do_not_fit_are_format_errors(
    change: dict[str, torch.Tensor | None], message: str, sparse_rows: Encoded
) -> None:
    with pytest.raises(FormatError, match=f"^t: .*{message}"):
        restore(sparse_rows, normal(6, 8), meta(6, 8), **change)


def test_memory_that_runs_out_is_no_fault_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed, "decode", full)
    with pytest.raises(torch.OutOfMemoryError):
        restore(rtn.encode(normal(6, 8), RtnSettings(bits=4), "t"), normal(6, 8), meta(6, 8))


@pytest.mark.parametrize("shape", [(6, 9), (5, 8), (7, 8), (48,), (8, 6)])
def test_another_tensor_than_the_parts_are_of_is_a_format_error(shape: tuple[int, ...]) -> None:
    encoded = rtn.encode(normal(6, 8), RtnSettings(bits=4), "t")
    for base in (normal(6, 8), normal(*shape)):
        with pytest.raises(FormatError, match=r"^t: .*(decode|expected)"):
            restore(encoded, base, meta(*shape) if base.shape == (6, 8) else meta(6, 8))


def test_bad_parameters_are_a_format_error(sparse_rows: Encoded) -> None:
    broken = Encoded("packed", sparse_rows.params | {"bits": 5}, sparse_rows.parts)
    with pytest.raises(FormatError, match=r"^t: parameters"):
        restore(broken, normal(6, 8), meta(6, 8))


def test_what_a_manifest_may_name_is_what_can_be_decoded_and_checked() -> None:
    assert set(get_args(TensorRecord.model_fields["format"].annotation)) == set(FORMATS) == set(DECODERS)
    with pytest.raises(FormatError, match=r"^t: unknown format 'jpeg'$"):
        list(restore_pieces("jpeg", {}, {}, None, meta(2, 2), "t", storage=False))

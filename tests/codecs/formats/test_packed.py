"""The packed format: decoding against numpy float32 arithmetic on the codes that went in, both layouts, damage."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.codecs.formats import packed
from deltacompress.codecs.formats.packed import PackedSpec
from deltacompress.codecs.rtn import magnitude_mask
from deltacompress.errors import FormatError
from deltacompress.numerics.grid import Grid, GridKind, fit_grid, quantize
from deltacompress.numerics.sparsity import Sparsity

PATTERNS = ["dense", "2:4", "1:4", "3:4", "4:8", "2:3", "unstructured:0.5"]
DRAWN = ["drawn:1:4", "drawn:2:4", "drawn:3:8", "drawn:5:16"]
"""Of one bit only."""


def drawn_of(spec: PackedSpec) -> torch.Tensor:
    """The pattern that docs/formats.md says, one Python number after the other."""

    def mixed(x: int) -> int:
        x %= 1 << 32
        for shift, factor in ((16, 2246822507), (13, 3266489909)):
            x = (x ^ x >> shift) * factor % (1 << 32)
        return x ^ x >> 16

    kept = torch.zeros(spec.rows, spec.padded, dtype=torch.bool)
    for r in range(spec.rows):
        numbers = [mixed(mixed(spec.seed + r) + c) for c in range(spec.padded)]
        for begin in range(0, spec.padded, spec.sparsity.m):
            group = range(begin, begin + spec.sparsity.m)
            kept[r, sorted(group, key=lambda c: (numbers[c], c))[: spec.sparsity.n]] = True
    return kept


class Case:
    """A random tensor in the packed format; every quarter of the rows is zero."""

    def __init__(
        self,
        bits: int,
        pattern: str,
        kind: GridKind,
        rows: int,
        columns: int,
        group: int,
        seed: int,
        *,
        masked: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=generator)
        weight[::4] = 0
        sparsity = Sparsity.parse(pattern)
        masked = masked and pattern == "dense" and bits != 16 and kind != "midrise"
        drawn = sparsity.kind == "drawn"
        self.spec = PackedSpec(rows, columns, bits, sparsity, group, kind, masked=masked, seed=seed if drawn else 0)
        self.mask = drawn_of(self.spec)[:, :columns] if drawn else magnitude_mask(weight, sparsity)
        self.weight = weight
        self.grid: Grid | None = None
        if bits == 16:
            self.parts = packed.pack_values(self.spec, values=weight, mask=self.mask)
        else:
            self.grid = fit_grid(weight, bits=bits, group=group, kind=kind)
            self.codes = quantize(weight, self.grid)
            # kept weights with the code that stands for zero, and pruned ones with any code, are both legal
            flip = torch.rand(weight.shape, generator=generator) < 0.2
            self.codes[flip] = torch.randint(0, 1 << bits, (int(flip.sum()),), generator=generator, dtype=torch.uint8)
            self.parts = packed.pack(self.spec, codes=self.codes, mask=self.mask, grid=self.grid)

    def wanted(self) -> np.ndarray:
        """What must be decoded, one numpy float32 operation after the other."""
        mask = self.mask.numpy()
        if self.grid is None:
            return np.where(mask, self.weight.bfloat16().float().numpy(), np.float32(0))
        column = np.arange(self.spec.columns) // self.spec.group
        scale = self.grid.scale.numpy()[:, column]
        zero = self.grid.zero.numpy()[:, column]
        assert scale.dtype == zero.dtype == np.float32
        return np.where(mask, (self.codes.numpy().astype(np.float32) - zero) * scale, np.float32(0))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    bits = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    kind = cast(GridKind, draw(st.sampled_from(["midrise"] if bits == 1 else ["minmax", "symmetric", "midrise"])))
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 37))
    group = draw(st.integers(1, columns + 3))
    patterns = PATTERNS + DRAWN if bits == 1 else PATTERNS
    pattern, seed = draw(st.sampled_from(patterns)), draw(st.integers(0, 2**31))
    return Case(bits, pattern, kind, rows, columns, group, seed, masked=draw(st.booleans()))


@given(cases())
@settings(max_examples=250, deadline=None)
def test_what_is_packed_decodes_bit_for_bit_in_either_layout(case: Case) -> None:
    spec, parts = case.spec, case.parts
    packed.check_parts(spec, parts, storage=False, where="t")
    decoded = packed.decode(spec, parts).numpy()
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == case.wanted().tobytes()

    stored = packed.to_storage(spec, parts)
    packed.check_parts(spec, stored, storage=True, where="t")
    served = packed.to_serving(spec, stored, "t")
    assert served.keys() == parts.keys()
    for name, part in parts.items():
        assert served[name].dtype == part.dtype
        assert torch.equal(served[name], part), name


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_stored_pattern_keeps_exactly_n_of_every_m(case: Case) -> None:
    sparsity = case.spec.sparsity
    if sparsity.kind != "n:m" or not case.spec.rows:
        return
    kept = packed._mask(case.spec, case.parts["pattern"])
    assert kept.shape == (case.spec.rows, case.spec.padded)
    assert (kept.view(case.spec.rows, -1, sparsity.m).sum(-1) == sparsity.n).all()


@pytest.mark.parametrize("bits", [1, 16])
def test_a_ragged_group_is_completed_behind_the_last_column(bits: int) -> None:
    """Of three weights one is kept: the other two stay zero, though two of four have to be."""
    spec = PackedSpec(1, 7, bits, Sparsity.parse("2:4"), 7, "midrise" if bits == 1 else "minmax")
    weight = torch.arange(1.0, 8.0).unsqueeze(0)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 1]], dtype=torch.bool)
    if bits == 16:
        parts = packed.pack_values(spec, values=weight, mask=mask)
    else:
        grid = fit_grid(weight, bits=bits, group=7, kind="midrise")
        parts = packed.pack(spec, codes=quantize(weight, grid), mask=mask, grid=grid)
    assert ((packed.decode(spec, parts) != 0) == mask).all()


@given(cases())
@settings(max_examples=60, deadline=None)
def test_parameters_survive_the_manifest(case: Case) -> None:
    assert PackedSpec.from_json(case.spec.to_json(), "t") == case.spec


def test_two_four_int4_bytes_by_hand() -> None:
    """One row of eight: keep columns 1, 3 with codes 5, 9 and columns 4, 6 with codes 15, 2; zero point 8."""
    spec = PackedSpec(1, 8, 4, Sparsity.parse("2:4"), 8, "symmetric")
    codes = torch.tensor([[0, 5, 0, 9, 15, 0, 2, 0]], dtype=torch.uint8)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    grid = Grid(4, 8, torch.tensor([[0.5]]), torch.tensor([[8.0]]))
    parts = packed.pack(spec, codes=codes, mask=mask, grid=grid)
    assert parts["codes"].tolist() == [[0x95, 0x2F]]
    assert parts["pattern"].tolist() == [[(1 | 3 << 2) | (0 | 2 << 2) << 4]]
    assert parts["scales"].dtype == torch.bfloat16
    assert packed.decode(spec, parts).tolist() == [[0, -1.5, 0, 0.5, 3.5, 0, -3.0, 0]]
    stored = packed.to_storage(spec, parts)
    assert stored["groups"].tolist() == [[0b01011010]]
    assert stored["nonzero"].tolist() == [(5 - 8) % 16 | (9 - 8) << 4, (15 - 8) | ((2 - 8) % 16) << 4]


def test_a_kept_zero_decodes_to_zero_wherever_it_is_put() -> None:
    spec = PackedSpec(1, 4, 2, Sparsity.parse("2:4"), 4, "symmetric")
    grid = Grid(2, 4, torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    mask = torch.tensor([[False, False, True, True]])
    parts = packed.pack(spec, codes=torch.tensor([[0, 0, 2, 3]], dtype=torch.uint8), mask=mask, grid=grid)
    decoded = packed.decode(spec, parts)
    assert decoded.tolist() == [[0, 0, 0, 1]]
    assert not decoded.signbit().any()


def test_what_is_pruned_is_positive_zero() -> None:
    spec = PackedSpec(2, 8, 4, Sparsity.parse("1:4"), 8, "symmetric")
    grid = Grid(4, 8, torch.ones(2, 1), torch.full((2, 1), 8.0))
    mask = torch.arange(8).remainder(4).eq(0).expand(2, 8)
    decoded = packed.decode(spec, packed.pack(spec, codes=torch.full((2, 8), 7).byte(), mask=mask, grid=grid))
    assert (decoded[mask] == -1).all()
    assert not decoded[~mask].signbit().any()


GOOD = {"bits": 4, "sparsity": "2:4", "group_size": 8, "grid": "minmax", "rows": 2, "columns": 8}


@pytest.mark.parametrize(
    "change",
    [{"bits": 5}, {"bits": "many"}, {"sparsity": "4:2"}, {"sparsity": 2}, {"group_size": 0}, {"grid": "odd"},
     {"rows": -1}, {"columns": 0}, {"columns": None}],
)  # fmt: skip
def test_bad_parameters_are_a_format_error(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^t: "):
        PackedSpec.from_json(GOOD | change, "t")


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_parameter_is_a_format_error(field: str) -> None:
    with pytest.raises(FormatError, match=f"^t: .*{field}"):
        PackedSpec.from_json({k: v for k, v in GOOD.items() if k != field}, "t")


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_parts_of_another_shape_dtype_or_name_are_refused(case: Case, data: st.DataObject) -> None:
    storage = data.draw(st.booleans())
    parts = dict(packed.to_storage(case.spec, case.parts) if storage else case.parts)
    name = data.draw(st.sampled_from(sorted(parts)))
    part = parts.pop(name)
    damage = data.draw(st.sampled_from(["missing", "renamed", "dtype", "flat", "rows"]))
    if damage == "renamed":
        parts[name + "s"] = part
    elif damage == "dtype":
        parts[name] = part.float()
    elif damage == "flat":
        parts[name] = part.unsqueeze(0)
    elif damage == "rows":
        if part.dim() == 1:  # its length depends on the data: the decoder checks it
            return
        parts[name] = torch.cat([part, part.new_zeros(1, part.shape[1])])
    with pytest.raises(FormatError, match=r"^t: part "):
        packed.check_parts(case.spec, parts, storage=storage, where="t")


@pytest.mark.parametrize("pattern", ["1:4", "4:8", "unstructured:0.5"])
def test_a_pattern_that_keeps_another_number_is_refused(pattern: str) -> None:
    case = Case(4, pattern, "minmax", 3, 16, 16, seed=0)
    case.parts["pattern"] = case.parts["pattern"].clone()
    case.parts["pattern"][1, 0] ^= 0b11 if pattern == "unstructured:0.5" else 0b1
    case.parts["pattern"][1, 1] = 0xFF
    with pytest.raises(ValueError, match=r"exactly|as many|codes"):
        packed.decode(case.spec, case.parts)


def test_streams_that_contradict_each_other_are_a_format_error() -> None:
    case = Case(4, "2:4", "minmax", 3, 16, 16, seed=0)
    stored = packed.to_storage(case.spec, case.parts)
    with pytest.raises(FormatError, match=r"^t: .*not as many"):
        packed.to_serving(case.spec, stored | {"nonzero": stored["nonzero"][:-1]}, "t")
    groups, nonzero = torch.full_like(stored["groups"], 0xFF), torch.zeros(3 * 16 // 2, dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"^t: .*more than two"):
        packed.to_serving(case.spec, stored | {"groups": groups, "nonzero": nonzero}, "t")


@pytest.mark.parametrize("params", [{"sparsity": "2:4"}, {"grid": "midrise"}, {"bits": 16}, {"masked": 2}])
def test_only_dense_codes_with_a_zero_are_masked(params: dict[str, Any]) -> None:
    spec = PackedSpec(3, 8, 2, Sparsity.parse("dense"), 8, "symmetric", masked=True)
    assert PackedSpec.from_json(spec.to_json(), "t") == spec
    with pytest.raises(FormatError, match="out of range"):
        PackedSpec.from_json(spec.to_json() | params, "t")


def test_masked_codes_are_as_many_as_the_mask_says() -> None:
    case = Case(2, "dense", "symmetric", 5, 20, 20, 1, masked=True)
    stored = packed.to_storage(case.spec, case.parts)
    assert stored.keys() == {"groups", "nonzero", "scales"}
    for wrong in (stored["nonzero"][:-1], torch.cat([stored["nonzero"], stored["nonzero"][:1]])):
        with pytest.raises(FormatError, match="not as many as the group masks say"):
            packed.to_serving(case.spec, stored | {"nonzero": wrong}, "t")


@pytest.mark.parametrize(("columns", "again"), [(48, 0), (45, 1)])
def test_a_pattern_that_is_given_whole_is_not_drawn_again(
    columns: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, asked = Case(1, "drawn:3:8", "midrise", 5, columns, columns, 0), list[PackedSpec]()
    draw = packed.drawn_pattern

    def drawn(spec: PackedSpec, device: torch.device) -> torch.Tensor:
        asked.append(spec)
        return draw(spec, device)

    assert case.grid is not None
    monkeypatch.setattr(packed, "drawn_pattern", drawn)
    parts = packed.pack(case.spec, codes=case.codes, mask=case.mask, grid=case.grid)
    assert len(asked) == again
    assert torch.equal(parts["codes"], case.parts["codes"])


def test_a_lot_is_not_the_pattern_that_kernels_read() -> None:
    assert PackedSpec(1, 8, 1, Sparsity.parse("2:4"), 8, "midrise").is_24
    assert not PackedSpec(1, 8, 1, Sparsity.parse("drawn:2:4"), 8, "midrise").is_24


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"seed": 1 << 32}, {"seed": None}, {"bits": 2}, {"sparsity": "3:8"}, {"sparsity": "dense"}]
)
def test_a_lot_has_a_seed_and_one_bit(change: dict[str, Any]) -> None:
    params = PackedSpec(2, 16, 1, Sparsity.parse("drawn:3:8"), 16, "midrise", seed=5).to_json()
    assert PackedSpec.from_json(params, "t").seed == 5
    with pytest.raises(FormatError, match="parameters of the packed format"):
        PackedSpec.from_json({name: value for name, value in (params | change).items() if value is not None}, "t")

"""One linear, one embedding, and every operand of adapters: held against the formula, written out in float64."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from butterflies import dense
from torch import Tensor, nn

from deltacompress.kernels import get_backend
from deltacompress.kernels.adapters import AdapterKernels, get_adapter_kernels
from deltacompress.kernels.adapters.select import ReferenceAdapters
from deltacompress.numerics.adapters.butterfly import rotate, rotations
from deltacompress.runtime.batch import Batch, FixedBatch, ForwardContext
from deltacompress.runtime.modules.embedding import decouple_embedding
from deltacompress.runtime.modules.linear import DecoupledLinear, LinearGroup
from deltacompress.runtime.operands.dense_delta import DeltaOfRows, DenseDelta
from deltacompress.runtime.operands.embedding_rows import (
    EmbeddingRows,
    EmbeddingTable,
    LowRankRows,
    ReplacedRows,
    RowsOver,
)
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.operand import Operand, Vector
from deltacompress.runtime.operands.product import Combined, LinearOperand
from deltacompress.runtime.operands.rotation import Rotation
from deltacompress.runtime.operands.scale import Scale
from deltacompress.runtime.operands.sparse import Sparse

CPU = torch.device("cpu")
INPUTS, OUT = 16, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotation(parameters: Tensor) -> Rotation:
    turns = rotations(parameters)
    blocks = {f"blocks{k}": one.blocks for k, one in enumerate(turns)}
    return Rotation(blocks, tuple((one.stride, one.chunk) for one in turns))


def sparse(matrix: Tensor) -> Sparse:
    rows, columns = matrix.nonzero(as_tuple=True)
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(1))
    rows, columns = rows[order], columns[order]
    return Sparse.of(rows, columns, matrix[rows, columns], matrix.shape[0])


A, B, BIAS = drawn(3, INPUTS), drawn(OUT, 3, seed=1), drawn(OUT, seed=2)
D, S = drawn(OUT, INPUTS, seed=3), drawn(OUT, INPUTS, seed=4) * (drawn(OUT, INPUTS, seed=5) > 1)
R = drawn(2, 4, 4, 4, seed=6)
CHAIN = Rotation({"blocks0": drawn(4, 4, 4, seed=12), "blocks1": drawn(2, 8, 8, seed=13)}, ((2, 2), (1, 8)))
SCALE, WHOLE, OWN = drawn(OUT, seed=8), drawn(OUT, INPUTS, seed=9), drawn(OUT, seed=10)
ROWS, FEW = torch.tensor([4, 1]), drawn(2, INPUTS, seed=11)
PARTS: dict[str, LinearOperand] = {
    "low rank": LowRank({"a": A, "b": B}),
    "low rank with bias": LowRank({"a": A, "b": B, "bias": BIAS}),
    "delta": DenseDelta({"delta": D}),
    "sparse": sparse(S),
    "rotation": rotation(R),
    "chain": CHAIN,
    "scale": Scale({"scale": SCALE}),
    "whole": FullWeight({"weight": WHOLE}),
    "few rows": DeltaOfRows({"rows": ROWS, "delta": FEW}),
}
SETS = [
    *((name,) for name in PARTS),
    ("delta", "low rank with bias"),
    ("whole", "low rank", "scale"),
    ("delta", "rotation", "scale"),
    ("whole", "rotation", "scale"),
    ("low rank", "chain", "sparse"),
    ("low rank", "sparse"),
    ("whole", "sparse", "few rows"),
    ("delta", "low rank", "sparse", "few rows", "scale"),
]


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[str, ...]) -> Tensor:
    """y = s * ((W + D) (x R) + B A x + b_B + S x) + bias."""
    x, w = x.double(), (WHOLE if "whole" in parts else weight).double()
    if "rotation" in parts:
        x = x @ dense(R)
    if "chain" in parts:
        for blocks, (stride, chunk) in zip(CHAIN.turns, CHAIN.layout, strict=True):
            x = rotate(x, blocks.double(), stride, chunk)
    y = x @ (w + ("delta" in parts) * D.double()).T
    if low := [name for name in parts if name.startswith("low rank")]:
        y = y + x @ A.double().T @ B.double().T + ("bias" in low[0]) * BIAS.double()
    y = y + ("sparse" in parts) * (x @ S.double().T)
    if "few rows" in parts:
        y[:, ROWS] += x @ FEW.double().T
    y = y * SCALE.double() if "scale" in parts else y
    return y if bias is None else y + bias.double()


@pytest.fixture(params=[None, "reference"], ids=["loops", "tables"])
def adapters(request: pytest.FixtureRequest) -> AdapterKernels | None:
    return None if request.param is None else get_adapter_kernels(request.param, CPU)


@pytest.mark.parametrize(("bias", "own"), [(False, False), (True, False), (True, True)])
def test_all_sets_of_parts_beside_each_other(bias: bool, own: bool, adapters: AdapterKernels | None) -> None:
    context, linear = ForwardContext(), nn.Linear(INPUTS, OUT, bias=bias)
    made = DecoupledLinear(linear, context, None, adapters, is_head=False)
    biases: list[Tensor | None] = [linear.bias.detach() if bias else None] * (1 + len(SETS))
    for slot, names in enumerate(SETS, start=1):
        parts = [PARTS[name] for name in names]
        made.set(slot, parts[0] if len(parts) == 1 else Combined.of(*parts))
        if own and slot % 2:
            assert made.biases is not None
            made.biases.set(slot, Vector({"vector": OWN}))
            biases[slot] = OWN
    x = drawn(1 + len(SETS), 3, INPUTS, seed=20)
    before = x.clone()
    with torch.inference_mode():
        for slots in ([*range(1 + len(SETS))], *([slot] for slot in range(1 + len(SETS))), [0, 3, 3, 8, 11]):
            context.batch = Batch(slots, CPU)
            found = made(x[slots])
            for slot, one in zip(slots, found, strict=True):
                wanted = formula(x[slot], linear.weight.detach(), biases[slot], SETS[slot - 1] if slot else ())
                torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bias", [False, True])
def test_linears_of_one_input_answer_in_a_group_as_alone(bias: bool, adapters: AdapterKernels | None) -> None:
    """Whatever their rows bring, for one of them or for all."""
    context = ForwardContext()
    linears = [nn.Linear(INPUTS, OUT, bias=bias) for _ in range(3)]
    weights = [linear.weight.detach().clone() for linear in linears]
    members = [DecoupledLinear(linear, context, None, adapters, is_head=False) for linear in linears]
    LinearGroup(members)
    for slot, names in enumerate(SETS, start=1):
        for k, member in enumerate(members):
            if slot % 3 != k:  # one of the three has nothing
                member.set(slot, Combined.of(*(PARTS[name] for name in names)))
    every = [*range(1 + len(SETS))]
    joined = [0, *(slot for slot in every[1:] if set(SETS[slot - 1]) <= {"low rank", "low rank with bias", "sparse"})]
    assert len(joined) == 5
    x = drawn(len(every), 2, INPUTS, seed=21)
    with torch.inference_mode():
        for slots in (every, joined, *([slot] for slot in every)):
            context.batch = Batch(slots, CPU)
            hidden = x[slots]
            found = [member(hidden) for member in members]
            for k, (slot_at, slot) in product(range(3), enumerate(slots)):
                parts = SETS[slot - 1] if slot and slot % 3 != k else ()
                own = linears[k].bias.detach() if bias else None
                wanted = formula(x[slot], weights[k], own, parts)
                torch.testing.assert_close(found[k][slot_at].double(), wanted, rtol=1e-5, atol=1e-5)


def test_sums_join_and_turns_and_scales_do_not() -> None:
    made = DecoupledLinear(nn.Linear(INPUTS, OUT), ForwardContext(), None, is_head=False)
    for slot, part in enumerate(PARTS.values(), start=1):
        made.set(slot, part)
    joins = {name: made.product(PARTS[name].product).joins([slot]) for slot, name in enumerate(PARTS, start=1)}
    assert {name for name, one in joins.items() if one} == {"low rank", "low rank with bias", "sparse"}


def test_a_grown_head_is_as_wide_as_its_matrices(adapters: AdapterKernels | None) -> None:
    context, linear = ForwardContext(), nn.Linear(INPUTS, OUT, bias=False)
    made = DecoupledLinear(linear, context, None, adapters, is_head=True)
    whole, b = drawn(OUT + 2, INPUTS, seed=1), drawn(OUT + 2, 3, seed=2)
    grown = LowRank({"a": A, "b": b})
    made.set(1, Combined.of(FullWeight({"weight": whole}), grown))
    made.set(2, Combined.of(PARTS["low rank"], Scale({"scale": SCALE})))
    made.set(3, Scale({"scale": drawn(OUT + 2, seed=4)}))
    x = drawn(4, 2, INPUTS)
    context.batch = Batch([0, 1, 2, 3], CPU)
    with torch.inference_mode():
        y = made(x)
        assert y.shape == (4, 2, OUT + 2)
        torch.testing.assert_close(y[1], x[1] @ whole.T + x[1] @ A.T @ b.T)
        torch.testing.assert_close(y[2, :, :OUT], (x[2] @ linear.weight.T + x[2] @ A.T @ B.T) * SCALE)
        torch.testing.assert_close(y[3, :, :OUT], x[3] @ linear.weight.T * drawn(OUT + 2, seed=4)[:OUT])
        torch.testing.assert_close(y[0, :, :OUT], x[0] @ linear.weight.T)
    lows = made.product(grown.product)
    assert (lows.joins([1, 2]), lows.joins([0, 2])) == (False, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_entries(dtype: torch.dtype, adapters: AdapterKernels | None) -> None:
    context, linear = ForwardContext(), nn.Linear(INPUTS, OUT, bias=False).to(dtype)
    made = DecoupledLinear(linear, context, None, adapters, is_head=False)
    made.set(1, sparse(S.to(dtype)))
    none = torch.tensor([], dtype=torch.int64)
    made.set(2, Sparse.of(none, none, drawn(0).to(dtype), OUT))
    x = drawn(2, 3, INPUTS).to(dtype)
    context.batch = Batch([1, 2], CPU)
    with torch.inference_mode():
        y, plain = made(x), linear(x)
    assert y.dtype == dtype
    wanted = x[0].double() @ (linear.weight.double() + S.to(dtype).double()).T
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y[0].double(), wanted, rtol=4 * eps, atol=8 * eps)
    assert torch.equal(y[1], plain[1])


def test_slots_take_other_operands_and_give_them_up(adapters: AdapterKernels | None) -> None:
    """Of other ranks, with longer chains or none; each part goes with the operand that brought it."""
    context, linear = ForwardContext(), nn.Linear(INPUTS, OUT, bias=False)
    made = DecoupledLinear(linear, context, None, adapters, is_head=False)
    a, b = drawn(150, INPUTS, seed=30) * 0.1, drawn(OUT, 150, seed=31) * 0.1
    wide = LowRank({"a": a, "b": b})
    made.set(1, PARTS["low rank"])
    made.set(2, Combined.of(PARTS["rotation"], PARTS["scale"]))
    made.set(3, Combined.of(PARTS["low rank"], PARTS["sparse"]))
    x = drawn(3, 2, INPUTS, seed=32)
    weight = linear.weight.detach()

    def found(slots: list[int]) -> list[Tensor]:
        context.batch = Batch(slots, CPU)
        with torch.inference_mode():
            return list(made(x[: len(slots)]).double())

    def wanted(row: int, *parts: str) -> Tensor:
        return formula(x[row], weight, None, parts)

    def holds(*rows: Tensor) -> None:
        found_rows = found([1, 2, 3])
        for one, other in zip(found_rows, rows, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    holds(wanted(0, "low rank"), wanted(1, "rotation", "scale"), wanted(2, "low rank", "sparse"))
    made.set(1, wide)
    made.set(2, PARTS["sparse"])
    widest = wanted(0) + x[0].double() @ a.double().T @ b.double().T
    holds(widest, wanted(1, "sparse"), wanted(2, "low rank", "sparse"))
    for slot in (1, 3):
        made.set(slot, None)
    holds(wanted(0), wanted(1, "sparse"), wanted(2))


def test_chains_of_any_layout_beside_each_other(adapters: AdapterKernels | None) -> None:
    """Slots with one turn, with several, with strided blocks of other sizes, and without any."""
    context, linear = ForwardContext(), nn.Linear(64, OUT, bias=False)
    made = DecoupledLinear(linear, context, None, adapters, is_head=False)
    shapes = [(1, 16, 4), (5, 32, 2), (6, 32, 2), (2, 16, 4), (5, 16, 4)]
    turned = [rotation(drawn(m, d, b, b, seed=m)) for m, d, b in shapes]
    assert {len(one.layout) for one in turned} == {1, 2}
    assert len({layout for one in turned for layout in one.layout}) > 4
    for slot, one in enumerate(turned, start=1):
        made.set(slot, one)
    x = drawn(7, 3, 64, seed=40)
    for slots in ([0, 1, 2, 3, 4, 5, 6], [1, 1, 4], [2, 3], [1, 2, 3]):
        if slots == [1, 2, 3]:  # another one in the place of a longer chain
            turned[1] = turned[0]
            made.set(2, turned[0])
        context.batch = Batch(slots, CPU)
        with torch.inference_mode():
            y = made(x[: len(slots)])
        for row, slot in enumerate(slots):
            rows = x[row]
            for one in turned[slot - 1 : slot] if slot else ():
                for blocks, (stride, chunk) in zip(one.turns, one.layout, strict=True):
                    rows = rotate(rows, blocks, stride, chunk)
            torch.testing.assert_close(y[row], linear(rows), rtol=1e-5, atol=1e-5)


class Noted(ReferenceAdapters):
    """Which operations run, for how many linears."""

    def __init__(self) -> None:
        super().__init__(CPU, "of a test")
        self.ran: list[tuple[str, int]] = []

    def add_low_rank(self, x: Tensor, y: Tensor, segments: Any, tables: Any) -> None:
        self.ran.append(("low rank", len(tables)))
        super().add_low_rank(x, y, segments, tables)

    def add_sparse_rows(self, x: Tensor, y: Tensor, segments: Any, tables: Any) -> None:
        self.ran.append(("sparse", len(tables)))
        super().add_sparse_rows(x, y, segments, tables)

    def rotate(self, x: Tensor, out: Tensor, segments: Any, tables: Any) -> None:
        self.ran.append(("rotate", len(tables)))
        super().rotate(x, out, segments, tables)

    def scale(self, y: Tensor, segments: Any, tables: Any) -> None:
        self.ran.append(("scale", len(tables)))
        super().scale(y, segments, tables)


def test_one_launch_of_each_kind_for_all_variants_and_linears() -> None:
    kernels, context = Noted(), ForwardContext()
    members = [DecoupledLinear(nn.Linear(INPUTS, OUT), context, None, kernels, is_head=False) for _ in range(3)]
    LinearGroup(members)
    for member in members[:2]:
        for slot, name in enumerate(["low rank", "low rank with bias", "sparse"], start=1):
            member.set(slot, PARTS[name])
        member.set(4, Combined.of(PARTS["rotation"], PARTS["scale"]))
        member.set(5, Combined.of(PARTS["low rank"], PARTS["scale"]))
    x = drawn(6, 2, INPUTS)

    def ran(*slots: int) -> list[tuple[str, int]]:
        kernels.ran.clear()
        context.batch = Batch(slots, CPU)
        hidden = x[: len(slots)]
        with torch.inference_mode():
            *_, last = [member(hidden) for member in members]
            torch.testing.assert_close(last, nn.functional.linear(hidden, members[2].weight, members[2].bias))
        return kernels.ran

    assert ran(0, 0, 0) == []
    assert ran(0, 1, 2) == [("low rank", 3)]
    assert ran(1, 1, 2, 3) == [("low rank", 3), ("sparse", 3)]
    assert ran(3) == [("sparse", 3)]
    assert ran(0, 4) == [("rotate", 2), ("scale", 3)]
    assert ran(1, 4, 4, 5) == [("rotate", 2), *[("low rank", 1)] * 2, ("scale", 3)]
    # a chain of one linear beside a single turn of another, which is copied in the second launch
    members[0].set(6, CHAIN)
    assert ran(4, 6) == [*[("rotate", 2)] * 2, ("scale", 3)]
    assert ran(6) == [*[("rotate", 1)] * 2]


def test_a_fixed_batch_turns_the_rows_of_whatever_requests_it_is_of() -> None:
    """Slots that it stands for need not be in it: what runs does not depend on them."""
    kernels, context = Noted(), ForwardContext()
    members = [DecoupledLinear(nn.Linear(INPUTS, OUT), context, None, kernels, is_head=False) for _ in range(3)]
    LinearGroup(members)
    for slot, names in enumerate(
        [("rotation", "low rank"), ("chain",), ("low rank",), ("sparse", "rotation")], start=1
    ):
        for member in members[slot % 2 :]:
            member.set(slot, Combined.of(*(PARTS[name] for name in names)))
    x, fixed = drawn(5, 3, INPUTS, seed=50), FixedBatch(5, 9, range(5), CPU, tokens=3)
    for slots in ([1, 2, 2, 4], [0, 3], [4, 1, 0, 2, 3], [0]):
        fixed.take(slots, [0] * len(fixed.index))
        answers, ran = [], []
        for batch, rows in ((fixed, x), (Batch(slots, CPU), x[: len(slots)])):
            kernels.ran.clear()
            context.batch = batch
            with torch.inference_mode():
                answers.append([member(rows)[: len(slots)] for member in members])
            ran.append([*kernels.ran])
        for one, other in zip(*answers, strict=True):
            torch.testing.assert_close(one, other)
        assert ran[0].count(("rotate", 3)) == 2


def test_matrices_placed_for_kernels() -> None:
    """B lies transposed there, as many bytes; loops and tables take it as they take B."""
    backend = get_backend("reference", "cpu")
    host = LowRank({"a": A, "b": B, "bias": BIAS})
    placed = host.placed(CPU, backend)
    assert placed.nbytes == host.nbytes == host.placed_bytes(backend)
    assert torch.equal(placed.tensors["up"], B.T)
    assert placed.tensors["up"].is_contiguous()
    assert placed.out == host.out == OUT
    for kernels in (None, get_adapter_kernels("reference", CPU)):
        context, linear = ForwardContext(), nn.Linear(INPUTS, OUT, bias=False)
        made = DecoupledLinear(linear, context, None, kernels, is_head=False)
        made.set(1, placed)
        context.batch = Batch([1], CPU)
        x = drawn(1, 2, INPUTS)
        with torch.inference_mode():
            torch.testing.assert_close(made(x)[0], x[0] @ linear.weight.T + x[0] @ A.T @ B.T + BIAS)


def test_compressed_rows() -> None:
    rows, columns = torch.tensor([5, 4, 0, 3, 3]), torch.tensor([1, 0, 9, 9, 2])
    found = Sparse.of(rows, columns, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), OUT)
    assert found.tensors["starts"].tolist() == [0, 1, 1, 1, 3, 4, 5]
    assert found.tensors["columns"].tolist() == [9, 2, 9, 0, 1]
    assert found.tensors["values"].tolist() == [3.0, 5.0, 4.0, 2.0, 1.0]
    assert found.nbytes == 7 * 4 + 5 * 4 + 5 * 4


def rows_of(table: Tensor) -> dict[str, Any]:
    """Name -> (operand, what its table is)."""
    a, b, scale = drawn(9, 2, seed=1), drawn(4, 2, seed=2), drawn(4, seed=3)
    ids, own, other = torch.tensor([2, 7]), drawn(2, 4, seed=4), drawn(9, 4, seed=5)
    whole = EmbeddingTable({"table": other})
    replaced, over = table.clone(), other.clone()
    replaced[ids] = over[ids] = own
    return {
        "low rank": (LowRankRows({"a": a, "b": b}, None), table + a @ b.T),
        "scaled": (LowRankRows({"a": a, "b": b, "scale": scale}, None), (table + a @ b.T) * scale),
        "over a table": (LowRankRows({"a": a, "b": b}, whole), other + a @ b.T),
        "replaced": (ReplacedRows({"ids": ids, "rows": own}, None), replaced),
        "replaced over a table": (ReplacedRows({"ids": ids, "rows": own}, whole), over),
        "replaced over low rank": (
            ReplacedRows({"ids": ids, "rows": own}, LowRankRows({"a": a, "b": b}, None)),
            torch.where(torch.isin(torch.arange(9), ids)[:, None], replaced, table + a @ b.T),
        ),
    }


def tensors_of(operand: EmbeddingRows) -> list[Tensor]:
    under = operand.under if isinstance(operand, RowsOver) else None
    return [*operand.tensors.values(), *(tensors_of(under) if under is not None else ())]


def test_rows_of_an_embedding() -> None:
    context, module = ForwardContext(), nn.Embedding(9, 4)
    table = module.weight.detach().clone()
    tables, found = decouple_embedding(module, context), rows_of(table)
    for slot, (operand, _) in enumerate(found.values(), start=1):
        assert operand.misfit(table, torch.float32) is None
        moved = operand.placed(CPU, None)
        assert moved.nbytes == operand.nbytes == operand.placed_bytes(None)
        assert {one.device.type for one in tensors_of(operand.placed(torch.device("meta"), None))} == {"meta"}
        tables.set(slot, moved)
    slots = [*range(1 + len(found))]
    context.batch = Batch(slots, CPU)
    ids = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(slot)) for slot in slots])
    with torch.inference_mode():
        rows = module(ids)
    for slot, wanted in enumerate([table, *(one for _, one in found.values())]):
        torch.testing.assert_close(rows[slot], wanted[ids[slot]], rtol=1e-6, atol=1e-6)


BASE = drawn(OUT, INPUTS)
TABLE = drawn(9, 4)
MISFITS: list[tuple[Operand, Tensor, str]] = [
    (LowRank({"a": drawn(3, 5), "b": B}), BASE, r"\[3, 5\] where \[any, 16\]"),
    (LowRank({"a": A, "b": drawn(OUT, 2)}), BASE, r"\[6, 2\] where \[any, 3\]"),
    (LowRank({"a": A, "b": B, "bias": drawn(5)}), BASE, r"\[5\] where \[6\]"),
    (LowRank({"a": A.half(), "b": B}), BASE, "float16 where the runtime computes in torch.float32"),
    (Rotation({"blocks0": drawn(4, 5, 5)}, ((1, 5),)), BASE, r"\[4, 5, 5\] where \[3, 5, 5\]"),
    (Rotation({"blocks0": drawn(4, 4, 4), "blocks1": drawn(2, 4, 4)}, ((1, 2), (2, 2))), BASE, r"\[2, 4, 4\] where"),
    (Scale({"scale": drawn(2, 3)}), BASE, r"\[2, 3\] where \[any\]"),
    (Scale({"scale": drawn(OUT).bfloat16()}), BASE, "bfloat16"),
    (Sparse.of(torch.tensor([1]), torch.tensor([1]), drawn(1), 5), BASE, r"\[6\] where \[7\]"),
    (Sparse(sparse(S).tensors | {"values": drawn(1)}), BASE, r"\[1\] where"),
    (Sparse(sparse(S).tensors | {"columns": torch.zeros(1)}), BASE, "float32 where"),
    (DeltaOfRows({"rows": ROWS, "delta": drawn(3, INPUTS)}), BASE, r"\[3, 16\] where \[2, 16\]"),
    (DeltaOfRows({"rows": ROWS.int(), "delta": FEW}), BASE, "int32"),
    (LowRankRows({"a": drawn(9, 2), "b": drawn(5, 2)}, None), TABLE, r"\[5, 2\] where \[4, 2\]"),
    (LowRankRows({"a": drawn(9, 2), "b": drawn(4, 2), "scale": drawn(9)}, None), TABLE, r"\[9\] where \[4\]"),
    (
        LowRankRows({"a": drawn(9, 2), "b": drawn(4, 2)}, EmbeddingTable({"table": drawn(9, 3)})),
        TABLE,
        r"\[9, 3\] where \[any, 4\]",
    ),
    (ReplacedRows({"ids": torch.tensor([1]), "rows": drawn(2, 4)}, None), TABLE, r"\[2, 4\] where \[1, 4\]"),
]


@pytest.mark.parametrize(("operand", "base", "told"), MISFITS, ids=[told for *_, told in MISFITS])
def test_what_does_not_fit_is_told(operand: Operand, base: Tensor, told: str) -> None:
    assert re.search(told, operand.misfit(base, torch.float32) or "")


def test_what_fits() -> None:
    for name, part in PARTS.items():
        assert part.misfit(BASE, torch.float32) is None, name

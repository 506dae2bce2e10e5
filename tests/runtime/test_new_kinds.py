"""A new kind of variant is one file (diagonal_variant.py); what it does may come before, beside or after the base."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diagonal_variant import FILE, Diagonal, DiagonalVariant
from runtime_cases import Served, assert_close, oracle_logits, oracle_tokens, random_ids
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch, BatchRows, ForwardContext
from deltacompress.runtime.modules.linear import DecoupledLinear, LinearGroup
from deltacompress.runtime.operands.dense_delta import DenseDelta
from deltacompress.runtime.operands.embedding_rows import EmbeddingTable
from deltacompress.runtime.operands.full_weight import FullWeight
from deltacompress.runtime.operands.operand import PinnedMemory, Vector
from deltacompress.runtime.operands.product import Combined, LinearOperand, Product
from deltacompress.runtime.variants.precision import Numerics
from deltacompress.runtime.variants.variant import Variant


@pytest.fixture(scope="module")
def diagonal(trio: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(directory of a DiagonalVariant, the checkpoint that it stands for)."""
    base = trio["a"].pair.base
    root = tmp_path_factory.mktemp("diagonal")
    merged = shutil.copytree(base, root / "merged")
    folder = root / "diagonal"
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    weights = load_file(merged / "model.safetensors")
    square = [name for name, w in weights.items() if name.endswith(("q_proj.weight", "o_proj.weight"))]
    generator = torch.Generator().manual_seed(7)
    diagonals = {name: 0.3 * torch.randn(weights[name].shape[1], generator=generator) for name in square}
    assert len(square) >= 4
    for name, d in diagonals.items():
        weights[name] = weights[name].float() + torch.diag(d)
    save_file({name: w.float() for name, w in weights.items()}, merged / "model.safetensors", {"format": "pt"})
    save_file(diagonals, folder / FILE)
    return folder, merged


@pytest.mark.parametrize("packed", [False, True])
def test_a_diagonal_beside_deltas_and_the_base(
    trio: dict[str, Served], diagonal: tuple[Path, Path], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """packed: deltas stay packed, as on a GPU, and linears of one input are a group."""
    if packed:
        monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))
    folder, merged = diagonal
    runtime = Runtime.from_base(trio["a"].pair.base, merge_rounding=not packed)
    runtime.load(trio["a"].artifact, "a")
    runtime.add(DiagonalVariant(folder, runtime.model.base), "d")
    runtime.load(trio["b"].artifact, "b")
    checkpoints = {None: trio["a"].pair.base, "a": trio["a"].restored, "b": trio["b"].restored, "d": merged}
    requests = [(name, random_ids(4 + i, i)) for i, name in enumerate(["d", None, "b", "d", "a"])]
    for (name, ids), logits in zip(requests, runtime.logits(requests), strict=True):
        # restored weights are rounded to bfloat16
        assert_close(logits, oracle_logits(checkpoints[name], ids), 0.02 if packed and name in ("a", "b") else 1e-4)
    for (name, ids), done in zip(requests, runtime.complete(requests, 6), strict=True):
        if name in ("d", None):
            assert list(done.tokens) == oracle_tokens(checkpoints[name], ids, 6)[: len(done.tokens)]
            assert len(done.tokens) > 2


def test_it_leaves_and_comes_back(trio: dict[str, Served], diagonal: tuple[Path, Path]) -> None:
    folder, merged = diagonal
    runtime, ids = Runtime.from_base(trio["a"].pair.base), random_ids(5)
    variant = DiagonalVariant(folder, runtime.model.base)
    runtime.add(variant, "d")
    size = runtime.variants["d"].nbytes
    assert size == sum(d.nbytes for d in load_file(folder / FILE).values())
    runtime.unload("d")
    runtime.load(trio["a"].artifact, "a")  # takes its slot
    assert_close(runtime.logits([("a", ids)])[0], oracle_logits(trio["a"].restored, ids))
    runtime.cache.residents.budget_bytes = runtime.variants["a"].nbytes + size - 1
    runtime.add(DiagonalVariant(folder, runtime.model.base), "d")
    for name, where in (("d", merged), ("a", trio["a"].restored), ("d", merged)):
        assert_close(runtime.logits([(name, ids)])[0], oracle_logits(where, ids))
    assert runtime.cache.counters.loads > 4


@dataclass(frozen=True)
class Turn(LinearOperand):
    """y = W (x R); tensors: r [in, in]."""

    @property
    def product(self) -> type[Product[Any]]:
        return TurnProduct


class TurnProduct(Product[Turn]):
    def before(self, x: Tensor, rows: BatchRows) -> Tensor:
        x = x.clone()
        for piece, operand in self.own(rows):
            x[piece.rows] = x[piece.rows] @ operand.tensors["r"]
        return x


@dataclass(frozen=True)
class Scale(LinearOperand):
    """y = s * (W x) + bias; tensors: s [out]."""

    @property
    def product(self) -> type[Product[Any]]:
        return ScaleProduct


class ScaleProduct(Product[Scale]):
    acts_after = True

    def after(self, y: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            y[piece.rows] *= operand.tensors["s"]


@pytest.mark.parametrize("own_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_before_beside_and_after_the_base(bias: bool, own_bias: bool) -> None:
    torch.manual_seed(0)
    context = ForwardContext()
    linear = nn.Linear(6, 4, bias=bias)
    made = DecoupledLinear(linear, context, None, is_head=False)
    r, s, d, w = torch.randn(6, 6), torch.randn(4), torch.randn(4, 6), torch.randn(4, 6)
    operands: list[LinearOperand] = [
        Turn({"r": r}),
        Scale({"s": s}),
        DenseDelta({"delta": d}),
        FullWeight({"weight": w}),
    ]
    for slot, operand in enumerate(operands, start=1):
        made.set(slot, operand)
    biases = [linear.bias if bias else torch.zeros(4)] * 5
    if bias and own_bias:
        assert made.biases is not None
        for slot in (2, 4):
            biases[slot] = torch.randn(4)
            made.biases.set(slot, Vector({"vector": biases[slot]}))
    slots = [0, 0, 1, 2, 3, 4, 4]
    weight = linear.weight.detach()
    weights = {0: weight, 1: weight @ r.T, 2: s[:, None] * weight, 3: weight + d, 4: w}
    with torch.inference_mode():
        x = torch.randn(len(slots), 3, 6)
        before = x.clone()
        for chosen in ([0, 1, 2, 3, 4, 5, 6], [1, 2, 5, 6], [0, 5], [5], [3], [2, 3], [4, 6]):
            context.batch = Batch([slots[i] for i in chosen], torch.device("cpu"))
            y = made(x[chosen])
            wanted = torch.stack([x[i] @ weights[slots[i]].T + biases[slots[i]] for i in chosen])
            torch.testing.assert_close(y, wanted)
        assert torch.equal(x, before)
        for slot in range(1, 5):
            made.set(slot, None)
        if bias:
            assert made.biases is not None
            for slot in range(1, 5):
                made.biases.set(slot, None)
        context.batch = Batch(slots, torch.device("cpu"))
        torch.testing.assert_close(made(x), linear(x))


def test_a_slot_holds_one_operand() -> None:
    """Whoever brings another kind takes the place of what was there."""
    context, linear = ForwardContext(), nn.Linear(3, 3, bias=False)
    made = DecoupledLinear(linear, context, None, is_head=False)
    made.set(1, DenseDelta({"delta": torch.eye(3)}))
    made.set(1, Scale({"s": torch.full((3,), 2.0)}))
    context.batch = Batch([1], torch.device("cpu"))
    x = torch.randn(1, 2, 3)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), 2 * linear(x))


def test_a_group_leaves_other_kinds_to_its_members() -> None:
    """What does not join is computed member by member, and members keep answering what they did alone."""
    torch.manual_seed(1)
    context = ForwardContext()
    members = [DecoupledLinear(nn.Linear(4, out), context, None, is_head=False) for out in (3, 5)]
    alone = [nn.functional.linear for _ in members]
    weights = [member.weight.detach().clone() for member in members]
    biases = [member.bias.detach().clone() for member in members]
    LinearGroup(members)
    members[1].set(2, Turn({"r": 2 * torch.eye(4)}))
    x = torch.randn(2, 3, 4)
    with torch.inference_mode():
        for slots, factor in (([0, 1], 1.0), ([0, 2], 2.0)):
            context.batch = Batch(slots, torch.device("cpu"))
            found = [member(x) for member in members]
            for k, one in enumerate(found):
                wanted = alone[k](x, weights[k], biases[k])
                if k == 1:
                    wanted[1] = factor * (x[1] @ weights[1].T) + biases[1]
                torch.testing.assert_close(one, wanted)


@dataclass(frozen=True)
class Added(LinearOperand):
    """y += x A^T, in one launch for all linears of a group; tensors: a [out, in]."""

    @property
    def product(self) -> type[Product[Any]]:
        return AddedProduct


class AddedProduct(Product[Added]):
    groups = 0

    def add(self, y: Tensor, x: Tensor, rows: BatchRows) -> None:
        for piece, operand in self.own(rows):
            y[piece.rows] += x[piece.rows] @ operand.tensors["a"].T

    def joins(self, slots: Iterable[int]) -> bool:
        return True

    @classmethod
    def add_group(cls, y: Tensor, x: Tensor, rows: BatchRows, products: Sequence[Any]) -> None:
        AddedProduct.groups += 1
        super().add_group(y, x, rows, products)


class OtherAdded(Added):
    @property
    def product(self) -> type[Product[Any]]:
        return OtherAddedProduct


class OtherAddedProduct(AddedProduct):
    pass


def test_kinds_that_join_share_one_product_of_the_base() -> None:
    torch.manual_seed(2)
    context = ForwardContext()
    linears = [nn.Linear(4, out) for out in (3, 5)]
    members = [DecoupledLinear(linear, context, None, is_head=False) for linear in linears]
    weights = [linear.weight.detach().clone() for linear in linears]
    biases = [linear.bias.detach().clone() for linear in linears]
    LinearGroup(members)
    a, b = torch.randn(5, 4), torch.randn(3, 4)
    members[1].set(1, Added({"a": a}))
    members[0].set(2, OtherAdded({"a": b}))
    x = torch.randn(3, 2, 4)
    context.batch = Batch([0, 1, 2], torch.device("cpu"))
    with torch.inference_mode():
        found = [member(x) for member in members]
    wanted = [x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]
    wanted[1][1] += x[1] @ a.T
    wanted[0][2] += x[2] @ b.T
    torch.testing.assert_close(found, wanted)
    assert AddedProduct.groups == 2


def test_one_variant_may_bring_several_kinds_for_a_linear() -> None:
    """A whole weight, what is added to it, a turn before and a scale after, whatever the order they came in."""
    torch.manual_seed(3)
    context, linear = ForwardContext(), nn.Linear(4, 6)
    bias = linear.bias.detach()
    w, d, r, s = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 4), torch.randn(6)
    delta, turn, scale = DenseDelta({"delta": d}), Turn({"r": r}), Scale({"s": s})
    both = Combined.of(delta, turn, scale)
    assert both.nbytes == both.placed_bytes(None) == 4 * (24 + 16 + 6)
    made = DecoupledLinear(linear, context, None, is_head=False)
    context.batch = Batch([0, 1, 2], torch.device("cpu"))
    made.set(1, both.pinned(PinnedMemory()).placed(torch.device("cpu"), None) if torch.cuda.is_available() else both)
    made.set(2, Combined.of(Added({"a": d}), FullWeight({"weight": w})))
    x = torch.randn(3, 2, 4)
    with torch.inference_mode():
        y = made(x)
        plain = linear(x)
        torch.testing.assert_close(y[0], plain[0])
        torch.testing.assert_close(y[1], s * ((x[1] @ r) @ (linear.weight + d).T) + bias)
        torch.testing.assert_close(y[2], x[2] @ (w + d).T + bias)
        made.set(1, delta)  # the turn and the scale are gone
        made.set(2, None)
        y = made(x)
        torch.testing.assert_close(y[1], x[1] @ (linear.weight + d).T + bias)
        torch.testing.assert_close(y[2], plain[2])
    with pytest.raises(ValueError, match="two operands of one kind"):
        Combined.of(delta, DenseDelta({"delta": d}))


def test_rows_that_no_request_owns_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows of 2 requests"):
        Batch([0, 1], torch.device("cpu")).rows(5)


def test_a_load_that_was_dropped_leaves_its_slot_clean(trio: dict[str, Served], diagonal: tuple[Path, Path]) -> None:
    runtime, ids = Runtime.from_base(trio["a"].pair.base), random_ids(5)
    runtime.load(trio["a"].artifact, "a")
    runtime.cache.drop(runtime.variants["a"])  # as after an interrupt
    runtime.add(DiagonalVariant(diagonal[0], runtime.model.base), "d")
    assert_close(runtime.logits([("d", ids)])[0], oracle_logits(diagonal[1], ids))


class Brings(Variant):
    """A variant of a folder with these operands."""

    def __init__(self, runtime: Runtime, operands: Any, **of: Any) -> None:
        super().__init__(runtime.model.base.checkpoint.path, runtime.model.base.layout, runtime.model.base)
        self.brought = operands
        self.__dict__.update(of)

    identity = "none"  # type: ignore[assignment]

    def paths(self) -> list[str]:
        return list(self.brought)

    def operand(self, module_path: str) -> Any:
        return self.brought[module_path]


LAYER = "model.layers.0"


def diagonal_of(*shape: int, dtype: torch.dtype = torch.float32) -> Diagonal:
    return Diagonal({"d": torch.ones(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("operands", "told"),
    [
        (
            {"model.layers.99.mlp.up_proj.weight": diagonal_of(48)},
            r"brings model\.layers\.99\.mlp\.up_proj\.weight, ",
        ),
        ({"nonsense": diagonal_of(48)}, "brings nonsense, where no variant"),
        ({f"{LAYER}.input_layernorm.weight": diagonal_of(48)}, "brings Diagonal for .*norm.weight, which takes Vector"),
        ({"model.embed_tokens.weight": diagonal_of(48)}, "brings Diagonal for .*, which takes EmbeddingRows"),
        ({f"{LAYER}.self_attn.o_proj.weight": "text"}, "brings str for .*, which takes LinearOperand or Combined"),
        ({f"{LAYER}.self_attn.o_proj.weight": diagonal_of(3)}, r"of shape \[3\] where \[\d+\] belongs"),
        ({f"{LAYER}.self_attn.o_proj.weight": diagonal_of(48, dtype=torch.bfloat16)}, "bfloat16 where the runtime"),
        ({f"{LAYER}.mlp.up_proj.weight": FullWeight({"weight": torch.ones(4, 5)})}, r"of shape \[4, 5\] where \[any, "),
        ({f"{LAYER}.mlp.up_proj.weight": DenseDelta({"delta": torch.ones(4)})}, r"of shape \[4\] where \[any, "),
        ({f"{LAYER}.input_layernorm.weight": Vector({"vector": torch.ones(3)})}, r"Vector .* of shape \[3\] where"),
        ({"model.embed_tokens.weight": EmbeddingTable({"table": torch.ones(9, 1)})}, r"of shape \[9, 1\] where"),
    ],
)
def test_operands_that_do_not_fit_are_refused(trio: dict[str, Served], operands: Any, told: str) -> None:
    runtime = Runtime.from_base(trio["a"].pair.base)
    with pytest.raises(InputError, match=told):
        runtime.add(Brings(runtime, operands), "x")
    if "belongs" in told or "runtime" in told or "any" in told:  # a linear's: so does a part of a combined one
        combined = {path: Combined.of(one) for path, one in operands.items()}
        with pytest.raises(InputError, match=told):
            runtime.add(Brings(runtime, combined), "x")
    assert not runtime.variants
    runtime.load(trio["a"].artifact, "x")  # name and slot are free
    assert_close(runtime.logits([("x", [5, 6])])[0], oracle_logits(trio["a"].restored, [5, 6]))


def test_what_is_no_variant_is_refused(trio: dict[str, Served]) -> None:
    runtime = Runtime.from_base(trio["a"].pair.base)
    for wrong in (None, DiagonalVariant, "text", {}):
        with pytest.raises(InputError, match="is no Variant"):
            runtime.add(wrong, "x")  # type: ignore[arg-type]
    for name in (5, ["a"], "a\nb", "\x1b[31m"):
        with pytest.raises(InputError, match="is no name for a variant"):
            runtime.add(Brings(runtime, {}), name)  # type: ignore[arg-type]
    assert not runtime.variants


def test_an_add_that_fails_late_leaves_nothing(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, ids = Runtime.from_base(trio["a"].pair.base), random_ids(4)

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.model, "install", fail)
        with pytest.raises(KeyError):
            runtime.load(trio["a"].artifact, "a")
    assert not runtime.variants
    runtime.load(trio["a"].artifact, "a")
    assert_close(runtime.logits([("a", ids)])[0], oracle_logits(trio["a"].restored, ids))

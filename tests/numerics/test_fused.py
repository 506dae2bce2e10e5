"""The column loops in one launch a block, and the compiled ones, against the same loops in PyTorch, on a CPU.

Without a GPU Triton's kernels run under its interpreter, in a process of their own and without bfloat16 (truncated
there). A near-tie may round the other way, which moves what follows in its row: rows are compared, and their losses.
"""

from __future__ import annotations

import importlib.util
import time
from threading import Event, current_thread, main_thread

import pytest
import torch
from interpreted import inside
from problems import Problem, problem
from tolerances import OBS_SAME_LOSS, OBS_SAME_ROWS

from deltacompress.numerics import obs
from deltacompress.numerics.compiled import fused as compiled
from deltacompress.numerics.grid import Grid, GridKind, dequantize, fit_grid
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.refine import _improver, refine
from deltacompress.numerics.sparsity import Sparsity
from deltacompress.numerics.triton import fused

CPU = torch.device("cpu")
RUNS = [
    pytest.param("cpu", marks=inside),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param(
        "compiled", marks=pytest.mark.skipif(compiled.missing(CPU) is not None, reason="numba is not installed")
    ),
]
Fields = tuple[int, GridKind, int | None]
GRIDS: list[Fields] = [
    (2, "minmax", None),
    (4, "minmax", 64),
    (4, "symmetric", 32),
    (1, "midrise", 8),
]
ROWS = 40  # not a multiple of the rows of a program
INTERPRETED = 11  # of few rows, of which a program has two, by the interpreter
FEW, MANY = True, False
"""Whether these count as few rows, which have kernels of their own."""
LAUNCH = fused.BLOCK


@pytest.mark.parametrize(
    ("lacks", "told"), [("triton", "Triton is not installed"), ("compiler", "(Failed to find C compiler.); it needs")]
)
def test_where_they_do_not_run_the_reason_is_told(lacks: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec("sys") if name == "triton" else spec(name))
    monkeypatch.setattr(fused, "_try_kernel", lambda _device: None)
    gpu = torch.device("cuda", 99)
    fused._missing.cache_clear()
    assert fused.usable(gpu)
    if lacks == "triton":
        monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    else:

        def fail(_device: torch.device) -> None:
            raise RuntimeError("Failed to find C compiler.\nPlease specify it.")

        monkeypatch.setattr(fused, "_try_kernel", fail)
    fused._missing.cache_clear()
    assert told in (fused.missing(gpu) or "")
    assert not fused.usable(gpu)
    assert not fused.usable(CPU)
    fused._missing.cache_clear()


def test_whoever_asks_waits_for_what_was_begun_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread whose current GPU may be another, and which says nothing of what breaks."""
    tried: list[tuple[torch.device, str]] = []
    begun, breaks = Event(), True

    def slow(device: torch.device) -> None:
        tried.append((device, current_thread().name))
        begun.set()
        time.sleep(0.2)
        if breaks:
            raise torch.OutOfMemoryError("no room")

    spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec("sys") if name == "triton" else spec(name))
    monkeypatch.setattr(fused, "_try_kernel", slow)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 98 if current_thread() is main_thread() else 0)
    fused._missing.cache_clear()
    fused.probe_early(torch.device("cuda"))
    assert begun.wait(60)
    with pytest.raises(torch.OutOfMemoryError):
        fused.missing(torch.device("cuda"))
    breaks = False
    begun.clear()
    fused.probe_early(torch.device("cuda"))
    assert begun.wait(60)
    assert fused.missing(torch.device("cuda")) is None
    assert [device.index for device, _ in tried] == [98, 98, 98]
    assert [name == "deltacompress-triton" for _, name in tried] == [True, False, True]
    fused._missing.cache_clear()


def test_without_numba_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._missing.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert (compiled.missing(CPU) or "").startswith("numba is not installed: pip install ")
    assert not compiled.usable(CPU)
    compiled._missing.cache_clear()
    assert compiled.missing(torch.device("cuda")) == "they are for CPUs"


def on(run: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Take what `run` names and nothing else from here on: where it runs."""
    monkeypatch.setattr(fused, "usable", lambda _device: run in ("cpu", "cuda"))
    monkeypatch.setattr(compiled, "usable", lambda _device: run == "compiled")
    return torch.device("cuda" if run == "cuda" else "cpu")


def sizes(run: str, columns: int, quantized: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, Fields]:
    """Columns of a launch, columns of the matrix, and its grid: what the GPU has, or a quarter for the interpreter.

    There as many columns are left over for a second launch, and as many launches and groups are cut through.
    """
    bits, kind, group = GRIDS[quantized or 0]
    if run == "cpu" and group != 8:
        monkeypatch.setattr(fused, "BLOCK", LAUNCH // 4)
        columns = LAUNCH // 4 + columns - LAUNCH if columns >= LAUNCH else -(-columns // 16) * 4 + columns % 4
        group = None if group is None else group // 4
    return fused.BLOCK, columns, (bits, kind, group)


def rows_of(run: str, *, few: bool) -> int:
    """Rows of a matrix; those that count as few are so few that the interpreter is soon through them."""
    return INTERPRETED if few and run == "cpu" else ROWS


def same_rows(p: Problem, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Values, then whatever else must be the same: of nearly all rows exactly, of all rows nearly the same loss."""
    found = [part.cpu() for part in found]
    close = torch.isclose(found[0], wanted[0], rtol=1e-4, atol=1e-5).all(1)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close &= (one == other).all(1)
    assert (~close).float().mean() <= OBS_SAME_ROWS.value
    assert p.loss(found[0]).sum() == pytest.approx(p.loss(wanted[0]).sum(), rel=OBS_SAME_LOSS.value)


def moved(grid: Grid, device: torch.device) -> Grid:
    return Grid(grid.bits, grid.group, grid.scale.to(device), grid.zero.to(device))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("pattern", "selection", "columns", "quantized", "few"),
    [
        ("2:4", "joint", 128, 0, MANY),
        ("2:4", "joint", 128, 0, FEW),
        ("2:4", "joint", 131, 1, MANY),
        ("2:4", "joint", 131, 1, FEW),
        ("2:4", "joint", 138, 1, MANY),
        ("2:4", "joint", 138, 1, FEW),
        ("2:4", "joint", 131, None, MANY),
        ("2:4", "joint", 131, None, FEW),
        ("2:4", "joint", 34, 3, MANY),
        ("2:4", "joint", 34, 3, FEW),
        ("2:4", "diagonal", 131, 0, FEW),
        ("2:4", "diagonal", 138, 1, MANY),
        ("2:4", "diagonal", 131, None, FEW),
        ("1:4", "diagonal", 131, 2, MANY),
        ("3:5", "diagonal", 138, 0, FEW),
        ("8:16", "diagonal", 131, 2, MANY),
        ("unstructured:0.5", "diagonal", 138, 1, FEW),
        ("unstructured:0.5", "diagonal", 131, None, MANY),
        ("dense", "diagonal", 138, 1, FEW),
        ("dense", "diagonal", 131, 2, MANY),
    ],
)
def test_a_block_in_one_launch_is_the_loop(
    run: str,
    pattern: str,
    selection: obs.Selection,
    columns: int,
    quantized: int | None,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch, columns, (bits, kind, group) = sizes(run, columns, quantized, monkeypatch)
    monkeypatch.setattr(fused, "FEW", ROWS if few else 0)
    p = problem(rows_of(run, few=few), columns, seed=columns, correlation=1.0)
    sparsity = Sparsity.parse(pattern)
    grid = None
    if quantized is not None:
        grid = fit_grid(p.target, bits=bits, group=group or columns, kind=kind)
    order = obs.activation_order(p.hessian, sparsity.m if sparsity.kind == "n:m" else obs.STEP)
    upper = problem_upper(p, order)
    block = {1: launch * 3 // 2, 3: 16}.get(quantized or 0, launch)  # 1: more than one launch takes

    def solved(there: torch.device) -> obs.Solution:
        return obs.solve(
            p.target.to(there),
            upper.to(there),
            sparsity=sparsity,
            grid=None if grid is None else moved(grid, there),
            value_dtype=torch.float32,
            block=block,
            selection=selection,
            order=order.to(there),
        )

    wanted = solved(on("loops", monkeypatch))
    found = solved(on(run, monkeypatch))
    if grid is None:
        assert found.values is not None
        assert wanted.values is not None
        same_rows(p, [found.values, found.mask], [wanted.values, wanted.mask])
    else:
        assert found.codes is not None
        assert wanted.codes is not None
        values = [dequantize(one.codes.cpu(), grid) * one.mask.cpu() for one in (found, wanted)]  # type: ignore[union-attr]
        same_rows(p, [values[0], found.mask], [values[1], wanted.mask])
    assert float(found.loss.sum()) == pytest.approx(float(wanted.loss.sum()), rel=OBS_SAME_LOSS.value)


@pytest.mark.parametrize("run", RUNS)
def test_a_single_row(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(1, 20, seed=1, correlation=1.0)
    grid = fit_grid(p.target, bits=8, group=20, kind="minmax")
    target = p.target.clone()
    on("loops", monkeypatch)
    wanted = obs.solve(p.target, p.upper, sparsity=Sparsity.parse("2:4"), grid=grid)
    device = on(run, monkeypatch)
    found = obs.solve(p.target.to(device), p.upper.to(device), sparsity=Sparsity.parse("2:4"), grid=moved(grid, device))
    assert torch.equal(p.target, target)
    assert found.codes is not None
    assert wanted.codes is not None
    assert torch.equal(found.codes.cpu() * found.mask.cpu(), wanted.codes * wanted.mask)


@pytest.mark.parametrize("run", RUNS[1:])
@pytest.mark.parametrize(("pattern", "few"), [("2:4", MANY), ("2:4", FEW), ("dense", FEW)])
def test_pruned_only_values_are_bfloat16(run: str, pattern: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEW", ROWS if few else 0)
    p, sparsity = problem(ROWS, 132, seed=3, correlation=1.0), Sparsity.parse(pattern)
    device = on(run, monkeypatch)
    found = obs.solve(p.target.to(device), p.upper.to(device), sparsity=sparsity, grid=None)
    on("loops", monkeypatch)
    wanted = obs.solve(p.target, p.upper, sparsity=sparsity, grid=None)
    assert found.values is not None
    assert wanted.values is not None
    assert torch.equal(found.values, found.values.bfloat16().float())
    same_rows(p, [found.values, found.mask], [wanted.values, wanted.mask])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("pattern", "columns", "quantized", "few"),
    [
        ("2:4", 131, 0, MANY),
        ("2:4", 131, 0, FEW),
        ("2:4", 72, 1, MANY),
        ("2:4", 72, 1, FEW),
        ("2:4", 70, 1, FEW),
        ("2:4", 64, 2, MANY),
        ("2:4", 64, 2, FEW),
        ("4:8", 131, 2, FEW),
        ("unstructured:0.5", 131, 1, FEW),
        ("dense", 138, 0, FEW),
    ],
)
def test_a_sweep_in_one_launch_is_the_loop(
    run: str, pattern: str, columns: int, quantized: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, columns, (bits, kind, group) = sizes(run, columns, quantized, monkeypatch)
    monkeypatch.setattr(fused, "FEW", ROWS if few else 0)
    p = problem(rows_of(run, few=few), columns, seed=columns, correlation=1.0)
    sparsity = Sparsity.parse(pattern)
    grid = fit_grid(p.target, bits=bits, group=group or columns, kind=kind)
    on("loops", monkeypatch)
    first = obs.solve(p.target, p.upper, sparsity=sparsity, grid=grid, selection="diagonal")
    assert first.codes is not None
    codes, mask, gain = refine(p.target, p.hessian, first.codes, first.mask, grid, sparsity=sparsity, sweeps=2)
    device = on(run, monkeypatch)
    args = [part.to(device) for part in (p.target, p.hessian, first.codes, first.mask)]
    new_codes, new_mask, new_gain = refine(*args, moved(grid, device), sparsity=sparsity, sweeps=2)
    found, wanted = dequantize(new_codes.cpu(), grid) * new_mask.cpu(), dequantize(codes, grid) * mask
    assert not torch.equal(wanted, dequantize(first.codes, grid) * first.mask)
    same_rows(p, [found], [wanted])
    assert float(new_gain.sum()) == pytest.approx(float(gain.sum()), rel=OBS_SAME_LOSS.value)
    fell = p.loss(dequantize(first.codes, grid) * first.mask) - p.loss(found)
    assert new_gain.cpu().numpy() == pytest.approx(fell, rel=1e-3, abs=1e-5 * fell.max())
    if sparsity.kind == "n:m":
        assert torch.equal(new_mask.sum(1).cpu(), mask.sum(1))


@pytest.mark.parametrize("run", ["loops", *RUNS])
@pytest.mark.parametrize(
    ("pattern", "columns", "few"),
    [("2:4", 64, MANY), ("2:4", 64, FEW), ("2:4", 23, MANY), ("2:4", 23, FEW), ("dense", 23, FEW)],
)
def test_a_sweep_tells_what_it_changed(
    run: str, pattern: str, columns: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each weight; and what stands behind the block in memory is nothing to it."""
    made = fused._with_room

    def with_nan(square: torch.Tensor) -> torch.Tensor:
        room = made(square)
        room.as_strided((16,), (1,), square.numel()).fill_(float("nan"))
        return room

    monkeypatch.setattr(fused, "_with_room", with_nan)
    monkeypatch.setattr(fused, "FEW", ROWS if few else 0)
    p, sparsity = problem(rows_of(run, few=few), columns, seed=columns, correlation=1.0), Sparsity.parse(pattern)
    grid = fit_grid(p.target, bits=4, group=columns, kind="minmax")
    device = on(run, monkeypatch)
    first = obs.solve(
        p.target.to(device), p.upper.to(device), sparsity=sparsity, grid=moved(grid, device), selection="diagonal"
    )
    assert first.codes is not None
    value = (dequantize(first.codes.cpu(), grid) * first.mask.cpu()).T.contiguous()
    gradient = p.hessian @ (value - p.target.T)
    state = [one.to(device) for one in (gradient, value.clone(), first.codes.T.contiguous(), first.mask.T.contiguous())]
    change, gain = torch.full_like(state[1], float("nan")), torch.zeros(len(p.target), device=device)
    improve = _improver(moved(grid, device), columns, device)
    improve(*state, p.hessian.to(device), change, gain, start=0, joint=pattern == "2:4")
    torch.testing.assert_close(change.cpu(), state[1].cpu() - value)
    fell = p.loss(value.T) - p.loss(state[1].cpu().T)
    assert fell.min() >= 0.0
    assert gain.cpu().numpy() == pytest.approx(fell, rel=1e-3, abs=1e-5 * fell.max())


@pytest.mark.gpu
@pytest.mark.parametrize("few", [MANY, FEW])
def test_more_columns_than_a_gpu_moves_at_once(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEW", ROWS if few else 0)
    p, sparsity = problem(ROWS, 1100, seed=5, correlation=1.0), Sparsity.parse("2:4")
    grid = fit_grid(p.target, bits=4, group=1100, kind="minmax")
    first = obs.solve(p.target, p.upper, sparsity=sparsity, grid=grid, selection="diagonal")
    assert first.codes is not None
    codes, mask, gain = refine(p.target, p.hessian, first.codes, first.mask, grid, sparsity=sparsity, sweeps=2)
    device = on("cuda", monkeypatch)
    args = [part.to(device) for part in (p.target, p.hessian, first.codes, first.mask)]
    found = refine(*args, moved(grid, device), sparsity=sparsity, sweeps=2)
    values = dequantize(found.codes.cpu(), grid) * found.mask.cpu()
    same_rows(p, [values], [dequantize(codes, grid) * mask])
    assert float(found.gain.sum()) == pytest.approx(float(gain.sum()), rel=OBS_SAME_LOSS.value)


@pytest.mark.parametrize("run", RUNS[2:])
@pytest.mark.parametrize("pattern", ["2:4", "dense"])
def test_rows_and_threads_do_not_change_each_other(run: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 rows are cut for three threads within 64 and 128; alone, a row has other neighbours in its vectors."""
    p, sparsity = problem(200, 132, seed=7, correlation=1.0), Sparsity.parse(pattern)
    grid = fit_grid(p.target, bits=3, group=132, kind="minmax")
    on(run, monkeypatch)

    def solved(rows: slice) -> list[torch.Tensor]:
        own = Grid(grid.bits, grid.group, grid.scale[rows], grid.zero[rows])
        work = [p.target[rows].T.contiguous(), torch.empty(132, len(own.scale))]
        codes, mask = (
            torch.zeros(132, len(own.scale), dtype=torch.uint8),
            torch.ones(132, len(own.scale), dtype=torch.bool),
        )
        block = fused.Block(work[0], work[1], codes, mask, p.upper)
        scales = fused.Scales.of(own, torch.arange(132))
        pairs = PairSolver.under(p.upper) if pattern == "2:4" else None
        compiled.fix(block, 0, sparsity, pairs, scales)
        gradient, change = work[1] * 2, torch.empty_like(work[1])  # any will do
        gain = torch.zeros(len(own.scale))
        state = (gradient, work[0], codes, mask, p.hessian, change, gain)
        compiled.improve(*state, start=0, joint=pattern == "2:4", scales=scales)
        return [part.T for part in (*work, codes, mask, change, gain.unsqueeze(0))]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = solved(slice(0, 200))
    finally:
        torch.set_num_threads(threads)
    for rows in (slice(0, 200), slice(17, 18), slice(60, 140)):
        for one, other in zip(together, solved(rows), strict=True):
            assert torch.equal(one[rows], other)


def problem_upper(p: Problem, order: torch.Tensor) -> torch.Tensor:
    """U of the columns in solving order."""
    inverse = torch.linalg.inv(p.hessian.double()[order][:, order])
    return torch.linalg.cholesky(inverse, upper=True).float()


@pytest.mark.parametrize("error", [ImportError("Numba needs NumPy 2.2 or less"), RuntimeError("no locator available")])
def test_numba_that_does_not_run_is_told_and_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_name: str) -> None:
        raise error

    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(compiled.importlib, "import_module", fail)
    told = compiled._missing.__wrapped__()
    assert told == f"numba does not run here ({error})"
    monkeypatch.setattr(compiled.importlib, "import_module", lambda _name: None)
    assert compiled._missing.__wrapped__() is None

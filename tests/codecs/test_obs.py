"""The obs codec end to end: what is packed is what was solved for, and the recorded loss is what is restored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tolerances import FLOAT32_CHAIN

from deltacompress.codecs import obs
from deltacompress.codecs.encoded import Encoded, LinearToEncode
from deltacompress.codecs.formats import packed
from deltacompress.codecs.settings import ObsSettings
from deltacompress.codecs.solver import replayed
from deltacompress.codecs.solver.solved import Solved
from deltacompress.errors import NumericsError, RecipeError
from deltacompress.numerics.coupling import BLOCKS, DAMP_FRACTION
from deltacompress.numerics.hessian import HessianAccumulator, factorize
from deltacompress.numerics.obs import activation_order
from deltacompress.numerics.pairs import PairSolver
from deltacompress.numerics.triton import repeated

COLUMNS = 48


@dataclass
class Layer:
    delta: torch.Tensor
    finetuned: torch.Tensor
    x: torch.Tensor
    target_x: torch.Tensor


def layer(rows: int = 12, columns: int = COLUMNS, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(300, columns, generator=generator) @ mix
    drift = 0.05 * torch.randn(300, columns, generator=generator)
    finetuned = torch.randn(rows, columns, generator=generator)
    return Layer(0.1 * torch.randn(rows, columns, generator=generator), finetuned, x, x + drift)


def statistics(it: Layer, *, asymmetric: bool = True) -> HessianAccumulator:
    sums = HessianAccumulator(it.x.shape[1], device=torch.device("cpu"), asymmetric=asymmetric)
    sums.add(it.x, it.target_x if asymmetric else None)
    return sums


def encode(it: Layer, **options: Any) -> Encoded:
    return obs.encode([LinearToEncode("q", it.delta, it.finetuned)], statistics(it), ObsSettings(**options))["q"]


def decode(encoded: Encoded) -> torch.Tensor:
    return packed.decode(packed.PackedSpec.from_json(encoded.params, "q"), encoded.parts)


def output_loss(it: Layer, restored: torch.Tensor, *, alpha: float) -> float:
    """Squared output error in float64, the part of it that a damped solver minimizes not included."""
    x = it.x.double()
    target = it.x + alpha * (it.target_x - it.x)
    wanted = target.double() @ it.finetuned.double().T - x @ (it.finetuned - it.delta).double().T
    return float((wanted - x @ restored.double().T).square().sum())


def damped_hessian(it: Layer) -> torch.Tensor:
    hessian = 2 / len(it.x) * it.x.double().T @ it.x.double()
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


PATTERNS = ["dense", "2:4", "1:4", "4:8", "unstructured:0.5"]


@pytest.mark.parametrize("sparsity", PATTERNS)
@pytest.mark.parametrize("activation_order", [False, True])
@pytest.mark.parametrize(
    ("bits", "grid", "group_size"),
    [
        (1, "midrise", "row"),
        (2, "minmax", 16),
        (3, "symmetric", "row"),
        (3, "symmetric", 16),
        (4, "minmax", "row"),
        (16, "minmax", "row"),
    ],
)
@pytest.mark.parametrize("gain", ["least", "unbiased"])
def test_recorded_loss_and_kept_share_are_those_of_the_decoded_parts(
    sparsity: str, activation_order: bool, bits: int, grid: str, group_size: str | int, gain: str
) -> None:
    it = layer()
    options: dict[str, Any] = {"bits": bits, "sparsity": sparsity, "grid": grid, "group_size": group_size, "gain": gain}
    if bits == 16:
        options["refine_sweeps"] = 0
    encoded = encode(it, activation_order=activation_order, asymmetric=0.0, **options)
    if bits < 16:
        assert encoded.parts["scales"].shape[1] == (1 if group_size == "row" else 3)
    h = damped_hessian(it)
    error = decode(encoded).double() - it.delta.double()
    delta = it.delta.double()
    wanted = float(((error @ h) * error).sum() / ((delta @ h) * delta).sum())
    assert encoded.loss == pytest.approx(wanted, rel=10 * FLOAT32_CHAIN.value)
    assert encoded.loss is not None
    assert encoded.loss < 1
    share = float(((decode(encoded).double() @ h) * delta).sum() / ((delta @ h) * delta).sum())
    assert encoded.kept == pytest.approx(share, rel=FLOAT32_CHAIN.value)


@pytest.mark.parametrize("group_size", ["row", 16])
@pytest.mark.parametrize(
    ("bits", "sparsity", "grid"), [(1, "2:4", "midrise"), (2, "2:4", "minmax"), (16, "2:4", "minmax")]
)
@pytest.mark.parametrize("asymmetric", [0.0, 1.0])
def test_a_gain_of_each_row_makes_it_lose_nothing_of_its_target_on_average(
    bits: int, sparsity: str, grid: str, group_size: str | int, asymmetric: float
) -> None:
    """The codes are the same, and each row of what is restored is longer by what it lacked along its target."""
    it = layer()
    options: dict[str, Any] = {"bits": bits, "sparsity": sparsity, "grid": grid, "group_size": group_size}
    options |= {"asymmetric": asymmetric, "refine_sweeps": 0 if bits == 16 else 2}
    least, unbiased = (encode(it, **options, gain=gain) for gain in ("least", "unbiased"))
    for part in least.parts.keys() - {"scales", "values"}:
        assert torch.equal(least.parts[part], unbiased.parts[part])
    h = damped_hessian(it)
    sums = statistics(it).finish()[1]
    assert sums is not None
    shift = it.finetuned.double() @ sums.double() @ torch.linalg.inv(h)
    target = it.delta.double() + asymmetric * shift

    def share(encoded: Encoded) -> torch.Tensor:
        return ((decode(encoded).double() @ h) * target).sum(1) / ((target @ h) * target).sum(1)

    assert share(least).mean() < 1
    wanted = (1 / share(least)).clamp(0.9, 1.25)
    ratio = decode(unbiased).double().norm(dim=1) / decode(least).double().norm(dim=1)
    assert float((ratio / wanted - 1).abs().max()) <= 2**-8  # what is stored is bfloat16
    assert (share(unbiased) - share(least) * wanted).abs().max() <= 2**-8
    assert least.kept is not None
    assert unbiased.kept is not None
    assert abs(unbiased.kept - 1) < abs(least.kept - 1)


def test_loss_is_told_against_the_target_that_was_asked_for() -> None:
    """With 8 bits nearly nothing is lost of the target, however far it lies from the plain delta."""
    it = layer()
    encoded = encode(it, bits=8, asymmetric=1.0)
    away = decode(encoded) - it.delta
    assert float(away.square().sum() / it.delta.square().sum()) > 0.01
    assert encoded.loss is not None
    assert encoded.loss < 1e-3


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_the_stored_pattern_keeps_exactly_n_of_every_m(pattern: str, bits: int) -> None:
    encoded = encode(layer(columns=50), bits=bits, sparsity=pattern, refine_sweeps=0 if bits == 16 else 2)
    spec = packed.PackedSpec.from_json(encoded.params, "q")
    kept = packed._mask(spec, encoded.parts["pattern"]).view(spec.rows, -1, spec.sparsity.m).sum(-1)
    assert (kept == spec.sparsity.n).all()
    nonzero = torch.nn.functional.pad(decode(encoded) != 0, (0, spec.padded - 50))
    assert (nonzero.view(spec.rows, -1, spec.sparsity.m).sum(-1) <= spec.sparsity.n).all()


def test_an_unstructured_pattern_keeps_its_share_of_every_block() -> None:
    options: dict[str, Any] = {"bits": 16, "sparsity": "unstructured:0.5", "activation_order": False}
    encoded = encode(layer(), block_size=16, refine_sweeps=0, **options)
    kept = packed._mask(packed.PackedSpec.from_json(encoded.params, "q"), encoded.parts["pattern"])
    assert kept.view(12, 3, 16).sum((0, 2)).tolist() == [96, 96, 96]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_each_strength_is_best_for_its_own_target(alpha: float) -> None:
    it = layer()
    losses = {
        strength: output_loss(it, decode(encode(it, bits=8, asymmetric=strength, damp_fraction=1e-4)), alpha=alpha)
        for strength in (0.0, 0.5, 1.0)
    }
    assert min(losses, key=lambda strength: losses[strength]) == alpha


def test_activation_order_and_refinement_do_not_move_the_asymmetric_target() -> None:
    it = layer()
    options: dict[str, Any] = {"bits": 8, "asymmetric": 1.0, "refine_sweeps": 0}
    plain, ordered = (encode(it, activation_order=order, **options) for order in (False, True))
    scale = decode(plain).abs().max()
    assert float((decode(plain) - decode(ordered)).abs().max()) <= 0.05 * scale


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows", [12, 40])
def test_targets_move_by_the_same_whichever_product_comes_first(rows: int, ordered: bool) -> None:
    """12 + 12 rows are fewer than the 48 columns, 40 + 40 are not."""
    linears = [
        LinearToEncode(name, it.delta, it.finetuned) for name, it in (("q", layer(rows)), ("k", layer(rows, seed=1)))
    ]
    hessian, drift = statistics(layer()).finish()
    assert drift is not None
    order = activation_order(hessian, 4) if ordered else None
    factor = factorize(hessian if order is None else hessian[order][:, order], damp_fraction=0.01, where="test")
    found = obs._shifted(linears, drift, factor, order, 0.5)
    damped = hessian.double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    shift = torch.linalg.solve(damped, drift.double().T).T
    for one in linears:
        wanted = one.delta.double() + 0.5 * one.finetuned.double() @ shift
        assert float((found[one.name] - wanted).abs().max()) <= FLOAT32_CHAIN.value * float(wanted.abs().max())


def test_targets_move_by_the_same_where_w_d_is_summed_up() -> None:
    """The codes are those of D, and without any strength those of no teacher; of no other rows than the linear's."""
    it, settings = layer(rows=12), ObsSettings(bits=8, asymmetric=1.0)
    sums = HessianAccumulator(COLUMNS, device=torch.device("cpu"), asymmetric=True, finetuned=it.finetuned)
    sums.add(it.x, it.target_x)
    moved = sums.moved()
    linear = LinearToEncode("q", it.delta, it.finetuned, moved=moved)
    found = obs.encode([linear], sums.copy(), settings)["q"]
    wanted = encode(it, bits=8, asymmetric=1.0)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-3)
    assert torch.allclose(decode(found), decode(wanted), atol=1e-5)
    unmoved = encode(it, bits=8, asymmetric=0.0)
    assert float((decode(found) - decode(unmoved)).abs().max()) > 1e-2
    still = obs.encode([linear], sums, ObsSettings(bits=8, asymmetric=0.0))["q"]
    assert torch.equal(decode(still), decode(unmoved))


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 3])
@pytest.mark.parametrize("sparsity", [*PATTERNS, "drawn"])
def test_linears_that_share_inputs_are_encoded_as_if_alone(sparsity: str, columns: int) -> None:
    it, other = layer(12, columns), layer(5, columns, seed=1)
    settings = ObsSettings(**(DRAWN if sparsity == "drawn" else {"bits": 2, "sparsity": sparsity}))
    jobs = [LinearToEncode("q", it.delta, it.finetuned), LinearToEncode("k", other.delta, other.finetuned)]
    together = obs.encode(jobs, statistics(it), settings)
    assert list(together) == ["q", "k"]
    for job in jobs:
        alone = obs.encode([job], statistics(it), settings)[job.name]
        assert alone.params == together[job.name].params
        for figure in ("loss", "kept"):
            assert getattr(alone, figure) == pytest.approx(getattr(together[job.name], figure), rel=1e-5)
        for name, part in alone.parts.items():
            assert torch.equal(part, together[job.name].parts[name])


def test_settings_of_a_stack_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that differ in steps, or in what they draw, in one; in their order."""
    both = [LinearToEncode(name, layer(12, seed=k).delta, layer(12).finetuned) for k, name in enumerate("qk")]
    both[1] = replace(both[1], delta=both[1].delta[:5] * 3, finetuned=both[1].finetuned[:5])
    plain: dict[str, Any] = {"asymmetric": 0.0, "refine_sweeps": 0, "grid": "symmetric"}
    drawn = plain | {"bits": 1, "grid": "midrise"}
    each = [
        ObsSettings(**plain, bits=2, step=3.4),
        ObsSettings(**drawn, sparsity="drawn:3:8"),
        ObsSettings(**plain, bits=4, step=0.5),
        ObsSettings(**plain, bits=2, step=1.9),
        ObsSettings(**drawn, sparsity="drawn:1:2"),
        ObsSettings(**plain, bits=2),
        ObsSettings(**plain, bits=2, step=5.0),
        ObsSettings(**plain, bits=2),
        ObsSettings(**plain, bits=3, step=1.0, gain="least"),
        ObsSettings(**plain, bits=3, step=2.0, gain="least"),
    ]
    sums = statistics(layer(), asymmetric=False)
    shared = obs.factored(sums, each[0], "q")
    wanted = [obs.encode_factored(both, shared, one) for one in each]
    rows = list[int]()
    solve = obs.solve

    def counted(target: torch.Tensor, *args: Any) -> Solved:
        rows.append(len(target))
        return solve(target, *args)

    monkeypatch.setattr(obs, "solve", counted)
    found = obs.encode_each(both, shared, each)
    assert rows == [3 * 17, 2 * 17, 17, 2 * 17, 2 * 17]
    for one, other, settings in zip(found, wanted, each, strict=True):
        assert list(one) == ["q", "k"]
        for name in one:
            assert one[name].params == other[name].params
            assert torch.equal(one[name].parts["scales"], other[name].parts["scales"]), settings.step
            differ = (decode(one[name]) != decode(other[name])).float().mean()
            assert differ < 0.005  # sums of another shape round otherwise
            assert one[name].sums == pytest.approx(other[name].sums, rel=1e-4)


def test_an_energy_that_is_known_is_taken() -> None:
    it = layer()
    known = obs.encode([LinearToEncode("q", it.delta, it.finetuned, energy=8.0)], statistics(it), ObsSettings(bits=2))
    assert known["q"].sums is not None
    assert known["q"].loss == known["q"].sums.lost / 8.0


def test_more_bits_more_sweeps_and_denser_patterns_lose_less() -> None:
    it = layer(rows=32)

    def loss(**options: Any) -> float:
        found = encode(it, **({"bits": 2, "sparsity": "2:4", "refine_sweeps": 0, "gain": "least"} | options)).loss
        assert found is not None
        return found

    for sparsity in ("dense", "2:4"):
        assert loss(bits=2, sparsity=sparsity) > loss(bits=3, sparsity=sparsity) > loss(bits=4, sparsity=sparsity)
    assert loss(refine_sweeps=0) > loss(refine_sweeps=1) >= loss(refine_sweeps=4)
    assert loss(bits=4, sparsity="1:4") > loss(bits=4) > loss(bits=4, sparsity="3:4") > loss(bits=4, sparsity="dense")
    assert loss(bits=1, grid="midrise", refit_scales=True) < loss(bits=1, grid="midrise")


def test_damping_that_was_needed_is_recorded() -> None:
    it = layer()
    assert encode(it, bits=4, damp_fraction=0.02).damp_fraction == 0.02


def test_a_zero_delta_is_coded_as_zero() -> None:
    it = layer()
    it.delta.zero_()
    encoded = encode(it, bits=2, sparsity="2:4", asymmetric=0.0)
    assert encoded.loss == 0.0
    assert encoded.kept is None
    assert not decode(encoded).any()


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e15, 1e19, 1e22, 1e28])
def test_deltas_whose_squares_are_beyond_float32_are_coded_all_the_same(size: float) -> None:
    """No gain is known then; what is stored is near the target at any size."""
    it = layer()
    it.delta *= size
    encoded = encode(it, bits=4, asymmetric=0.0)
    restored = decode(encoded).double() / size
    assert float((restored - it.delta.double() / size).norm() / (it.delta.double() / size).norm()) < 0.2
    assert encoded.kept is None or abs(encoded.kept - 1) < 0.01


def test_errors_name_the_linear() -> None:
    it = layer()
    with pytest.raises(RecipeError, match=r"^q: group_size 32 does not divide its 48 columns"):
        encode(it, bits=4, group_size=32)
    it.x.zero_()
    it.target_x.zero_()
    with pytest.raises(NumericsError, match=r"^q: all calibration inputs are zero"):
        encode(it, bits=4)


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    encode(layer(), bits=4)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("sparsity", ["dense", "2:4"])
def test_range_search_gives_every_row_its_best_factor(sparsity: str) -> None:
    it = layer()
    factors = (0.7, 1.0, 1.3)
    options: dict[str, Any] = {"bits": 2, "sparsity": sparsity, "asymmetric": 0.0}
    found = decode(encode(it, range_search=factors, **options))
    alone = [decode(encode(it, range_factor=factor, **options)) for factor in factors]
    rows_of = [[torch.equal(found[r], one[r]) for r in range(len(found))] for one in alone]
    assert all(any(row) for row in zip(*rows_of, strict=True))
    best = min(output_loss(it, one, alpha=0.0) for one in alone)
    assert output_loss(it, found, alpha=0.0) <= best * 1.01  # the solver judges with damping


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("search", [(), (0.8, 1.0)])
def test_a_single_row_is_solved_as_one_of_two_that_are_equal(sweeps: int, search: tuple[float, ...]) -> None:
    """A row turned into a column is the same memory, which the solver must not write to."""
    one = layer(rows=1)
    two = Layer(one.delta.repeat(2, 1), one.finetuned.repeat(2, 1), one.x, one.target_x)
    options = {"bits": 4, "sparsity": "2:4", "activation_order": False, "asymmetric": 0.0}
    options |= {"refine_sweeps": sweeps, "range_search": search}
    delta = one.delta.clone()
    found, wanted = encode(one, **options), encode(two, **options)
    assert torch.equal(one.delta, delta)
    assert torch.equal(decode(found), decode(wanted)[:1])
    assert found.loss == pytest.approx(wanted.loss, rel=FLOAT32_CHAIN.value)


def fisher_of(rows: int) -> torch.Tensor:
    gradients = torch.randn(500, rows, generator=torch.Generator().manual_seed(9))
    gradients += gradients[:, :3].sum(1, keepdim=True)
    return gradients.T @ gradients / len(gradients)


def weighted(it: Layer, restored: torch.Tensor, fisher: torch.Tensor) -> float:
    """tr G E H E^T against the shifted target, in float64, G and H damped as the solvers damp them."""
    error = restored.double() - shifted_target(it)
    hessian = damped_hessian(it)
    weights = fisher.double() + DAMP_FRACTION * fisher.diagonal().double().mean() * torch.eye(
        len(fisher), dtype=torch.float64
    )
    return float((weights @ error @ hessian * error).sum())


def shifted_target(it: Layer) -> torch.Tensor:
    drift = 2 / len(it.x) * (it.target_x - it.x).double().T @ it.x.double()
    return it.delta.double() + it.finetuned.double() @ drift @ torch.linalg.inv(damped_hessian(it))


@pytest.mark.parametrize("options", [{"sparsity": "2:4"}, {}, {"range_search": (0.8, 1.0)}, {"refit_scales": True}])
def test_fisher_lowers_what_it_weighs(options: dict[str, Any]) -> None:
    it, fisher = layer(rows=64), fisher_of(64)
    settings = ObsSettings(bits=2, fisher=True, **options)
    [with_fisher] = obs.encode([LinearToEncode("q", it.delta, it.finetuned, fisher)], statistics(it), settings).values()
    without = encode(it, bits=2, **options)
    assert weighted(it, decode(with_fisher), fisher) < 0.8 * weighted(it, decode(without), fisher)
    error = decode(with_fisher).double() - shifted_target(it)
    energy = (it.delta.double() @ damped_hessian(it) * it.delta.double()).sum()
    assert with_fisher.loss == pytest.approx(float((error @ damped_hessian(it) * error).sum() / energy), rel=1e-3)
    pull = damped_hessian(it) @ shifted_target(it).T
    share = torch.trace(decode(with_fisher).double() @ pull) / torch.trace(shifted_target(it) @ pull)
    assert with_fisher.kept == pytest.approx(float(share), rel=FLOAT32_CHAIN.value)


def test_fisher_couples_each_linear_to_itself() -> None:
    """Two linears of one input come out as each alone."""
    it, other = layer(rows=32), layer(rows=48, seed=5)
    settings = ObsSettings(bits=2, fisher=True)
    first = LinearToEncode("q", it.delta, it.finetuned, fisher_of(32))
    second = LinearToEncode("k", other.delta, other.finetuned, fisher_of(48))
    together = obs.encode([first, second], statistics(it), settings)
    for one in (first, second):
        alone = obs.encode([one], statistics(it), settings)[one.name]
        for name, part in alone.parts.items():
            assert torch.equal(part, together[one.name].parts[name])


def test_without_fisher_information_rows_are_solved_apart() -> None:
    it = layer(rows=32)
    plain, without = encode(it, bits=2), encode(it, bits=2, fisher=True)
    assert plain.loss == without.loss
    assert all(torch.equal(part, without.parts[name]) for name, part in plain.parts.items())


def test_the_last_rows_make_up_for_all_that_was_lost_before() -> None:
    """They are coded as targets that are the best answer, in fp64, to the errors of all other rows."""
    it, fisher = layer(rows=64), fisher_of(64)
    settings = ObsSettings(bits=4, asymmetric=0, fisher=True)
    linear = LinearToEncode("q", it.delta, it.finetuned, fisher)
    restored = decode(obs.encode([linear], statistics(it, asymmetric=False), settings)["q"])
    last = torch.arange(BLOCKS - 1, 64, BLOCKS)
    fixed = torch.tensor([row for row in range(64) if row not in last.tolist()])
    weights = fisher.double() + DAMP_FRACTION * fisher.diagonal().double().mean() * torch.eye(64, dtype=torch.float64)
    lost = (restored - it.delta)[fixed].double()
    best = it.delta[last] - torch.linalg.solve(weights[last][:, last], weights[last][:, fixed] @ lost).float()
    alone = LinearToEncode("q", best, it.finetuned[last])
    expected = decode(obs.encode([alone], statistics(it, asymmetric=False), ObsSettings(bits=4, asymmetric=0))["q"])
    torch.testing.assert_close(restored[last], expected, rtol=1e-3, atol=1e-5)


def test_steps_are_in_root_mean_squares_of_the_targets() -> None:
    """Of what OBS solves for, which is not the delta where inputs have moved."""
    it = layer(rows=5)
    encoded = encode(it, bits=2, grid="symmetric", step=2.2, gain="least")
    found, target = encoded.parts["scales"][:, 0].double(), shifted_target(it)
    assert torch.allclose(found, 2.2 * target.square().mean(1).sqrt(), rtol=2**-7)
    assert not torch.allclose(found, 2.2 * it.delta.double().square().mean(1).sqrt(), rtol=2**-7)
    assert "zeros" not in encoded.parts


DRAWN: dict[str, Any] = {"bits": 1, "grid": "midrise", "sparsity": "drawn:3:8", "damp_fraction": 3.0}


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS + 3])
@pytest.mark.parametrize("activation_order", [False, True])
def test_signs_by_lot_are_those_of_the_weights_that_a_reader_draws(
    columns: int, sweeps: int, activation_order: bool
) -> None:
    it = layer(columns=columns)
    more = {"activation_order": activation_order, "refine_sweeps": sweeps, "asymmetric": 0.0, "damp_fraction": 0.1}
    encoded = encode(it, **DRAWN | more)
    spec = packed.PackedSpec.from_json(encoded.params, "q")
    kept = packed.drawn_pattern(spec, torch.device("cpu"))[:, :columns]
    found = decode(encoded)
    assert torch.equal(found != 0, kept)
    assert encoded.parts.keys() == {"codes", "scales"}
    hessian = 2 / len(it.x) * it.x.double().T @ it.x.double()
    hessian += 0.1 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    error, delta = found.double() - it.delta.double(), it.delta.double()
    wanted = float(((error @ hessian) * error).sum() / ((delta @ hessian) * delta).sum())
    assert encoded.loss == pytest.approx(wanted, rel=1e-3)
    plain = it.delta.sign() * kept * found.abs().amax(1, keepdim=True)
    error = plain.double() - delta
    assert wanted < 0.95 * float(((error @ hessian) * error).sum() / ((delta @ hessian) * delta).sum())


def test_tensors_of_a_shape_have_patterns_of_their_own() -> None:
    it = layer()
    two = [LinearToEncode(name, it.delta, it.finetuned) for name in ("q", "k")]
    found = obs.encode(two, statistics(it), ObsSettings(**DRAWN))
    assert not torch.equal(decode(found["q"]) != 0, decode(found["k"]) != 0)
    alone = obs.encode(two[1:], statistics(it), ObsSettings(**DRAWN))["k"]
    assert torch.equal(decode(alone), decode(found["k"]))


def test_fisher_solves_signs_by_lot_block_by_block() -> None:
    it = layer(rows=40)
    fisher = torch.eye(40)
    one = LinearToEncode("q", it.delta, it.finetuned, fisher)
    apart = obs.encode([replace(one, fisher=None)], statistics(it), ObsSettings(**DRAWN))["q"]
    coupled = obs.encode([one], statistics(it), ObsSettings(**DRAWN, fisher=True))["q"]
    assert torch.equal(decode(coupled) != 0, decode(apart) != 0)
    assert torch.allclose(decode(coupled), decode(apart), rtol=0.02)


REPEATED = {
    "2:4": {"bits": 2, "sparsity": "2:4"},
    "steps": {"bits": 2, "grid": "symmetric", "step": 2.1, "damp_fraction": 0.3},
    "ranges": {"bits": 2, "gain": "least", "range_search": (1.0, 0.8)},
    "drawn": DRAWN,
    "in order, of groups": {"bits": 4, "sparsity": "2:4", "activation_order": False, "group_size": 64},
    "no refinement": {"bits": 3, "grid": "symmetric", "refine_sweeps": 0},
    "refitted": {"bits": 1, "grid": "midrise", "refit_scales": True},
}


def tensors_of(solved: Solved) -> list[torch.Tensor]:
    assert solved.kept is not None
    grid = [] if solved.grid is None else [solved.grid.scale, solved.grid.zero]
    found = [solved.codes, solved.values, solved.mask, *grid, solved.loss, *solved.kept]
    return [one for one in found if one is not None]


def run_again(work: Any, given: Any, _: torch.device) -> Any:
    """As repeated._capture, without a GPU: what would be replayed is run, and lies where the first result did."""
    result = work(*given)

    def replay() -> None:
        for mine, one in zip(tensors_of(result), tensors_of(work(*given)), strict=True):
            mine.copy_(one)

    return replay, result


def captures(monkeypatch: pytest.MonkeyPatch, place: str) -> list[torch.Size]:
    """Shapes of what is captured from now on, of which nothing is kept yet; on a CPU as if it could.

    Inverses of groups are no part of it: a GPU's library may wait.
    """
    found, real = [], repeated._capture if place == "cuda" else run_again

    def capture(work: Any, given: Any, device: torch.device) -> Any:
        found.append(given[0].shape)
        with monkeypatch.context() as within:
            within.setattr(PairSolver, "under", lambda *_: pytest.fail("inverts what is captured"))
            return real(work, given, device)

    repeated.forget()
    monkeypatch.setattr(repeated, "_given_up", [])  # whatever ran out of memory before
    monkeypatch.setattr(repeated, "_capture", capture)
    monkeypatch.setattr(replayed, "usable", lambda _: True)
    monkeypatch.setattr(repeated, "unreserved_bytes", lambda _: 1 << 40)
    return found


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", REPEATED)
def test_blocks_that_are_replayed(monkeypatch: pytest.MonkeyPatch, kind: str, place: str) -> None:
    """Of two linears whose rows are no whole blocks: the same bytes as where there is no room to capture any.

    What is captured in the first layer is replayed in the second, whose inputs are others.
    """
    device, captured = torch.device(place), captures(monkeypatch, place)
    settings = ObsSettings(fisher=True, **REPEATED[kind])

    def encoded(number: int) -> dict[str, Encoded]:
        layers = [layer(rows=rows, columns=512, seed=seed + number) for seed, rows in enumerate((90, 64))]
        sums = HessianAccumulator(512, device=device, asymmetric=True)
        sums.add(layers[0].x.to(device), layers[0].target_x.to(device))
        linears = [
            LinearToEncode(
                f"{at}", one.delta.to(device), one.finetuned.to(device), fisher_of(len(one.delta)).to(device)
            )
            for at, one in enumerate(layers)
        ]
        return obs.encode(linears, sums, settings)

    found = [encoded(number) for number in (0, 2)]
    assert len(captured) == (0 if kind == "refitted" else 2)  # 6 + 4 rows of the first ten blocks, then 5 + 4
    repeated.forget()
    monkeypatch.setattr(repeated, "unreserved_bytes", lambda _: 0)
    for both, number in zip(found, (0, 2), strict=True):
        wanted = encoded(number)
        for name, one in both.items():
            assert one.sums == wanted[name].sums
            assert one.parts.keys() == wanted[name].parts.keys()
            assert all(torch.equal(part, wanted[name].parts[key]) for key, part in one.parts.items())


def test_blocks_are_replayed_where_no_more_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then of one stack alone."""
    captured, it = captures(monkeypatch, "cpu"), layer(rows=64, columns=128)
    monkeypatch.setattr(repeated, "_MOST", 0)
    for _ in range(2):
        linear = LinearToEncode("q", it.delta, it.finetuned, fisher_of(64))
        obs.encode([linear], statistics(it), ObsSettings(bits=2, fisher=True))
    assert len(captured) == 2


ALIKE = REPEATED | {
    "values": {"bits": 16, "sparsity": "2:4", "refine_sweeps": 0},
    "a share": {"bits": 4, "sparsity": "unstructured:0.5"},
    "the published rule": {"bits": 4, "sparsity": "2:4", "selection": "diagonal", "asymmetric": 0.0},
}


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ALIKE)
def test_stacks_of_a_shape_are_replayed_in_every_layer(monkeypatch: pytest.MonkeyPatch, kind: str, place: str) -> None:
    """Two shapes in turn, other numbers in each layer: the same bytes as where nothing is replayed."""
    device, captured = torch.device(place), captures(monkeypatch, place)
    settings = ObsSettings(**ALIKE[kind])

    def encoded(it: Layer) -> Encoded:
        sums = HessianAccumulator(it.x.shape[1], device=device, asymmetric=True)
        sums.add(it.x.to(device), it.target_x.to(device))
        return obs.encode([LinearToEncode("q", it.delta.to(device), it.finetuned.to(device))], sums, settings)["q"]

    shapes = [(40, 256), (24, 128)]
    layers = [layer(rows, columns, seed) for seed in range(4) for rows, columns in shapes]
    found = [encoded(one) for one in layers]
    assert [tuple(one) for one in captured] == ([] if kind in ("refitted", "a share") else shapes)
    repeated.forget()
    monkeypatch.setattr(replayed, "usable", lambda _: False)
    for one, it in zip(found, layers, strict=True):
        wanted = encoded(it)
        assert (one.sums, one.loss, one.kept) == (wanted.sums, wanted.loss, wanted.kept)
        assert one.parts.keys() == wanted.parts.keys()
        assert all(torch.equal(part, wanted.parts[key]) for key, part in one.parts.items())


def test_what_settings_differ_in_is_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captures(monkeypatch, "cpu")
    with repeated.forgotten():
        for bits in (2, 4, 2, 4):
            encode(layer(), bits=bits, sparsity="2:4")
        assert len(captured) == 2
    encode(layer(), bits=2, sparsity="2:4")
    assert len(captured) == 2  # what was captured is gone


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["2:4", "least", "4:8"])
def test_wide_and_high_stacks_are_replayed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Several lazy batches, a ragged last group of columns, rows in more than one slice; two linears in a stack."""
    device, captured = torch.device("cuda"), captures(monkeypatch, "cuda")
    kinds = {"2:4": {"sparsity": "2:4"}, "least": {"sparsity": "2:4", "gain": "least"}, "4:8": {"sparsity": "4:8"}}
    settings = ObsSettings(bits=4, **kinds[kind])

    def encoded(rows: int, columns: int, seed: int) -> list[Encoded]:
        one, other = (layer(rows, columns, seed + more) for more in (0, 1))
        sums = HessianAccumulator(columns, device=device, asymmetric=True)
        sums.add(one.x.to(device), one.target_x.to(device))
        two = [
            LinearToEncode(f"{k}", it.delta.to(device), it.finetuned.to(device)) for k, it in enumerate((one, other))
        ]
        return list(obs.encode(two, sums, settings).values())

    calls = [(rows, columns, seed) for seed in range(3) for rows, columns in ((40, 2310), (1100, 256))]
    with repeated.forgotten():
        found = [encoded(*one) for one in calls]
    assert len(captured) == 2
    monkeypatch.setattr(replayed, "usable", lambda _: False)
    for both, call in zip(found, calls, strict=True):
        for one, wanted in zip(both, encoded(*call), strict=True):
            assert (one.sums, one.parts.keys()) == (wanted.sums, wanted.parts.keys())
            assert all(torch.equal(part, wanted.parts[key]) for key, part in one.parts.items())

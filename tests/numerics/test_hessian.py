from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import inside
from problems import problem
from tolerances import FLOAT32_CHAIN, LEAST_SQUARES

from deltacompress.errors import NumericsError
from deltacompress.numerics.hessian import DAMPING_STEPS, HessianAccumulator, add_squares, factorize
from deltacompress.numerics.products import mirror

CPU = torch.device("cpu")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [7, 600])
def test_h_and_d_are_twice_the_mean_outer_products(columns: int) -> None:
    x, target = normal(60, columns, seed=0), normal(60, columns, seed=1)
    sums = HessianAccumulator(columns, device=CPU, asymmetric=True)
    for start, stop in ((0, 13), (13, 14), (14, 60)):
        sums.add(x[start:stop], target[start:stop])
    hessian, drift = sums.finish()
    assert sums.tokens == 60
    a, b = x.double().numpy(), target.double().numpy()
    assert np.allclose(hessian.numpy(), 2 / 60 * a.T @ a, atol=FLOAT32_CHAIN.value)
    assert torch.equal(hessian, hessian.T)
    assert drift is not None
    assert np.allclose(drift.numpy(), 2 / 60 * (b - a).T @ a, atol=FLOAT32_CHAIN.value)


@pytest.mark.parametrize(
    ("device", "bits"), [pytest.param("cpu", 7, marks=inside), pytest.param("cuda", 16, marks=pytest.mark.gpu)]
)
def test_drift_and_inputs_are_rounded_in_one_pass_as_in_three(device: str, bits: int) -> None:
    """To the bit; the interpreter, which truncates, is given values that bfloat16 has."""
    from deltacompress.numerics.triton.drift import drift_and_inputs

    x, target = ((normal(67, 123, seed=k) * 20).to(device, torch.float16) for k in range(2))
    if bits == 7:
        x, target = (one.round().clamp(-63, 63) for one in (x, target))
    for a, b in ((target, x), (target.T, x.T)):
        drift, inputs = drift_and_inputs(a, b)
        assert torch.equal(drift, (a - b).bfloat16())
        assert torch.equal(inputs, b.bfloat16())


@pytest.mark.parametrize(
    ("device", "dtype", "error"),
    [
        ("cpu", torch.float32, 1e-6),
        pytest.param("cuda", torch.float32, 5e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 5e-3, marks=pytest.mark.gpu),
    ],
)
def test_w_d_is_summed_up_in_the_place_of_d(device: str, dtype: torch.dtype, error: float) -> None:
    """By norm, against fp64 of the same inputs; a GPU rounds to bfloat16, differences after they are taken."""
    x, other, finetuned = (normal(*shape, seed=k) for k, shape in enumerate([(4000, 90), (4000, 90), (20, 90)]))
    x, target, finetuned = (one.to(device, dtype) for one in (x, x + 0.01 * other, finetuned))
    sums = HessianAccumulator(90, device=torch.device(device), asymmetric=True, finetuned=finetuned.float())
    with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):  # as a GPU's walk does
        for start, stop in ((0, 13), (13, 14), (14, 2000)):
            sums.add(x[start:stop], target[start:stop])
    sums.add(x[2000:].float(), target[2000:].float())  # as after an overflow
    twin = sums.copy()
    with pytest.raises(RuntimeError, match="take moved"):
        sums.finish()
    twin.reduce_(lambda one: one.mul_(2), lambda tokens: tokens * 2)  # as if another had as many of the same
    moved = sums.moved()
    assert moved is not None
    assert sums.moved() is None
    a, b, w = x.double(), target.double(), finetuned.double()
    wanted = 2 / 4000 * w @ (b - a).T @ a
    assert float((moved.double() - wanted).norm() / wanted.norm()) < error
    again = twin.moved()
    assert again is not None
    assert torch.equal(moved, again)
    hessian, drift = sums.finish()
    assert drift is None
    wanted = 2 / 4000 * a.T @ a
    assert float((hessian.double() - wanted).norm() / wanted.norm()) < error


def test_a_d_that_is_summed_up_itself_has_no_w_d() -> None:
    sums = HessianAccumulator(3, device=CPU, asymmetric=True)
    sums.add(normal(8, 3, seed=0), normal(8, 3, seed=1))
    assert sums.moved() is None
    assert sums.finish()[1] is not None


@pytest.mark.parametrize("columns", [7, 600])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_squares_add_up_in_upper_panels(columns: int, device: str) -> None:
    rows = normal(400, columns, seed=0)
    total = torch.zeros(columns, columns, device=device)
    for part in rows.split(300):
        add_squares(total, part.to(device))
    assert columns < 512 or not total[512:, :256].any()  # half of the work
    expected = rows.double().T @ rows.double()
    rounded = 1e-6 if device == "cpu" else 1e-3  # bfloat16 on a GPU, and the errors of 400 products average out
    assert float((mirror(total).cpu().double() - expected).abs().max()) < rounded * 400


@pytest.mark.parametrize("asymmetric", [False, True])
def test_finish_hands_the_sums_over_and_a_copy_gives_them_again(asymmetric: bool) -> None:
    sums = HessianAccumulator(3, device=CPU, asymmetric=asymmetric)
    sums.add(normal(8, 3, seed=0).bfloat16(), normal(8, 3, seed=1))
    twin = sums.copy()
    held = sums._xx.data_ptr()
    first = sums.finish()
    assert first[0].data_ptr() == held  # no second matrix
    with pytest.raises(RuntimeError, match="copy"):
        sums.finish()
    second = twin.finish()
    assert torch.equal(first[0], second[0])
    if asymmetric:
        assert first[1] is not None
        assert second[1] is not None
        assert torch.equal(first[1], second[1])
    else:
        assert first[1] is None
        assert second[1] is None
    first[0].add_(1)
    assert not torch.equal(first[0], second[0])


def test_an_asymmetric_accumulator_wants_both_inputs() -> None:
    with pytest.raises(ValueError, match="inputs too"):
        HessianAccumulator(3, device=CPU, asymmetric=True).add(normal(8, 3, seed=0))


@pytest.mark.parametrize("columns", [1, 4, 33, 600])
def test_factor_is_the_upper_cholesky_factor_of_the_damped_inverse(columns: int) -> None:
    hessian = problem(1, columns, seed=columns).hessian
    kept = hessian.clone()
    factor = factorize(hessian, damp_fraction=0.05, where="test", with_root=True)
    assert factor.damp_fraction == 0.05
    assert torch.equal(hessian, kept)
    assert not factor.upper.tril(-1).any()
    damped = hessian.double().numpy() + 0.05 * float(hessian.diagonal().mean()) * np.eye(columns)
    wanted = np.linalg.cholesky(np.linalg.inv(damped)).T
    assert np.allclose(factor.upper.numpy(), wanted, rtol=FLOAT32_CHAIN.value, atol=FLOAT32_CHAIN.value)
    assert factor.root is not None
    assert not factor.root.tril(-1).any()
    root = factor.root.double().numpy()
    assert np.allclose(root @ root.T, damped, rtol=FLOAT32_CHAIN.value, atol=FLOAT32_CHAIN.value)
    assert factorize(hessian, damp_fraction=0.05, where="test").root is None
    right = normal(3, columns, seed=1)
    solved = np.linalg.solve(damped, right.double().numpy().T).T
    assert np.allclose(factor.inverse_times(right).numpy(), solved, rtol=1e-3, atol=FLOAT32_CHAIN.value)


@pytest.mark.parametrize("step", DAMPING_STEPS)
def test_damping_rises_by_the_recorded_steps_until_it_works(step: float) -> None:
    previous = ([0.0, *DAMPING_STEPS])[DAMPING_STEPS.index(step)]
    # the negative eigenvalue is made up for by this step, but not by the one before
    hessian = torch.eye(1000)
    hessian[-1, -1] = -0.01 * (previous + step) / 2 * (1000 / 1001)
    mean = float(hessian.diagonal().mean())
    factor = factorize(hessian, damp_fraction=0.01, where="test")
    assert factor.damp_fraction == pytest.approx(0.01 * step)
    damped = torch.eye(1000) * (1 + 0.01 * step * mean)
    assert torch.allclose(factor.upper.diagonal()[:-1], damped.diagonal()[:-1].rsqrt())


def test_few_tokens_give_a_singular_hessian_that_damping_repairs() -> None:
    x = normal(3, 16, seed=0)
    factor = factorize(2 / 3 * x.T @ x, damp_fraction=0.01, where="test")
    assert factor.damp_fraction in [pytest.approx(0.01 * step) for step in DAMPING_STEPS]
    assert torch.isfinite(factor.upper).all()


@pytest.mark.parametrize(
    ("entry", "message"),
    [(0.0, "all calibration inputs are zero"), (float("nan"), "not finite"), (float("inf"), "not finite")],
)
def test_useless_statistics_are_an_error_that_names_the_layer(entry: float, message: str) -> None:
    with pytest.raises(NumericsError, match=rf"^layers\.3\.q_proj: .*{message}"):
        factorize(torch.full((4, 4), entry), damp_fraction=0.01, where="layers.3.q_proj")


def test_a_hessian_that_no_damping_repairs_is_an_error_that_names_layer_and_remedy() -> None:
    hessian = torch.diag(torch.tensor([5.0, 5.0, -4.0]))
    with pytest.raises(NumericsError, match=r"^layers\.3\.q_proj: .*damp_fraction 1;.*raise damp_fraction"):
        factorize(hessian, damp_fraction=0.01, where="layers.3.q_proj")


def test_a_factor_that_overflows_is_not_used() -> None:
    """Each column nearly a copy of the next: there is a factor, whose inverse is larger than a float32."""
    factor = torch.eye(30) / 32
    factor.diagonal(1).fill_(1)  # its inverse reaches 32^30
    hessian = factor @ factor.T
    with pytest.raises(NumericsError, match=r"no Cholesky factor even with damp_fraction 1e-14; raise damp_fraction"):
        factorize(hessian, damp_fraction=1e-16, where="test")
    assert torch.isfinite(factorize(hessian, damp_fraction=0.01, where="test").upper).all()


def test_the_shifted_target_is_what_minimizes_the_asymmetric_loss() -> None:
    tokens, columns, rows = 200, 12, 5
    x, drifted = normal(tokens, columns, seed=0), normal(tokens, columns, seed=1)
    target_x = x + 0.2 * drifted
    base, delta = normal(rows, columns, seed=2), 0.1 * normal(rows, columns, seed=3)
    sums = HessianAccumulator(columns, device=CPU, asymmetric=True)
    sums.add(x, target_x)
    hessian, drift = sums.finish()
    assert drift is not None
    shift = factorize(hessian, damp_fraction=1e-6, where="test").inverse_times(drift)
    got = delta + (base + delta) @ shift
    # argmin over Q of sum over tokens || W_ft x' - (W_base + Q) x ||^2
    wanted_outputs = (target_x @ (base + delta).T - x @ base.T).double().numpy()
    best = np.linalg.lstsq(x.double().numpy(), wanted_outputs, rcond=None)[0].T
    assert np.abs(got.numpy() - best).max() <= LEAST_SQUARES.value * np.abs(best).max()


def test_equal_streams_shift_nothing() -> None:
    sums = HessianAccumulator(6, device=CPU, asymmetric=True)
    x = normal(40, 6, seed=0)
    sums.add(x, x)
    hessian, drift = sums.finish()
    assert drift is not None
    assert not factorize(hessian, damp_fraction=0.01, where="test").inverse_times(drift).any()

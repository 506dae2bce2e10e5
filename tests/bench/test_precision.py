"""`bench precision`: the error of the drift's sums, against a layer computed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import Pair

from deltacompress.bench import precision
from deltacompress.cli.main import main
from deltacompress.errors import InputError


def test_errors_grow_as_the_delta_shrinks_and_with_fewer_bits(pair: Pair) -> None:
    found = precision.run(pair.base, pair.finetuned, layer=1, samples=4, seq_len=16, device="cpu").to_json()
    assert (found["layer"], found["samples"], found["seq_len"]) == (1, 4, 16)
    error = {(row["delta_times"], row["linear"], row["precision"]): row["error_of_E"] for row in found["rows"]}
    linears = {linear for _, linear, _ in error}
    assert linears == {"o_proj", "gate_proj", "down_proj"}  # both streams bring the same to q_proj
    assert len(error) == 3 * len(linears) * 2
    for linear in linears:
        assert error[1.0, linear, "fp32"] < 1e-3
        for kind in ("fp32", "bf16"):
            assert error[1.0, linear, kind] < error[1 / 4, linear, kind] < error[1 / 16, linear, kind]
    for scale in precision.SCALES:
        assert sum(error[scale, linear, "bf16"] for linear in linears) >= sum(
            error[scale, linear, "fp32"] for linear in linears
        )


def test_the_error_is_that_of_the_sums(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are a tenth too large are wrong by a tenth, in whatever precision."""
    exact = precision._sum
    monkeypatch.setattr(precision, "_sum", lambda x, target: exact(x, target) / 1.1)
    rows = precision.run(pair.base, pair.finetuned, samples=4, seq_len=16, device="cpu").rows
    assert [row["error_of_E"] for row in rows if row["precision"] == "fp32"] == pytest.approx([0.1] * 9, abs=0.01)


def test_a_random_pair_and_what_is_refused(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "precision", "--device", "cpu", "--samples", "1", "--seq-len", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pair"], found["seq_len"]) == ("random", 8)
    with pytest.raises(InputError, match="two models"):
        precision.run(pair.base, device="cpu")
    with pytest.raises(InputError, match="layer 7: there are 2 layers"):
        precision.run(pair.base, pair.finetuned, layer=7, device="cpu")
    with pytest.raises(InputError, match=r"seq_len 4097: the model has \d+ positions; give fewer tokens"):
        precision.run(pair.base, pair.finetuned, samples=1, seq_len=4097, device="cpu")


def test_what_has_no_such_sums_is_refused(pair: Pair, make_pair: Callable[..., Pair]) -> None:
    with pytest.raises(InputError, match="layer 0 is the same in both models"):
        precision.run(pair.base, pair.base, samples=1, seq_len=8, device="cpu")
    mixture = make_pair("mixtral")
    with pytest.raises(InputError, match="layer 0 holds experts"):
        precision.run(mixture.base, mixture.finetuned, samples=1, seq_len=8, device="cpu")


def test_weights_are_the_base_and_the_scaled_delta(pair: Pair) -> None:
    from deltacompress.checkpoints.reader import Checkpoint
    from deltacompress.models.skeleton import Skeleton

    base, finetuned = Checkpoint.open(pair.base), Checkpoint.open(pair.finetuned)
    skeleton = Skeleton.from_config(pair.finetuned, finetuned.tensors, device=torch.device("cpu"))
    name = skeleton.linear_names(1)[0]
    teacher, student = precision._weights(base, finetuned, skeleton, name, 0.25)
    start, end = base.read(name).double(), finetuned.read(name).double()
    assert torch.allclose(teacher.double(), start + (end - start) / 4, atol=1e-6)
    step = (end - start).abs().amax(1, keepdim=True) / 4 / 7  # 15 steps from the least to the largest
    assert ((student.double() - teacher.double()).abs() <= step).all()
    assert not torch.equal(student, teacher)
    norm = next(one for one in skeleton.layer_names(1) if "norm" in one)
    assert torch.equal(*precision._weights(base, finetuned, skeleton, norm, 0.25))

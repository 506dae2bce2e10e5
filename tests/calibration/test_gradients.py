"""Gradients taken layer by layer against autograd through the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import Pair
from torch import nn
from transformers import AutoModelForCausalLM

from deltacompress.calibration import gradients
from deltacompress.calibration.fisher_sum import FisherSum
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import capture_calls
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.hessian import add_squares
from deltacompress.reporter import SILENT

ROWS, TOKENS = 5, 16
PRECISION = Precision("fp32")


class Opened:
    """A tiny fine-tuned model as the walk has it, its outer weights loaded, and what its first layer receives."""

    def __init__(self, pair: Pair, batch: int = 2, device: str = "cpu", host_share: float = 0.0) -> None:
        self.checkpoint = Checkpoint.open(pair.finetuned)
        self.skeleton = Skeleton.from_config(pair.finetuned, self.checkpoint.tensors, device=device)
        self.skeleton.load(self.skeleton.outer_names(), self.checkpoint.read)
        vocabulary = self.skeleton.model.config.vocab_size
        self.ids = torch.randint(vocabulary, (8, TOKENS), generator=torch.Generator().manual_seed(2))
        self.stream, _ = capture_calls(self.skeleton, self.ids, batch, host_share=host_share)
        self.read: list[str] = []
        self.told: list[Any] = []  # of what is read next

    def _read(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.checkpoint.read(name)

    def sums(self, *layers: int) -> dict[str, torch.Tensor]:
        """Of the linears of these layers, f32 [out, out]."""
        asked = [self.skeleton.linear_names(i) if i in layers else [] for i in range(self.skeleton.num_layers)]
        ahead = self.checkpoint.read_ahead if self.skeleton.device.type == "cuda" else self.told.append
        found = gradients.fisher_information(
            self.skeleton, self.ids[:ROWS], asked, self.stream, self._read, PRECISION, SILENT, ahead
        )
        assert sorted(found) == sorted(name for names in asked for name in names)
        assert {one.tokens for one in found.values()} <= {ROWS * TOKENS}
        return {name: one.whole(torch.device("cpu")) for name, one in found.items()}


def whole_model(pair: Pair, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients [tokens, out] at each linear's output, of the same draws, by one backward."""
    model: Any = AutoModelForCausalLM.from_pretrained(pair.finetuned, dtype=torch.float32)
    model.requires_grad_(False)
    linears: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def watch(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: linears.__setitem__(f"{name}.weight", grad.flatten(0, 1)))

        return watch

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_forward_hook(keep(name))
    logits = model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_()).logits
    chance = torch.Generator().manual_seed(0)
    p = logits.detach().softmax(-1)
    drawn = p.sqrt() * torch.cat([torch.randn((1, *one.shape), generator=chance) for one in logits])
    (logits * (drawn - p * drawn.sum(-1, keepdim=True))).sum().backward()
    return linears


def shortened(grad: torch.Tensor) -> torch.Tensor:
    """No gradient longer than twice the median of those that are not zero."""
    lengths = grad.double().norm(dim=1)
    most = 2 * sorted(lengths[lengths > 0].tolist())[(int((lengths > 0).sum()) - 1) // 2]
    return torch.stack(
        [row * min(1.0, most / max(float(n), 1e-30)) for row, n in zip(grad.double(), lengths, strict=True)]
    )


def test_fisher_information_is_the_sum_of_squares_of_what_the_whole_model_gives(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five layers, which go back three and two at a time."""
    pair = make_pair("llama", num_hidden_layers=5)
    opened = Opened(pair, batch=8)
    monkeypatch.setattr(gradients, "_AT_ONCE", 8 * TOKENS)  # one piece: medians are of a piece
    linears = whole_model(pair, opened.ids[:ROWS])
    sums = opened.sums(*range(5))
    assert sums.keys() == linears.keys()
    for name, found in sums.items():
        expected = shortened(linears[name]).T @ shortened(linears[name])
        difference = (found.double() - expected).norm() / expected.norm()
        assert float(difference) < 0.02, name
    weights = opened.skeleton.model.named_parameters()
    assert all(weight.is_meta for name, weight in weights if ".layers." in name)  # none stays


def test_only_what_is_asked_for_is_kept(pair: Pair) -> None:
    assert Opened(pair).sums(1)
    assert not Opened(pair).sums()


@pytest.mark.parametrize("order", [[0, 0], [0, 1, 0, 1, 0], [0, 1, 2, 3, 4, 3, 4, 3, 0, 1, 2, 1, 0]])
def test_the_next_layer_is_told_before_one_runs(
    make_pair: Callable[..., Pair], order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one, two and five layers: forward, then each segment, the last first, forward to its last layer and back."""
    layers = max(order) + 1
    opened = Opened(make_pair("llama", num_hidden_layers=layers))
    names = [opened.skeleton.layer_names(i) for i in range(layers)]
    run_layer = Skeleton.run_layer

    def noted(self: Skeleton, i: int, hidden: torch.Tensor, call: Any) -> torch.Tensor:
        loaded = len(opened.read) // len(names[0])
        assert opened.told == [names[follows] for follows in order[1 : loaded + 1]]
        return run_layer(self, i, hidden, call)

    monkeypatch.setattr(Skeleton, "run_layer", noted)
    opened.sums(0)
    assert opened.read == [name for i in order for name in names[i]]
    assert len(opened.told) == len(order) - 1


def test_inputs_wait_where_there_is_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, asked = Opened(pair), []
    here = opened.sums(0, 1)
    assert gradients._host_share(torch.device("cpu"), 1 << 60) == 0
    monkeypatch.setattr(gradients, "free_bytes", lambda device: 9e9)
    shares = [gradients._host_share(torch.device("cuda"), size) for size in (3_000_000_000, 6_000_000_000, 1 << 50)]
    assert shares == [0, 0.5, pytest.approx(1, abs=1e-5)]

    def all_of_it(device: torch.device, nbytes: int) -> float:
        asked.append(nbytes)
        return 1.0

    waited: list[int] = []
    rounded = gradients._rounded

    def noted(*given: Any) -> Any:
        found = rounded(*given)
        waited.append(sum(one.nbytes for one in found))
        assert found.host_share == 1
        return found

    monkeypatch.setattr(gradients, "_host_share", all_of_it)
    monkeypatch.setattr(gradients, "_rounded", noted)
    there = opened.sums(0, 1)
    size = opened.skeleton.hidden_size
    assert waited == 2 * [2 * ROWS * TOKENS * size]  # bfloat16, of layers 0 and 1
    assert asked == [gradients.waiting_bytes(ROWS * TOKENS, size, [[], []])]
    assert all(torch.equal(there[name], one) for name, one in here.items())


@pytest.mark.parametrize("size", [1, 7, 300])
def test_half_of_a_sum_is_the_whole(size: int) -> None:
    rows = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(size))
    rows[:, size // 2 :] *= 1e-9
    rows[:, size // 3] = 0.0
    square = rows.T @ rows
    upper = torch.zeros(size, size)
    add_squares(upper, rows)  # its lower panels stay zero
    half = FisherSum.of(upper, 5)
    whole = half.whole(torch.device("cpu"))
    assert torch.equal(whole, whole.T)
    root = square.diagonal().sqrt()
    torch.testing.assert_close(whole, square, rtol=0, atol=float(root.max() ** 2) / 200)
    scale = root[:, None] * root + torch.finfo(torch.float32).tiny  # small outputs as well as large ones
    assert float(((whole - square) / scale).abs().max()) < 1 / 200
    stored = sum(panel.nbytes for panel in half.panels)
    assert stored <= 2 * size * size
    assert size < 300 or stored < 1.9 * size * size


def test_one_token_cannot_outweigh_all_others() -> None:
    rows = torch.ones(9, 4)
    rows[0] *= 1e6
    rows[1:3] = 0
    cut = gradients._shortened(rows)
    torch.testing.assert_close(cut[0], torch.full((4,), 2.0))
    assert torch.equal(cut[1:], rows[1:])
    assert not gradients._shortened(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("zeros", [0, 1, 4, 8, 9])
def test_the_usual_length_is_of_gradients_that_are_not_zero(zeros: int) -> None:
    """Of ten tokens, so of even and odd numbers."""
    generator = torch.Generator().manual_seed(zeros)
    rows = (
        torch.randn(10, 6, generator=generator)
        * torch.logspace(-6, 6, 10)[torch.randperm(10, generator=generator)][:, None]
    )
    rows[torch.randperm(10, generator=generator)[:zeros]] = 0
    torch.testing.assert_close(gradients._shortened(rows).double(), shortened(rows), rtol=1e-6, atol=0)


def test_pieces_are_the_leading_sequences(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_AT_ONCE", 2 * TOKENS)
    opened = Opened(pair, batch=3)
    pieces = list(gradients._pieces(opened.stream, ROWS))
    assert [len(piece) for piece in pieces] == [2, 1, 2]
    torch.testing.assert_close(torch.cat(pieces), torch.cat(list(opened.stream))[:ROWS])


def test_how_many_sequences() -> None:
    ids = torch.zeros(100, 16, dtype=torch.int64)
    assert len(gradients.rows_for_gradients(ids, 32)) == 32
    assert len(gradients.rows_for_gradients(ids, 33)) == 33
    assert len(gradients.rows_for_gradients(torch.zeros(9, 64, dtype=torch.int64), 33)) == 9
    assert len(gradients.rows_for_gradients(torch.zeros(99, 64, dtype=torch.int64), 33)) == 9
    assert len(gradients.rows_for_gradients(ids, 10_000)) == 100


def test_gradients_that_are_not_finite_are_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(pair)
    run_head = Skeleton.run_head
    monkeypatch.setattr(Skeleton, "run_head", lambda self, hidden: run_head(self, hidden) * float("inf"))
    with pytest.raises(RuntimeError):
        opened.sums(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("broken", [0, ROWS, ROWS + 3, ROWS + 5])
def test_one_value_that_is_not_finite_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, broken: int, value: float
) -> None:
    """Of sequences at the end, and of pieces of either layer."""
    opened, taken = Opened(pair), []
    gradient = gradients._gradient

    def once(start: torch.Tensor) -> torch.Tensor:
        found = gradient(start)
        if len(taken) == broken:
            found[0, 3, 1] = value
        taken.append(start)
        return found

    monkeypatch.setattr(gradients, "_gradient", once)
    with pytest.raises(RuntimeError, match="its gradients are not finite"):
        opened.sums(0)
    assert len(taken) > broken


def test_what_goes_back_has_the_covariance_of_the_divergence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits z that are the hidden states themselves, KL(p(z) || p(z + d)) is about d^T C d / 2."""
    opened = Opened(pair)
    z = 2 * torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(Skeleton, "run_head", lambda self, hidden: hidden * 1.0)
    drawn = gradients._at_the_end(opened.skeleton, z.expand(1, 40000, 6), torch.Generator().manual_seed(0))[0].double()
    covariance = drawn.T @ drawn / len(drawn)
    p = z.double().softmax(-1).flatten()
    torch.testing.assert_close(covariance, torch.diag(p) - torch.outer(p, p), rtol=0.05, atol=2e-3)
    d = 0.01 * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    kl = (p * (p.log() - (z.double().flatten() + d).log_softmax(-1))).sum()
    assert float(d @ covariance @ d / 2) == pytest.approx(float(kl), rel=0.1)


def test_pieces_add_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_LONGEST", 1e9)  # medians are of a piece
    opened, sums = Opened(pair, batch=8), []
    for at_once in (2 * TOKENS, 8 * TOKENS):
        monkeypatch.setattr(gradients, "_AT_ONCE", at_once)
        sums.append(opened.sums(1))
    for name, one in sums[0].items():
        assert float((one - sums[1][name]).norm() / one.norm()) < 0.01, name


def test_no_value_depends_on_where_pieces_wait(pair: Pair) -> None:
    here, some, there = (Opened(pair, host_share=share).sums(0, 1) for share in (0.0, 0.5, 1.0))
    assert here.keys() == some.keys() == there.keys()
    assert all(torch.equal(some[name], one) and torch.equal(there[name], one) for name, one in here.items())


def test_a_piece_keeps_no_memory_of_its_batch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []

    class Watched(gradients.HiddenStates):
        def append(self, hidden: torch.Tensor) -> None:
            kept.append(hidden.untyped_storage().nbytes() > hidden.nbytes)
            super().append(hidden)

    opened = Opened(pair, batch=8)
    monkeypatch.setattr(gradients, "HiddenStates", Watched)
    monkeypatch.setattr(gradients, "_AT_ONCE", 2 * TOKENS)
    opened.sums(1)
    assert len(kept) > 3
    assert not any(kept)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_gpu_gives_what_a_cpu_gives_and_the_same_every_time(pair: Pair, share: float) -> None:
    expected = Opened(pair).sums(0, 1)
    first, second = (Opened(pair, device="cuda", host_share=share).sums(0, 1) for _ in range(2))
    for name, one in expected.items():
        assert torch.equal(first[name], second[name]), name
        assert float(first[name].trace()) == pytest.approx(float(one.trace()), rel=0.5), name  # other draws


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_within_a_layer() -> None:
    rows = torch.randn(5000, 600, generator=torch.Generator().manual_seed(3))
    rows[::7] = 0
    there, total = rows.cuda(), torch.zeros(600, 600, device="cuda")
    add_squares(total.clone(), gradients._shortened(there))  # libraries are loaded
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            add_squares(total, gradients._shortened(there))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = shortened(rows).T @ shortened(rows)
    found = FisherSum.of(total, 5000).on_host().whole(torch.device("cpu")).double()
    assert float((found - expected).abs().max() / expected.diagonal().max()) < 1 / 200

"""Gradients taken layer by layer against autograd through the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import Pair
from torch import nn
from transformers import AutoModelForCausalLM

from deltacompress.calibration import gradients
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.recording import capture_calls
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.models.skeleton import Skeleton
from deltacompress.reporter import SILENT

ROWS, TOKENS = 5, 16
PRECISION = Precision("fp32")


class Opened:
    """A tiny fine-tuned model as the walk has it, its outer weights loaded, and what its first layer receives."""

    def __init__(self, pair: Pair, batch: int = 2) -> None:
        self.checkpoint = Checkpoint.open(pair.finetuned)
        self.skeleton = Skeleton.from_config(pair.finetuned, self.checkpoint.tensors, device="cpu")
        self.skeleton.load(self.skeleton.outer_names(), self.checkpoint.read)
        vocabulary = self.skeleton.model.config.vocab_size
        self.ids = torch.randint(vocabulary, (8, TOKENS), generator=torch.Generator().manual_seed(2))
        self.stream, _ = capture_calls(self.skeleton, self.ids, batch)

    def gradients(self) -> gradients.OutputGradients:
        return gradients.output_gradients(
            self.skeleton, self.ids[:ROWS], self.stream, self.checkpoint.read, PRECISION, SILENT
        )


def whole_model(pair: Pair, ids: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients at each layer's output, and at each linear's, of the same draws, by one backward."""
    model: Any = AutoModelForCausalLM.from_pretrained(pair.finetuned, dtype=torch.float32)
    model.requires_grad_(False)
    linears: dict[str, torch.Tensor] = {}
    kept = []

    def keep(name: str) -> Any:
        def watch(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: linears.__setitem__(f"{name}.weight", grad.flatten(0, 1)))

        return watch

    def keep_layer(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.retain_grad()
        kept.append(hidden)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_forward_hook(keep(name))
    for layer in model.model.layers:
        layer.register_forward_hook(keep_layer)
    logits = model(inputs_embeds=model.get_input_embeddings()(ids).requires_grad_()).logits
    chance = torch.Generator().manual_seed(0)
    p = logits.detach().softmax(-1)
    drawn = p.sqrt() * torch.cat([torch.randn((1, *one.shape), generator=chance) for one in logits])
    (logits * (drawn - p * drawn.sum(-1, keepdim=True))).sum().backward()
    return [one.grad for one in kept], linears


def test_gradients_are_those_of_the_whole_model(pair: Pair) -> None:
    opened = Opened(pair)
    found = opened.gradients()
    expected, _ = whole_model(pair, opened.ids[:ROWS])
    assert len(found.layers) == len(expected) == 2
    for pieces, whole in zip(found.layers, expected, strict=True):
        assert all(piece.dtype == torch.bfloat16 for piece in pieces)
        difference = (torch.cat(pieces).float() - whole).norm() / whole.norm()
        assert float(difference) < 0.01  # bfloat16
    weights = opened.skeleton.model.named_parameters()
    assert all(weight.is_meta for name, weight in weights if ".layers." in name)  # none stays


def shortened(grad: torch.Tensor) -> torch.Tensor:
    """No gradient longer than twice the median of those that are not zero."""
    lengths = grad.double().norm(dim=1)
    most = 2 * sorted(lengths[lengths > 0].tolist())[(int((lengths > 0).sum()) - 1) // 2]
    return torch.stack(
        [row * min(1.0, most / max(float(n), 1e-30)) for row, n in zip(grad.double(), lengths, strict=True)]
    )


def test_fisher_information_is_the_sum_of_squares_of_what_the_whole_model_gives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(pair, batch=8)
    monkeypatch.setattr(gradients, "_AT_ONCE", 8 * TOKENS)  # one piece: medians are of a piece
    found = opened.gradients()
    _, linears = whole_model(pair, opened.ids[:ROWS])
    names = opened.skeleton.linear_names(0)
    opened.skeleton.load(opened.skeleton.layer_names(0), opened.checkpoint.read)
    sums = gradients.fisher_information(opened.skeleton, 0, names, opened.stream, found, PRECISION)
    assert sums.keys() == set(names)
    for name in names:
        expected = shortened(linears[name]).T @ shortened(linears[name])
        difference = (sums[name].double() - expected).norm() / expected.norm()
        assert float(difference) < 0.02, name


def test_one_token_cannot_outweigh_all_others() -> None:
    rows = torch.ones(9, 4)
    rows[0] *= 1e6
    rows[1:3] = 0
    cut = gradients._shortened(rows)
    torch.testing.assert_close(cut[0], torch.full((4,), 2.0))
    assert torch.equal(cut[1:], rows[1:])
    assert not gradients._shortened(torch.zeros(3, 4)).any()


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
        opened.gradients()


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
        found = opened.gradients()
        opened.skeleton.load(opened.skeleton.layer_names(1), opened.checkpoint.read)
        names = opened.skeleton.linear_names(1)
        sums.append(gradients.fisher_information(opened.skeleton, 1, names, opened.stream, found, PRECISION))
    for name, one in sums[0].items():
        assert float((one - sums[1][name]).norm() / one.norm()) < 0.01, name

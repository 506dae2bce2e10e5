"""Calibrated experts: statistics against sums in fp64 of plain transformers, experts that no token reaches, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import Pair, Recorder, Weights, edit, files_of, make_pair, weights_of
from torch import Tensor

from deltacompress.artifact.delta import load_delta, verify
from deltacompress.artifact.restoration import restore
from deltacompress.calibration.forwards import memory
from deltacompress.calibration.forwards.memory import Room
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression import workspace
from deltacompress.compression.layerwise import model as walking
from deltacompress.compression.layerwise.experts import ExpertSums
from deltacompress.errors import Interrupted

EXPERTS, LAYERS = 4, 2
OBS: dict[str, Any] = {"codec": "obs", "bits": 4, "asymmetric": 1.0}
DRAWN: dict[str, Any] = {"bits": 1, "grid": "midrise", "sparsity": "drawn:3:8", "damp_fraction": 3.0}


def recipe(*, sequential: bool = True, **fields: Any) -> Recipe:
    rules = [{"kind": "linear"} | OBS | fields, {"codec": "exact"}]
    return Recipe.parse({"name": "mine", "sequential": sequential, "rules": rules})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen3-moe", torch.float32)


@dataclass(frozen=True)
class Stage:
    """What the experts of a layer receive in a plain model, fp64: hidden [tokens, in], and what down does."""

    hidden: Tensor
    chosen: Tensor
    inner: dict[tuple[int, int], Tensor]  # of (expert, token)


def plain(checkpoint: Path, ids: Tensor) -> list[Stage]:
    """Layer by layer, from the library's own forward, and the formula of the experts written out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    stages: list[Stage] = []

    def see(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, chosen, _ = args
        inner = {}
        for token, experts in enumerate(chosen.tolist()):
            for expert in experts:
                gate, up = (module.gate_up_proj[expert] @ hidden[token]).chunk(2)
                inner[expert, token] = torch.nn.functional.silu(gate) * up
        stages.append(Stage(hidden, chosen, inner))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(see)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return stages


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], list[Tensor]]]:
    """What experts are solved with, in order, and the calibration tokens."""
    taken: list[Any] = []
    tokens: list[Tensor] = []
    take, capture = ExpertSums.take, walking.capture_calls

    def taking(self: ExpertSums, expert: int) -> Any:
        sums, count = take(self, expert)
        taken.append((expert, count, *sums.copy().finish()))
        return sums, count

    def capturing(skeleton: Any, ids: Tensor, *args: Any, **options: Any) -> Any:
        tokens.append(ids)
        return capture(skeleton, ids, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ExpertSums, "take", taking)
        patched.setattr(walking, "capture_calls", capturing)
        yield taken, tokens


def drawn(own: Tensor, everyone: Tensor, like: tuple[Tensor, Tensor]) -> Tensor:
    """(n_e H_e + k H) / (n_e + k) of products of rows: like = (expert's, everyone's other factor); k = features."""
    k = own.shape[1]
    mean = 2 * everyone.T @ like[1] / len(everyone)
    return (2 * own.T @ like[0] + k * mean) / (len(own) + k)


@pytest.mark.parametrize("fields", [{}, {"asymmetric": 0.0}, DRAWN])
def test_statistics_are_those_of_plain_models(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    with watched(monkeypatch) as (taken, tokens):
        pair.compress(tmp_path / "delta", recipe=recipe(**fields))
    found = restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored")
    students, teachers = plain(found, tokens[0]), plain(pair.finetuned, tokens[0])
    assert len(taken) == LAYERS * 2 * EXPERTS
    parted = 0
    for at, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        pairs = sorted(student.inner)
        inner = torch.stack([student.inner[one] for one in pairs])
        goals = torch.stack([teacher.inner.get(one, student.inner[one]) for one in pairs])
        parted += sum(one not in teacher.inner for one in pairs)
        for expert in range(EXPERTS):
            tokens_of = [token for e, token in pairs if e == expert]
            rows = torch.tensor([e == expert for e, _ in pairs])
            first, second = (taken[(2 * at + product) * EXPERTS + expert] for product in (0, 1))
            assert (first[0], second[0]) == (expert, expert)
            assert first[1] == second[1] == len(tokens_of)
            x, own = student.hidden, student.hidden[tokens_of]
            drift, own_drift = teacher.hidden - x, (teacher.hidden - x)[tokens_of]
            close(first[2], drawn(own, x, (own, x)))
            close(second[2], drawn(inner[rows], inner, (inner[rows], inner)))
            if fields.get("asymmetric") == 0:
                assert first[3] is None
                assert second[3] is None
                continue
            close(first[3], drawn(own_drift, drift, (own, x)), 1e-4)
            moved = goals - inner
            close(second[3], drawn(moved[rows], moved, (inner[rows], inner)), 1e-4)
    assert parted > 0  # or the rule for tokens that part was not tried


def close(found: Tensor, wanted: Tensor, error: float = 2e-5) -> None:
    """fp32 sums of fp32 activations, or of their differences."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=error * float(wanted.abs().max()) + 1e-7)


def test_the_share_of_tokens_that_go_where_they_went_is_told(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Recorder()
    with watched(monkeypatch) as (_, tokens):
        pair.compress(tmp_path / "delta", recipe=recipe(bits=2), reporter=told)
    found = restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored")
    both = zip(plain(found, tokens[0]), plain(pair.finetuned, tokens[0]), strict=True)
    same = [len(student.inner.keys() & teacher.inner.keys()) / len(student.inner) for student, teacher in both]
    assert min(same) < 1
    least = same.index(min(same))
    wanted = f"{sum(same) / LAYERS:.1%} of the experts that tokens go to are those of the fine-tuned model"
    assert f"{wanted} (least in layer {least}: {min(same):.1%})" in told.notes


def test_no_share_is_told_where_the_fine_tuned_model_does_not_run(pair: Pair, tmp_path: Path) -> None:
    told = Recorder()
    pair.compress(tmp_path / "delta", recipe=recipe(asymmetric=0), reporter=told)
    assert not any("experts" in note for note in told.notes)


def routed(pair: Pair, biases: list[float], **config: Any) -> None:
    """Both models send their tokens by these biases alone."""

    def change(weights: Weights) -> Weights:
        made = {name: torch.tensor(biases) if "score_correction" in name else w for name, w in weights.items()}
        assert any("score_correction" in name for name in made)
        return made

    for checkpoint in (pair.base, pair.finetuned):
        edit(checkpoint, change, **config)


@pytest.mark.parametrize(
    ("biases", "choices", "tokens"),
    [([0.0, 0.0, 0.0, -100.0], 2, None), ([100.0, 0.0, 0.0, 0.0], 1, [128, 0, 0, 0])],
)
def test_an_expert_that_no_token_reaches_is_coded_by_what_all_receive(
    tmp_path: Path, biases: list[float], choices: int, tokens: list[int] | None
) -> None:
    pair = make_pair(tmp_path, "deepseek-v3")
    routed(pair, biases, num_experts_per_tok=choices)
    told = Recorder()
    pair.compress(tmp_path / "delta", recipe="int4-24", reporter=told)
    verify(tmp_path / "delta", base=pair.base)
    found = weights_of(restore(tmp_path / "delta", base=pair.base, out=tmp_path / "restored"))
    old, tuned = weights_of(pair.base), weights_of(pair.finetuned)
    records = load_delta(tmp_path / "delta").tensors
    assert list(records) == sorted(tuned) or set(records) == set(tuned)
    counts = [0] * EXPERTS
    for name, record in records.items():
        if ".mlp.experts." not in name:
            assert record.tokens is None
            continue
        expert = int(name.split(".")[5])
        assert (record.codec, record.status) == ("obs", "coded")
        assert record.tokens is not None
        counts[expert] = record.tokens
        assert record.loss is not None
        assert 0 < record.loss < 1
        error, change = (one[name].float() - tuned[name].float() for one in (found, old))
        assert 0 < error.norm() < change.norm(), name
    assert sum(counts) == choices * 128
    assert counts[3] == 0
    assert tokens is None or counts == tokens
    layers = len({name.split(".")[2] for name in records if ".mlp.experts." in name})
    unreached = f"{counts.count(0) * layers} of {EXPERTS * layers} experts got none of the calibration tokens"
    assert [note for note in told.notes if note.startswith(unreached)]


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("most", [1, 3])
def test_memory_for_some_experts_at_a_time_changes_no_byte(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: bool, most: int
) -> None:
    mine = recipe(sequential=sequential)
    pair.compress(tmp_path / "whole", recipe=mine)
    asked: list[int] = []

    def little(_room: Room, nbytes: int) -> int:
        asked.append(nbytes)
        return most

    monkeypatch.setattr(Room, "most", little)
    pair.compress(tmp_path / "parts", recipe=mine)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    both, one = 2 * 4 * 32**2, 2 * 4 * 16**2  # H and D in f32, of each expert
    assert set(asked) == ({both, one} if sequential else {both + one})


def test_as_many_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10_000
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free)
    room = Room(
        torch.device("cpu"), features=4, hidden=2, tokens=1, note=print
    )  # keeps 5000 free for others, 320 for the solver
    assert [room.most(nbytes) for nbytes in (100, 4680, 4681, 10**9)] == [46, 1, 1, 1]
    free = 5_000
    assert room.most(100) == 1


def test_without_room_to_wait_the_bytes_are_the_same(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.compress(tmp_path / "whole")
    monkeypatch.setattr(Room, "left", lambda _room: False)
    pair.compress(tmp_path / "anew")
    assert files_of(tmp_path / "anew") == files_of(tmp_path / "whole")


def test_an_interrupted_run_goes_on_to_the_same_bytes(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "whole")
    with pytest.raises(Interrupted):
        pair.compress(tmp_path / "parts", reporter=Recorder(stop_at=2))
    pair.compress(tmp_path / "parts", resume=True)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_where_the_parts_of_a_layer_are_is_read_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each of its parts, of which a layer of experts has thousands."""
    found: list[Path] = []
    real = workspace.read_header

    def counted(path: Path) -> Any:
        found.append(path)
        return real(path)

    monkeypatch.setattr(workspace, "read_header", counted)
    pair.compress(tmp_path / "delta")
    assert found
    assert len(found) <= 2 * len(set(found)), "by the artifact's writer, and by the look at the head"


def test_some_experts_can_be_left_out_by_name(pair: Pair, tmp_path: Path) -> None:
    """A stage whose first experts are exact, and one of which nothing is coded."""
    rules = [
        {"name": "*layers.0.mlp.experts.0.*", "codec": "exact"},
        {"name": "*layers.1.mlp.experts.*.down_proj.weight", "codec": "exact"},
        {"kind": "linear"} | OBS,
        {"codec": "exact"},
    ]
    pair.compress(tmp_path / "delta", recipe=Recipe.parse({"name": "mine", "rules": rules}))
    verify(tmp_path / "delta", base=pair.base)
    records = load_delta(tmp_path / "delta").tensors
    coded = {name for name, one in records.items() if one.status == "coded" and ".experts." in name}
    wanted = {
        *(f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in (1, 2, 3) for part in ("gate", "up", "down")),
        *(f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up")),
    }
    assert coded == wanted


def test_a_codec_that_looks_at_the_model_leaves_experts_exact(tmp_path: Path, make: Callable[[str], Pair]) -> None:
    rules = [{"kind": "linear", "codec": "bitdelta"}, {"codec": "exact"}]
    told, mixture = Recorder(), make("qwen2-moe")
    mixture.compress(tmp_path / "delta", recipe=Recipe.parse({"name": "mine", "rules": rules}), reporter=told)
    records = load_delta(tmp_path / "delta").tensors.values()
    assert {one.codec for one in records if one.kind == "linear" and ".experts." in one.name} == {"exact"}
    assert {one.codec for one in records if one.kind == "linear" and ".experts." not in one.name} == {"bitdelta"}
    first = "model.layers.1.mlp.experts.0.down_proj.weight"
    assert f"12 linear weights ({first}, ...) are no modules of transformers' model: stored exactly" in told.notes


def test_what_stays_exact_because_it_is_of_all_experts_is_told(tmp_path: Path, make: Callable[[str], Pair]) -> None:
    told, mixture = Recorder(), make("gpt-oss")
    mixture.compress(tmp_path / "delta", reporter=told)
    records = load_delta(tmp_path / "delta").tensors
    stacked = sorted(name for name, one in records.items() if len(one.shape) == 3)
    assert {records[name].status for name in stacked} == {"exact"}
    assert f"4 tensors ({stacked[0]}, ...) hold a weight of all experts each: stored exactly" in told.notes


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Pair]:
    return lambda architecture: make_pair(tmp_path / architecture, architecture)

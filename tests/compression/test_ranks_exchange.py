"""What ranks tell each other, in processes of their own; and which devices a run is split over."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair
from ranked import on_ranks

from deltacompress import devices
from deltacompress.checkpoints.pairing import pair as pairing
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression.before.prepare import kind_of, odd_linears, skeleton_of
from deltacompress.compression.planning import make_plan
from deltacompress.compression.ranks import ranks as module
from deltacompress.compression.ranks.plans import received, sent
from deltacompress.compression.ranks.ranks import ALONE, Ranks
from deltacompress.compression.ranks.steps import FollowerSteps, LeaderSteps
from deltacompress.compression.steps import Unfinished
from deltacompress.devices import chosen_devices, device_numbers
from deltacompress.errors import BackendError, InputError
from deltacompress.fleet.jobs_file import Fleet


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [7, 8, 100])
def test_shares_are_equal_and_all_there_is(size: int, count: int) -> None:
    shares = [list(range(count))[Ranks(size, rank).share(count)] for rank in range(size)]
    assert [one for share in shares for one in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_is_the_identity() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    ALONE.sum_(tensor)
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert ALONE.gather(tensor, 3) is tensor
    assert ALONE.same(tensor) is tensor
    assert ALONE.total(5) == 5
    assert ALONE.numbers([1, 2]) == [[1, 2]]
    assert ALONE.first


def sums(ranks: Ranks) -> list[Any]:
    """Values of which another order gives another sum, in pieces that do not divide."""
    module._AT_A_TIME = 2
    value = torch.tensor([1.0, 1e8, -1e8])[ranks.rank]
    matrix = value * torch.ones(3, 5)
    ranks.sum_(matrix)
    return matrix.flatten().tolist()


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    one, big = torch.tensor(1.0), torch.tensor(1e8)
    expected = float((one + big) - big)
    assert expected != float(one + (big - big))
    assert on_ranks(3, sums) == [[expected] * 15] * 3


def gathered(ranks: Ranks) -> list[Any]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        whole = (torch.arange(14).view(7, 2) % 5).to(dtype)
        found.append(ranks.gather(whole[ranks.share(7)], 7).equal(whole))
    deep = torch.arange(40).view(5, 2, 4)
    found.append(ranks.gather(deep[ranks.share(5)], 5).equal(deep))
    mine = torch.full((2, 3), ranks.rank + 7, dtype=torch.bfloat16)
    found += [ranks.same(mine).tolist(), ranks.same(mine.t()).shape == (3, 2)]
    return [*found, ranks.numbers([ranks.rank, 0.5]), ranks.total(10 + ranks.rank)]


def test_rows_and_numbers_come_together() -> None:
    expected = [*[True] * 5, [[7.0] * 3] * 2, True, [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]], 33]
    assert on_ranks(3, gathered) == [expected] * 3


def wide_steps(ranks: Ranks) -> list[Any]:
    """Each rank's own numbers of the batches that were wide, saved by the first and recalled by all."""
    saved: dict[str, list[int]] = {}
    kept = SimpleNamespace(
        save=lambda step, outcomes, *, wide_from: saved.update({step: list(wide_from)}),
        wide_from=lambda step: saved.get(step, []),
    )
    steps: Any = LeaderSteps(kept, ranks) if ranks.first else FollowerSteps(None, ranks)  # type: ignore[arg-type]
    steps.save("layer", [], wide_from=[3 + ranks.rank, -1])
    return [saved, steps.wide_from("layer"), steps.wide_from("other")]


def test_batches_that_were_wide_are_those_of_each_rank() -> None:
    found = on_ranks(2, wide_steps)
    assert found == [[{"layer": [3, -1, 4, -1]}, [3, -1], []], [{}, [4, -1], []]]


def test_what_was_made_of_nothing_is_not_saved() -> None:
    """A GPU computes with whatever is there where a rank is gone."""
    lost = BackendError("gone")
    failures: list[BackendError] = []

    def check() -> None:
        if failures:
            raise failures[0]

    stored: list[Any] = []
    kept: Any = SimpleNamespace(save=lambda step, some, *, wide_from: stored.append([one.outcome() for one in some]))
    steps = LeaderSteps(kept, Ranks(check=check))
    outcome: Any = "an outcome"
    steps.save("first", [Unfinished(0.5, lambda: outcome)])
    with pytest.raises(BackendError, match=r"^gone$"):
        steps.save("second", [Unfinished(0.5, lambda: failures.append(lost) or outcome)])
    assert stored == [["an outcome"]]


def hooks(ranks: Ranks) -> list[Any]:
    ranks.total(1)  # who leaves at once may be gone before the other has met it
    return [sys.excepthook is sys.__excepthook__]


def test_meeting_leaves_the_process_as_it_was() -> None:
    assert on_ranks(2, hooks) == [[True]] * 2


CARD = SimpleNamespace(name="H", total_memory=80 << 30)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found = [CARD, CARD, SimpleNamespace(name="H", total_memory=(80 << 30) - (1 << 20))]
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    return found


def test_devices_that_are_there(cards: list[Any]) -> None:
    assert chosen_devices((2, 0), "auto") == (torch.device("cuda:2"), torch.device("cuda:0"))
    assert chosen_devices((1,), "cuda") == (torch.device("cuda:1"),)
    assert chosen_devices(None, "cpu") == (torch.device("cpu"),)


def test_devices_that_are_not(cards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"^devices 0,3: there is no GPU 3: torch sees 3 here, from 0 to 2; "):
        chosen_devices((0, 3), "auto")
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    with pytest.raises(BackendError, match=r"^devices 0: there is no GPU 0: torch sees none here; "):
        chosen_devices((0,), "auto")


@pytest.mark.parametrize(("name", "memory"), [("A", 80), ("H", 40), ("H", 96)])
def test_devices_that_are_not_equal(cards: list[Any], name: str, memory: int) -> None:
    cards[1] = SimpleNamespace(name=name, total_memory=memory << 30)
    assert chosen_devices((0, 2), "auto")
    told = rf"^devices 0,1: GPU 1 is {name} with {memory} GiB, GPU 0 is H with 80 GiB: a run is split over equal ones"
    with pytest.raises(BackendError, match=told):
        chosen_devices((0, 1), "auto")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "devices : names no GPU"),
        (" , ", "devices  , : names no GPU"),
        ([], r"devices \[\]: names no GPU"),
        ("0,", "devices 0,: '' is no number of a GPU"),
        ("0,one", "devices 0,one: 'one' is no number of a GPU"),
        ("-1", "devices -1: '-1' is no number of a GPU"),
        ([0, -1], r"devices \[0, -1\]: '-1' is no number of a GPU"),
        ("0,1,0", "devices 0,1,0: GPU 0 is there twice"),
        ([2, 2], r"devices \[2, 2\]: GPU 2 is there twice"),
    ],
)
def test_numbers_that_are_none(given: Any, told: str) -> None:
    with pytest.raises(InputError, match=f"^{told}; "):
        device_numbers(given)


def test_numbers() -> None:
    assert device_numbers("0, 1") == device_numbers([0, 1]) == (0, 1)
    assert device_numbers((1, 0)) == (1, 0)
    assert device_numbers(None) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--devices", "0,0"), "--devices 0,0: GPU 0 is there twice; give each once"),
        (("--devices", ","), "--devices ,: names no GPU; give numbers of GPUs such as 0,1"),
        (("--devices", "0,1"), "--devices: names GPUs, while --device is cpu; leave out one of the two"),
    ],
)
def test_the_command_line_tells(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], told: str
) -> None:
    assert main(pair.argv(tmp_path / "out", *given)) == 2
    assert capsys.readouterr().err.strip() == f"error: {told}"
    assert main(["bench", "layers", "--device", "cpu", *given]) == 2
    assert capsys.readouterr().err.strip() == f"error: {told}"


def test_python_tells(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^devices: names GPUs, while device is cpu; leave out one of the two"):
        pair.compress(tmp_path / "out", devices=[0, 1])
    with pytest.raises(InputError, match=r"^devices: 7 must be "):
        pair.compress(tmp_path / "out", devices=7)


def test_a_jobs_file_has_no_devices(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobs.yaml"
    job = f"finetunes:\n  - model: {pair.finetuned}\n    out: {tmp_path / 'out'}\n"
    file.write_text(f"base: {pair.base}\ndefaults:\n  recipe: int4\n  devices: 0,1\n{job}")
    told = r"line 4: defaults.devices: is for one model, not for a jobs file: each of its workers has one GPU"
    with pytest.raises(InputError, match=told):
        Fleet.load(file)
    assert main(["compress", "--jobs", str(file), "--devices", "0,1"]) == 2
    assert "--devices: is for one model, not for --jobs" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_plan_arrives_as_it_was(make_pair: Callable[..., Pair], architecture: str) -> None:
    checkpoints = make_pair(architecture)
    base, finetuned = Checkpoint.open(checkpoints.base), Checkpoint.open(checkpoints.finetuned)
    recipe = Recipe.load("int4-24")
    skeleton = skeleton_of(finetuned, recipe, torch.device("cpu"))
    plan = make_plan(pairing(base, finetuned), recipe, kind_of(skeleton), odd_linears(skeleton))
    found = received(json.loads(json.dumps(sent(plan))), base, finetuned, recipe)
    assert found.tensors == plan.tensors
    assert list(found.tensors) == list(plan.tensors)
    assert {one.treatment for one in plan.tensors.values()} > {"code"}

"""Interrupted runs: nothing half-published, and the bytes of an uninterrupted run once they are resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, Weights, edit, files_of, perturb, weights_of, write_data
from safetensors.torch import load_file, save_file

from deltacompress import plan
from deltacompress.artifact.delta import verify
from deltacompress.artifact.restoration import restore
from deltacompress.calibration.forwards.precision import Precision
from deltacompress.calibration.forwards.turns import LayerTurns
from deltacompress.checkpoints.header import read_header
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import Recipe
from deltacompress.compression import driver, publication, run_identity, workspace
from deltacompress.compression import steps as steps_module
from deltacompress.compression.encoding import lay_out
from deltacompress.compression.steps import Steps
from deltacompress.compression.workspace import Workspace
from deltacompress.errors import BackendError, InputError, Interrupted, OutputError

STEPS = ["outer", "layer-00000", "layer-00001", "head"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def steps_in(out: Path) -> list[str]:
    return sorted(path.stem.removeprefix("step-") for path in partial(out).glob("step-*.safetensors"))


def interrupted(pair: Pair, out: Path, **options: Any) -> None:
    with pytest.raises(Interrupted, match=r"run again with resume=True|nothing is left of it, run it again") as caught:
        pair.compress(out, **options)
    assert caught.value.exit_code == 2
    assert not out.exists()
    assert partial(out).is_dir() == bool(steps_in(out)) == ("with resume=True" in str(caught.value))
    if partial(out).is_dir():
        assert not [path.name for path in partial(out).iterdir() if path.suffix not in (".json", ".safetensors")]


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit", "int2"])
@pytest.mark.parametrize("stop_at", range(len(STEPS)))
def test_after_any_step(pair: Pair, out: Path, tmp_path: Path, recipe: str, stop_at: int) -> None:
    pair.compress(tmp_path / "whole", recipe=recipe)
    interrupted(pair, out, recipe=recipe, reporter=Recorder(stop_at))
    kept = steps_in(out)
    assert kept == sorted(step for step in STEPS[: stop_at + 1] if step != "head" or recipe != "deltazip-2bit")
    before = {name: (partial(out) / f"step-{name}.safetensors").stat().st_ino for name in kept}
    saved: list[str] = []
    original = Workspace.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Workspace, "save", lambda self, step, *a, **k: (saved.append(step), original(self, step, *a, **k))
        )
        pair.compress(out, recipe=recipe, resume=True)
    assert not set(saved) & before.keys()  # nothing is done twice
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not partial(out).exists()


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_a_run_interrupted_again_and_again(pair: Pair, out: Path, tmp_path: Path, lossless: str) -> None:
    pair.compress(tmp_path / "whole", recipe="int2", lossless=lossless)
    for _ in STEPS:
        interrupted(pair, out, recipe="int2", lossless=lossless, resume=True, reporter=Recorder(len(steps_in(out))))
    assert steps_in(out) == sorted(STEPS)
    pair.compress(out, recipe="int2", lossless=lossless, resume=True)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", range(len(STEPS)))
def test_while_a_step_is_saved(
    pair: Pair, out: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, when: str, call: int
) -> None:
    original, calls = Workspace.save, iter(range(99))

    def save(self: Workspace, step: str, outcomes: Any, **more: Any) -> None:
        stop = next(calls) == call
        if stop and when == "before":
            raise KeyboardInterrupt
        original(self, step, outcomes, **more)
        if stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "save", save)
    interrupted(pair, out)
    monkeypatch.undo()
    pair.compress(out, resume=True)
    assert files_of(out) == files_of(artifact)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("call", range(8))
def test_while_the_artifact_is_written(
    pair: Pair, out: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, error: Any, call: int
) -> None:
    """Ctrl-C or a full disk at any file of the publication."""
    real, calls = os.fsync, iter(range(99))
    armed = False

    def fsync(descriptor: int) -> None:
        if armed and next(calls) == call:
            raise error
        real(descriptor)

    original = publication.publish

    def publish(*args: Any) -> Any:
        nonlocal armed
        armed = True
        return original(*args)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("deltacompress.compression.driver.publish", publish)
    with pytest.raises(Interrupted if error is KeyboardInterrupt else OutputError) as caught:
        pair.compress(out)
    monkeypatch.undo()
    if out.exists():  # the rename had happened: it is whole, and nothing is left to resume
        assert next(calls) > 5
        assert "was published whole" in str(caught.value) or error is not KeyboardInterrupt
        assert not partial(out).exists()
        verify(out, base=pair.base)
        return
    assert not (partial(out) / "artifact").exists()  # half of one, on a disk that may be full
    assert error is KeyboardInterrupt or "free some space" in str(caught.value)
    pair.compress(out, resume=True)
    assert files_of(out) == files_of(artifact)


@pytest.mark.parametrize("stop_at", [0, 3, 11])
def test_recipes_without_calibration(pair: Pair, out: Path, tmp_path: Path, stop_at: int) -> None:
    pair.compress(tmp_path / "whole", recipe="lossless")
    interrupted(pair, out, recipe="lossless", reporter=Recorder(stop_at))
    assert len(steps_in(out)) == stop_at + 1
    pair.compress(out, recipe="lossless", resume=True)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_killed(pair: Pair, out: Path, artifact: Path) -> None:
    """kill -9 while a layer is being written: only whole steps count."""
    code = (
        "import os, signal, sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "from pathlib import Path\nfrom pairs import Pair\nfrom deltacompress.compression import workspace\n"
        "write = workspace.write_file\n"
        "def dying(path, chunks):\n"
        "    if 'layer-00001' not in path.name: return write(path, chunks)\n"
        "    path.write_bytes(b''.join(chunks)[:1000])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "workspace.write_file = dying\n"
        f"Pair(*map(Path, {[str(p) for p in (pair.base, pair.finetuned, pair.data)]})).compress(Path({str(out)!r}))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert not out.exists()
    assert steps_in(out) == ["layer-00000", "outer"]
    assert (partial(out) / "step-layer-00001.safetensors.tmp").stat().st_size == 1000
    pair.compress(out, resume=True)
    assert files_of(out) == files_of(artifact)


# --- what may be resumed ---------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(pair: Pair, out: Path) -> Path:
    interrupted(pair, out, reporter=Recorder(1))
    return out


def test_other_options_are_named(pair: Pair, unfinished: Path, tmp_path: Path) -> None:
    kept = files_of(partial(unfinished))
    other_data = write_data(tmp_path / "train.jsonl", records=50)
    sets: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "int2-24"}, "recipe"),
        ({"lossless": "none"}, "lossless"),
        ({"seed": 1}, "calibration"),
        ({"samples": 7}, "calibration"),
        ({"calibration": other_data}, "calibration"),
    ]
    for options, told in sets:
        with pytest.raises(
            InputError,
            match=rf"started with other input \({told}\); give the same again, remove it, or leave out resume=True",
        ):
            pair.compress(unfinished, resume=True, **options)
        assert files_of(partial(unfinished)) == kept
    shutil.copytree(pair.base, tmp_path / "base")
    edit(tmp_path / "base", lambda weights: {name: tensor * 1.5 for name, tensor in weights.items()})
    with pytest.raises(InputError, match=r"other input \(base\)"):
        Pair(tmp_path / "base", pair.finetuned, pair.data).compress(unfinished, resume=True)
    shutil.copytree(pair.finetuned, tmp_path / "tuned")
    edit(tmp_path / "tuned", lambda weights: weights, rms_norm_eps=0.1)
    with pytest.raises(InputError, match=r"other input \(config\)"):
        Pair(pair.base, tmp_path / "tuned", pair.data).compress(unfinished, resume=True)
    edit(tmp_path / "tuned", perturb)
    with pytest.raises(InputError, match=r"other input \(config, fine-tuned\)"):
        Pair(pair.base, tmp_path / "tuned", pair.data).compress(unfinished, resume=True)
    pair.compress(unfinished, resume=True)


def test_with_and_without_resume_it_says_what_becomes_of_an_earlier_run(pair: Pair, unfinished: Path) -> None:
    """That it could have been used, only where that is so."""

    def told(reporter: Recorder) -> str:
        (note,) = [note for note in reporter.notes if "earlier run" in note]
        return note.removeprefix(f"{partial(unfinished)}: ")

    of_other = Recorder(0)
    interrupted(pair, unfinished, recipe="int2", reporter=of_other)
    assert steps_in(unfinished) == ["outer"]
    assert told(of_other) == "2 finished steps of an earlier run removed, of no use to this one"
    one, two = Recorder(1), Recorder(0)
    interrupted(pair, unfinished, recipe="int2", reporter=one)
    assert told(one) == "1 finished step of an earlier run removed; resume=True would have used it"
    interrupted(pair, unfinished, recipe="int2", reporter=two)
    assert told(two) == "2 finished steps of an earlier run removed; resume=True would have used them"
    again = Recorder()
    pair.compress(unfinished, recipe="int2", resume=True, reporter=again)
    assert told(again) == "1 finished step of an earlier run used again"


@pytest.mark.parametrize("during", ["open_job", "prepare", "identity_of"])
def test_an_interrupt_before_the_workspace_is_open_tells_what_waits(
    pair: Pair, unfinished: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    def stop(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, during, stop)
    with pytest.raises(Interrupted, match=r"waits in .*\.partial: run again with resume=True"):
        pair.compress(unfinished, resume=True)
    with pytest.raises(KeyboardInterrupt):  # whoever does not resume has given the steps up
        pair.compress(unfinished)
    assert steps_in(unfinished)


def test_a_layer_is_saved_though_the_forward_after_it_is_stopped(
    pair: Pair, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_all = LayerTurns.finish_all

    def stop(self: LayerTurns) -> None:
        if self.i == 1:  # the teacher is past the layer already
            raise KeyboardInterrupt
        finish_all(self)

    monkeypatch.setattr(LayerTurns, "finish_all", stop)
    interrupted(pair, out)
    assert steps_in(out) == ["layer-00000", "layer-00001", "outer"]


class Halves(Precision):
    """As fp16 on a GPU, whose range ends at 65504: inputs of linears are rounded so, products are of fp32."""

    def products(self) -> Any:
        return nullcontext()

    def rounded(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.half().float()


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_a_layer_that_overflowed_is_left_as_it_was(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Inputs tell that a layer overflows, and a layer that is resumed has none: what it gave the next one is saved."""

    def enlarge(weights: Weights) -> Weights:
        far = ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
        return {name: weight * 4e3 if any(one in name for one in far) else weight for name, weight in weights.items()}

    base = edit(shutil.copytree(pair.base, tmp_path / "base"), enlarge)
    large = Pair(base, edit(shutil.copytree(pair.finetuned, tmp_path / "finetuned"), enlarge), pair.data)
    monkeypatch.setattr(
        "deltacompress.compression.layerwise.walk.calibration_precision",
        lambda *_, **__: Halves("fp16", wider=Precision("fp32")),
    )
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 48})  # batches of 3, 3, 2
    notes = Recorder()
    large.compress(tmp_path / "whole", recipe=recipe, reporter=notes)
    assert [note for note in notes.notes if note.startswith("layer 0: values beyond the range of fp16")]
    save = Steps.save

    def stop_after_the_first(self: Steps, step: str, *args: Any, **options: Any) -> None:
        save(self, step, *args, **options)
        if step == "layer-00000":
            raise KeyboardInterrupt

    monkeypatch.setattr(Steps, "save", stop_after_the_first)
    with pytest.raises(Interrupted):
        large.compress(tmp_path / "out", recipe=recipe)
    monkeypatch.setattr(Steps, "save", save)
    large.compress(tmp_path / "out", recipe=recipe, resume=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("failure", [None, BackendError("no codec"), RuntimeError("lost"), KeyboardInterrupt()])
def test_tensors_that_a_thread_finishes(
    pair: Pair, out: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | None
) -> None:
    """As on a GPU: the same bytes; what goes wrong there is told here, and the steps before stay."""
    finish, threads, coded = steps_module.finish, set(), []

    def watch(plan: Any, tensor: Any, *args: Any) -> Any:
        threads.add(threading.current_thread().name)
        coded.append(tensor.name)
        if failure is not None and "layers.1" in tensor.name:
            raise failure
        return finish(plan, tensor, *args)

    class OnGpu:
        """A LaidOut whose restored tensor says that it is on a GPU."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.restored = inner, inner.restored

        def to_host(self) -> Any:
            return self.inner, lambda: None

    monkeypatch.setattr(steps_module, "finish", watch)
    monkeypatch.setattr(steps_module, "lay_out", lambda *args: OnGpu(lay_out(*args)))
    monkeypatch.setattr(steps_module, "_on_cpu", lambda _laid_out: False)
    if failure is None:
        pair.compress(out)
        assert files_of(out) == files_of(artifact)
    else:
        with pytest.raises((type(failure), Interrupted)):
            pair.compress(out)
        assert not out.exists()
        assert steps_in(out) == ["layer-00000", "outer"]
    assert {name.split("_")[0] for name in threads} == {"finish"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("finish")]


def test_resume_with_nothing_to_resume_is_a_plain_run(pair: Pair, out: Path, artifact: Path) -> None:
    pair.compress(out, resume=True)
    assert files_of(out) == files_of(artifact)


@pytest.mark.parametrize("lossless", ["none", "zstd"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_step_is_no_ones_delta(pair: Pair, out: Path, lossless: str, damage: str) -> None:
    interrupted(pair, out, reporter=Recorder(1), lossless=lossless)
    step = partial(out) / "step-layer-00000.safetensors"
    raw = bytearray(step.read_bytes())
    raw[-3] ^= 32
    step.write_bytes(raw if damage == "flip" else raw[:50])
    told = r"step-layer-00000\.safetensors: damaged.*; remove it, or leave out resume=True to start over"
    with pytest.raises(OutputError, match=told):
        pair.compress(out, resume=True, lossless=lossless)
    assert not out.exists()
    assert steps_in(out) == ["layer-00000", "outer"]  # the message says what to remove; the rest is good
    step.unlink()
    pair.compress(out, resume=True, lossless=lossless)
    pair.compress(out.with_name("whole"), lossless=lossless)
    assert files_of(out) == files_of(out.with_name("whole"))


@pytest.mark.parametrize(("recipe", "step"), [("int4-24", "layer-00000"), ("lossless", "tensor-00000")])
@pytest.mark.parametrize("damage", ["a stored byte", "the restored hash"])
def test_what_a_step_restores_to_is_compared(pair: Pair, out: Path, recipe: str, step: str, damage: str) -> None:
    interrupted(pair, out, recipe=recipe, reporter=Recorder(1), lossless="none")
    file = partial(out) / f"step-{step}.safetensors"
    if damage == "a stored byte":
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 32
        file.write_bytes(raw)
    else:
        records = json.loads(read_header(file).metadata["records"])
        records[0]["sha256"] = records[0]["sha256"][::-1]
        told = json.dumps(records)
        with_records(file, lambda _: {"records": told, "sha256": workspace._digest(step, told)})
    with pytest.raises(OutputError, match=rf"step-{step}\.safetensors: damaged.*; remove it"):
        pair.compress(out, recipe=recipe, resume=True, lossless="none")
    assert not out.exists()


IDENTITIES = [b"\xff\xfe\x00", b"", b"[1, 2]", b"5", b"null", b'{"base": ', b"[" * 100_000]


@pytest.mark.parametrize("raw", IDENTITIES, ids=range(len(IDENTITIES)))
def test_a_damaged_identity(
    pair: Pair, unfinished: Path, capsys: pytest.CaptureFixture[str], artifact: Path, raw: bytes
) -> None:
    (partial(unfinished) / "identity.json").write_bytes(raw)
    kept = files_of(partial(unfinished))
    assert main(pair.argv(unfinished, "--resume")) == 2
    told = capsys.readouterr().err
    assert f"{partial(unfinished) / 'identity.json'}: damaged (" in told
    assert told.endswith("; remove it, or leave out --resume to start over\n")
    assert files_of(partial(unfinished)) == kept
    assert main(pair.argv(unfinished)) == 0
    assert files_of(unfinished) == files_of(artifact)


def test_steps_that_nothing_tells_the_input_of(pair: Pair, unfinished: Path, artifact: Path) -> None:
    (partial(unfinished) / "identity.json").unlink()
    told = Recorder()
    pair.compress(unfinished, resume=True, reporter=told)
    (note,) = [note for note in told.notes if "earlier run" in note]
    assert note.endswith("steps of an earlier run removed, since no identity.json says what they are of")
    assert files_of(unfinished) == files_of(artifact)


@pytest.mark.parametrize("resume", [True, False])
def test_what_no_run_left_there_is_not_removed(pair: Pair, unfinished: Path, *, resume: bool) -> None:
    notes = partial(unfinished) / "notes.txt"
    notes.write_text("mine")
    kept = files_of(partial(unfinished))
    with pytest.raises(OutputError, match=r"out\.partial: holds notes\.txt, no work of a run; move it or choose"):
        pair.compress(unfinished, resume=resume)
    assert files_of(partial(unfinished)) == kept


def with_records(step: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Rewrite the metadata of a step's file, tensors untouched."""
    save_file(load_file(step), step, metadata=change(read_header(step).metadata))


RECORDS: list[Callable[[dict[str, str]], dict[str, str]]] = [
    lambda told: {},
    lambda told: {"records": told["records"]},
    lambda told: told | {"records": "5"},
    lambda told: told | {"records": "["},
    lambda told: told | {"records": "[]"},
    lambda told: told | {"records": '[{"name": 1}]'},
    lambda told: (
        told | {"records": told["records"].replace('"loss": 0.', '"loss": 0.1')}
    ),  # plausible, but not the run's
]


@pytest.mark.parametrize("change", RECORDS, ids=range(len(RECORDS)))
def test_a_step_with_other_records(
    pair: Pair,
    unfinished: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    step = partial(unfinished) / "step-layer-00000.safetensors"
    with_records(step, change)
    assert main(pair.argv(unfinished, "--resume")) == 2
    told = capsys.readouterr().err
    assert f"{step}: damaged (its records differ); remove it, or leave out --resume to start over" in told
    assert not unfinished.exists()


def seal(step: Path, records: str) -> None:
    """Other records, with the digest that belongs to them."""
    name = step.stem.removeprefix("step-")
    with_records(step, lambda _: {"records": records, "sha256": workspace._digest(name, records)})


def without_its_base(text: str) -> str:
    records = json.loads(text)
    records[0] |= {"base_name": None, "base_rows": None, "base_sha256": None}
    return json.dumps(records)


def of_another_shape(text: str) -> str:
    records = json.loads(text)
    records[0]["shape"] = [*records[0]["shape"], 1]
    return json.dumps(records)


FORGED: list[Callable[[str], str]] = [
    lambda _: "[]",
    lambda _: "{}",
    lambda _: "[{}]",
    lambda _: "[5]",
    lambda _: "null",
    lambda _: "[",
    lambda _: "[" * 100_000,
    lambda _: "[" * 500 + "]" * 500,
    lambda text: json.dumps(json.loads(text)[1:]),
    lambda text: json.dumps([*json.loads(text), json.loads(text)[0]]),
    without_its_base,
    of_another_shape,
]


@pytest.mark.parametrize("change", FORGED, ids=range(len(FORGED)))
def test_a_step_whose_records_are_sealed_but_none_of_the_run(
    pair: Pair, unfinished: Path, capsys: pytest.CaptureFixture[str], change: Callable[[str], str]
) -> None:
    step = partial(unfinished) / "step-layer-00000.safetensors"
    seal(step, change(read_header(step).metadata["records"]))
    assert main(pair.argv(unfinished, "--resume")) == 2
    told = capsys.readouterr().err
    assert f"{step}: damaged (" in told
    assert told.endswith("; remove it, or leave out --resume to start over\n")
    assert "layer-00000" in steps_in(unfinished)


def test_a_tensor_whose_records_are_sealed_but_none_of_the_run(pair: Pair, out: Path) -> None:
    interrupted(pair, out, recipe="lossless", reporter=Recorder(2))
    step = partial(out) / "step-tensor-00000.safetensors"
    for change in FORGED[:8]:
        seal(step, change(read_header(step).metadata["records"]))
        with pytest.raises(OutputError, match=r"step-tensor-00000\.safetensors: damaged \(.*\); remove it"):
            pair.compress(out, recipe="lossless", resume=True)


def test_the_step_of_another_layer(pair: Pair, unfinished: Path) -> None:
    shutil.copy(
        partial(unfinished) / "step-layer-00000.safetensors", partial(unfinished) / "step-layer-00001.safetensors"
    )
    with pytest.raises(InputError, match=r"step-layer-00001\.safetensors: damaged \(its records differ\)"):
        pair.compress(unfinished, resume=True)


def test_a_workspace_that_is_a_link(pair: Pair, out: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    partial(out).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"out\.partial: is a symbolic link, .*; remove it"):
        pair.compress(out)
    partial(out).unlink()
    partial(out).symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=r"out\.partial: cannot be written"):
        pair.compress(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out.partial"]


def test_recalling_reads_no_fine_tuned_tensor(
    pair: Pair, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Recorder()
    pair.compress(tmp_path / "whole", recipe="lossless", reporter=steps)
    interrupted(pair, out, recipe="lossless", reporter=Recorder(len(steps.steps) - 1))
    seen: list[Path] = []
    for name in ("read", "read_flat"):
        real = getattr(Checkpoint, name)

        def watch(self: Checkpoint, *args: Any, real: Any = real, **options: Any) -> Any:
            seen.append(self.path)
            return real(self, *args, **options)

        monkeypatch.setattr(Checkpoint, name, watch)
    pair.compress(out, recipe="lossless", resume=True)
    assert pair.base in seen
    assert pair.finetuned not in seen
    assert files_of(out) == files_of(tmp_path / "whole")


def test_what_can_change_a_byte_is_in_the_identity(
    pair: Pair, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = json.loads((partial(unfinished) / "identity.json").read_text())
    assert identity["processor"][0] == torch.backends.cpu.get_cpu_capability()
    assert identity["lossless"] == ["zstd (CPU)"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 97)
        with pytest.raises(InputError, match=r"other input \(threads\)"):
            pair.compress(unfinished, resume=True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    with pytest.raises(InputError, match=r"other input \(processor\)"):
        pair.compress(unfinished, resume=True)


def test_the_version_of_nvcomp_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        SimpleNamespace(name="nvidia-libnvcomp-cu12", version="6.0.0.12"),
        SimpleNamespace(name="x", version="1"),
    ]
    monkeypatch.setattr(run_identity, "distributions", lambda: installed)
    zstd, ans = (SimpleNamespace(codec=codec, name=f"{codec} somewhere") for codec in ("zstd", "ans"))
    assert run_identity.lossless_of(ans) == ["ans somewhere", "nvidia-libnvcomp-cu12 6.0.0.12"]
    assert run_identity.lossless_of(zstd) == ["zstd somewhere"]


def test_another_run_holds_the_output(pair: Pair, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = Workspace.open(out, {"mine": 1}, resume=False)
    kept = files_of(partial(out))
    for resume in (False, True):
        with pytest.raises(OutputError, match="another run is writing there"):
            pair.compress(out, resume=resume)
    assert main(pair.argv(out)) == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert files_of(partial(out)) == kept
    held.discard()
    pair.compress(out)


def test_a_directory_of_someone_else_is_left_alone(pair: Pair, out: Path) -> None:
    partial(out).mkdir()
    (partial(out) / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"out\.partial: holds thesis\.tex"):
            pair.compress(out, resume=resume)
    assert files_of(partial(out)) == {"thesis.tex": b"years of work"}


def test_an_error_leaves_nothing(pair: Pair, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise InputError("cannot go on")

    monkeypatch.setattr("deltacompress.compression.driver.publish", fail)
    with pytest.raises(InputError, match="cannot go on"):
        pair.compress(out)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_can_be_mended_says_how_to_go_on(
    pair: Pair, out: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OutputError("disk full; free some space")

    seen = Recorder()
    monkeypatch.setattr("deltacompress.compression.driver.publish", full)
    for resume in (False, True):  # those who always resume may have no such option
        with pytest.raises(OutputError):
            pair.compress(out, reporter=seen, resume=resume)
    monkeypatch.undo()
    waits = f"what is finished waits in {partial(out)}: mend the cause and run"
    assert [seen.notes[0], seen.notes[-1]] == [f"{waits} again with resume=True", f"{waits} it again"]
    pair.compress(out, resume=True)
    assert files_of(out) == files_of(artifact)


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_on_the_command_line(
    pair: Pair,
    out: Path,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    as_it_was = signal.getsignal(number)
    original: Callable[..., None] = Workspace.save

    def save(self: Workspace, step: str, outcomes: Any, **more: Any) -> None:
        original(self, step, outcomes, **more)
        if step == "layer-00000":
            signal.raise_signal(number)

    monkeypatch.setattr(Workspace, "save", save)
    assert main(pair.argv(out)) == 2
    assert signal.getsignal(number) is as_it_was
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"interrupted, nothing published; what is finished waits in {partial(out)}: run again with --resume" in error
    monkeypatch.undo()
    assert main(pair.argv(out, "--resume")) == 0
    assert files_of(out) == files_of(artifact)


@pytest.mark.parametrize("stop_at", [0, 5])
def test_an_interrupted_restore_leaves_nothing(pair: Pair, artifact: Path, tmp_path: Path, stop_at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        restore(artifact, base=pair.base, out=tmp_path / "restored", reporter=Recorder(stop_at))
    assert list(tmp_path.iterdir()) == []
    restore(artifact, base=pair.base, out=tmp_path / "restored")
    assert weights_of(tmp_path / "restored").keys() == weights_of(pair.finetuned).keys()


def test_the_recipe_object_and_its_name_are_one_run(pair: Pair, unfinished: Path, artifact: Path) -> None:
    pair.compress(unfinished, recipe=Recipe.load("int4-24"), resume=True)
    assert files_of(unfinished) == files_of(artifact)


@pytest.mark.parametrize("recipe", ["int4-24", "lossless"])
def test_killed_after_it_published(pair: Pair, out: Path, tmp_path: Path, recipe: str) -> None:
    """The next run finds the artifact, and leaves nothing of the work beside it; a dry run leaves it all."""
    shutil.copytree(killed_run(pair, tmp_path / "killed", recipe), partial(out))
    pair.compress(out.with_name("whole"), recipe=recipe)
    out.with_name("whole").rename(out)
    assert steps_in(out)
    plan(pair.base, pair.finetuned, recipe=recipe, out=out, calibration=pair.data, samples=8, seq_len=16, device="cpu")
    assert steps_in(out)
    assert pair.compress(out, recipe=recipe).used_again
    assert not partial(out).exists()


@pytest.mark.parametrize("difference", ["recipe", "samples", "lossless", "a file", "locked"])
def test_unfinished_work_of_another_run_stays(
    pair: Pair, out: Path, artifact: Path, tmp_path: Path, difference: str
) -> None:
    shutil.copytree(artifact, out)
    options = {"recipe": {"recipe": "int4"}, "samples": {"samples": 4}, "lossless": {"lossless": "none"}}
    changed = dict(options.get(difference, {}))
    shutil.copytree(killed_run(pair, tmp_path / "killed", changed.pop("recipe", "int4-24"), **changed), partial(out))
    if difference == "a file":
        (partial(out) / "mine").write_text("x")
    lock = os.open(partial(out), os.O_RDONLY)
    if difference == "locked":
        fcntl.flock(lock, fcntl.LOCK_EX)
    before = files_of(partial(out))
    assert pair.compress(out).used_again
    assert files_of(partial(out)) == before
    os.close(lock)


def killed_run(pair: Pair, out: Path, recipe: str, **options: Any) -> Path:
    """What a run leaves that is stopped after two steps."""
    with pytest.raises(Interrupted):
        pair.compress(out, recipe=recipe, reporter=Recorder(2), **options)
    return partial(out)

"""What can be told to be wrong before torch is imported, which takes seconds: verbs call this before they work.

Each check is the room's own, with the room's own words; whoever does the work makes it once more. Only what is cheap
is looked at: paths, names, numbers, headers and manifests, no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deltacompress.cli.shown.failures import CALLED
from deltacompress.devices import check_driver
from deltacompress.errors import option
from deltacompress.files.output import check_can_hold
from deltacompress.files.places import check_folder, check_place
from deltacompress.reporter import SILENT, Reporter

if TYPE_CHECKING:
    from deltacompress.adapters.adapter import Adapter


def checkpoints(*paths: Path) -> None:
    """Each is a checkpoint: config, headers and index are read. None is fetched from the hub before all may be one.

    Raises:
        CheckpointError: one is not.
    """
    from deltacompress.checkpoints.hub import model_directory
    from deltacompress.checkpoints.reader import Checkpoint

    for path in sorted(paths, key=lambda path: model_directory(path) is None):
        Checkpoint.open(path)


def output(out: Path, *, replaces: Literal["artifact", "checkpoint", "nothing"] = "nothing") -> None:
    """A directory that is going to be made, and what of it may stand there already.

    Raises:
        OutputError: something else is there, or it cannot be made.
    """
    from deltacompress.artifact import outputs

    known = {"artifact": outputs.holds_artifact, "checkpoint": outputs.holds_checkpoint}
    outputs.check_free(out, replaces=known.get(replaces))


def folder(out: Path) -> None:
    """A directory that gets files, and may hold others.

    Raises:
        OutputError: it is none, lies inside a zoo or an artifact, or nothing can be written there.
    """
    check_folder(out)
    check_can_hold(out.absolute(), out)


def calibration(given: str | Path) -> None:
    """A file, or what may be the id of a data set.

    Raises:
        CalibrationError: neither.
    """
    from deltacompress.calibration.sources import local_file

    local_file(str(given))


def artifact(spec: str, zoo: str | None, *, base: Path | None = None, reporter: Reporter = SILENT) -> Path:
    """The directory of an artifact, pulled if it is an entry's name; manifest and headers are read.

    base: what it is going to be put on.

    Raises:
        InputError, IntegrityError, ZooError: as artifact.load_delta and zoo.resolve.artifact_path.
        CheckpointError: `base` is no checkpoint.
    """
    from deltacompress.artifact.delta import load_delta

    if base is not None:
        checkpoints(base)
    found = place(spec, zoo, base=base, reporter=reporter)
    load_delta(found)  # tells an adapter, too
    return found


def served(spec: str, zoo: str | None, *, base: Path, over: Path | None = None, reporter: Reporter = SILENT) -> Path:
    """As `artifact`, or the directory of a PEFT adapter; base: what serves it; over: the delta that the adapter goes
    over.

    Raises:
        CheckpointError, BaseMismatchError: as adapters.open_adapter.
        InputError: something else than an adapter is to go over a delta.
        InputError, IntegrityError, ZooError: as `artifact`.
    """
    from deltacompress.adapters.directory import is_adapter, need_adapter
    from deltacompress.checkpoints.reader import Checkpoint

    Checkpoint.open(base)  # told first
    found = place(spec, zoo, base=base, reporter=reporter)
    if not is_adapter(found):
        artifact(str(found), None, base=base)  # what is neither is told as that
        if over is not None:
            need_adapter(found, f"leave out {option('over')}")
    else:
        adapter(found, base, over)
    return found


def adapter(directory: Path, base: Path | None, over: Path | None = None) -> Adapter:
    """The adapter in a directory, held against its base, or the delta that it goes over: one is given.

    Raises:
        CheckpointError, BaseMismatchError: as adapters.open_adapter.
        InputError, IntegrityError: as artifact.load_delta.
    """
    from deltacompress.adapters.adapter import open_adapter

    if over is not None:
        from deltacompress.artifact.delta import load_delta

        below = load_delta(over).tensors
        return open_adapter(directory, {name: one.shape for name, one in below.items()}, base_name=str(over))
    from deltacompress.checkpoints.reader import Checkpoint

    assert base is not None
    checkpoint = Checkpoint.open(base)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    return open_adapter(directory, shapes, base_name=str(checkpoint.path))


def place(spec: str, zoo: str | None, *, base: Path | None = None, reporter: Reporter = SILENT) -> Path:
    """As zoo.resolve.artifact_path; where no zoo is asked for, its room is not imported.

    Raises:
        ZooError: as artifact_path.
    """
    if spec and not zoo:  # the command line has looked at DELTACOMPRESS_ZOO
        return Path(spec)
    from deltacompress.zoo.exchange.resolve import artifact_path

    found = artifact_path(spec, zoo, base=base, reporter=reporter)
    CALLED[str(found)] = spec
    return found


def entry(spec: str, zoo: str | None) -> str | None:
    """As zoo.resolve.entry_of; where no zoo is asked for, its room is not imported.

    Raises:
        ZooError: as entry_of.
    """
    if not (spec and zoo):
        return None
    from deltacompress.zoo.exchange.resolve import entry_of

    return entry_of(spec, zoo)


def zoo(given: str | None) -> None:
    """A zoo is there.

    Raises:
        NotAZooError: it is not.
    """
    from deltacompress.zoo.exchange.resolve import open_zoo

    open_zoo(given)


def waits(out: Path) -> bool:
    """Whether an unfinished run of `compress` lies beside `out`, with or without a gate."""
    names = (f"{out.name}.{what}" for what in ("partial", "candidate", "candidate.partial"))
    return any(out.with_name(name).exists() for name in names)


def recipes(*names: str) -> None:
    """Each is a recipe, by name or path.

    Raises:
        RecipeError: one is not.
    """
    from deltacompress.codecs.recipe import Recipe

    for name in names:
        Recipe.load(name)


def methods(names: str) -> bool:
    """Methods that are compared, separated by commas; whether any of them calibrates.

    Raises:
        InputError: no such method, or one twice.
    """
    from deltacompress.evaluation.methods.names import load_methods

    chosen = load_methods([name for name in names.split(",") if name])
    return any(recipe is None or recipe.needs_calibration for recipe in chosen.values())


def compression(
    base: Path,
    finetuned: Path,
    out: Path,
    recipe: str | None,
    calibrated_on: str | None,
    lossless: str,
    device_name: str,
) -> None:
    """What `compress` is given. recipe: None where it is still to be chosen.

    Raises:
        InputError: its subclasses name the first thing that is wrong.
    """
    check_can_hold(out.absolute().parent, out)  # the cheapest first
    check_place(out)

    from deltacompress import lossless as codecs
    from deltacompress.codecs.recipe import Recipe

    chosen = None if recipe is None else Recipe.load(recipe)
    check_driver(device_name)
    if lossless in ("none", "zstd"):  # the others ask torch for a GPU
        codecs.coder(lossless, device=device_name)
    if calibrated_on is not None:
        calibration(calibrated_on)
    if chosen is not None:
        chosen.check_calibration(calibrated_on)
    output(out, replaces="artifact")
    checkpoints(base, finetuned)


def tasks(names: str, task_dir: Path | None, *, few_shot: int | None = None, limit: int | None = None) -> None:
    """Tasks that are measured, separated by commas, and that lm-eval is here.

    Raises:
        InputError: no such task, its data is wrong, or lm-eval is missing.
    """
    from deltacompress.evaluation.scoring.lm_eval_version import require_lm_eval
    from deltacompress.evaluation.tasks.load import load_tasks

    require_lm_eval()
    load_tasks([name for name in names.split(",") if name], task_dir=task_dir, few_shot=few_shot, limit=limit)


def policy(given: str | Path) -> None:
    """A policy, by name or path.

    Raises:
        InputError: there is none.
    """
    from deltacompress.evaluation.gate.rules import Gate

    Gate.load(given)


def gate(given: str | Path, names: str, task_dir: Path | None, *, limit: int | None = None) -> None:
    """A policy that is going to be held against tasks: those that are named, or that it requires.

    Raises:
        InputError: there is none; as `tasks`; or neither names a task.
    """
    from deltacompress.evaluation.gate.early import tasks_for
    from deltacompress.evaluation.gate.rules import Gate

    found = tasks_for(Gate.load(given).policy, [name for name in names.split(",") if name])
    tasks(",".join(found), task_dir, limit=limit)


def labels(given: Iterable[str]) -> None:
    """What the measured models are called.

    Raises:
        InputError: a name that cannot be used.
    """
    from deltacompress.evaluation.labels import check_label

    for one in given:
        check_label(one)


def sampling(max_new_tokens: int, stop: Sequence[str], temperature: float, top_p: float, seed: int) -> None:
    """How text is written.

    Raises:
        InputError: a number out of its range.
    """
    from deltacompress.runtime.engine.generation_config import GenerationConfig, Sampling

    GenerationConfig.checked(max_new_tokens, stop, Sampling(temperature, top_p, seed), None, streams=False)


def measured(found: Mapping[str, Path], base: Path, over: Mapping[str, Path]) -> None:
    """Artifacts and adapters that are measured beside `base`, by label, and what they go over; raises as `served`."""
    for label, place in found.items():
        served(str(place), None, base=base, over=over.get(label))

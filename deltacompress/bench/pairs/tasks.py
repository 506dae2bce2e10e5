"""Which tasks a directory of models and one of data have in common; needs no torch."""

from __future__ import annotations

from pathlib import Path

from deltacompress.errors import InputError


def tasks_of(models: Path, data: Path, wanted: list[str]) -> list[str]:
    """The tasks to measure: those wanted, or all that have a checkpoint and data.

    Raises:
        InputError: a wanted one lacks either, or none has both.
    """
    way_out = "give the directory of checkpoints, and then that of data"
    for folder in (models, data):
        if not folder.is_dir():
            raise InputError("no such directory", where=folder, way_out=way_out)

    def missing(task: str) -> list[Path]:
        files = (models / task / "config.json", *(data / task / f"{name}.jsonl" for name in ("train", "validation")))
        return [file for file in files if not file.is_file()]

    if wanted:
        for task in wanted:
            if lacking := missing(task):
                raise InputError(
                    f"no such file; task {task} needs a checkpoint, train and validation data", where=lacking[0]
                )
        return wanted
    found = sorted(path.name for path in data.iterdir() if not missing(path.name))
    if not found:
        raise InputError(
            f"no folder there has train.jsonl and validation.jsonl and the name of a checkpoint in {models}",
            where=data,
            way_out=way_out,
        )
    return found

"""Many processes publish under one name while collectors and readers run: no version lost, none twice, no gap."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from multiprocessing.synchronize import Event
from pathlib import Path

from zoo.samples import make_artifact

from deltacompress.errors import DeltaCompressError
from deltacompress.zoo import Zoo

NAME = "team/busy"


def race(location: str, folder: Path, *, processes: int, versions: int) -> str | None:
    """Publish processes x versions to a new zoo at `location`; what is wrong, or None."""
    Zoo.init(location)
    shared = {"shared.weight.planes": b"s" * 5000, "shared.norm.planes": b"n" * 10}
    for index in range(processes):
        make_artifact(folder / f"in-{index}", shared | {"own.weight.planes": os.urandom(4500)}, seed=index)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    told = context.Queue()
    others = [context.Process(target=work, args=(location, done, told)) for work in (_collect, _read)]
    publishers = [
        context.Process(target=_publish, args=(location, folder / f"in-{index}", versions, told))
        for index in range(processes)
    ]
    for process in (*others, *publishers):
        process.start()
    results = [told.get(timeout=1800) for _ in publishers]
    done.set()
    results += [told.get(timeout=600) for _ in others]
    for process in (*others, *publishers):
        process.join()
    if wrong := [result for result in results if isinstance(result, str)]:
        return wrong[0]
    acked = sorted(version for result in results for version in result)
    if acked != list(range(1, processes * versions + 1)):
        return f"{len(set(acked))} different versions acknowledged, {len(acked)} in all"
    zoo = Zoo.open(location)
    zoo.gc(grace=0)
    found = sorted(entry.version for entry in zoo.list(all_versions=True) if entry.problem is None)
    if found != acked:
        return f"{len(found)} of {len(acked)} present"
    report = zoo.verify()
    return None if report.ok else report.problems[0].message


def _publish(location: str, artifact: Path, versions: int, told: multiprocessing.Queue[object]) -> None:
    try:
        zoo = Zoo.open(location)
        told.put([zoo.add_artifact(artifact, NAME).version for _ in range(versions)])
    except DeltaCompressError as error:
        told.put(f"publisher: {error}")


def _collect(location: str, done: Event, told: multiprocessing.Queue[object]) -> None:
    try:
        zoo = Zoo.open(location)
        while not done.wait(0.2):
            zoo.gc(grace=0, empty_trash=True)
        told.put([])
    except DeltaCompressError as error:
        told.put(f"collector: {error}")


def _read(location: str, done: Event, told: multiprocessing.Queue[object]) -> None:
    """Pull the newest version over and over: it must be whole whenever there is one."""
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"zoo-race-{os.getpid()}"
    try:
        zoo = Zoo.open(location)
        while not done.wait(0.1):
            if zoo.list():
                zoo.pull(NAME, out)
                shutil.rmtree(out)
        told.put([])
    except DeltaCompressError as error:
        told.put(f"reader: {error}")
    finally:
        shutil.rmtree(out, ignore_errors=True)

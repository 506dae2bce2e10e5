"""Calibration records streamed from a dataset of the Hugging Face hub.

Streamed, because a few hundred records are needed and the dataset may be larger than the disk; hence records are
checked as they come, not all beforehand. Their order is `IterableDataset.shuffle` (shards, then a buffer of 10 000
records): seeded, but only as stable as the dataset's revision and the `datasets` version; pin the former with
`id@revision`. Loading scripts are never run: `datasets` 4 dropped them, and asking for one fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deltacompress.calibration.records import (
    FIELDS,
    Record,
    RecordChecker,
    RecordSource,
    format_of,
    without_padding,
)
from deltacompress.checkpoints.hub import look_up_host
from deltacompress.errors import CalibrationError, first_line

_BUFFER = 10_000
_LOGGERS = ("datasets", "fsspec", "httpx", "huggingface_hub", "urllib3")


def open_hub(source: str, dataset_id: str, config: str | None, revision: str | None, split: str) -> RecordSource:
    """Open a hub dataset; `source` is what the user wrote, for messages.

    Raises:
        CalibrationError: here or while iterating: no network, no such dataset, config or split, or a bad record.

    """
    import datasets  # type: ignore[import-untyped,unused-ignore]

    with _hub_errors(source):
        look_up_host()
        dataset = datasets.load_dataset(dataset_id, name=config, revision=revision, split=split, streaming=True)
        first = next(iter(dataset), None)
    if first is None:
        raise CalibrationError(
            f"split {split!r} holds no records", where=source, way_out="choose another data set or a local file"
        )
    format_ = format_of(first, f"{source}: record 1")

    def shuffled(seed: int) -> Iterator[Record]:
        checker = RecordChecker(source)
        with _hub_errors(source):
            rows = dataset.select_columns(list(FIELDS[format_])).shuffle(seed=seed, buffer_size=_BUFFER)
            for number, row in enumerate(rows, start=1):
                where = f"{source}: shuffled record {number}"
                if checker.accept(row, where):
                    yield Record(where, without_padding(row))

    return RecordSource(source, format_, shuffled)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turn whatever the network stack raises, and logs on the way, into one line; the cause is there for --debug."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except CalibrationError:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise CalibrationError(
            "no such local file, and no network to look for it on the Hugging Face hub",
            where=source,
            way_out="pass a local .jsonl, .json, .parquet or .txt file",
        ) from error
    except Exception as error:  # a loader over HTTP, fsspec, arrow and several decompressors has no common error type
        raise CalibrationError(
            f"no such local file, and the hub dataset cannot be loaded ({first_line(error)})",
            where=source,
            way_out="pass a local file",
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

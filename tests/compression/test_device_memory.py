"""`--device-memory`: what a size is, and that it is told where it does nothing. What it does is for a GPU to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import Pair, Recorder, files_of

from deltacompress import plan
from deltacompress.cli.main import main
from deltacompress.compression.job import CompressionJob, device_memory
from deltacompress.errors import InputError


@pytest.mark.parametrize(
    ("given", "size"), [("26GB", 26_000_000_000), ("1.5 GiB", 3 * 2**29), ("64MiB", 2**26), (10**10, 10**10)]
)
def test_sizes(given: str | int, size: int) -> None:
    assert device_memory(given) == size


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("12XB", "no size"),
        ("", "no size"),
        ("-5", "no size"),
        (0, "no size"),
        ("26", "too little"),
        ("1KB", "too little"),
    ],
)
def test_what_is_no_size(given: str | int, told: str) -> None:
    with pytest.raises(InputError, match=f"device_memory {given}: is {told}; give one such as 26GB"):
        device_memory(given)


def test_a_job_keeps_it(pair: Pair, tmp_path: Path) -> None:
    job = CompressionJob.of(
        pair.base, pair.finetuned, recipe="int4-24", out=tmp_path, calibration=None, device_memory="2GB"
    )
    assert CompressionJob.model_validate_json(job.model_dump_json()).device_memory == 2 * 10**9


def test_without_a_gpu_it_is_told_that_nothing_comes_of_it(pair: Pair, tmp_path: Path) -> None:
    told = [Recorder(), Recorder()]
    pair.compress(tmp_path / "all")
    pair.compress(tmp_path / "some", device_memory="1GB", reporter=told[0])
    plan(
        pair.base,
        pair.finetuned,
        recipe="int4-24",
        out=tmp_path / "planned",
        calibration=pair.data,
        samples=8,
        seq_len=16,
        device_memory="1GB",
        reporter=told[1],
    )
    for one in told:
        assert [note for note in one.notes if note == "device_memory: not used, since no GPU computes"]
    assert files_of(tmp_path / "all") == files_of(tmp_path / "some")


def test_the_command_line_tells_it_before_any_work(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(pair.argv(tmp_path / "out", "--device-memory", "12XB")) == 2
    assert "--device-memory 12XB: is no size; give one such as 26GB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

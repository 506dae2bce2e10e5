"""What became of a fleet: a row for each job, and one exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltacompress.errors import DeltaCompressError, switch
from deltacompress.fleet.state import JobState


class FleetFailedError(DeltaCompressError):
    """Jobs of a fleet failed. exit_code: the largest of theirs: 70 a bug of ours, 3 integrity, 2 input."""

    def __init__(self, what: str, *, where: object = None, way_out: str | None = None, exit_code: int = 2) -> None:
        super().__init__(what, where=where, way_out=way_out)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class FleetResult:
    """jobs: the state of each, in the order of the jobs file. seconds: of all together, with the checks."""

    jobs: tuple[JobState, ...]
    seconds: float

    @property
    def failed(self) -> list[JobState]:
        """The jobs that did not come to an artifact (or not to a version in the zoo)."""
        return [one for one in self.jobs if one.state == "failed"]

    def require(self) -> None:
        """Raise FleetFailedError unless every job is done."""
        if failed := self.failed:
            names = ", ".join(one.label for one in failed)
            codes = [one.error["exit_code"] for one in failed if one.error is not None]
            raise FleetFailedError(
                f"{len(failed)} of {len(self.jobs)} jobs failed: {names}",
                way_out=f"mend what each tells, and run again with {switch('resume')}",
                exit_code=max((code for code in codes if isinstance(code, int)), default=2),
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `compress --jobs --json` prints it."""
        return {"done": len(self.jobs) - len(self.failed), "failed": len(self.failed), "seconds": self.seconds,
                "jobs": [one.model_dump(mode="json") for one in self.jobs]}  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """The table: a row for each job."""
        return [_row(one, one.result or {}) for one in self.jobs]

    def errors(self) -> Sequence[str]:
        """One line for each job that failed."""
        return [f"{one.label}: {_line(one.error)}" for one in self.failed if one.error is not None]


def _row(one: JobState, figures: Mapping[str, Any]) -> dict[str, Any]:
    state = "used again" if one.used_again else one.state
    return {
        "job": one.label,
        "state": state if one.published is None else f"{state}, {one.published}",
        "artifact_bytes": figures.get("artifact_bytes"),
        "ratio": figures.get("ratio"),
        "kl": figures.get("kl_on_calibration"),
        "seconds": figures.get("seconds"),
    }


def _line(error: Mapping[str, str | int | None]) -> str:
    told = f"{error['where']}: {error['what']}" if error["where"] else str(error["what"])
    return f"{told}; {error['way_out']}" if error["way_out"] else told

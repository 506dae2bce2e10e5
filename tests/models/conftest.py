"""What the tests of opening models share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deltacompress.models.architectures.survey import Verdict


@pytest.fixture
def lm_eval() -> None:
    pytest.importorskip("lm_eval")


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verdict]:
    """The survey's verdict of a model type, found once for all of xdist's workers: to try a type takes its time."""
    from deltacompress.models.architectures.survey import Verdict, judge

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "judged"
    folder.mkdir(exist_ok=True)

    def verdict(model_type: str) -> Verdict:
        kept = folder / model_type
        if not kept.exists():
            part = folder / f"{model_type}.{os.getpid()}"
            part.write_text(json.dumps(asdict(judge(model_type))))
            part.rename(kept)  # whole or not there, whoever looks
        return Verdict(**json.loads(kept.read_text()))

    return verdict

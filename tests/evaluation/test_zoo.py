"""Reports attached to the entry that they are about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from evaluation.reports import report, subject

from deltacompress.artifact.manifest import read_manifest
from deltacompress.errors import InputError
from deltacompress.evaluation.report.data import Report
from deltacompress.evaluation.zoo import attach_report, pinned
from deltacompress.zoo import Zoo, ZooError
from deltacompress.zoo.entries.reports import scores

if TYPE_CHECKING:
    from pairs import Pair


def report_on(artifact: Path) -> Report:
    """The made-up report, about this artifact."""
    digest = read_manifest(artifact).digest
    measured = subject("int2", "delta", manifest_digest=digest, identity=digest, ratio=10.0, recipe="int2-24")
    return report(subjects=[subject("finetuned", "finetuned"), measured, subject("sparse", "checkpoint")])


def test_a_report_is_attached_with_its_scores(artifact: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/bot")
    attach_report(str(tmp_path / "zoo"), "team/bot", "int2", report_on(artifact))
    (attached,) = zoo.referrers("team/bot")
    assert (attached.kind, attached.summary["tasks"]) == ("report", "sql")
    measured = report().score("sql", "int2")
    assert measured is not None
    assert scores(zoo, "team/bot") == {"sql.exact_match": measured.value, "sql.kl": measured.fidelity.kl}


def test_a_report_needs_its_zoo_and_its_label(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)
    with pytest.raises(ZooError, match="give --zoo PATH"):
        attach_report(None, "team/bot", "int2", report())
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/bot")
    with pytest.raises(InputError, match="the report measures no other"):
        attach_report(zoo.where, "team/bot", "other", report())


def test_a_report_fits_no_other_artifact(artifact: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/bot")
    for label in ("int2", "finetuned"):
        with pytest.raises(InputError, match="team/bot@1: not the artifact that the report measured"):
            attach_report(zoo.where, "team/bot", label, report())
    assert not zoo.referrers("team/bot")


def test_an_alias_is_looked_up_once(artifact: Path, pair: Pair, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/bot")
    zoo.add_base(pair.base, "team/base")
    zoo.tag("team/bot@1", "prod")
    assert pinned(zoo.where, "team/bot@prod") == "team/bot@1"
    with pytest.raises(InputError, match="is a directory; give the name of its entry"):
        pinned(zoo.where, str(artifact))
    with pytest.raises(ZooError, match="a base-ref, not a delta"):
        pinned(zoo.where, "team/base")

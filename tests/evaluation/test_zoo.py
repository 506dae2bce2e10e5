"""Reports attached to the entry that they are about."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation.reports import report

from deltacompress.errors import InputError
from deltacompress.evaluation.zoo import attach_report
from deltacompress.zoo import Zoo, ZooError
from deltacompress.zoo.reports import scores


def test_a_report_is_attached_with_its_scores(artifact: Path, tmp_path: Path) -> None:
    zoo = Zoo.init(tmp_path / "zoo")
    zoo.add(artifact, "team/bot")
    attach_report(str(tmp_path / "zoo"), "team/bot", "int2", report())
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

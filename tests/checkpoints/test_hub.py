"""Where a checkpoint says that it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.checkpoints.hub import hub_origin

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        (f"hub/models--org--a-model/snapshots/{COMMIT}", ("org/a-model", COMMIT)),
        (f"hub/models--gpt2/snapshots/{COMMIT}", ("gpt2", COMMIT)),
        (f"hub/models--org--m/other/{COMMIT}", (COMMIT, None)),
        ("hub/models--org--m/snapshots/main", ("main", None)),
        (f"snapshots/{COMMIT}", (COMMIT, None)),
        ("zoo/team-model", ("team-model", None)),
    ],
)
def test_hub_models_go_by_their_id_and_commit(path: str, origin: tuple[str, str | None], tmp_path: Path) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert hub_origin(tmp_path / path) == origin


def test_a_linked_directory_goes_by_the_name_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert hub_origin(tmp_path / "link") == ("real", None)

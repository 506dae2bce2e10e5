"""Entries of a zoo as the engine's process takes them: which version a name means, its directory, its scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deltacompress.errors import DeltaCompressError
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Origin

if TYPE_CHECKING:
    from deltacompress.zoo.zoo import Zoo


class Entries:
    """Of one zoo, beside one base; it is opened once for all that one load asks.

    zoo: where it is, or one that is open; None for the one that DELTACOMPRESS_ZOO names, if it names any.
    origins: of the variants that were `loaded`, and are not gone; None: not of a zoo.
    """

    def __init__(self, zoo: str | Zoo | None, base: str) -> None:
        self.origins: dict[str, Origin | None] = {}
        self._zoo, self._base, self._log = zoo, base, Log()
        self._opened: Zoo | None = None  # as long as something is being loaded
        self._taken: list[Path] = []  # for what is being loaded; one at a time is
        self._of: dict[str, list[Path]] = {}

    def meant(self, source: str) -> str | None:
        """The version that a source means now, `team/bot@7`; None: it is a path. Raises as resolve.entry_of."""
        from deltacompress.zoo.exchange.resolve import name_of

        name = name_of(source, self._zoo)
        return None if name is None else str(self._open().resolve(name))

    def directory(self, entry: str) -> str:
        """Its files, pulled once and verified; raises as resolve.artifact_path."""
        from deltacompress.zoo.exchange.resolve import entry_path

        path = entry_path(entry, self._open(), base=self._base)
        self._taken.append(path)
        return str(path)

    def beneath(self, entry: str) -> Path | None:
        """The delta that an adapter's entry goes over, pulled; None: its base. Raises as resolve.delta_path."""
        from deltacompress.zoo.exchange.resolve import delta_path

        path = delta_path(entry, self._open())
        if path is not None:
            self._taken.append(path)
        return path

    def loaded(self, name: str, origin: Origin | None) -> None:
        """What was taken is the variant's of this name, until it is gone."""
        self.origins[name], self._of[name], self._taken = origin, self._taken, []
        self._opened = None

    def failed(self) -> None:
        """What was taken was for nothing."""
        taken, self._taken, self._opened = self._taken, [], None
        self._let_go(taken)

    def gone(self, name: str) -> None:
        """The cache may remove what that variant was read from."""
        self.origins.pop(name, None)
        self._let_go(self._of.pop(name, []))

    def _open(self) -> Zoo:
        if self._opened is None:
            from deltacompress.zoo.exchange.resolve import open_zoo

            self._opened = open_zoo(self._zoo)
        return self._opened

    def _let_go(self, paths: list[Path]) -> None:
        from deltacompress.zoo.exchange.cache import let_go

        for path in paths:
            let_go(path)

    def origin(self, entry: str) -> Origin:
        """Entry and version, with the attested scores. Reports that cannot be read stop nobody, and the log has why.

        Raises:
            ZooError: no such entry.
        """
        zoo = self._open()
        found = zoo.resolve(entry)
        scores = None
        try:
            scores = dict(zoo.scores(entry))
        except DeltaCompressError as error:
            self._log.line("scores_unreadable", entry=entry, error=str(error))
        return Origin(found.name, found.version, scores)

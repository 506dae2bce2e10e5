"""Entries of a zoo as the engine's process takes them: which version a name means, its directory, its scores."""

from __future__ import annotations

from pathlib import Path

from deltacompress.errors import DeltaCompressError
from deltacompress.serving.logs import Log
from deltacompress.serving.messages import Origin


class Entries:
    """Of one zoo, beside one base. zoo: None for the one that DELTACOMPRESS_ZOO names, if it names any."""

    def __init__(self, zoo: str | None, base: str) -> None:
        self._zoo, self._base, self._log = zoo, base, Log()

    def meant(self, source: str) -> str | None:
        """The version that a source means now, `team/bot@7`; None: it is a path. Raises as resolve.entry_of."""
        from deltacompress.zoo.exchange.resolve import entry_of

        return entry_of(source, self._zoo)

    def directory(self, entry: str) -> str:
        """Its files, pulled once and verified; raises as resolve.artifact_path."""
        from deltacompress.zoo.exchange.resolve import entry_path

        return str(entry_path(entry, self._zoo, base=self._base))

    def beneath(self, entry: str) -> Path | None:
        """The delta that an adapter's entry goes over, pulled; None: its base. Raises as resolve.delta_path."""
        from deltacompress.zoo.exchange.resolve import delta_path

        return delta_path(entry, self._zoo)

    def origin(self, entry: str) -> Origin:
        """Entry and version, with the attested scores. Reports that cannot be read stop nobody, and the log has why.

        Raises:
            ZooError: no such entry.
        """
        from deltacompress.zoo.exchange.resolve import open_zoo

        zoo = open_zoo(self._zoo)
        found = zoo.resolve(entry)
        scores = None
        try:
            scores = dict(zoo.scores(entry))
        except DeltaCompressError as error:
            self._log.line("scores_unreadable", entry=entry, error=str(error))
        return Origin(found.name, found.version, scores)

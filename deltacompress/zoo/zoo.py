"""The delta zoo: what the command line and a notebook use. Each method is one verb; the modules beside do the work,
on the smaller `Catalog`; those of the rarer verbs are imported when they are called, so that a slip is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo import create
from deltacompress.zoo.care import removal
from deltacompress.zoo.care.fsck import FsckReport, fsck
from deltacompress.zoo.care.gc import GRACE, GcReport, collect
from deltacompress.zoo.care.usage import Usage, usage
from deltacompress.zoo.care.verify import VerifyReport, verify
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.exchange import pull
from deltacompress.zoo.ledger import names, referrers, tags, versions
from deltacompress.zoo.ledger.publish import Published
from deltacompress.zoo.ledger.read import copy_sources, need_kind, open_entry
from deltacompress.zoo.ledger.tags import Move

if TYPE_CHECKING:
    from deltacompress.zoo.entries.signing import Signed
    from deltacompress.zoo.exchange.transfer import Exported, Imported
    from deltacompress.zoo.views.lineage import LineageGraph


class Zoo(Catalog):
    """An opened zoo; make it with `Zoo.open` or `Zoo.init`. Names are `namespace/name[@version | @alias]`.

    Methods raise ZooError (deltacompress.zoo.errors) with one clear line.
    """

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> Zoo:
        """The zoo in a directory or at s3://bucket/prefix."""
        return cls(*create.open_store(location))

    @classmethod
    def init(cls, location: str | os.PathLike[str]) -> Zoo:
        """A new zoo, in a new or empty directory or under an empty prefix."""
        return cls(*create.init(location))

    def add(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        base: str | None = None,
        parents: Iterable[str] = (),
        relation: str | None = None,
        hub_id: str | None = None,
        revision: str | None = None,
        reporter: Reporter = SILENT,
    ) -> Published:
        """Publish the directory of an artifact, adapter or base as the next version of `name`; durable on return.

        What it belongs to is found, see linking.add, which also says what the options mean.
        """
        from deltacompress.zoo.entries import linking

        return linking.add(
            self,
            Path(source),
            name,
            base=base,
            parents=parents,
            relation=relation,
            hub_id=hub_id,
            revision=revision,
            reporter=reporter,
        ).published

    def push(self, name: str, other: Zoo, target: str | None = None, *, reporter: Reporter = SILENT) -> Published:
        """Copy a version, and what is attached to it, to another zoo, under `target` or its own name.

        What a version there holds already is a version again, which takes no room; `reporter` is told.
        """
        found = self.resolve(name)
        entry = open_entry(self.store, found)
        there = versions.version_with(other.store, names.parse_name(target or found.name), found.manifest)
        new = other.publish(entry, copy_sources(self.store, entry), target or found.name, reporter=reporter)
        if there is not None:
            reporter.note(f"{new} holds the same as {there}, byte for byte")
            new = replace(new, same_as=there)
        for _, attached in referrers.open_attached(self.store, found.manifest):
            referrers.attach(other.store, attached, copy_sources(self.store, attached), reporter)
        return new

    def pull(self, name: str, out: str | os.PathLike[str], *, reporter: Reporter = SILENT) -> Path:
        """Write a version's files to the new directory `out`; run again to go on after an interruption."""
        found, entry = self.show(name)
        need_kind(found, entry, "delta", "adapter")
        return pull.pull(self.store, found, entry, Path(out), reporter)

    def tag(self, name: str, alias: str, *, expect: int | None = None) -> Move:
        """Let `alias` point to a version; see tags.tag."""
        return tags.tag(self.store, names.parse(name), alias, expect=expect)

    def history(self, name: str) -> Sequence[Move]:
        """Every move of `namespace/name@alias`, oldest first."""
        return tags.known_history(self.store, names.parse(name))

    def rm(self, name: str, *, force: bool = False) -> Sequence[int]:
        """Remove a version, or all versions of a name, until `undelete`; their numbers."""
        return removal.remove(self.store, names.parse(name), force=force)

    def undelete(self, name: str, *, reporter: Reporter = SILENT) -> None:
        """Take back the removal of a version."""
        removal.undelete(self.store, names.parse(name), reporter)

    def verify(
        self, name: str | None = None, *, share: float = 1.0, seed: int | None = None, reporter: Reporter = SILENT
    ) -> VerifyReport:
        """Check everything, or one version (and a share of the blobs only)."""
        only = None
        if name is not None:
            found = self.resolve(name)
            only = [(found.name, found.version)]
        return verify(self.store, reporter, only=only, share=share, seed=seed)

    def fsck(self, *, repair: bool = False, copy: Zoo | None = None, reporter: Reporter = SILENT) -> FsckReport:
        """Check everything and, with `repair`, mend it from the trash or from a copy of the zoo."""
        return fsck(self.store, reporter, repair=repair, copy=None if copy is None else copy.store)

    def gc(self, *, grace: float = GRACE, empty_trash: bool = False) -> GcReport:
        """Move what nothing needs to the trash; with `empty_trash`, first delete what is there already."""
        return collect(self.store, grace=grace, empty_trash=empty_trash)

    def du(self) -> Usage:
        """Logical and physical size."""
        return usage(self.store)

    def lineage(self, name: str | None = None) -> LineageGraph:
        """What came from what; with a name, only what that entry came from and what came of it."""
        from deltacompress.zoo.views import lineage

        entries = self.list(all_versions=True)
        return lineage.lineage(entries, None if name is None else lineage.meant(entries, name, self.resolve(name)))

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """What differs between two entries; see diff.diff."""
        from deltacompress.zoo.views import diff

        return diff.diff(self, a, b)

    def card(self, name: str) -> str:
        """The Hugging Face model card of an entry."""
        from deltacompress.zoo.views import card

        return card.card(self, name)

    def export(self, names: Iterable[str], out: str | os.PathLike[str], *, reporter: Reporter = SILENT) -> Exported:
        """Write versions, with what is attached to them, to one tar file."""
        from deltacompress.zoo.exchange import transfer

        return transfer.export(self, tuple(names), Path(out), reporter=reporter)

    def import_(self, path: str | os.PathLike[str], *, reporter: Reporter = SILENT) -> Sequence[Imported]:
        """Publish what an export holds and this zoo lacks."""
        from deltacompress.zoo.exchange import transfer

        return transfer.import_(self, Path(path), reporter=reporter)

    def attest(
        self,
        name: str,
        report: str | os.PathLike[str],
        *,
        key: str | os.PathLike[str] | None = None,
        reporter: Reporter = SILENT,
    ) -> str:
        """Attach a report (a JSON file) to a version, signed if there is a private key; the report's digest.

        report.json of `deltacompress eval` counts for the artifact that it measured; every number of any other JSON
        object counts for the version.
        """
        from deltacompress.zoo.entries import signing

        return signing.attest(self, name, Path(report), key=None if key is None else Path(key), reporter=reporter)

    def scores(self, name: str) -> Mapping[str, float]:
        """What the reports that are attached to a version measured."""
        from deltacompress.zoo.entries import reports

        return reports.scores(self, name)

    def sign(self, name: str, key: str | os.PathLike[str], *, reporter: Reporter = SILENT) -> str:
        """Sign a version with a private key (PEM); the public key as hex."""
        from deltacompress.zoo.entries import signing

        return signing.sign(self, name, Path(key), reporter=reporter)

    def signatures(self, name: str) -> Sequence[Signed]:
        """Every signature of a version and of its reports; raises ChecksumError if one of them is not good."""
        from deltacompress.zoo.entries import signing

        return signing.signatures(self, name)

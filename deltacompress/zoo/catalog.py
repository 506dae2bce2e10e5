"""The small face of a zoo that everything else builds on: what is there, and how an entry gets there.

`Zoo` adds the verbs to it; the modules that do their work take a `Catalog`, so that none of them imports `Zoo`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.entries.artifact import describe
from deltacompress.zoo.entries.bases import describe_base
from deltacompress.zoo.entries.index import index_path
from deltacompress.zoo.entries.listing import Listed, list_entries
from deltacompress.zoo.ledger import names, publish, referrers
from deltacompress.zoo.ledger.blobs import Blob
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.publish import Published
from deltacompress.zoo.ledger.read import open_entry
from deltacompress.zoo.ledger.records import ZooRecord
from deltacompress.zoo.ledger.versions import Resolved, resolve
from deltacompress.zoo.store.base import Store


class Catalog:
    """An opened zoo. Names are `namespace/name[@version | @alias]`.

    store, id: for what builds on this class. Methods raise ZooError (deltacompress.zoo.errors) with one clear line.
    """

    def __init__(self, store: Store, record: ZooRecord) -> None:
        self.store = store
        self.id = record.id
        self.capabilities = record.capabilities

    @property
    def where(self) -> str:
        return self.store.where

    def resolve(self, name: str) -> Resolved:
        """Which version a name means now."""
        return resolve(self.store, names.parse(name))

    def show(self, name: str) -> tuple[Resolved, EntryManifest]:
        """A version and its manifest."""
        found = self.resolve(name)
        return found, open_entry(self.store, found)

    def list(self, *, all_versions: bool = False, removed: bool = False) -> Sequence[Listed]:
        """The newest version of every name, or every version, sorted by name, newest first."""
        return list_entries(self.store, index_path(self.id), all_versions=all_versions, removed=removed)

    def publish(
        self, entry: EntryManifest, blobs: Iterable[Blob], name: str, *, reporter: Reporter = SILENT
    ) -> Published:
        """Publish an entry from a manifest and the blobs that it lists; versions of one name are of one kind."""
        checked = names.parse_name(name)
        publish.check_kind(self.store, checked, entry.kind)
        return publish.publish_entry(self.store, checked, entry, blobs, reporter)

    def add_artifact(
        self,
        artifact: str | os.PathLike[str],
        name: str,
        *,
        parents: Iterable[str] = (),
        relation: str | None = None,
        reporter: Reporter = SILENT,
    ) -> Published:
        """Publish an artifact directory without looking for its base.

        parents: entries of this zoo it was made from; relation: see entry.Lineage.
        """
        checked = names.parse_name(name)
        publish.check_kind(self.store, checked, "delta")
        given = (parents,) if isinstance(parents, str) else parents
        digests = tuple(self.resolve(parent).manifest for parent in given)
        described = describe(Path(artifact), parents=digests, relation=relation)
        return publish.publish_entry(self.store, checked, described.entry, described.blobs, reporter)

    def add_base(
        self,
        checkpoint: str | os.PathLike[str],
        name: str,
        *,
        hub_id: str | None = None,
        revision: str | None = None,
        reporter: Reporter = SILENT,
    ) -> Published:
        """Publish the identity of a base checkpoint; its weights stay where they are."""
        checked = names.parse_name(name)
        publish.check_kind(self.store, checked, "base-ref")
        described = describe_base(Path(checkpoint), hub_id=hub_id, revision=revision)
        return publish.publish_entry(self.store, checked, described.entry, described.blobs, reporter)

    def attach(self, entry: EntryManifest, blobs: Iterable[Blob], *, reporter: Reporter = SILENT) -> str:
        """Attach a referrer (a report, a signature) to the manifest that is its `subject`; its digest."""
        return referrers.attach(self.store, entry, blobs, reporter)

    def referrers(self, name: str) -> Sequence[EntryManifest]:
        """What is attached to a version."""
        return [entry for _, entry in referrers.open_attached(self.store, self.resolve(name).manifest)]

"""`add`: what a directory holds (artifact, adapter, base model), and which base-ref of the zoo it belongs to.

An artifact names its base by content hash, an adapter by a name only. Both are linked to the base-ref entry of that
base; where two base-refs have the same weights but different tokenizers, nobody but the user can know which is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltacompress.adapters.directory import base_note, claimed_base, is_adapter, left_out
from deltacompress.artifact.manifest import read_manifest
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG
from deltacompress.errors import BaseMismatchError, InputError, option, spelled
from deltacompress.files.places import CONFIG, MANIFEST
from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.adapters import describe_adapter
from deltacompress.zoo.entries.bases import BaseIdentity, check_base, check_tokenizer, identity_in
from deltacompress.zoo.entries.beneath import deltas_of, model_of
from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.errors import ConflictError, NotFoundError
from deltacompress.zoo.ledger import names
from deltacompress.zoo.ledger.entry import EntryManifest, Kind
from deltacompress.zoo.ledger.publish import Published
from deltacompress.zoo.ledger.read import need_kind
from deltacompress.zoo.ledger.versions import Resolved

_HEEDED: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "delta": ("an artifact", ("base", "parents", "relation")),
    "adapter": ("an adapter", ("base",)),
    "base-ref": ("a base model", ("hub_id", "revision")),
}
"""What each kind that is added is called, and what may be said of it."""


@dataclass(frozen=True, slots=True)
class Added:
    """What `add` published. base: the base-ref that it was linked to, or an adapter's delta (None: this zoo has none,
    or it is a base itself).
    """

    published: Published
    kind: str
    base: str | None


def add(
    zoo: Catalog,
    source: Path,
    name: str,
    *,
    base: str | None = None,
    parents: Iterable[str] = (),
    relation: str | None = None,
    hub_id: str | None = None,
    revision: str | None = None,
    reporter: Reporter = SILENT,
) -> Added:
    """Publish a directory of whatever kind as the next version of `name`; durable on return.

    The same bytes again are a version too, which takes no room; `reporter` is told.

    base: the base-ref it belongs to, or of an adapter the delta that it goes over; parents: entries it was made from;
        relation: see entry.Lineage (both of artifacts); hub_id, revision: of a base model.

    Raises:
        InputError: what is given is not of its kind.
        NotFoundError: no such base-ref or parent; nothing known in the directory.
        ConflictError: several base-refs could be meant.
        BaseMismatchError: it does not belong to `base`.
        DeltaCompressError: the directory is damaged, or the zoo cannot be written.
    """
    names.parse_name(name)
    kind = kind_of(source)
    parents = (parents,) if isinstance(parents, str) else tuple(parents)
    given = {"base": base, "parents": parents, "relation": relation, "hub_id": hub_id, "revision": revision}
    told, heeded = _HEEDED[kind]
    for key, value in given.items():
        if value and key not in heeded:
            called = spelled("--parent", key) if key == "parents" else option(key)
            raise InputError(f"is {told}, for which {called} says nothing", where=source, way_out="leave that out")
    before = zoo.list(all_versions=True)
    if kind == "delta":
        content = read_manifest(source).base.content_hash
        ref = _base_of(zoo, str(source), content, base, before)
        own = (*(() if ref is None else (ref,)), *parents)
        published = zoo.add_artifact(source, name, parents=own, relation=relation, reporter=reporter)
        added = Added(published, "delta", ref)
    elif kind == "adapter":
        added = _add_adapter(zoo, source, name, base, before, reporter)
    else:
        published = zoo.add_base(source, name, hub_id=hub_id, revision=revision, reporter=reporter)
        added = Added(published, "base-ref", None)
    return _compared(added, before, reporter)


def kind_of(source: Path) -> Kind:
    """What a directory holds.

    Raises:
        NotFoundError: nothing known.
    """
    if (source / MANIFEST).is_file() or any(source.glob("delta-*.safetensors")):
        return "delta"  # without a manifest: an incomplete copy, which is told when it is read
    if is_adapter(source):
        return "adapter"
    if (source / CONFIG).is_file():
        return "base-ref"
    raise NotFoundError(
        f"holds no {MANIFEST}, {ADAPTER_CONFIG} or {CONFIG}",
        where=source,
        way_out="give an artifact, adapter or base model",
    )


def _compared(added: Added, before: Sequence[Listed], reporter: Reporter) -> Added:
    """With the newest version that held the same; tells of it."""
    new = added.published
    for one in before:
        if (one.name, one.manifest, one.problem) == (new.name, new.manifest, None):
            same = f"{one.name}@{one.version}"
            reporter.note(f"{new} holds the same as {same}, byte for byte")
            return replace(added, published=replace(new, same_as=same))
    return added


def identity_of(zoo: Catalog, name: str) -> tuple[Resolved, EntryManifest, BaseIdentity]:
    """A base-ref, opened.

    Raises:
        NotFoundError: no such entry, or one of another kind.
        IntegrityError: it is damaged.
    """
    found, entry = zoo.show(name)
    need_kind(found, entry, "base-ref")
    return found, entry, identity_in(zoo.store, entry, str(found))


def base_refs(
    zoo: Catalog, *, content: str | None = None, hub_id: str | None = None, listed: Sequence[Listed] | None = None
) -> list[Listed]:
    """Base-refs with these weights, or of this hub id; newest first under each name. listed: all versions, if known."""
    return [
        one
        for one in (zoo.list(all_versions=True) if listed is None else listed)
        if one.kind == "base-ref"
        and (content is None or one.lineage.get("base") == content)
        and (hub_id is None or hub_id in (one.summary.get("hub_id"), one.lineage.get("base_name")))
    ]


def check_base_of(zoo: Catalog, name: str, directory: Path, *, weights: bool = True) -> str | None:
    """Make sure that `directory` is the base of entry `name`, tokenizer included; the base-ref that told.

    weights: False where whoever decodes the entry compares them anyway, and the tokenizer is all that is left.
    None: the entry is linked to no base-ref that is still here.

    Raises:
        BaseMismatchError: it is not.
    """
    _, entry = zoo.show(name)
    for one in base_refs(zoo, content=entry.lineage.base):
        if one.manifest in entry.lineage.parents:
            ref = f"{one.name}@{one.version}"
            check = check_base if weights else check_tokenizer
            check(identity_of(zoo, ref)[2], directory, ref)
            return ref
    return None


def _base_of(zoo: Catalog, source: str, content: str, wanted: str | None, listed: Sequence[Listed]) -> str | None:
    wanted = wanted or _only(base_refs(zoo, content=content, listed=listed), source)
    if wanted is None:
        return None
    found, entry, _ = identity_of(zoo, wanted)
    if entry.lineage.base != content:
        raise BaseMismatchError(
            f"was made from a base with content hash {content[:12]}, {found} has {str(entry.lineage.base)[:12]}",
            where=source,
            way_out="give its own base",
        )
    return str(found)


def _add_adapter(
    zoo: Catalog, source: Path, name: str, wanted: str | None, listed: Sequence[Listed], reporter: Reporter
) -> Added:
    if wanted is None:
        claimed, revision = claimed_base(source)
        candidates = base_refs(zoo, hub_id=claimed, listed=listed) if claimed else []
        candidates = [one for one in candidates if revision is None or one.summary.get("revision") in (revision, None)]
        wanted = _only(candidates, str(source)) or _only_delta(deltas_of(claimed or "", listed), str(source))
        if wanted is None:
            there = ", ".join([*dict.fromkeys(one.name for one in base_refs(zoo, listed=listed))][:4])
            raise NotFoundError(
                f"no base of this zoo is known as {claimed[:200]!a}, which it names as its own"
                if claimed
                else "its config does not say which base it is of",
                where=source,
                way_out=f"say which with --base ({there})" if there else "add it (`zoo add BASE_MODEL NAME`)",
            )
    beneath = model_of(zoo, wanted)
    described = describe_adapter(source, beneath)
    of_base = None if beneath.over is not None else base_note(source, beneath.lineage.base_name or beneath.name)
    for note in (*described.notes, *([] if of_base is None else [of_base])):
        reporter.note(f"{source}: {note}")
    if beside := left_out(source):
        reporter.note(f"{source}: not registered: {', '.join(beside)}")
    published = zoo.publish(described.entry, described.blobs, name, reporter=reporter)
    return Added(published, "adapter", beneath.name)


def _only_delta(candidates: list[Listed], source: str) -> str | None:
    """The one that is meant: the first, unless what they hold differs."""
    if len({one.manifest for one in candidates}) > 1:
        told = ", ".join(f"{one.name}@{one.version}" for one in candidates[:4])
        raise ConflictError(f"several deltas could be meant ({told})", where=source, way_out="say which with --base")
    return f"{candidates[0].name}@{candidates[0].version}" if candidates else None


def _only(candidates: list[Listed], source: str) -> str | None:
    """The one that is meant: the first, unless they differ in what they are."""
    if not candidates:
        return None
    if len({(one.lineage.get("base"), one.summary.get("tokenizer")) for one in candidates}) > 1:
        told = ", ".join(f"{one.name}@{one.version}" for one in candidates[:4])
        raise ConflictError(f"several bases could be meant ({told})", where=source, way_out="say which with --base")
    return f"{candidates[0].name}@{candidates[0].version}"

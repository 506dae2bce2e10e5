"""The small records of a zoo, one by one: is each what was written there, is none missing, is there nothing else?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deltacompress.errors import IntegrityError
from deltacompress.zoo.errors import StoreError
from deltacompress.zoo.ledger.records import (
    AliasRecord,
    IntentRecord,
    LedgerRecord,
    OutcomeRecord,
    ReferrerRecord,
    RemovalRecord,
    VersionRecord,
    ZooRecord,
    read,
)
from deltacompress.zoo.ledger.referrers import heads
from deltacompress.zoo.ledger.tags import history
from deltacompress.zoo.ledger.versions import states
from deltacompress.zoo.store import layout
from deltacompress.zoo.store.base import NoSuchObjectError, Store


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. kind: damaged, missing (something needs it) or stray (it does not belong there);
    key: where; entries, file: what it hits; message: one line, with the repair; digest, size: of the blob, if one.
    """

    kind: Literal["damaged", "missing", "stray"]
    key: str
    entries: tuple[str, ...]
    file: str
    message: str
    digest: str | None = None
    size: int | None = None


def check_records(store: Store) -> list[Problem]:
    """Problems of everything but manifests and blobs.

    Raises:
        StoreError: something cannot be read at all.
    """
    problems = [
        Problem("stray", stray, (), "", f"{store.where}/{stray}: does not belong into a zoo; remove it")
        for stray in store.strays()
    ]
    for key in store.list(""):
        if key.startswith((layout.TRASH, layout.TEMPORARY)):
            continue
        kind = kind_of(key)
        if kind is None:
            if layout.blob_of(key) is None:
                told = f"{store.where}/{key}: does not belong into a zoo; remove it"
                problems.append(Problem("stray", key, (), "", told))
            continue
        try:
            read(store, key, kind)
        except NoSuchObjectError:
            continue  # settled and forgotten since it was listed
        except StoreError:
            raise
        except IntegrityError as error:
            problems.append(Problem("damaged", key, _entries(key), "its reference", str(error)))
    problems += _gaps(store)
    return problems


def kind_of(key: str) -> type[LedgerRecord] | None:
    """What kind of record belongs under `key`; None for blobs and for what does not belong there.

    The marks of condemned blobs are not read: that they are there is all they say.
    """
    if key == layout.ZOO:
        return ZooRecord
    for prefix, kind in ((layout.INTENTS, IntentRecord), (layout.OUTCOMES, OutcomeRecord)):
        if key.startswith(prefix):
            return kind
    part = key.split("/")
    if part[0] == "referrers" and len(part) == 4 and layout.number_of(key) is not None:
        return ReferrerRecord
    if part[0] != "names" or layout.number_of(key) is None:
        return None
    if len(part) == 5 and part[3] == "v":
        return VersionRecord
    if len(part) == 6 and part[3] == "rm":
        return RemovalRecord
    if len(part) == 6 and part[3] == "alias":
        return AliasRecord
    return None


def _gaps(store: Store) -> Iterator[Problem]:
    """Numbers that are missing from a log before its last, moves of aliases that do not follow from each other."""
    for subject, found in heads(store).items():
        for one, last in found.items():
            yield from _missing(store, [layout.referrer_key(subject, one, n) for n in range(1, last)])
    for name, state in states(list(store.list(layout.NAMES))).items():
        logs = [layout.version_key(name, n) for n in range(1, max(state.versions, default=0))]
        logs += [layout.removal_key(name, v, n) for v, last in state.removals.items() for n in range(1, last)]
        yield from _missing(store, logs)
        for alias in state.aliases:
            try:
                history(store, name, alias)
            except StoreError:
                raise
            except IntegrityError as error:
                key = layout.alias_key(name, alias, state.aliases[alias])
                yield Problem("damaged", key, (f"{name}@{alias}",), "its history", str(error))


def _missing(store: Store, logs: list[str]) -> Iterator[Problem]:
    for key in logs:
        if not store.exists(key):
            told = f"{store.where}/{key}: missing, later ones are there; `zoo fsck --repair --from COPY`"
            yield Problem("missing", key, _entries(key), "its reference", told)


def _entries(key: str) -> tuple[str, ...]:
    part = key.split("/")
    if part[0] != "names":
        return ()
    name = f"{part[1]}/{part[2]}"
    if part[3] == "alias":
        return (f"{name}@{part[4]}",)
    number = layout.number_of("/" + part[4])
    return (name if number is None else f"{name}@{number}",)

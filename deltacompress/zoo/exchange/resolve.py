"""Names where a path is expected: `team/support-bot@prod` becomes a directory, pulled from the zoo once (cache.py)."""

from __future__ import annotations

import os
from pathlib import Path

from deltacompress.reporter import SILENT, Reporter
from deltacompress.zoo.entries.beneath import delta_under
from deltacompress.zoo.entries.linking import add, check_base_of
from deltacompress.zoo.errors import InvalidNameError, NotAZooError
from deltacompress.zoo.exchange.cache import pulled
from deltacompress.zoo.ledger import names
from deltacompress.zoo.ledger.publish import check_kind
from deltacompress.zoo.zoo import Zoo

ENVIRONMENT = "DELTACOMPRESS_ZOO"


def open_zoo(zoo: str | os.PathLike[str] | Zoo | None = None) -> Zoo:
    """The zoo at a path or URL, or the one that DELTACOMPRESS_ZOO names; one that is open as it is.

    Raises:
        NotAZooError: neither is given, or there is no zoo.
    """
    if isinstance(zoo, Zoo):
        return zoo
    location = zoo if zoo is not None else os.environ.get(ENVIRONMENT)
    if not location:
        raise NotAZooError(f"which zoo? give --zoo PATH, or set {ENVIRONMENT}")
    return Zoo.open(location)


def artifact_path(
    spec: str | os.PathLike[str],
    zoo: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    reporter: Reporter = SILENT,
) -> Path:
    """The directory of an artifact or adapter: `spec` itself if it is one, else the entry of that name, pulled.

    base: a directory that the entry is going to be put on: its tokenizer must be that of the entry's base-ref, if it
    has one. Weights are compared by whoever decodes the entry, and all bytes are verified as those of any artifact.

    Raises:
        BaseMismatchError: `base` has another tokenizer.
        InvalidNameError: `spec` is empty.
        ZooError: the zoo does not have the entry, or it is damaged.
    """
    if not os.fspath(spec):
        raise InvalidNameError(
            "an artifact's path is empty", way_out="give its directory, or the name of an entry of a zoo"
        )
    entry = entry_of(spec, zoo)  # once: an alias may move meanwhile
    if entry is None:
        return Path(spec)  # what is neither is reported by whoever opens it
    return entry_path(entry, zoo, base=base, reporter=reporter)


def entry_of(spec: str | os.PathLike[str], zoo: str | os.PathLike[str] | None = None) -> str | None:
    """`team/bot@7`: the version of an entry that `spec` means at this moment; None: it is a path, as artifact_path
    takes it.

    Raises:
        ZooError: the zoo does not have the entry.
    """
    name = name_of(spec, zoo)
    return None if name is None else str(open_zoo(zoo).resolve(name))


def name_of(spec: str | os.PathLike[str], zoo: str | os.PathLike[str] | Zoo | None = None) -> str | None:
    """The name that `spec` is, whether the zoo has it or not; None: it is a path, as artifact_path takes it."""
    if Path(spec).is_dir() or not (zoo or os.environ.get(ENVIRONMENT)):
        return None
    return _name(spec)


def entry_path(
    entry: str,
    zoo: str | os.PathLike[str] | Zoo | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    reporter: Reporter = SILENT,
) -> Path:
    """As artifact_path, of what is an entry whatever lies in the working directory."""
    opened = open_zoo(zoo)
    if base is not None and Path(base).is_dir():
        check_base_of(opened, entry, Path(base), weights=False)
    return pulled(opened, entry, reporter=reporter)


def delta_path(
    entry: str | None, zoo: str | os.PathLike[str] | Zoo | None = None, *, reporter: Reporter = SILENT
) -> Path | None:
    """The directory of the delta that the adapter `entry` goes over, pulled; None: it goes over its base, or is none.

    Raises:
        ZooError: the zoo does not have the entry, or not its delta.
    """
    if entry is None:
        return None
    opened = open_zoo(zoo)
    found = delta_under(opened, entry)
    return None if found is None else pulled(opened, found, reporter=reporter)


def served_path(
    spec: str | os.PathLike[str],
    zoo: str | os.PathLike[str] | None,
    over: str | Path | None,
    *,
    base: str | os.PathLike[str],
) -> tuple[Path, str | Path | None]:
    """As artifact_path, and what it goes over: `over`, or where that is None, what delta_path finds."""
    entry = entry_of(spec, zoo)
    path = artifact_path(entry or spec, zoo, base=base)
    return path, delta_path(entry, zoo) if over is None else over


def check_destination(name: str, zoo: str | os.PathLike[str] | None = None) -> None:
    """Find out, before hours of work, that a delta could not be published as `name`.

    Raises:
        ZooError: no such zoo, no name of an entry, or its versions are of another kind.
    """
    try:
        checked = names.parse_name(name)
    except InvalidNameError as error:
        if zoo is None and not os.environ.get(ENVIRONMENT):  # told at once, for one more try
            raise error.retold(InvalidNameError, also=f"and give --zoo PATH, or set {ENVIRONMENT}") from error
        raise
    check_kind(open_zoo(zoo).store, checked, "delta")


def publish_artifact(
    path: str | os.PathLike[str], name: str, zoo: str | os.PathLike[str] | None = None, *, reporter: Reporter = SILENT
) -> str:
    """Publish a finished artifact directory, linked to its base; `name@version`, durable on return.

    Raises:
        ZooError: as linking.add.
    """
    return str(add(open_zoo(zoo), Path(path), name, reporter=reporter).published)


def _name(spec: str | os.PathLike[str]) -> str | None:
    """`spec` if it is a name."""
    try:
        return str(names.parse(os.fspath(spec)))
    except InvalidNameError:
        return None

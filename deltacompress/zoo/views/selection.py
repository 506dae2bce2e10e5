"""Which entries of a list are meant: by what they are, and by what was measured of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from deltacompress.errors import InputError
from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.linking import base_refs
from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.entries.reports import scores
from deltacompress.zoo.entries.scores import Condition

_NAMED = 10
"""Scores that an error names at most."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an entry must be; None and no conditions: anything. base: its entry, name or hash."""

    kind: str | None = None
    base: str | None = None
    recipe: str | None = None
    min_ratio: float | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Selected:
    """One entry, with its scores if there were conditions on them."""

    entry: Listed
    scores: dict[str, float]


def select(zoo: Catalog, entries: Iterable[Listed], wanted: Wanted, note: Callable[[str], None]) -> list[Selected]:
    """The entries of a list of this zoo that are as wanted, in their order. Damaged and removed ones have no scores.

    note: is told where there are conditions, and no scores at all.

    Raises:
        InputError: a condition is on a score that no entry has, while there are others.
    """
    belongs = _belongs_to(zoo, wanted.base)
    kept: list[Listed] = []
    others: list[Listed] = []
    for one in entries:
        ratio = one.summary.get("ratio")
        fits = (
            wanted.kind in (None, one.kind)
            and belongs(one)
            and wanted.recipe in (None, one.summary.get("recipe"))
            and (wanted.min_ratio is None or (isinstance(ratio, int | float) and ratio >= wanted.min_ratio))
        )
        (kept if fits else others).append(one)
    if not wanted.conditions:
        return [Selected(one, {}) for one in kept]
    scored = [Selected(one, _scores(zoo, one)) for one in kept]
    asked = {one.score for one in wanted.conditions}
    known = {name for one in scored for name in one.scores}
    for one in others:  # a name that only others have is rare; one that none has is wrong
        if asked <= known:
            break
        known |= _scores(zoo, one).keys()
    if not known:
        note(f"--score {min(asked)}: nothing here has a score; `zoo attest` attaches a report")
    elif not asked <= known:
        raise _unknown(min(asked - known), sorted(known))
    return [one for one in scored if all(condition.holds(one.scores) for condition in wanted.conditions)]


def _belongs_to(zoo: Catalog, base: str | None) -> Callable[[Listed], bool]:
    if base is None:
        return lambda one: True
    hashes = {
        one.lineage.get("base")
        for one in base_refs(zoo)
        if base in (one.name, f"{one.name}@{one.version}", one.summary.get("hub_id"))
    }

    def belongs(one: Listed) -> bool:
        name, content = one.lineage.get("base_name"), one.lineage.get("base")
        return base in (name, content) or content in hashes or (len(base) >= 8 and str(content).startswith(base))

    return belongs


def _scores(zoo: Catalog, one: Listed) -> dict[str, float]:
    return {} if one.problem is not None or one.removed else scores(zoo, f"{one.name}@{one.version}")


def _unknown(score: str, known: Sequence[str]) -> InputError:
    """What is spelled like it comes first."""
    alike = get_close_matches(score, known, n=_NAMED, cutoff=0.5)
    named = [*alike, *(one for one in known if one not in alike)]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return InputError(f"no entry has it; there are {', '.join(named[:_NAMED])}{more}", where=f"--score {score}")

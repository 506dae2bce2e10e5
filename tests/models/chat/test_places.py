"""Who computes next: the template that has the fewest places, and of these who came first."""

from __future__ import annotations

import threading

import pytest
from serving.harness import eventually

from deltacompress.models.chat.places import Places, TemplateBusyError


class Crowd:
    """Threads that have a place until they are told to leave."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.inside: list[str] = []
        self.late: list[str] = []
        self.threads: list[threading.Thread] = []
        self._ends: dict[str, threading.Event] = {}

    def come(self, name: str) -> None:
        """One, for the template of its first letter."""
        self._ends[name] = threading.Event()
        known = len(self.places._waiting) + self.places._taken.total()
        self.threads.append(threading.Thread(target=self._work, args=(name,)))
        self.threads[-1].start()
        eventually(lambda: len(self.places._waiting) + self.places._taken.total() > known)

    def _work(self, name: str) -> None:
        try:
            with self.places.one(name[0]):
                self.inside.append(name)
                self._ends[name].wait(20)
        except TemplateBusyError:
            self.late.append(name)

    def go(self, name: str) -> None:
        self._ends[name].set()


def test_no_template_has_all_and_who_has_fewest_is_next() -> None:
    crowd = Crowd(Places(3, 2, 20))
    for name in ("a1", "a2", "a3", "b1", "b2", "a4", "c1"):
        crowd.come(name)
    eventually(lambda: len(crowd.inside) == 3)
    assert {*crowd.inside} == {"a1", "a2", "b1"}
    for leaves, comes in (("a1", "c1"), ("c1", "a3"), ("a2", "b2"), ("b1", "a4")):
        crowd.go(leaves)
        eventually(lambda comes=comes: comes in crowd.inside)
    for name in ("a3", "a4", "b2"):
        crowd.go(name)
    for thread in crowd.threads:
        thread.join()
    assert crowd.late == []
    assert (crowd.places._taken, crowd.places._waiting) == ({}, [])


def test_who_waits_too_long_is_told_and_leaves_nothing_behind() -> None:
    crowd = Crowd(Places(1, 1, 0.2))
    crowd.come("a1")
    crowd.come("b1")
    eventually(lambda: crowd.late == ["b1"])
    assert crowd.places._waiting == []
    crowd.go("a1")
    for thread in crowd.threads:
        thread.join()
    with crowd.places.one("b"):
        assert crowd.places._taken == {"b": 1}


def test_who_breaks_gives_its_place_back() -> None:
    places = Places(1, 1, 0.2)
    with pytest.raises(ValueError, match="broke"), places.one("a"):
        raise ValueError("broke")
    with places.one("a"):
        pass

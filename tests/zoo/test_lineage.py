"""Lineage: the graph that manifests imply, and its pictures, whatever names are in it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.zoo import Zoo
from deltacompress.zoo.entries import linking
from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.store import osfs
from deltacompress.zoo.views.lineage import LineageGraph, lineage
from deltacompress.zoo.views.lineage_picture import mermaid, svg, tree

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
NASTY = 'a"]; click n0 "javascript:alert(1)"\n</text><script>x</script>\x1b[2J&#\x00 %% --> '


def entry(name: str, digest: str, kind: str = "delta", **told: Any) -> Listed:
    version = told.pop("version", 1)
    summary = told.pop("summary", {})
    told = {"base": None, "finetuned": None, "parents": [], "relation": None} | told
    return Listed(name, version, kind, digest, 10, 0.0, summary, told, (), False)


FAMILY = [
    entry("t/base", "B", "base-ref", base="hb", relation="base"),
    entry("t/a", "A", base="hb", finetuned="fa", finetuned_name="tuned-a", parents=["B"], relation="quantized"),
    entry("t/b", "C", base="hb", finetuned="fb", finetuned_name="tuned-b", parents=["B"], relation="quantized"),
    entry("t/a2", "D", base="hb", finetuned="fa", parents=["B", "A"], relation="recompressed"),
    entry("t/m", "M", base="hb", finetuned="fm", parents=["B", "A", "C"], relation="merge"),
    entry("t/s", "S", base="hb", finetuned="fs", parents=["B", "M"], relation="distilled"),
    entry("t/l", "L", "adapter", base="hb", parents=["B"], relation="adapter"),
    entry("u/far", "F", base="hx", base_name="far", finetuned="fx", relation="quantized"),
]


def edges(graph: LineageGraph) -> set[tuple[str, str, str]]:
    return {(edge.parent, edge.child, edge.relation) for edge in graph.edges}


def test_a_family() -> None:
    assert edges(lineage(FAMILY)) == {
        ("B", "fa", "finetune"),
        ("B", "fb", "finetune"),
        ("fa", "A", "quantized"),
        ("fb", "C", "quantized"),
        ("A", "D", "recompressed"),
        ("A", "M", "merge"),
        ("C", "M", "merge"),
        ("M", "S", "distilled"),
        ("B", "L", "adapter"),
        ("hx", "fx", "finetune"),
        ("fx", "F", "quantized"),
    }


def test_one_entry_shows_what_it_came_from_and_what_came_of_it() -> None:
    graph = lineage(FAMILY, {"M"})
    assert {node.id for node in graph.nodes} == {"B", "fa", "fb", "A", "C", "M", "S"}
    assert [node.id for node in graph.nodes if node.focus] == ["M"]
    assert tree(lineage(FAMILY, {"D"})).splitlines() == [
        "t/base@1  [base-ref]",
        "`-- finetune: tuned-a (fa)  [finetuned, not in this zoo]",
        "    `-- quantized: t/a@1  [delta]",
        "        `-- recompressed: t/a2@1  [delta]  <--",
    ]


def test_a_child_of_two_is_drawn_out_once() -> None:
    lines = tree(lineage(FAMILY, {"M"})).splitlines()
    assert sum("t/m@1" in line for line in lines) == 2
    assert sum("see above" in line for line in lines) == 1
    assert sum("t/s@1" in line for line in lines) == 1


def test_equal_entries_are_one_node_and_lost_parents_are_shown() -> None:
    graph = lineage([entry("t/a", "A", version=1), entry("t/a", "A", version=2), entry("t/b", "B", parents=["gone"])])
    assert [node.label for node in graph.nodes] == ["entry (gone)", "t/b@1", "t/a@1, t/a@2"]
    assert "unknown, not in this zoo" in tree(graph)


def test_claims_that_go_in_circles() -> None:
    graph = lineage(
        [
            entry("t/a", "A", base="x", finetuned="y"),
            entry("t/b", "B", base="y", finetuned="z"),
            entry("t/c", "C", base="z", finetuned="x"),
            entry("t/d", "D", base="x", finetuned="x"),
        ]
    )
    assert {node.id for node in graph.nodes} == {"x", "y", "z", "A", "B", "C", "D"}
    assert ("z", "x", "finetune") not in edges(graph)
    for draw in (tree, mermaid, lambda graph: svg(graph, "t")):
        assert "t/d@1" in draw(graph)


def test_what_was_made_from_an_entry_has_no_base_of_its_own_beside_it() -> None:
    """Nothing would hang from it."""
    made = entry("t/again", "R", base="hq", base_name="lost", finetuned="fa", parents=["A"], relation="recompressed")
    assert "hq" not in {node.id for node in lineage([*FAMILY, made]).nodes}


def test_two_base_refs_of_one_hash() -> None:
    twins = [entry("t/x", "X", "base-ref", base="h"), entry("t/y", "Y", "base-ref", base="h")]
    graph = lineage([*twins, entry("t/a", "A", base="h", finetuned="f", parents=["Y"])])
    assert ("Y", "f", "finetune") in edges(graph)
    graph = lineage([*twins, entry("t/a", "A", base="h", base_name="some", finetuned="f")])
    assert ("h", "f", "finetune") in edges(graph)


def test_no_name_gets_out_of_its_place() -> None:
    graph = lineage([entry("t/a", "A", base="h" * 64, base_name=NASTY, finetuned="f", finetuned_name=NASTY)])
    text = tree(graph)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3
    drawn = mermaid(graph).splitlines()
    assert all(re.fullmatch(r'    n\d\["[^"\\\[\]<>]*<br/>[^"\\\[\]<>]*"\]', line) for line in drawn[1:4])
    picture = svg(graph, NASTY)
    root = ElementTree.fromstring(picture)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "style", "defs", "marker", "path", "rect", "g", "text"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|href|@import|@font-face|url\((?!#arrow)", picture)
    assert "prefers-color-scheme: dark" in picture


def test_boxes_do_not_overlap() -> None:
    root = ElementTree.fromstring(svg(lineage(FAMILY), "family"))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("rx")]
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == len(boxes) == len(lineage(FAMILY).nodes)
    assert all(int(str(box.get("x"))) + 250 <= int(str(root.get("width"))) for box in boxes)
    assert all(int(str(box.get("y"))) + 46 <= int(str(root.get("height"))) for box in boxes)


def test_a_long_chain_and_a_wide_family() -> None:
    chain = [entry("t/n", f"d{i}", version=i + 1, parents=[f"d{i - 1}"] if i else []) for i in range(1500)]
    wide = [entry("t/w", f"w{i}", version=i + 1, base="h", finetuned=f"f{i}") for i in range(1500)]
    graph = lineage(chain + wide)
    assert len(graph.nodes) == 1500 + 1 + 1500 + 1500
    assert tree(graph).count("\n") == len(graph.nodes) - 1
    assert svg(graph, "t").count("<rect class=") == len(graph.nodes) + 1


@given(st.lists(st.tuples(*[st.integers(0, 8)] * 4), max_size=25))
@settings(max_examples=60, deadline=None)
def test_any_claims_make_a_graph_without_cycles(claims: list[tuple[int, int, int, int]]) -> None:
    entries = [
        # parents come before: a digest cannot be among what it is the digest of
        entry(
            "t/n", f"d{i}", version=i + 1, base=f"h{a}", finetuned=f"h{b}", parents=[f"d{c}"] if c < min(i, d) else []
        )
        for i, (a, b, c, d) in enumerate(claims)
    ]
    graph = lineage(entries)
    place = {node.id: i for i, node in enumerate(graph.nodes)}
    assert len(place) == len(graph.nodes)
    assert all(place[edge.parent] < place[edge.child] for edge in graph.edges)
    assert all(one.manifest in place for one in entries)
    ElementTree.fromstring(svg(graph, "t"))
    assert tree(graph).count("(see above)") <= len(graph.edges)


def test_from_a_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    zoo = Zoo.init(tmp_path / "zoo")
    linking.add(zoo, GOLDEN / "base", "t/base")
    linking.add(zoo, GOLDEN / "int4-24", "t/bot")
    linking.add(zoo, GOLDEN / "int2-24", "t/small", parents=["t/bot"], relation="recompressed")
    assert tree(lineage(zoo.list(all_versions=True), {zoo.resolve("t/bot").manifest})).splitlines() == [
        "t/base@1  [base-ref]",
        "`-- finetune: finetuned (93d828abfc35)  [finetuned, not in this zoo]",
        "    `-- quantized: t/bot@1  [delta, int4-24, ratio 0.42]  <--",
        "        `-- recompressed: t/small@1  [delta, int2-24, ratio 0.46]",
    ]
    shutil.rmtree(tmp_path / "zoo" / "blobs")
    assert lineage(zoo.list(all_versions=True)).edges  # known rows come from the cache

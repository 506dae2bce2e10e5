"""What came from what: base -> fine-tuned -> delta -> recompressed, merged or distilled children.

Nothing is stored for this. Every manifest names the content hashes of the two checkpoints it stands between and the
digests of the entries it was made from; the graph is read off those, so it cannot disagree with the entries. A hash
that no entry of this zoo stands for (a base that was never added, a fine-tuned model whose weights live elsewhere, a
parent that was collected) is a node of its own, marked as not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltacompress.zoo.entries.listing import Listed
from deltacompress.zoo.ledger.names import Reference, parse
from deltacompress.zoo.ledger.versions import Resolved


@dataclass(frozen=True, slots=True)
class Node:
    """One model.

    id: digest of the entry, or content hash of a checkpoint; names: `name@version` of every version it is (none: it
    is not in this zoo); title: what to call it; kind: of the entry, else base, finetuned or unknown; ratio, bytes: of a
    delta; focus: asked for.
    """

    id: str
    names: tuple[str, ...]
    title: str
    kind: str
    bytes: int | None = None
    ratio: float | None = None
    recipe: str | None = None
    focus: bool = False

    @property
    def label(self) -> str:
        """One line: names, or title and the first digits of the hash."""
        return ", ".join(self.names) if self.names else f"{self.title} ({self.id[:12]})"

    @property
    def detail(self) -> str:
        """A second line: kind, recipe, ratio."""
        parts = [self.kind if self.names else f"{self.kind}, not in this zoo"]
        parts += [self.recipe] if self.recipe else []
        parts += [f"ratio {self.ratio:.2f}"] if self.ratio is not None else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Edge:
    """`child` came from `parent` in the way `relation` says."""

    parent: str
    child: str
    relation: str


@dataclass(frozen=True, slots=True)
class LineageGraph:
    """A graph without cycles. nodes: parents before children."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def roots(self) -> tuple[Node, ...]:
        """Nodes that came from nothing known."""
        children = {edge.child for edge in self.edges}
        return tuple(node for node in self.nodes if node.id not in children)

    def children(self) -> dict[str, list[Edge]]:
        """Id -> the edges that leave it, in the order of `nodes`."""
        return _by((edge.parent, edge) for edge in self.edges)

    def parents(self) -> dict[str, list[Edge]]:
        """Id -> the edges that lead to it, in the order of `nodes`."""
        return _by((edge.child, edge) for edge in self.edges)

    def to_json(self) -> dict[str, Any]:
        """Plain data: nodes and edges."""
        return {
            "nodes": [
                {
                    "id": node.id,
                    "names": list(node.names),
                    "title": node.title,
                    "kind": node.kind,
                    "bytes": node.bytes,
                    "ratio": node.ratio,
                    "recipe": node.recipe,
                    "focus": node.focus,
                }
                for node in self.nodes
            ],
            "edges": [{"parent": edge.parent, "child": edge.child, "relation": edge.relation} for edge in self.edges],
        }


def _by(keyed: Iterable[tuple[str, Edge]]) -> dict[str, list[Edge]]:
    found: dict[str, list[Edge]] = {}
    for key, edge in keyed:
        found.setdefault(key, []).append(edge)
    return found


def lineage(entries: Iterable[Listed], focus: Collection[str] | None = None) -> LineageGraph:
    """The graph of `entries` (every version of a zoo); `focus`: only what these digests came from, and what of them.

    Entries with a `problem` have no lineage that could be read; they are left out, as `list` shows them.
    """
    nodes, edges = _graph([one for one in entries if one.problem is None and not one.removed], frozenset(focus or ()))
    if focus is not None:
        kept = _reach(focus, _by((edge.child, edge) for edge in edges.values()))
        kept |= _reach(focus, _by((edge.parent, edge) for edge in edges.values()))
        nodes = {key: node for key, node in nodes.items() if key in kept}
        edges = {key: edge for key, edge in edges.items() if edge.parent in kept and edge.child in kept}
    order = _order(nodes, edges)
    return LineageGraph(
        tuple(nodes[key] for key in order),
        tuple(sorted(edges.values(), key=lambda edge: (order[edge.parent], order[edge.child]))),
    )


def meant(entries: Iterable[Listed], name: str, found: Resolved) -> set[str]:
    """The digests that a name stands for in a lineage: those of all versions, if it gives none.

    found: what it resolves to.
    """
    if parse(name) != Reference(found.name):
        return {found.manifest}
    return {found.manifest, *(one.manifest for one in entries if one.name == found.name)} - {""}


def _graph(entries: list[Listed], focus: frozenset[str]) -> tuple[dict[str, Node], dict[tuple[str, str], Edge]]:
    names: dict[str, list[str]] = {}
    for one in sorted(entries, key=lambda one: (one.name, one.version)):
        names.setdefault(one.manifest, []).append(f"{one.name}@{one.version}")
    by_digest = {one.manifest: one for one in entries}
    nodes = {digest: _entry_node(by_digest[digest], tuple(names[digest]), digest in focus) for digest in names}
    # One weight hash may have several base-refs (other tokenizers): an entry that names its own is linked to that one.
    refs: dict[str, list[str]] = {}
    for digest, one in by_digest.items():
        if one.kind == "base-ref" and one.lineage.get("base"):
            refs.setdefault(one.lineage["base"], []).append(digest)
    edges: dict[tuple[str, str], Edge] = {}

    def checkpoint(content: str, kind: str, title: str) -> str:
        found = sorted(refs.get(content, ()))
        if len(found) == 1:
            return found[0]
        nodes.setdefault(content, Node(content, (), title, kind, focus=content in focus))
        return content

    tuned_from: dict[str, list[Edge]] = {}

    def link(parent: str, child: str, relation: str) -> None:
        edges.setdefault((parent, child), Edge(parent, child, relation))

    def link_checkpoints(parent: str, child: str) -> None:
        # Digests of entries cannot form a circle, but content hashes are claims: none that closes one.
        if parent not in _reach((child,), tuned_from):
            link(parent, child, "finetune")
            tuned_from.setdefault(parent, []).append(edges[parent, child])

    for digest, one in sorted(by_digest.items()):
        if one.kind == "base-ref":
            continue
        told: Mapping[str, Any] = one.lineage
        relation = str(told.get("relation") or "derived")
        own = [parent for parent in told.get("parents", ()) if parent in by_digest]
        base_ref = next((parent for parent in own if by_digest[parent].kind == "base-ref"), None)
        made_from = [parent for parent in told.get("parents", ()) if parent != base_ref]
        for parent in made_from:
            nodes.setdefault(parent, Node(parent, (), "entry", "unknown", focus=parent in focus))
            link(parent, digest, relation)
        if made_from:
            continue
        base = base_ref
        if base is None and told.get("base"):
            base = checkpoint(told["base"], "base", str(told.get("base_name") or "base"))
        if told.get("finetuned"):
            tuned = checkpoint(told["finetuned"], "finetuned", str(told.get("finetuned_name") or "fine-tuned"))
            if base is not None:
                link_checkpoints(base, tuned)
            link(tuned, digest, relation)
        elif base is not None:
            link(base, digest, relation)
    return nodes, edges


def _entry_node(one: Listed, names: tuple[str, ...], focus: bool) -> Node:
    ratio, recipe = one.summary.get("ratio"), one.summary.get("recipe")
    return Node(
        one.manifest,
        names,
        names[0],
        one.kind,
        bytes=one.bytes,
        ratio=float(ratio) if isinstance(ratio, int | float) else None,
        recipe=recipe if isinstance(recipe, str) else None,
        focus=focus,
    )


def _reach(start: Iterable[str], links: Mapping[str, Iterable[Edge]]) -> set[str]:
    """Everything that `links` lead to from `start`, both ends of an edge counting."""
    seen: set[str] = set()
    todo = list(start)
    while todo:
        key = todo.pop()
        if key not in seen:
            seen.add(key)
            for edge in links.get(key, ()):
                todo += [edge.parent, edge.child]
    return seen


def _order(nodes: Mapping[str, Node], edges: Mapping[tuple[str, str], Edge]) -> dict[str, int]:
    """Node -> place: parents before children, by label among those that could come next."""
    waiting = dict.fromkeys(nodes, 0)
    children: dict[str, list[str]] = {}
    for edge in edges.values():
        waiting[edge.child] += 1
        children.setdefault(edge.parent, []).append(edge.child)

    def by_label(keys: Iterable[str]) -> list[str]:
        return sorted(keys, key=lambda key: (nodes[key].label, key), reverse=True)

    ready = by_label(key for key, count in waiting.items() if not count)
    order: dict[str, int] = {}
    while ready:
        key = ready.pop()
        order[key] = len(order)
        freed = []
        for child in children.get(key, ()):
            waiting[child] -= 1
            if not waiting[child]:
                freed.append(child)
        ready += by_label(freed)  # depth first: a child follows its last parent
    return order

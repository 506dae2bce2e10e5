"""A lineage as text, as Mermaid and as an SVG picture that needs nothing else to be seen.

The SVG is written by hand: no script, no font, no link, and colours that follow the reader's light or dark mode, so it
can stand in a README or be opened alone. Names come from whoever published an entry; everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from deltacompress.zoo.views.lineage import LineageGraph, Node

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 250, 46, 90, 22, 16
_CHARACTERS = 34
_STYLE = """
  .lineage { color-scheme: light dark; } .lineage text { font: 12px sans-serif; fill: #1f2328; }
  .lineage .sheet { fill: #ffffff; } .lineage .box { fill: #f6f8fa; stroke: #8c959f; }
  .lineage .absent { stroke-dasharray: 5 3; } .lineage .focus { stroke: #0969da; stroke-width: 2.5; }
  .lineage .title { font-weight: 600; } .lineage .detail, .lineage .relation { fill: #59636e; font-size: 10.5px; }
  .lineage .relation { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; }
  .lineage .edge { fill: none; stroke: #8c959f; } .lineage .head { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    .lineage text { fill: #e6edf3; } .lineage .sheet { fill: #0d1117; }
    .lineage .box { fill: #161b22; stroke: #6e7681; } .lineage .focus { stroke: #58a6ff; }
    .lineage .detail, .lineage .relation { fill: #9198a1; } .lineage .relation { stroke: #0d1117; }
    .lineage .edge { stroke: #6e7681; } .lineage .head { fill: #6e7681; }
  }
"""


def tree(graph: LineageGraph) -> str:
    """Indented text. A node with several parents is drawn out under the first and mentioned under the others."""
    nodes = {node.id: node for node in graph.nodes}
    children = graph.children()
    lines: list[str] = []
    seen: set[str] = set()
    # (id, what stands before its branch, its branch, what stands before those of its children); a stack, as a model
    # may have been compressed anew more often than Python likes to call itself.
    todo = [(root.id, "", "", "") for root in reversed(graph.roots)]
    while todo:
        key, before, branch, below = todo.pop()
        node, edges = nodes[key], children.get(key, [])
        again = "  (see above)" if key in seen and edges else ""
        lines.append(_line(f"{before}{branch}{node.label}  [{node.detail}]{'  <--' if node.focus else ''}{again}"))
        if key in seen:
            continue
        seen.add(key)
        for edge in reversed(edges):
            last = edge is edges[-1]
            mark = f"{'`--' if last else '|--'} {edge.relation}: "
            todo.append((edge.child, before + below, mark, "    " if last else "|   "))
    return "\n".join(lines)


def mermaid(graph: LineageGraph) -> str:
    """A Mermaid flowchart."""
    ids = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    lines += [f'    {ids[node.id]}["{_mermaid(node.label)}<br/>{_mermaid(node.detail)}"]' for node in graph.nodes]
    lines += [f'    {ids[edge.parent]} -->|"{_mermaid(edge.relation)}"| {ids[edge.child]}' for edge in graph.edges]
    absent = [ids[node.id] for node in graph.nodes if not node.names]
    focus = [ids[node.id] for node in graph.nodes if node.focus]
    lines += [f"    style {one} stroke-dasharray: 5 3" for one in absent]
    lines += [f"    style {one} stroke-width: 3px" for one in focus]
    return "\n".join(lines)


def svg(graph: LineageGraph, title: str) -> str:
    """A picture, parents left of their children."""
    places = _places(graph)
    columns = max((column for column, _ in places.values()), default=0) + 1
    rows = max((row for _, row in places.values()), default=0) + 1
    width = 2 * _MARGIN + columns * _WIDTH + (columns - 1) * _GAP_X
    height = 2 * _MARGIN + rows * _HEIGHT + (rows - 1) * _GAP_Y
    body = "\n".join([*_edges(graph, places), *(_box(node, *places[node.id]) for node in graph.nodes)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'class="lineage" role="img">\n<title>{_xml(title)}</title>\n<style>{_STYLE}</style>\n'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect class="sheet" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _places(graph: LineageGraph) -> dict[str, tuple[int, int]]:
    """Node -> (column, row): one column right of the farthest parent, in the first free row from a parent's on."""
    parents = graph.parents()
    columns: dict[str, int] = {}
    rows: dict[str, int] = {}
    free: dict[int, int] = {}  # column -> its first row that nothing stands in or below
    for node in graph.nodes:  # parents come before their children
        above = [edge.parent for edge in parents.get(node.id, ())]
        column = max((columns[one] for one in above), default=-1) + 1
        start = min((rows[one] for one in above), default=max(free.values(), default=0))
        columns[node.id], rows[node.id] = column, max(start, free.get(column, 0))
        free[column] = rows[node.id] + 1
    return {key: (columns[key], rows[key]) for key in columns}


def _corner(column: int, row: int) -> tuple[int, int]:
    return _MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y)


def _edges(graph: LineageGraph, places: dict[str, tuple[int, int]]) -> Iterator[str]:
    """All lines, then what stands on them."""
    labels = []
    for edge in graph.edges:
        x1, y1 = _corner(*places[edge.parent])
        x2, y2 = _corner(*places[edge.child])
        x1, y1, y2 = x1 + _WIDTH, y1 + _HEIGHT // 2, y2 + _HEIGHT // 2
        bend = _GAP_X // 2
        path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2 - 2} {y2}"
        yield f'<path class="edge" d="{path}" marker-end="url(#arrow)"/>'
        told = _xml(_short(edge.relation, 12))
        labels.append(f'<text class="relation" text-anchor="end" x="{x2 - 12}" y="{y2 - 5}">{told}</text>')
    yield from labels


def _box(node: Node, column: int, row: int) -> str:
    x, y = _corner(column, row)
    classes = " ".join(["box", *(["absent"] if not node.names else []), *(["focus"] if node.focus else [])])
    return (
        f"<g><title>{_xml(f'{node.label}: {node.detail}; {node.id}')}</title>"
        f'<rect class="{classes}" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="title" x="{x + 10}" y="{y + 19}">{_xml(_short(node.label, _CHARACTERS))}</text>'
        f'<text class="detail" x="{x + 10}" y="{y + 35}">{_xml(_short(node.detail, _CHARACTERS + 4))}</text></g>'
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _line(text: str) -> str:
    """No control characters: a name must not move the cursor of whoever reads it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _xml(text: str) -> str:
    """For text and attribute values; characters that XML does not know are replaced."""
    return escape(_line(text), {'"': "&quot;", "'": "&apos;"})


def _mermaid(text: str) -> str:
    """Everything that is not plain becomes an entity of Mermaid's (#code;), so no text can end a label."""
    return "".join(c if c.isascii() and (c.isalnum() or c in " ./@_-,") else f"#{ord(c)};" for c in _line(text))

"""The Hugging Face model card of an entry: front matter that the hub understands, and how to use what is there.

Names in it come from whoever published the entry: the front matter goes through a YAML writer, and in the text every
character that Markdown or HTML gives a meaning to is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from deltacompress.zoo.catalog import Catalog
from deltacompress.zoo.entries.adapters import IDENTITY
from deltacompress.zoo.entries.linking import base_refs
from deltacompress.zoo.entries.reports import scores
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.versions import Resolved

_HUB = {
    "finetune": "finetune",
    "distilled": "finetune",
    "adapter": "adapter",
    "quantized": "quantized",
    "recompressed": "quantized",
    "merge": "merge",
}
"""Our relation -> the hub's base_model_relation, which knows these four."""


def card(zoo: Catalog, name: str) -> str:
    """The text of a README.md for an entry.

    Raises:
        ZooError: no such entry, or a damaged one.
    """
    found, entry = zoo.show(name)
    told = entry.lineage
    base, revision = _base(zoo, entry)
    if entry.kind == "adapter" and told.finetuned is not None:  # it goes over the fine-tuned model
        base, revision = told.finetuned_name, None
    measured = scores(zoo, str(found))
    facts = _facts(entry)
    content = told.finetuned if entry.kind == "adapter" and told.finetuned is not None else told.base
    front: dict[str, Any] = {}
    if base is not None and entry.kind != "base-ref":
        front["base_model"] = base
        front["base_model_relation"] = _HUB.get(str(told.relation), "quantized")
    front["library_name"] = "peft" if entry.kind == "adapter" else "deltacompress"
    front["tags"] = ["deltacompress", entry.kind, *([facts["recipe"]] if isinstance(facts.get("recipe"), str) else [])]
    extra = {"name": str(found), "digest": found.manifest, "base_content_hash": content, "base_revision": revision}
    front["deltacompress"] = {key: value for key, value in (extra | facts | extra).items() if value is not None}
    text = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=False, width=10_000).rstrip(),
        "---",
        "",
        f"# {escape(str(found))}",
        "",
        _sentence(entry, base),
        "",
        *_table(("what", "value"), facts | {"entry digest": found.manifest}),
    ]
    if measured:
        text += ["", "## Scores", "", *_table(("score", "value"), measured)]
    return "\n".join([*text, "", *_usage(found, entry, base), ""])


def escape(text: str) -> str:
    """`text` as plain words of one Markdown line."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", line)


def _base(zoo: Catalog, entry: EntryManifest) -> tuple[str | None, str | None]:
    """Hub id and revision of the base from its base-ref, else the name that the entry has for it.

    Of several with these weights the one that it is linked to.
    """
    if entry.lineage.base is not None:
        refs = base_refs(zoo, content=entry.lineage.base)
        for one in sorted(refs, key=lambda ref: ref.manifest not in entry.lineage.parents):
            hub_id, revision = one.summary.get("hub_id"), one.summary.get("revision")
            if isinstance(hub_id, str):
                return hub_id, revision if isinstance(revision, str) else None
    return entry.lineage.base_name, None


def _facts(entry: EntryManifest) -> dict[str, Any]:
    summary = {key: value for key, value in entry.summary.items() if key not in ("artifact", IDENTITY)}
    own = {"kind": entry.kind, "finetuned": entry.lineage.finetuned_name}
    return own | summary | own


def _sentence(entry: EntryManifest, base: str | None) -> str:
    known = escape(base) if base else "its base model"
    if entry.kind == "delta":
        tuned = f" {escape(entry.lineage.finetuned_name)}" if entry.lineage.finetuned_name else ""
        return (
            f"The fine-tuned model{tuned}, stored as a compressed difference from {known}. The base model is needed to "
            "use it; its weights are not in here."
        )
    if entry.kind == "adapter":
        return f"A PEFT adapter of {known}."
    if entry.kind == "base-ref":
        return f"The identity of {known}: what deltas and adapters in this zoo were made from. No weights."
    return f"An entry of kind {entry.kind}."


def _usage(found: Resolved, entry: EntryManifest, base: str | None) -> list[str]:
    if entry.kind == "delta":
        about = f"BASE the directory{f' or hub id ({escape(base)})' if base else ''} of the base model."
        commands = [
            f"deltacompress zoo pull {found} delta --zoo ZOO",
            "deltacompress verify delta --base BASE",
            "deltacompress restore delta --base BASE --out model",
        ]
        told = f"Every restored tensor is checked against its recorded hash. ZOO stands for the zoo, {about}"
        return ["## Restore", "", told, "", "```sh", *commands, "```"]
    if entry.kind == "adapter":
        return [
            "## Use",
            "",
            "```sh",
            f"deltacompress zoo pull {found} adapter --zoo ZOO",
            "```",
            "",
            'Then `PeftModel.from_pretrained(base_model, "adapter")`.',
        ]
    return []


def _table(heads: tuple[str, str], rows: Mapping[str, Any]) -> list[str]:
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    for key, value in rows.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else escape(str(value))
            lines.append(f"| {escape(key.replace('_', ' '))} | {shown} |")
    return lines

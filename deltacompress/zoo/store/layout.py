"""Where everything lies in a zoo. The keys of this module are the format; docs describe them, nothing else builds them.

    zoo.json                             format version, id, what the store was found to do
    blobs/sha256/ab/<hex>                bytes, immutable; <hex>.<n> is a later generation of the same bytes
    names/<ns>/<name>/v/<8 digits>       a version: names the manifest. The visibility point
    names/<ns>/<name>/rm/<8 digits>/<8 digits>   removals and restorations of a version; the highest wins
    names/<ns>/<name>/alias/<alias>/<8 digits>   moves of an alias; the highest wins
    referrers/<hex>/<hex>/<8 digits>     manifests attached to a manifest (reports, signatures); the highest wins
    txn/intent/<id>, txn/outcome/<id>    publications under way; outcomes `abort` stay for ever
    gc/condemned/ab/<hex>[.<n>]          blob keys that nobody may begin to rely on; stay for ever
    trash/<key>                          what gc removed
    tmp/                                 files being written; reserve-1 and -2: room for rm and gc on a full disk

Why blobs have generations: a collector that was suspended may delete a key long after everybody forgot it. So a key
that was ever condemned is never relied on again; whoever needs the same bytes puts them under the next generation.
"""

from __future__ import annotations

from deltacompress.files import places

ZOO = places.ZOO
BLOBS = "blobs/sha256/"
NAMES = "names/"
REFERRERS = "referrers/"
INTENTS = "txn/intent/"
OUTCOMES = "txn/outcome/"
CONDEMNED = "gc/condemned/"
TRASH = "trash/"
TEMPORARY = "tmp/"
DIGITS = 8
LAST_NUMBER = 10**DIGITS - 1


def blob_key(digest: str, generation: int) -> str:
    """Key of the blob with sha256 `digest` (hex)."""
    return BLOBS + _leaf(digest, generation)


def condemned_key(digest: str, generation: int) -> str:
    """Key of the mark that condemns a blob key."""
    return CONDEMNED + _leaf(digest, generation)


def blob_of(key: str) -> tuple[str, int] | None:
    """(digest, generation) of a blob key or a mark's key, or None if it is neither."""
    for prefix in (BLOBS, CONDEMNED):
        if key.startswith(prefix):
            digest, _, generation = key.rpartition("/")[2].partition(".")
            if (
                len(digest) == 64
                and not digest.strip("0123456789abcdef")
                and (not generation or (len(generation) <= 18 and generation.isdecimal() and generation.isascii()))
                and key == prefix + _leaf(digest, int(generation or 0))
            ):
                return digest, int(generation or 0)
    return None


def name_prefix(name: str) -> str:
    """Prefix of everything about `namespace/name`."""
    return f"{NAMES}{name}/"


def version_key(name: str, version: int) -> str:
    """Key of a version."""
    return f"{NAMES}{name}/v/{version:0{DIGITS}d}"


def removal_key(name: str, version: int, generation: int) -> str:
    """Key of the n-th removal or restoration of a version."""
    return f"{NAMES}{name}/rm/{version:0{DIGITS}d}/{generation:0{DIGITS}d}"


def alias_key(name: str, alias: str, generation: int) -> str:
    """Key of the n-th move of an alias."""
    return f"{NAMES}{name}/alias/{alias}/{generation:0{DIGITS}d}"


def referrer_key(subject: str, manifest: str, generation: int) -> str:
    """Key of the n-th attachment (or its end) of one manifest (digest) to another."""
    return f"{REFERRERS}{subject}/{manifest}/{generation:0{DIGITS}d}"


def number_of(key: str) -> int | None:
    """The number that a version, removal or alias key ends in, or None if it ends in none."""
    last = key.rpartition("/")[2]
    return int(last) if len(last) == DIGITS and last.isascii() and last.isdecimal() and int(last) else None


def _leaf(digest: str, generation: int) -> str:
    return f"{digest[:2]}/{digest}" + (f".{generation}" if generation else "")

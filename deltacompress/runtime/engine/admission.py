"""A variant's way into a runtime: all of it, or nothing of it, whatever ends it in between."""

from __future__ import annotations

from threading import RLock

from deltacompress.runtime.cache.variant_cache import VariantCache
from deltacompress.runtime.engine.tokenizers import Tokenizers
from deltacompress.runtime.variants.variant import Variant


def admit(
    variant: Variant, name: str, cache: VariantCache, tokenizers: Tokenizers, lock: RLock, *, verify: bool, pin: bool
) -> str | None:
    """Load an opened variant under this name; returns its note.

    Requests know it when this returns and not before: what fails or is interrupted leaves neither name nor slot taken.

    Args:
        lock: of whoever decides in `cache`; it is not held while the variant is read.
        verify, pin: as Runtime.load.

    Raises:
        InputError: the name is taken; operands that do not fit.
        IntegrityError: a part is damaged.
        BackendError: budget or slots are too few, or out of memory.
    """
    cache.check_free(name)
    sources = cache.read(variant)  # the long part: requests run meanwhile
    loaded = cache.made(name, variant, sources, verify=verify, pin=pin)
    try:
        with lock:
            cache.check_free(name)
            cache.add(loaded)
        note = variant.note()  # while it comes
        cache.confirm(loaded)  # and this one
        _ = variant.identity  # what was read was hashed meanwhile, and that may have failed
        with lock:
            tokenizers.add(name, variant.tokenizer_folder)
            cache.publish(loaded)
    except BaseException:
        with lock:
            if cache.drop(loaded):
                tokenizers.remove(name)
        raise
    return note

"""/admin/load, /admin/unload and /admin/drain: for whoever holds the admin key."""

from __future__ import annotations

from typing import Any

from deltacompress.errors import DeltaCompressError
from deltacompress.serving.client import Client
from deltacompress.serving.http.errors import ApiError, unknown_model, wrong
from deltacompress.serving.http.fields import Fields
from deltacompress.serving.messages import Load, Unload


async def load(body: dict[str, Any], client: Client) -> dict[str, Any]:
    """Load a variant: name, source, over, pin.

    Raises:
        ApiError: 400 with the reason, for whoever holds this key may know it.
    """
    fields = Fields(body)
    name, source, over = (fields.text(one, most=1024) for one in ("name", "source", "over"))
    pin = fields.flag("pin")
    fields.done()
    for field, value in (("name", name), ("source", source)):
        if not value:
            raise wrong(field, f"{field}: give one", "missing_required_parameter")
    assert name is not None
    assert source is not None
    if name == client.settings.base_name or any(one.name == name for one in client.state.variants):
        raise ApiError(409, f"the name {name!r} is taken; unload it first, or give another", param="name", code="taken")
    await _change(Load(client.number(), source, name, over, pin), client)
    return {"loaded": name}


async def unload(body: dict[str, Any], client: Client) -> dict[str, Any]:
    """Unload a variant that no request uses: name.

    Raises:
        ApiError: 404, or 409 with the reason.
    """
    fields = Fields(body)
    name = fields.text("name", most=1024)
    fields.done()
    if not name or all(one.name != name for one in client.state.variants):
        raise unknown_model(name or "")
    await _change(Unload(client.number(), name), client, status=409)
    return {"unloaded": name}


async def _change(order: Load | Unload, client: Client, status: int = 400) -> None:
    try:
        await client.change(order)
    except DeltaCompressError as error:
        raise ApiError(status, str(error), code=type(error).__name__) from error

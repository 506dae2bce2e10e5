"""Errors as a client sees them: a status, and OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from deltacompress.errors import BackendError, DeltaCompressError, IntegrityError, NumericsError
from deltacompress.serving.messages import Over, Refused
from deltacompress.zoo.errors import CacheFullError, StoreError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """What a request is answered with that cannot be served.

    param: the field it is about; code: a word that programs compare.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, dict(headers)

    def body(self) -> dict[str, Any]:
        """As OpenAI's API writes it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A request that makes no sense."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str) -> ApiError:
    """The model that was asked for is not here; the base never takes its place."""
    return ApiError(
        404, f"the model {name!r:.200} does not exist; see /v1/models", param="model", code="model_not_found"
    )


def unavailable(message: str, code: str, retry_after: int = 5) -> ApiError:
    """Not now; later, or elsewhere."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after)})


def model_unavailable(model: str, error: DeltaCompressError | None) -> ApiError:
    """A variant that cannot be had, or gives no answer; what the error says names files, and is for the log alone."""
    if isinstance(error, NumericsError):
        return ApiError(500, f"the model {model!r:.200} gives logits that are not finite", code="not_finite")
    match error:
        case IntegrityError():
            why = ": it is damaged, or was changed since it was loaded"
        case BackendError() | CacheFullError():
            why = ": there is no room for it, or the device does not take it"
        case StoreError():
            why = ": its zoo cannot be read"
        case _:
            why = ""
    return unavailable(f"the model {model!r:.200} cannot be served{why}", "model_unavailable", 30)


def too_late() -> ApiError:
    """No answer in the time that a request may take."""
    return ApiError(504, "the request took longer than it may", code="timeout")


def too_many(whose: str, retry_after: int) -> ApiError:
    """More calls than a key or a model may begin in a minute."""
    headers = {"retry-after": str(retry_after)}
    return ApiError(429, f"too many requests for {whose} in a minute", code="rate_limited", headers=headers)


def engine_gone() -> ApiError:
    """The engine's process ended; the server ends, too."""
    return unavailable("the engine ended", "engine_gone")


def draining() -> ApiError:
    """The server is about to end."""
    return unavailable("the server takes no new requests, it is draining", "draining")


def no_engine(*, failed: bool) -> ApiError:
    """Its process has ended; failed: by itself, not because the server ends."""
    return engine_gone() if failed else draining()


def of_refusal(refused: Refused, model: str, prompt: str) -> ApiError:
    """Why the engine did not take a call. prompt: the field that what it says is about, unless it names another."""
    match refused.reason:
        case "model":
            return unknown_model(model)
        case "full":
            return ApiError(429, "too many requests wait", code="queue_full", headers={"retry-after": "1"})
        case "busy":
            return unavailable("the model's chat template is busy with other conversations", "template_busy")
        case "prompt":
            return wrong(prompt, str(refused.failure), "context_length_exceeded")
        case "context":
            return wrong("max_tokens", str(refused.failure), "context_length_exceeded")
        case "input":
            where = refused.failure.where or ""
            return wrong("logit_bias" if where.endswith(": logit_bias") else prompt, str(refused.failure))
        case _:
            return ApiError(500, "the request could not be taken", code="internal")


def of_end(over: Over, model: str, *, gone: bool, stopping: bool) -> ApiError | None:
    """Why a call ended without an answer; None: it has one. gone: the engine is; stopping: the server is."""
    match over.finish:
        case "failed" if gone:
            return engine_gone()
        case "failed":  # what is wrong with it names files: that is for the log
            return model_unavailable(model, None if over.error is None else over.error.error())
        case "timeout":
            return too_late()
        case "cancelled" if stopping:
            return unavailable("the server ended before the answer did", "draining")
        case "cancelled":
            return ApiError(499, "the request was cancelled", code="cancelled")
        case _:
            return None

"""Our errors across gRPC: a status code and the text, and in trailing metadata the class, the remedy and the fields.

A servicer is decorated with `reports_errors` and simply raises; `received` and `rebuild` are the caller's side.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from jvlab import _errors as errors

KEY = "jvlab-error-bin"
MAX_BYTES = 4096  # of the entry; a larger one would be refused together with the whole answer
Code = grpc.StatusCode
LOST_REMEDY = "pool.status() and pool.logs() show what happened"
T = TypeVar("T", bound=type)


class CallFailed(errors.JvlabError):
    """A call that failed with this status code; `sent` is another servicer's error, if that is passed on."""

    def __init__(self, code: grpc.StatusCode, message: str, remedy: str = "", sent: Sent | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.code, self.sent = code, sent

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> CallFailed:
        """Another servicer's error, passed on as it came."""
        sent = received(error)
        return cls(error.code(), sent.message, sent.remedy, sent)


def refused(message: str, remedy: str = "") -> CallFailed:
    """The state of things does not allow the call."""
    return CallFailed(Code.FAILED_PRECONDITION, message, remedy)


@dataclass(frozen=True)
class Sent:
    """An error as it crossed the wire. `kind` is None if it was none of our classes."""

    message: str
    remedy: str = ""
    kind: type[errors.JvlabError] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    ours: bool = False  # by a servicer of ours, as opposed to gRPC itself


def status_of(error: errors.JvlabError) -> grpc.StatusCode:
    """The status code that an error travels with."""
    match error:
        case CallFailed():
            return error.code
        case errors.Unsupported():
            return Code.UNIMPLEMENTED
        case errors.LimitExceeded():
            return Code.OUT_OF_RANGE
        case errors.ConfigError():
            return Code.INVALID_ARGUMENT
        case errors.ReplicaLost():
            return Code.UNAVAILABLE
        case _:
            return Code.FAILED_PRECONDITION


async def abort(context: Any, error: errors.JvlabError) -> None:
    """End a call with this error."""
    kind, fields = type(error).__name__, error.fields
    if isinstance(error, CallFailed):
        known = error.sent
        kind, fields = (known.kind.__name__, known.fields) if known is not None and known.kind is not None else ("", {})
    remedy = error.remedy
    entry = json.dumps({"kind": kind, "remedy": remedy, "fields": {k: v for k, v in fields.items() if _is_plain(v)}})
    if len(entry) > MAX_BYTES:
        remedy = remedy[: MAX_BYTES // 8]
        entry = json.dumps({"kind": kind, "remedy": remedy})
    text = f"{error.message}\n  → {remedy}" if remedy else error.message
    await context.abort(status_of(error), text, trailing_metadata=((KEY, entry.encode()),))


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def reports_errors(servicer: T) -> T:
    """Class decorator of a servicer: what its methods raise of our errors ends the call with that error.

    A servicer's `explain(error)`, if it has one, may first translate an exception.
    """
    for name, method in list(vars(servicer).items()):
        if name[0].isupper() and callable(method):
            setattr(servicer, name, _reporting(method))
    return servicer


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: Any) -> Any:
            try:
                async with contextlib.aclosing(method(self, request, context)) as messages:
                    async for message in messages:
                        yield message
            except Exception as error:
                await _report(self, error, context)

        return stream

    @functools.wraps(method)
    async def reply(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:
            await _report(self, error, context)

    return reply


async def _report(servicer: Any, error: Exception, context: Any) -> None:
    explain = getattr(servicer, "explain", None)
    meant = explain(error) if explain is not None else error
    if not isinstance(meant, errors.JvlabError):
        raise error
    await abort(context, meant)


def received(error: grpc.aio.AioRpcError) -> Sent:
    """The error of a failed call."""
    text = error.details() or error.code().name
    entry = next((value for key, value in error.trailing_metadata() or () if key == KEY), None)
    if entry is None:
        return Sent(text)
    plain = json.loads(entry)
    remedy = str(plain["remedy"])
    kind = getattr(errors, plain["kind"], None)
    known = kind if isinstance(kind, type) and issubclass(kind, errors.JvlabError) else None
    return Sent(text.removesuffix(f"\n  → {remedy}"), remedy, known, plain.get("fields", {}), ours=True)


def rebuild(sent: Sent) -> errors.JvlabError | None:
    """The error of ours that was raised on the other side, if it was one."""
    return None if sent.kind is None else sent.kind(sent.message, remedy=sent.remedy, **sent.fields)

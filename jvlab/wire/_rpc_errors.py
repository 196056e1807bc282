"""Our errors across gRPC: status code and text, with class, remedy and fields in the trailing metadata.

A servicer decorated with `reports_errors` simply raises; `received` and `rebuild` are the caller's side. What gRPC
itself reports (a connection, a bug in a servicer) is put into plain words by `in_words`: its own are not for users.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from jvlab import _errors as errors

KEY = "jvlab-error-bin"
MAX_BYTES = 4096  # of the metadata entry; gRPC rejects the whole reply if it is larger
Code = grpc.StatusCode
LOST_REMEDY = "pool.status() and pool.logs() show what happened"
T = TypeVar("T", bound=type)
WORDS = {  # of what gRPC itself reports
    Code.OK: "it ended",
    Code.CANCELLED: "the call was cancelled",
    Code.DEADLINE_EXCEEDED: "the time was over",
    Code.RESOURCE_EXHAUSTED: "a limit was reached",
    Code.UNIMPLEMENTED: "it does not know this call; is it another version of jvlab?",
    Code.INTERNAL: "the connection failed",
    Code.UNAVAILABLE: "it is out of reach",
    Code.UNAUTHENTICATED: "the token is wrong or missing",
}
UNTOLD = "it failed for a reason it does not tell"
_CAUSES = (  # (what gRPC's text has, in words); the first that fits
    (r"refused", "nothing listens there"),
    (
        r"handshake|\bssl|certificate|peer name",
        "TLS failed; is it the right certificate?",
    ),
    (r"DNS|resolution|resolve|empty address", "its address cannot be resolved"),
    (
        r"keepalive|ping timeout|timed out|timeout occurred|no route|unreachable",
        "it is out of reach",
    ),
    (
        r"socket closed|reset by peer|broken pipe|goaway|rst_stream|stream removed"
        r"|error from core|channel .*(clos|shut)|EOF",
        "the connection was closed",
    ),
)
_BUG = re.compile(r"Unexpected <class '([\w.]+)'>: (.*)", re.DOTALL)
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
_OWN = re.compile(  # gRPC's vocabulary
    r"\b("
    + "|".join(code.name for code in Code if code is not Code.OK)
    + r"|RPC|HTTP2?|FD|Method not found)\b"
    r"|(?i:grpc|ipv[46]:|unix:|channel|cancelled|deadline exceeded|all addresses)"
)


class CallFailed(errors.JvlabError):
    """A call that failed with this status code; `sent` is another servicer's error that is passed on."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        remedy: str = "",
        sent: RemoteError | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code
        self.sent = sent

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> CallFailed:
        """Another servicer's error, passed on unchanged."""
        sent = received(error)
        return cls(error.code(), sent.message, sent.remedy, sent)


def refused(message: str, remedy: str = "") -> CallFailed:
    """The current state does not allow the call."""
    return CallFailed(Code.FAILED_PRECONDITION, message, remedy)


@dataclass(frozen=True)
class RemoteError:
    """An error as received over gRPC. `kind` is None if it is not one of our classes."""

    message: str
    remedy: str = ""
    kind: type[errors.JvlabError] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    ours: bool = False  # raised by one of our servicers, not by gRPC itself


def status_of(error: errors.JvlabError) -> grpc.StatusCode:
    """The status code for an error."""
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
    kind = type(error).__name__
    fields = error.fields
    if isinstance(error, CallFailed):
        known = error.sent
        kind, fields = (
            (known.kind.__name__, known.fields)
            if known is not None and known.kind is not None
            else ("", {})
        )
    remedy = error.remedy
    entry = json.dumps(
        {
            "kind": kind,
            "remedy": remedy,
            "fields": {k: v for k, v in fields.items() if _is_plain(v)},
        }
    )
    if len(entry) > MAX_BYTES:
        remedy = remedy[: MAX_BYTES // 8]
        entry = json.dumps({"kind": kind, "remedy": remedy})
    text = f"{error.message}\n  → {remedy}" if remedy else error.message
    await context.abort(
        status_of(error), text, trailing_metadata=((KEY, entry.encode()),)
    )


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def reports_errors(servicer: T) -> T:
    """Class decorator of a servicer: one of our errors, raised by a method, ends the call with that error.

    A servicer's `explain(error)`, if defined, may first translate an exception.
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
                async with contextlib.aclosing(
                    method(self, request, context)
                ) as messages:
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
    translated = explain(error) if explain is not None else error
    if not isinstance(translated, errors.JvlabError):
        raise error
    await abort(context, translated)


def in_words(code: grpc.StatusCode, details: str | None) -> str:
    """What a status that gRPC itself made means; details that are not gRPC's are returned as they are."""
    text = (details or "").strip()
    if found := _BUG.match(text):
        return f"it failed with {found[1]}: {found[2]}"
    if found := _TOO_LARGE.search(text):
        return f"a message of {found[1]} bytes is over the limit of {found[2]}"
    for pattern, words in _CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            return words
    if text and not _OWN.search(text):
        return text
    return WORDS.get(code, UNTOLD)


def received(error: grpc.aio.AioRpcError) -> RemoteError:
    """The error of a failed call."""
    entry = next(
        (value for key, value in error.trailing_metadata() or () if key == KEY), None
    )
    if entry is None:
        return RemoteError(in_words(error.code(), error.details()))
    text = error.details() or WORDS.get(error.code(), UNTOLD)
    plain = json.loads(entry)
    remedy = str(plain["remedy"])
    kind = getattr(errors, plain["kind"], None)
    known = (
        kind if isinstance(kind, type) and issubclass(kind, errors.JvlabError) else None
    )
    return RemoteError(
        text.removesuffix(f"\n  → {remedy}"),
        remedy,
        known,
        plain.get("fields", {}),
        ours=True,
    )


def rebuild(sent: RemoteError) -> errors.JvlabError | None:
    """The error raised on the other side, if it was one of ours."""
    return (
        None
        if sent.kind is None
        else sent.kind(sent.message, remedy=sent.remedy, **sent.fields)
    )

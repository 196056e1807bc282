"""Tokens, certificates and addresses: who may call, and where a server may listen."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError

MAX_MESSAGE = 64 * 2**20  # bytes, in both directions
NEVER_MS = 2**31 - 1
TOKEN_VARIABLE = "JVLAB_TOKEN"  # may be set by the user, for `jvlab gateway`


def new_token() -> str:
    return secrets.token_urlsafe(32)


def pool_key(token: str, http_url: str) -> str:
    """A pool's key: generates at this address, and does nothing else. Whoever has the lab's token can compute it."""
    made = hmac.digest(token.encode(), f"http key of {http_url}".encode(), "sha256")
    return made.hex()


def child_environment(**more: str) -> dict[str, str]:
    """Our environment for a child process, without the token: a child that needs it reads it from a pipe.

    An environment is inherited by every descendant and visible in /proc.
    """
    kept = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return {**kept, **more}


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Tls:
    """Paths of a server's certificate chain and private key, PEM."""

    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        """For a server that is not gRPC's."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self.certificate, self.key)
        return made

    def credentials(self) -> grpc.ServerCredentials:
        try:
            pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"TLS file cannot be read: {error}",
                remedy="give PEM files the user can read",
            ) from error
        return grpc.ssl_server_credentials([pair])


def options(*, keepalive: bool = True) -> list[tuple[str, Any]]:
    """Channel and server options: message limits, and keep-alive so that a vanished peer is noticed within a minute.

    Without keep-alive the system alone tells that a peer is gone. On one machine it always does, and a peer that is
    only stopped (Ctrl-Z, a debugger) keeps its connection.
    """
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.keepalive_time_ms", 30_000 if keepalive else NEVER_MS),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 0),
        # a peer that was started again is found soon (the default grows to 120 s), and at once by a new channel
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def authorization(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call."""
    return (("authorization", f"Bearer {token}"),)


def is_bearer(given: str | bytes, expected: bytes) -> bool:
    """Whether this is the expected value, compared in constant time; any bytes or characters are accepted."""
    raw = (
        given if isinstance(given, bytes) else given.encode("utf-8", "surrogateescape")
    )
    return hmac.compare_digest(raw, expected)


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a local socket, according to the kernel.

    Abstract Unix sockets have no permissions: any local user may connect.
    """
    pid_uid_gid = struct.Struct("3i")
    found = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size
    )
    return pid_uid_gid.unpack(found)[1]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call with a wrong token before reading any of its message."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = dict(handler_call_details.invocation_metadata or ())
        if is_bearer(metadata.get("authorization", ""), self._expected):
            return await continuation(handler_call_details)
        return _REFUSAL


async def _refuse(_: object, context: grpc.aio.ServicerContext):
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
    yield  # makes this a generator, as a streaming handler must be


# For unary and streaming methods: they are alike on the wire, and only a stream handler is called before the server has
# read a message. Without a deserializer, nothing that the caller sent is parsed.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)

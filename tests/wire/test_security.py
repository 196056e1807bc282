"""Where a gateway may listen, and over what a client may speak."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.engine._agent import Host, _pinned
from jvlab.wire import _channels, _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool):
    assert _security.is_loopback(host) is loopback


def test_a_client_never_sends_its_token_in_clear_text_over_a_network():
    with pytest.raises(errors.ConfigError, match="clear text"):
        jv.Lab.attach("10.1.2.3:7000", "token")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A self-signed certificate for localhost."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


def test_tls_carries_a_whole_lab(certificate: tuple[str, str]):
    with jv.Lab(tls=certificate) as lab:
        assert lab.status()["lab"] == lab.name
        assert lab.address != lab.public_address
        outside = jv.Lab.attach(lab.public_address, lab._token, tls_ca=certificate[0])
        assert outside.name == lab.name
        outside._leave()
        with pytest.raises(errors.ControlError):
            jv.Lab.attach(lab.public_address, lab._token)  # no TLS, no talk
        again = jv.Lab.attach(lab.name)
        assert again.name == lab.name
        again._leave()


def test_a_taken_port_is_a_clear_error():
    with jv.Lab() as lab:
        port = int(lab.address.rpartition(":")[2])
        with pytest.raises(errors.GatewayUnreachable, match="cannot listen"):
            jv.Lab(port=port)


# A certificate of its own, pinned by its fingerprint ----------------------------------------------------------------


class Impostor:
    """Somebody else's gRPC server with TLS and a certificate of its own: what does it learn?"""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.pem, key = _channels.make_certificate(["127.0.0.1"])
        impostor = self

        class Spy(grpc.ServerInterceptor):
            def intercept_service(self, continuation: Any, details: Any) -> Any:
                impostor.seen += [str(v) for _, v in details.invocation_metadata]
                return continuation(details)

        self._server = grpc.server(ThreadPoolExecutor(2), interceptors=[Spy()])
        pair = [(key.encode(), self.pem.encode())]
        credentials = grpc.ssl_server_credentials(pair)
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    @property
    def told(self) -> bool:
        """Whether the token reached it."""
        return any(TOKEN in text for text in self.seen)

    def close(self) -> None:
        assert self._server.stop(0).wait(60)


TOKEN = "a-token-that-nobody-else-may-see"


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    made = Impostor()
    yield made
    made.close()


def test_a_gateway_for_others_makes_its_certificate_and_says_how_to_join():
    with jv.Lab(host="0.0.0.0") as lab:
        words = shlex.split(lab.join_line)
        assert words[:3] == ["jvlab", "rollout", "--gateway"]
        assert words[3].partition(":")[0] == platform.node(), "0.0.0.0 is nobody's"
        assert words[4] == "--fingerprint"
        assert lab._token not in lab.join_line
        pin = words[5]
        port = words[3].rpartition(":")[2]
        address = f"127.0.0.1:{port}"
        outside = jv.Lab.attach(address, lab._token, fingerprint=pin)
        assert outside.name == lab.name
        assert outside.join_line == lab.join_line
        outside._leave()
        other = _channels.fingerprint(_channels.make_certificate(["127.0.0.1"])[0])
        with pytest.raises(errors.AuthError, match="another certificate") as caught:
            jv.Lab.attach(address, lab._token, fingerprint=other)
        assert "the line that this gateway printed" in caught.value.remedy
        with pytest.raises(errors.AuthError, match="refuses this token"):
            jv.Lab.attach(address, "wrong", fingerprint=pin)
        inside = lab.address
        with pytest.raises(errors.GatewayUnreachable):
            jv.Lab.attach(inside, lab._token, fingerprint=pin)  # speaks no TLS there
    with jv.Lab() as alone, pytest.raises(errors.ConfigError, match="this machine al"):
        alone.join_line  # noqa: B018


def test_the_command_prints_the_line_and_keeps_its_certificate(tmp_path: Path):
    """At the first start it is made, private; at the next one it is the same."""
    lines: list[str] = []
    for start in range(2):
        command = [sys.executable, "-m", "jvlab", "gateway", "--host", "0.0.0.0"]
        command += ["--folder", str(tmp_path), "--lab", "far"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(3)]
            process.terminate()
            assert process.wait(60) == 0
        assert said[1] == "gateway: another host joins with\n"
        lines.append(said[2].strip())
        assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600, start
    pins = {line.rpartition(" ")[2] for line in lines}
    assert pins == {_channels.fingerprint((tmp_path / "cert.pem").read_text())}


def test_an_impostor_never_gets_the_token(impostor: Impostor):
    with jv.Lab(host="0.0.0.0") as lab:
        right = lab.join_line.rpartition(" ")[2]
    with pytest.raises(errors.AuthError, match="another certificate"):
        jv.Lab.attach(impostor.address, TOKEN, fingerprint=right)
    host = Host(impostor.address, TOKEN)
    with pytest.raises(errors.AuthError, match="another certificate"):
        _pinned(host, right, Path())
    assert impostor.seen == [], "not even a call without the token"
    # the same server with its own fingerprint gets it: it would have been seen
    own = _channels.fingerprint(impostor.pem)
    with pytest.raises(errors.JvlabError):
        jv.Lab.attach(impostor.address, TOKEN, fingerprint=own, timeout=30)
    assert impostor.told


def test_a_channel_trusts_the_pinned_certificate_alone(impostor: Impostor):
    """Who answers with another certificate after it was fetched gets nothing either."""
    other = _channels.Trust(_channels.make_certificate(["127.0.0.1"])[0], "jvlab")
    client = Client(impostor.address, TOKEN, other)
    try:
        with pytest.raises(errors.ControlError):
            client.call("Describe", pb.DescribeRequest(), 3.0)
    finally:
        client.close()
    assert impostor.seen == []


@pytest.mark.parametrize(
    "given",
    [
        "",
        "sha256:",
        "ab" * 31,
        "ab" * 33,
        "sha256:" + "zz" * 32,
        "md5:" + "ab" * 16,
        "sha1:" + "ab" * 32,
        "sha256:" + "\u0661" * 64,
        "--token",
    ],
)
def test_a_malformed_fingerprint_says_what_one_is(given: str):
    with pytest.raises(errors.ConfigError, match="not a certificate's finger") as it:
        jv.Lab.attach("192.0.2.1:9", TOKEN, fingerprint=given)  # asked nobody
    assert "64 hex digits" in it.value.remedy


def test_fingerprints_are_read_as_openssl_writes_them(certificate: tuple[str, str]):
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in"]
    done = subprocess.run([*command, certificate[0]], capture_output=True, text=True)
    theirs = done.stdout.strip().partition("=")[2]
    ours = _channels.fingerprint(Path(certificate[0]).read_text())
    assert _channels.digest_of(theirs) == _channels.digest_of(ours)
    chain = Path(certificate[0]).read_text() + _channels.make_certificate(["x"])[0]
    assert _channels.fingerprint(chain) == ours, "the first is what a server shows"
    with jv.Lab(tls=certificate) as lab:  # a user's own, for an address of its own
        at = lab.public_address.replace("127.0.0.1", "localhost")
        outside = jv.Lab.attach(at, lab._token, fingerprint=theirs)
        assert outside.name == lab.name
        outside._leave()
    with pytest.raises(errors.ConfigError, match="pass one of them"):
        jv.Lab.attach(at, TOKEN, fingerprint=theirs, tls_ca=certificate[0])

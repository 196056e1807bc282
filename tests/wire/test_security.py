"""Where a gateway may listen, and over what a client may speak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire import _security


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


def test_a_bind_beyond_loopback_without_tls_is_refused():
    with pytest.raises(errors.ConfigError, match="without TLS"):
        jv.Lab(host="0.0.0.0")
    command = [sys.executable, "-m", "jvlab", "gateway", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "refusing to listen on 0.0.0.0 without TLS" in done.stderr


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

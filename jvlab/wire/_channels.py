"""gRPC channels between hosts: trusted certificates, a lab's self-signed one, and the address other hosts see."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import platform
import secrets
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._deadline import Deadline
from jvlab._errors import (
    AuthError,
    ConfigError,
    GatewayUnreachable,
    MissingDependency,
)
from jvlab.wire import _security as security

OWN_NAME = "jvlab"  # in every certificate that a lab makes for itself
VALID_DAYS = 30


@dataclass(frozen=True)
class Trust:
    """The certificate to trust: PEM text, and the name it must contain ("": the address's own)."""

    pem: str = ""
    name: str = ""

    @classmethod
    def of_file(cls, path: str | None, name: str = "") -> Trust:
        """From the file of a CA's or a server's certificate; an empty Trust without a path."""
        if path is None:
            return cls()
        try:
            return cls(Path(path).read_text(), name)
        except OSError as error:
            raise ConfigError(
                f"TLS file cannot be read: {error}",
                remedy="give a PEM file the user can read",
            ) from error


def host_of(address: str) -> str:
    """The host of "host:port", without brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{address!r} is not an address", remedy="write it as HOST:PORT"
        )
    return host.strip("[]")


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_channel(address: str, trust: Trust) -> grpc.aio.Channel:
    """A channel on which the token may travel: plain text on this machine only."""
    options = security.options()
    if trust.pem:
        if trust.name:
            options.append(("grpc.ssl_target_name_override", trust.name))
        return grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(trust.pem.encode()), options=options
        )
    if not security.is_loopback(host_of(address)):
        raise ConfigError(
            f"{address} is not on this machine: the token would cross the network in clear text",
            remedy="give the fingerprint that the gateway printed, or its certificate: --fingerprint sha256:…, "
            "--tls-ca FILE, or these arguments of jv.Lab.attach",
            address=address,
        )
    return grpc.aio.insecure_channel(address, options=options)


# A pinned certificate: instead of its file, its SHA-256 digest, which fits into a line to paste. It is no secret.

FINGERPRINT = "sha256:"
FETCH_SECONDS = 10.0


def fingerprint(pem: str) -> str:
    """The digest of a certificate, the first of a chain: "sha256:" and 64 hex digits."""
    end = "-----END CERTIFICATE-----"
    first = pem[: pem.index(end) + len(end)]
    return FINGERPRINT + hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


def digest_of(given: str) -> bytes:
    """The digest that a fingerprint names; colons between its digits, as openssl writes them, do no harm.

    >>> digest_of("SHA256:" + "AB:" * 31 + "ab").hex() == "ab" * 32
    True
    """
    text = given.strip().lower()
    digits = text.removeprefix(FINGERPRINT).replace(":", "")
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(
            f"{given!r} is not a certificate's fingerprint",
            remedy=f'"{FINGERPRINT}" and 64 hex digits, as the gateway printed it and `lab.join_line` has it',
        )
    return bytes.fromhex(digits)


def fetch_pinned(address: str, pin: str, deadline: Deadline) -> Trust:
    """The certificate that this address shows, if it is the one of the fingerprint.

    Nothing but a TLS handshake takes place: whoever has another certificate learns no token. Channels then trust this
    certificate alone, so that only who has its key can answer.
    """
    wanted = digest_of(pin)
    host = host_of(address)
    port = int(address.rpartition(":")[2])
    seconds = max(deadline.within(FETCH_SECONDS), 0.001)
    try:
        # nothing is believed of what it shows except its digest
        pem = ssl.get_server_certificate((host, port), timeout=seconds)
    except ssl.SSLError as error:
        raise GatewayUnreachable(
            f"{address} does not speak TLS: {error}",
            remedy="is this the port of a gateway that listens beyond loopback?",
        ) from error
    except OSError as error:
        raise GatewayUnreachable(
            f"no gateway at {address}: {error}",
            remedy="does it run, and is the address right?",
        ) from error
    if not hmac.compare_digest(digest_of(fingerprint(pem)), wanted):
        raise AuthError(
            f"{address} shows another certificate than that of {pin}: no token was sent",
            remedy="paste the line that this gateway printed; if that is what you did, somebody else answers there",
            address=address,
        )
    return Trust(pem, OWN_NAME if _is_own(pem) else "")


def _is_own(pem: str) -> bool:
    """Whether a lab made this certificate for itself: then it has a name that does not depend on the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pem)
    names = [
        name
        for certificate in context.get_ca_certs()
        for name in certificate.get("subjectAltName", ())
    ]
    return ("DNS", OWN_NAME) in names


def join_line(address: str, pin: str) -> str:
    """The command by which another host joins. The token is not in it: it would stay in that shell's history."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") in ("0.0.0.0", "::"):  # every address of this machine
        address = f"{platform.node()}:{port}"
    return f"jvlab rollout --gateway {address} --fingerprint {pin}"


def read_token(path: str) -> str:
    """The token in a file that others can't read."""
    file = Path(path)
    try:
        text = file.read_text().strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the token file cannot be read: {error}",
            remedy="lab.write_token(FILE) makes one",
        ) from error
    if not text or any(c.isspace() for c in text):
        raise ConfigError(
            f"{path} holds no token",
            remedy="one line, nothing else; lab.write_token(FILE) makes one",
        )
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read by others (mode {mode & 0o777:o}), but whoever has the token has the lab",
            remedy=f"chmod 600 {path}",
        )
    return text


def write_private(path: str | Path, text: str) -> Path:
    """Write a file that only its owner can ever read, atomically.

    It is created under an unguessable new name (O_EXCL) and renamed, so neither a symbolic link nor a file that is open
    elsewhere is written to.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}.new")
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
    )
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # no deadline: UDP: nothing is sent, nobody asked
        except OSError as error:
            raise ConfigError(
                f"no route to {host}: {error}", remedy="is the name right?"
            ) from error
        return probe.getsockname()[0]


def _san(host: str) -> Any:
    """A host as a certificate's subject alternative name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def tls_folder(folder: Path, host: str) -> security.Tls:
    """The lab's own certificate and key in this folder, created if missing."""
    certificate = folder / "cert.pem"
    key = folder / "key.pem"
    if not (certificate.exists() and key.exists()):
        made = make_certificate([host])
        write_private(key, made[1])
        write_private(certificate, made[0])  # last: once it exists, so does the key
    return security.Tls(str(certificate), str(key))


def make_certificate(addresses: list[str]) -> tuple[str, str]:
    """(certificate, key) as PEM text: self-signed, for this lab and these hosts."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingDependency(
            "a lab on several machines needs a certificate, and making one needs the package cryptography",
            remedy='pip install cryptography, or pass your own: tls=("cert.pem", "key.pem")',
        ) from error
    from datetime import UTC, datetime, timedelta

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, OWN_NAME)])
    names: list[x509.GeneralName] = [x509.DNSName(OWN_NAME)]
    names += [_san(address) for address in addresses]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(
        serialization.Encoding.PEM
    ).decode(), private.decode()

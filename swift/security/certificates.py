"""A certificate authority for one machine or one drill. An organisation has its own; it needs none of this."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swift.security.files import write_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DAYS_DEFAULT = 30.0
_BACKDATED = datetime.timedelta(minutes=5)  # clocks differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class PrivateCA:
    """Its own key stays in memory: what it is to sign, it signs while it is there."""

    def __init__(self, directory: Path, *, days: float = DAYS_DEFAULT) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self._days = days
        self._key = _new_key()
        self._signed = _build("swift private CA", self._key, None, self._key, (), days)
        write_file(self.certificate, _pem(self._signed), secret=False)

    def issue(self, name: str, *hosts: str, days: float | None = None) -> Pair:
        """``name.pem`` and ``name.key``, for a server at `hosts` or, without any, a client. Replaces older ones."""
        from cryptography.hazmat.primitives import serialization as s

        key = _new_key()
        made = _build(name, key, self._signed, self._key, hosts, self._days if days is None else days)
        pair = Pair(certificate=self.directory / f"{name}.pem", key=self.directory / f"{name}.key")
        secret = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        write_file(pair.key, secret, secret=True)
        write_file(pair.certificate, _pem(made), secret=False)
        return pair


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _build(
    name: str,
    key: "EllipticCurvePrivateKey",
    issuer: "x509.Certificate | None",
    issuer_key: "EllipticCurvePrivateKey",
    hosts: tuple[str, ...],
    days: float,
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False
        )
    return builder.sign(issuer_key, SHA256())


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

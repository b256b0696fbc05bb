"""`swift-ft credentials init`: a cluster's certificate authority, certificates, signing key and tokens, in one command.

A directory has a folder for each kind of holder, to be copied to its machines::

    authority/  ca.key, signing/KID.pem, verifying/KID.pem     signs certificates and tokens: keep it where it is
    services/   ca.pem, tls.pem, tls.key, token, KID.pem       log servers and coordinators
    ranks/      ca.pem, tls.pem, tls.key, token                launchers and ranks
    operators/  ca.pem, tls.pem, tls.key, token                people: status, inspect, logs, ...

`SWIFT_CREDENTIALS` names the directory, a copy of it without ``authority``, or one folder of it
(`swift_ft.credentials.own_folder`). The files are flat, so that a Kubernetes secret can hold a folder.
"""

import datetime
import ipaddress
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swift_ft.cli_parser import Parser, command, local_directory
from swift_ft.credentials import CA_FILE, CERTIFICATE_FILE, ENV_CREDENTIALS, TOKEN_FILE
from swift_ft.errors import UsageError
from swift_ft.files import make_directory
from swift_ft.text import job_called, tell
from swift_ft.tokens import EVERY_JOB, Role, SigningKey, new_key, read_file, read_secret, write_file
from swift_ft.tools.token import HOURS_MAX

HOLDERS = {
    "services": frozenset({Role.COORDINATOR}),
    "ranks": frozenset({Role.WRITER, Role.REPLAYER}),
    "operators": frozenset({Role.OPERATOR}),
}
"""Folder → roles of its token."""
_AUTHORITY_DAYS = 3650
_DAYS_MAX = 825
"""Days for which clients of today accept a server's certificate at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    certificate: Path
    key: Path


class CertificateAuthority:
    """A certificate authority. Its key is a file, so it can sign for machines that come later."""

    def __init__(self, directory: Path) -> None:
        """Loads ``ca.pem`` and ``ca.key`` of the directory, or makes them. Raises UsageError if they cannot be used."""
        make_directory(directory)
        self.directory, self.certificate, key = directory, directory / CA_FILE, directory / "ca.key"
        if key.exists():
            try:
                loaded = s.load_pem_private_key(read_secret(key, "authority"), password=None)
                self._certificate = x509.load_pem_x509_certificate(read_file(self.certificate, "authority"))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{directory}: its authority cannot be used: {error}") from None
            if not isinstance(loaded, ec.EllipticCurvePrivateKey):
                raise UsageError(f"{key}: no key of an elliptic curve: use an empty directory")
            self._key = loaded
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("swift-ft authority")
        made = _builder(name, name, self._key, _AUTHORITY_DAYS)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._certificate = made.add_extension(identifier, critical=False).sign(self._key, hashes.SHA256())
        write_file(self.certificate, self._certificate.public_bytes(s.Encoding.PEM), secret=False)
        write_file(key, _secret(self._key), secret=True)

    def issue(self, name: str, *hosts: str, folder: Path | None = None, days: float = 365.0) -> Pair:
        """Writes ``name.pem`` and ``name.key`` for a server at `hosts` or, without hosts, for a client. Replaces an
        older certificate, and keeps its key, so that the two always belong together. The default folder is the
        authority's."""
        folder = folder or self.directory
        pair = Pair(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
        private = _kept(pair.key) or ec.generate_private_key(ec.SECP256R1())
        made = _builder(_name(f"swift-ft {folder.name} {name}"), self._certificate.subject, private, days)
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(identifier, critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            made = made.add_extension(names, critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        write_file(pair.key, _secret(private), secret=True)
        write_file(pair.certificate, signed.public_bytes(s.Encoding.PEM), secret=False)
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _secret(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _kept(key: Path) -> ec.EllipticCurvePrivateKey | None:
    """Returns the key of that file; None if it is not there, cannot be used, or others can read it."""
    try:
        loaded = s.load_pem_private_key(read_secret(key, "key"), password=None)
    except (UsageError, ValueError, TypeError):
        return None
    return loaded if isinstance(loaded, ec.EllipticCurvePrivateKey) else None


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make(
    directory: Path,
    hosts: Collection[str],
    *,
    job: str = EVERY_JOB,
    hours: float = 24.0,
    days: float = 365.0,
) -> Path:
    """Makes or renews all files below `directory`; the authority and signing keys stay once they are there. The newest
    key signs.

    Args:
        hosts: names and addresses at which services are reached, beside loopback's and those known already.
        job: whose ranks the token of `ranks` is for.
        hours: the tokens' lifetime.
        days: the certificates' lifetime.

    Returns the signing key. Raises UsageError if a file cannot be used.
    """
    authority = CertificateAuthority(directory / "authority")
    keys = list((directory / "authority" / "signing").glob("*.pem"))
    newest = max(keys, key=lambda path: path.stat().st_mtime_ns, default=None)
    signing = newest or new_key(directory / "authority")[0]
    key = SigningKey.load(signing, "authority")
    for holder, roles in HOLDERS.items():
        folder = directory / holder
        make_directory(folder)
        write_file(folder / CA_FILE, authority.certificate.read_bytes(), secret=False)
        served = ["localhost", "127.0.0.1", "::1", *hosts] if holder == "services" else []
        served += [host for host in _served(folder / CERTIFICATE_FILE) if host not in served]
        authority.issue(Path(CERTIFICATE_FILE).stem, *served, folder=folder, days=days)
        token = key.mint(job if holder == "ranks" else EVERY_JOB, roles, hours * 3600, subject=holder)
        write_file(folder / TOKEN_FILE, f"{token}\n".encode(), secret=True)
    for public in (directory / "authority" / "verifying").glob("*.pem"):
        write_file(directory / "services" / public.name, public.read_bytes(), secret=False)
    return signing


def only_accepted(directory: Path) -> list[Path]:
    """Returns the keys that services accept, but that the authority's folder lacks: it may have been removed there to
    revoke its tokens, or belong to somebody else."""
    known = {path.name for path in (directory / "authority" / "verifying").glob("*.pem")}
    return [
        path
        for path in sorted((directory / "services").glob("*.pem"))
        if path.name not in {*known, CA_FILE, CERTIFICATE_FILE}
    ]


def _served(certificate: Path) -> list[str]:
    """Returns the names and addresses of a server's certificate; none if it is not there, or a client's."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def parser() -> Parser:
    parser = Parser(
        prog="swift-ft credentials",
        description="Makes a cluster's certificates, signing key and tokens; a second time, it renews them.",
    )
    add = parser.add_argument
    add("action", choices=["init"], help="make what is missing, renew certificates and tokens")
    add("directory", type=local_directory, metavar="DIR")
    add(
        "--hosts",
        default="",
        metavar="HOST,HOST",
        help="names and addresses of the machines with log servers and coordinators, as clients call them; those named "
        "before stay",
    )
    add("--job", default=EVERY_JOB, metavar="NAME", help="the job of the ranks' token (default: every job)")
    add("--hours", type=float, default=24.0, metavar="H", help="lifetime of tokens (default %(default)g)")
    add(
        "--days",
        type=float,
        default=365.0,
        metavar="D",
        help="lifetime of certificates (default %(default)g)",
    )
    return parser


def parse(argv: Sequence[str]) -> Namespace:
    given = parser().parse_args(argv)
    given.hosts = [host.strip() for host in given.hosts.split(",") if host.strip()]
    for host in given.hosts:
        if (
            (":" in host and isinstance(_alternative(host), x509.DNSName))
            or not host.isascii()
            or "/" in host
        ):
            raise UsageError(f"credentials: --hosts {host}: a name or an address, without a port")
    if not 0 < given.hours <= HOURS_MAX:
        raise UsageError(f"credentials: --hours {given.hours:g}: more than 0, at most {HOURS_MAX}")
    if not 0 < given.days <= _DAYS_MAX:
        raise UsageError(f"credentials: --days {given.days:g}: more than 0, at most {_DAYS_MAX}")
    if given.job != EVERY_JOB:
        given.job = job_called(given.job)
    return given


@command
def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    signing = make(given.directory, given.hosts, job=given.job, hours=given.hours, days=given.days)
    print(
        f"copy {given.directory}/services, ranks and operators to the machines that need them, and set\n"
        f"{ENV_CREDENTIALS} to the folder there; keep {given.directory}/authority here.\n"
        f"Tokens are good for {given.hours:g} h, certificates for {given.days:g} days: the same command renews them.\n"
        f"A token that renews itself: swift-ft token --key {signing} --job '{given.job}' --role writer,replayer "
        f"--hours 1 --out {given.directory}/ranks/{TOKEN_FILE} --renew"
    )
    for path in only_accepted(given.directory):
        tell(
            f"{path} is not in authority/verifying: remove it on all machines too, or its tokens still count"
        )
    return 0

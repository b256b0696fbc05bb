"""What both servers' programs share: flags, the protected port, exit codes, signals, what is announced.

On a non-loopback address a server requires TLS and tokens, unless --insecure is given. Its use is reported in the start
event and by every health check.
"""

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc

from swift_ft import events, logs
from swift_ft.cli_parser import (
    Parser,
    add_metrics_arguments,
    end_process,
    host_and_port,
    is_loopback,
    write_address,
)
from swift_ft.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, act_as, own_folder
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.logs import end_process_on_uncaught
from swift_ft.tokens import Authority, Revoked, Signature, read_file, read_secret, signature
from swift_ft_services.authorization import Audit, CallLimits, Gate

CALLS_PER_TOKEN_S_MIN = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """Security options of the command line, validated together with the address."""

    listen: str
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """CA that must have signed the clients' certificates."""
    token_keys: Path | None = None
    insecure_allowed: bool = False
    revoked: Path | None = None
    """File of revoked tokens."""
    audit: Path | None = None
    service: str = ""
    """Service name in the audit file."""
    limits: CallLimits = field(default_factory=CallLimits)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--tls-cert and --tls-key: give both, or neither")
        if self.client_ca is not None and self.certificate is None:
            raise UsageError("--tls-client-ca: needs --tls-cert and --tls-key as well")
        if self.revoked is not None and self.token_keys is None:
            raise UsageError("--revoked: revokes tokens, so give --token-keys as well")
        host_and_port(self.listen, "--listen")
        if self.insecure and not self.insecure_allowed:
            missing = [
                flags
                for given, flags in (
                    (self.certificate, "--tls-cert and --tls-key"),
                    (self.token_keys, "--token-keys"),
                )
                if given is None
            ]
            raise UsageError(
                f"--listen {self.listen} is not loopback: give {' and '.join(missing)}, "
                "or --insecure if the network is trusted"
            )

    @property
    def insecure(self) -> bool:
        """True if a client on another machine can read or send without TLS or without a token."""
        loopback = is_loopback(self.listen.rpartition(":")[0])
        return not loopback and (self.certificate is None or self.token_keys is None)

    @property
    def shown(self) -> str:
        """Protection for health checks: words separated by commas; empty on a plain loopback port."""
        return ",".join(word.replace("_", "-") for word, given in self.fields().items() if given)

    def fields(self) -> Mapping[str, bool]:
        return {
            "tls": self.certificate is not None,
            "mutual_tls": self.client_ca is not None,
            "tokens": self.token_keys is not None,
            "insecure": self.insecure,
        }

    def gate(self) -> Gate:
        """Creates the gate. Raises UsageError if there is no key in --token-keys, or if a file cannot be used."""
        revoked = None if self.revoked is None else Revoked(self.revoked)
        authority = None if self.token_keys is None else Authority(self.token_keys, revoked)
        audit = None if self.audit is None else Audit(self.audit, self.service)
        return Gate(authority, self.limits, self.shown, audit)

    def credentials(self) -> grpc.ServerCredentials | None:
        """Returns the TLS credentials, None without TLS. Raises UsageError for a file that cannot be used."""
        if self.certificate is None:
            return None
        return _Certificates(self).credentials()


def bind(server: grpc.Server | grpc.aio.Server, protection: Protection) -> int:
    """Binds the port and returns it. Raises UsageError if it is in use or not allowed."""
    credentials = protection.credentials()
    try:
        if credentials is None:
            port = server.add_insecure_port(protection.listen)
        else:
            port = server.add_secure_port(protection.listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise UsageError(
            f"--listen {protection.listen}: cannot listen there: the port is in use or not allowed; give another"
        )
    return port


class _Certificates:
    """Checks the files at every handshake, so that renewed certificates are loaded without a restart."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection
        self._lock = threading.Lock()
        self._signature: Signature = ()

    def credentials(self) -> grpc.ServerCredentials:
        self._signature = self._now()
        return grpc.dynamic_ssl_server_credentials(
            self._read(), self._changed, require_client_authentication=self._protection.client_ca is not None
        )

    def _now(self) -> Signature:
        of = self._protection
        return signature([path for path in (of.certificate, of.key, of.client_ca) if path is not None])

    def _read(self) -> grpc.ServerCertificateConfiguration:
        of = self._protection
        assert of.certificate is not None
        assert of.key is not None
        certificate, key = read_file(of.certificate, "--tls-cert"), read_secret(of.key, "--tls-key")
        _check_pair(certificate, key, of)
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)],
            None if of.client_ca is None else read_file(of.client_ca, "--tls-client-ca"),
        )

    def _changed(self) -> Any:
        """(gRPC, at a handshake) Returns None to keep the certificate: if the files are unchanged, or do not match, as
        they may while being renewed."""
        with self._lock:
            now = self._now()
            if now == self._signature:
                return None
            self._signature = now
            try:
                made = self._read()
            except UsageError as error:
                events.emit("certificate_not_reloaded", reason=str(error))
                return None
            events.emit("certificate_reloaded")
            return made


def _check_pair(certificate: bytes, key: bytes, of: Protection) -> None:
    """Raises UsageError unless key and certificate match: gRPC would accept them and silently fail every handshake."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        public = x509.load_pem_x509_certificate(certificate).public_key()
    except ValueError:
        raise UsageError(f"--tls-cert {of.certificate}: not a certificate in PEM") from None
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError):
        raise UsageError(f"--tls-key {of.key}: not a private key in PEM without a password") from None
    if private.public_key() != public:
        raise UsageError(f"--tls-key {of.key}: not the key of the certificate in {of.certificate}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address to listen on; port 0 takes any free one (default %(default)s)",
    )
    group = parser.add_argument_group(
        "security", "see docs/security.md; SWIFT_CREDENTIALS names a directory with all of the first four"
    )
    add = group.add_argument
    add(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="the server's certificate chain; reloaded when it changes",
    )
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, mode 0600")
    add(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="clients must show a certificate that this CA has signed",
    )
    add(
        "--token-keys",
        type=Path,
        metavar="DIR",
        help="directory of public keys; every call needs a token that is signed with one of these keys",
    )
    add(
        "--revoked",
        type=Path,
        metavar="FILE",
        help="tokens that do not count any more, one per line: its id, or sub:NAME; read again when it changes",
    )
    add(
        "--audit",
        type=Path,
        metavar="FILE",
        help="append a JSON line for each change that a caller makes, and for each denied call (FILE.1: older lines)",
    )
    add("--insecure", action="store_true", help="allow --listen off loopback without TLS and tokens")
    add(
        "--calls-per-peer",
        type=int,
        default=CallLimits().per_peer,
        metavar="N",
        help="limit of calls under way from one address (default %(default)s)",
    )
    add(
        "--calls-per-token-s",
        type=float,
        default=CallLimits().per_token_s,
        metavar="N",
        help="limit of calls that one token may begin in a second; 0: no limit (default %(default)g)",
    )


def protection_of(options: argparse.Namespace, service: str = "") -> Protection:
    if options.calls_per_token_s < 0 or 0 < options.calls_per_token_s < CALLS_PER_TOKEN_S_MIN:
        raise UsageError(
            f"--calls-per-token-s must be 0, which is any number, or at least {CALLS_PER_TOKEN_S_MIN:g}: one token "
            "is all that a job's ranks have"
        )
    if options.calls_per_peer < 1:
        raise UsageError("--calls-per-peer must be at least 1")
    act_as("services")
    folder = own_folder()

    def file(given: Path | None, name: str) -> Path | None:
        return folder / name if given is None and folder is not None else given

    return Protection(
        listen=options.listen,
        certificate=file(options.tls_cert, CERTIFICATE_FILE),
        key=file(options.tls_key, KEY_FILE),
        client_ca=file(options.tls_client_ca, CA_FILE),
        token_keys=file(options.token_keys, ""),
        insecure_allowed=options.insecure,
        revoked=options.revoked,
        audit=options.audit,
        service=service,
        limits=CallLimits(per_peer=options.calls_per_peer, per_token_s=options.calls_per_token_s),
    )


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--address-file", type=Path, help="host:port is written to this file once it serves")
    add_flags(parser)
    add_metrics_arguments(parser)
    logs.add_arguments(parser)


def run(
    name: str, parse: Callable[[], argparse.Namespace], serve: Callable[[argparse.Namespace], None]
) -> int:
    """Serves until a signal. Returns the exit code. An error is one line in the log."""
    events.configure(name)
    log = logs.Log(name, logs.TEXT, logging.WARNING)
    try:
        arguments = parse()
        file = arguments.address_file
        if file is not None and not file.parent.is_dir():  # it is written last
            raise UsageError(f"--address-file {file}: there is no directory {file.parent}")
        log = logs.from_arguments(name, arguments)
        log.start()
        end_process_on_uncaught(log.uncaught)
        serve(arguments)
    except SwiftError as error:
        log.fatal(str(error))
        return error.exit_code
    except OSError as error:
        log.fatal(str(error))
        return ServiceError.exit_code
    except KeyboardInterrupt:  # before it served
        return 130
    return 0


def take_signals(stop: Callable[[], object]) -> None:
    """Makes the first SIGTERM or SIGINT call `stop` (in a thread), and the next one kill the process.

    Called before any other thread is started. A separate thread waits for the signals, because the main one may be
    blocked; the kill is done by the kernel. Everything acknowledged is durable.
    """
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # here and in every thread started later

    def wait() -> None:
        number = signal.sigwait(numbers)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        events.emit("signal", number=int(number))
        stop()
        threading.Event().wait()  # the only thread that a second signal can be delivered to

    threading.Thread(target=wait, name="signals", daemon=True).start()


def announce(arguments: argparse.Namespace, who: str, port: int, protection: Mapping[str, bool]) -> None:
    """Announces the address: in a file if one was requested, as an event, and where the log is text as a line."""
    address = f"{arguments.listen.rpartition(':')[0]}:{port}"
    store = getattr(arguments, "store", None)
    where = f"directory {arguments.directory}" if store is None else f"store {store}"
    events.emit("serving", address=address, directory=str(arguments.directory or store), **protection)
    if arguments.log_format == logs.TEXT:
        print(f"{who} on {address}, {where}", flush=True)
    if arguments.address_file is not None:  # last: whoever has waited for it finds the event and the line
        write_address(arguments.address_file, address)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs a server's program and ends the process: what it has acknowledged is durable."""
    os.umask(0o077)  # its files are readable only by its user
    end_process(main)

"""Credentials of clients: token files that are renewed, channels over TLS that carry tokens, and health answers."""

import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
from grpc_health.v1 import health_pb2

from swift_ft import events
from swift_ft.cli_parser import is_loopback
from swift_ft.errors import ServiceError, UsageError
from swift_ft.text import one_line
from swift_ft.tokens import Owner, Role, Signature, SigningKey, read_file, read_secret, signature, write_file

# Who may talk to whom: tokens and their keys, roles, and channels that carry tokens over TLS.
#
# (operator)  swift-ft token --new-key DIR              a key pair: signing/KID.pem is secret, verifying/KID.pem is not
#             swift-ft token --key FILE --job NAME …    a token, signed
# (servers)   Authority(DIR/verifying).grant(token)     what the bearer may do, for every call
# (clients)   open_channel(address, options)            sends the token of $SWIFT_TOKEN_FILE with every call
#
# `jwt` and `cryptography` are imported when a token is made or checked, not before.


# Token files that are renewed while they are used: long runs with tokens that are short-lived.
#
# (operator)  swift-ft token --key FILE --job NAME --role … --hours 1 --out FILE --renew
# (drill)     renewal = Renewal(key_file, file, job, roles, lifetime_s); renewal.turn() as often as it likes
#
# Half of the lifetime is left when a new token is written: so long may this process be away. Whoever uses the file
# reads it again at every call, so nobody is restarted. The key may be replaced as well (the file, or where a link
# leads to): the next turn mints with the new one.

LOOK_EVERY_S = 1.0
_LEFT = 0.5


def due(now_s: float, monotonic_s: float, written_at: tuple[float, float], lifetime_s: float) -> bool:
    """Whether half of the lifetime is over, by either clock: servers go by the wall clock at a token's first call,
    which may be set; the other one stands still while a machine sleeps."""
    spent_s = max(now_s - written_at[0], monotonic_s - written_at[1])
    return spent_s >= (1 - _LEFT) * lifetime_s or now_s < written_at[0] - 1


class Renewal:
    """One token file. Errors of a turn: UsageError (the key), OSError (the file); the next turn tries again."""

    def __init__(
        self,
        key: Path,
        out: Path,
        job: str,
        roles: Collection[Role],
        lifetime_s: float,
        owner: Owner | None = None,
        subject: str = "",
    ) -> None:
        """``owner``: of the file; None: whoever runs this. ``subject``: whom the tokens are for."""
        self._subject = subject
        self.out = out
        self._owner = owner
        self._key_file = key
        self._job = job
        self._roles = frozenset(roles)
        self._lifetime_s = lifetime_s
        self._key: tuple[Signature, SigningKey] | None = None
        self._written_at: tuple[float, float] | None = None

    def turn(self) -> bool:
        """True: a new token is in the file."""
        now_s, monotonic_s = time.time(), time.monotonic()
        key, changed = self._current_key()
        if (
            not changed
            and self._written_at is not None
            and not due(now_s, monotonic_s, self._written_at, self._lifetime_s)
            and self.out.exists()
        ):
            return False
        self._written_at = None  # until it is there
        token = key.mint(self._job, self._roles, self._lifetime_s, subject=self._subject)
        write_file(self.out, f"{token}\n".encode(), secret=True, owner=self._owner)
        self._written_at = (now_s, monotonic_s)
        return True

    def _current_key(self) -> tuple[SigningKey, bool]:
        current = (*signature([self._key_file]), (os.path.realpath(self._key_file), 0, 0, 0))
        if self._key is not None and self._key[0] == current:
            return self._key[1], False
        key = SigningKey.load(self._key_file, "--key")
        self._key = (current, key)
        return key, True


class Complaints:
    """Trouble that lasts is told once."""

    def __init__(self) -> None:
        self._said = ""

    def about(self, error: UsageError | OSError | None) -> str:
        """A line to be said; empty: it was."""
        words = ""
        if isinstance(error, OSError):
            words = f"{error.filename}: {error.strerror}"
        elif error is not None:
            words = str(error)
        if words == self._said:
            return ""
        self._said = words
        return words and f"not renewed, tried again every {LOOK_EVERY_S:g} s: {words}"


# The client's side: which files hold its credentials, and channels that use them.
#
# Every connection to a log server or a coordinator is made here. Without credentials it is a plain one, which
# is only made to loopback, or if SWIFT_INSECURE=1 says that the network is trusted.

ENV_TOKEN_FILE = "SWIFT_TOKEN_FILE"
ENV_CA = "SWIFT_TLS_CA"
ENV_CERTIFICATE = "SWIFT_TLS_CERT"
ENV_KEY = "SWIFT_TLS_KEY"
ENV_INSECURE = "SWIFT_INSECURE"
AUTHORIZATION = "authorization"
BEARER = "Bearer "
_RELOAD_S = 1.0
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile("[0-9]{1,5}")
_SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"}
"""gRPC takes "unix:7301" for a socket's path."""

Options = Sequence[tuple[str, Any]]


class _Details(NamedTuple):
    """What a multi-callable was made with."""

    kind: str
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Files that say who this process is, and whom it believes."""

    token_file: Path | None = None
    ca: Path | None = None
    """Signs the servers' certificates; given: connections are TLS."""
    certificate: Path | None = None
    """Of this client, for servers that ask for one."""
    key: Path | None = None
    insecure: bool = False
    """Plain connections off loopback are allowed."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError(f"{ENV_CERTIFICATE} and {ENV_KEY}: give both, or neither")
        if self.certificate is not None and self.ca is None:
            raise UsageError(f"{ENV_CERTIFICATE}: a client's certificate needs {ENV_CA} too; set both")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Credentials":
        """What the SWIFT_ variables name; files are not read yet."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if environment.get(name) else None

        return cls(
            token_file=path(ENV_TOKEN_FILE),
            ca=path(ENV_CA),
            certificate=path(ENV_CERTIFICATE),
            key=path(ENV_KEY),
            insecure=environment.get(ENV_INSECURE) == "1",
        )

    def check(self, address: str) -> None:
        """UsageError, in one line: a file is missing or badly kept, or the connection would be in clear text."""
        host, _, port = address.rpartition(":")
        if not host or not _is_port(port):
            raise UsageError(f"{address!r} is not HOST:PORT, such as 10.0.0.5:7301")
        if self.ca is None and not self.insecure and not is_loopback(host):
            raise UsageError(
                f"{address} is not loopback and {ENV_CA} is not set: name the CA of its certificate there, "
                f"or say {ENV_INSECURE}=1 if the network is trusted"
            )
        self.tls()
        if self.token_file is not None:
            read_token(self.token_file)

    def check_named(self, address: str) -> None:
        """As `check`, of an address that somebody else has named: he must not get this process's token in clear text,
        wherever that is allowed otherwise, nor make it connect to anything but a host's port."""
        host, _, port = address.rpartition(":")
        if not _is_port(port) or not _HOST.fullmatch(host) or host.lower() in _SCHEMES:
            raise UsageError(f"{address!r} is not HOST:PORT, such as 10.0.0.5:7301")
        if self.token_file is not None and self.ca is None and not is_loopback(host):
            raise UsageError(
                f"{address} is not loopback, and without {ENV_CA} it would be given the token in clear text: "
                f"name the CA of its certificate there"
            )
        self.check(address)

    def tls(self) -> grpc.ChannelCredentials | None:
        if self.ca is None:
            return None
        return grpc.ssl_channel_credentials(
            read_file(self.ca, ENV_CA),
            None if self.key is None else read_secret(self.key, ENV_KEY),
            None if self.certificate is None else read_file(self.certificate, ENV_CERTIFICATE),
        )

    def tls_files(self) -> list[Path]:
        return [path for path in (self.ca, self.certificate, self.key) if path is not None]


def _is_port(text: str) -> bool:
    return _PORT.fullmatch(text) is not None and int(text) < 65536


def read_token(path: Path) -> str:
    try:
        token = read_secret(path, ENV_TOKEN_FILE).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"{ENV_TOKEN_FILE} {path}: holds no token: make one with swift-ft token")
    return token


def open_channel(address: str, options: Options, credentials: Credentials | None = None) -> grpc.Channel:
    """Connects in the background, and again whenever the connection is lost. UsageError: see `check`."""
    credentials = credentials or Credentials.from_environment()
    credentials.check(address)
    if credentials.token_file is None and credentials.ca is None:
        return grpc.insecure_channel(address, options=options)
    return _CredentialedChannel(address, options, credentials)


class _CredentialedChannel(grpc.Channel):
    """Gives each call the token that is in its file at that moment, and connects anew with changed certificates.

    Calls under way stay on the connection they were made on; it is closed when the last of them has ended.
    """

    def __init__(self, address: str, options: Options, credentials: Credentials) -> None:
        self._address = address
        self._options = options
        self._credentials = credentials
        self._lock = threading.Lock()
        self._token: tuple[Signature, str] = ((), "")
        self._complained: Signature = ()
        self._files: Signature = signature(credentials.tls_files())
        self._look_at = time.monotonic() + _RELOAD_S
        self._channel = self._connect()
        self._number = 0
        self._closed = False

    def _connect(self) -> grpc.Channel:
        tls = self._credentials.tls()
        if tls is None:
            return grpc.insecure_channel(self._address, options=self._options)
        return grpc.secure_channel(self._address, tls, options=self._options)

    def current(self) -> tuple[int, grpc.Channel]:
        """The channel of now, and its number."""
        now = time.monotonic()
        with self._lock:
            if now >= self._look_at and not self._closed:
                self._look_at = now + _RELOAD_S
                files = signature(self._credentials.tls_files())
                if files != self._files:
                    try:
                        self._channel = self._connect()
                        self._number += 1
                        self._files = files
                    except UsageError:  # half-written: looked at again in a second
                        pass
            return self._number, self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        path = self._credentials.token_file
        if path is None:
            return ()
        current = signature([path])
        if current != self._token[0]:
            try:
                self._token = (current, read_token(path))
            except UsageError as error:  # the one we have may be good for a while
                if current and current != self._complained:  # not only being replaced
                    self._complained = current
                    events.emit("token_not_reloaded", reason=str(error))
        return ((AUTHORIZATION, BEARER + self._token[1]),)

    def _callable(
        self, kind: str, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        return _Callable(self, _Details(kind, method, arguments, keywords))

    def unary_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("unary_unary", method, arguments, keywords)

    def unary_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("unary_stream", method, arguments, keywords)

    def stream_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("stream_unary", method, arguments, keywords)

    def stream_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("stream_stream", method, arguments, keywords)

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool | None = False) -> None:
        self.current()[1].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        self.current()[1].unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()

    def __enter__(self) -> "_CredentialedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Callable:
    """A multi-callable of whatever channel is the current one."""

    def __init__(self, channel: _CredentialedChannel, details: _Details) -> None:
        self._channel = channel
        self._details = details
        self._made: tuple[int, Any] = (-1, None)

    def _now(self) -> Any:
        number, channel = self._channel.current()
        if self._made[0] != number:
            made = getattr(channel, self._details.kind)
            self._made = (
                number,
                made(self._details.method, *self._details.arguments, **self._details.keywords),
            )
        return self._made[1]

    def _with_token(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {**keywords, "metadata": (*(keywords.get("metadata") or ()), *self._channel.metadata())}

    def __call__(self, request: Any, **keywords: Any) -> Any:
        return self._now()(request, **self._with_token(keywords))

    def with_call(self, request: Any, **keywords: Any) -> Any:
        return self._now().with_call(request, **self._with_token(keywords))

    def future(self, request: Any, **keywords: Any) -> Any:
        return self._now().future(request, **self._with_token(keywords))


# What to do about a connection that is not made: gRPC's own words for a server that wants TLS are "Socket closed".

_LOOK_S = 1.0
_NOT_BELIEVED = ("CERTIFICATE_VERIFY_FAILED", "certificate signature failure", "Peer name")
_UNSPECIFIC = ("Socket closed", "reset", "eadline", "in time", "within", "Broken pipe", "no reason given")


def advice(address: str, reason: str, credentials: Credentials | None = None) -> str:
    """What is to be done, as far as it can be found out; empty: nobody can tell, or ``said`` tells. May look there, for
    a second."""
    credentials = credentials or Credentials.from_environment()
    if credentials.ca is None:
        if any(words in reason for words in _UNSPECIFIC) and speaks_tls(address):
            return f"it wants TLS: name the CA of its certificate in {ENV_CA}"
        return ""
    if any(words in reason for words in _NOT_BELIEVED):
        return (
            f"its certificate is not signed by the CA in {ENV_CA}, {credentials.ca}, or names another address: "
            "give the CA that has signed it, and an address that it names"
        )
    doubtful = "WRONG_VERSION_NUMBER" in reason or any(words in reason for words in _UNSPECIFIC)
    if doubtful and not speaks_tls(address) and _listens(address):
        return f"it does not speak TLS: start it with --tls-cert and --tls-key, or unset {ENV_CA}"
    return ""


def advised(address: str, reason: str, credentials: Credentials | None = None) -> str:
    """``said``, and what to do about it."""
    more = advice(address, reason, credentials)
    return f"{reason}: {more}" if more else reason


def speaks_tls(address: str) -> bool:
    """Whoever it is: nothing is believed of him."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with _connected(address) as connection:
            _shake_hands(context, connection)
    except (OSError, ValueError):
        return False
    return True


def _shake_hands(context: ssl.SSLContext, connection: socket.socket) -> None:
    """By hand: ``wrap_socket`` of a connection that has just been reset leaves its socket open (Python 3.11)."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = context.wrap_bio(received, to_send)
    while True:
        try:
            handshake.do_handshake()
            return
        except ssl.SSLWantReadError:
            connection.sendall(to_send.read())
            if data := connection.recv(1 << 14):
                received.write(data)
            else:
                received.write_eof()


def _listens(address: str) -> bool:
    try:
        _connected(address).close()
    except (OSError, ValueError):
        return False
    return True


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _LOOK_S)


SECURITY_KEY = "swift-security"


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """One answer of ``grpc.health.v1``."""

    status: str
    """SERVING, NOT_SERVING, …"""
    tls: bool
    mutual_tls: bool
    tokens: bool
    insecure: bool
    """It listens off loopback without TLS or without tokens: somebody said --insecure."""


def check_service(
    address: str, service: str = "", timeout_s: float = 5.0, credentials: Credentials | None = None
) -> Health:
    """Asks once. Needs no token. ServiceError: no answer; UsageError: see `Credentials.check`."""
    channel = open_channel(address, (("grpc.enable_http_proxy", 0),), credentials)
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer, call = ask.with_call(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        details = cast("grpc.Call", error).details()  # what a failed call raises is the call itself
        why = advised(address, one_line(details), credentials)
        raise ServiceError(f"{address} does not answer a health check: {why}") from None
    finally:
        channel.close()
    words: set[str] = set()
    for key, value in call.trailing_metadata() or ():
        if key == SECURITY_KEY and isinstance(value, str):
            words = set(value.split(","))
    return Health(
        status=_named(answer.status),
        tls="tls" in words,
        mutual_tls="mutual-tls" in words,
        tokens="tokens" in words,
        insecure="insecure" in words,
    )


def _named(status: int) -> str:
    known = health_pb2.HealthCheckResponse.ServingStatus
    return str(known.Name(status)) if status in known.values() else f"STATUS_{status}"

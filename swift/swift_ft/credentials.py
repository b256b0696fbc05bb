"""Client credentials: renewed token files, channels that use TLS and tokens, and health checks."""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from swift_ft import events
from swift_ft.cli_parser import is_loopback
from swift_ft.errors import UsageError
from swift_ft.text import split_address
from swift_ft.tokens import Owner, Role, Signature, SigningKey, read_file, read_secret, signature, write_file

# Overview of authentication: tokens and their keys, roles, and channels that carry tokens over TLS.
#
# (operator)  swift-ft token --new-key DIR              a key pair: signing/KID.pem is secret, verifying/KID.pem is not
#             swift-ft token --key FILE --job NAME …    a token, signed
# (servers)   Authority(DIR/verifying).grant(token)     what the bearer may do, for every call
# (clients)   open_channel(address, options)            sends the token of $SWIFT_TOKEN_FILE with every call
#
# `jwt` and `cryptography` are imported when a token is created or checked, not before.


# Renewal of token files while they are used: long runs with short-lived tokens.
#
# (operator)  swift-ft token --key FILE --job NAME --role … --hours 1 --out FILE --renew
# (drill)     renewal = Renewal(key_file, file, job, roles, lifetime_s); renewal.turn() as often as needed
#
# A new token is written when half of the lifetime is left: so long may this process be down. Clients read the file
# again at every call, so no restart is needed. The key file may be replaced as well (the file, or a link's target): the
# next turn mints with the new key.


@dataclass
class Renewal:
    """Renews one token file. A turn raises UsageError (the key) or OSError (the file); the next turn tries again."""

    key: Path
    out: Path
    job: str
    roles: Collection[Role]
    lifetime_s: float
    owner: Owner | None = None
    """Of the file; None: the current user."""
    subject: str = ""
    _written: tuple[Signature, float, float] | None = field(default=None, init=False)
    """The key's state when the token was written, and the time on the wall clock, which may be adjusted, and on the
    monotonic one, which stops while a machine sleeps."""

    def turn(self) -> bool:
        """Renews the token if it is due. Returns whether a new token was written."""
        key_now = (*signature([self.key]), (os.path.realpath(self.key), 0, 0, 0))
        now_s, monotonic_s = time.time(), time.monotonic()
        if self._written is not None and self._written[0] == key_now and self.out.exists():
            age_s = now_s - self._written[1]  # below 0: the clock was put back
            if age_s > -1 and max(age_s, monotonic_s - self._written[2]) < self.lifetime_s / 2:
                return False
        self._written = None  # until it is written
        key = SigningKey.load(self.key, "--key")
        token = key.mint(self.job, self.roles, self.lifetime_s, subject=self.subject)
        write_file(self.out, f"{token}\n".encode(), secret=True, owner=self.owner)
        self._written = key_now, now_s, monotonic_s
        return True


# Client side: the files of its credentials, and channels that use them.
#
# Every connection to a log server or a coordinator is opened here. Without credentials it is unencrypted, which is only
# allowed to loopback, or if SWIFT_INSECURE=1 declares the network trusted.

ENV_TOKEN_FILE = "SWIFT_TOKEN_FILE"
ENV_CA = "SWIFT_TLS_CA"
ENV_CERTIFICATE = "SWIFT_TLS_CERT"
ENV_KEY = "SWIFT_TLS_KEY"
ENV_INSECURE = "SWIFT_INSECURE"
ENV_CREDENTIALS = "SWIFT_CREDENTIALS"
"""A directory that `swift-ft credentials init` has made, or one holder's folder of it."""
CA_FILE, CERTIFICATE_FILE, KEY_FILE, TOKEN_FILE = "ca.pem", "tls.pem", "tls.key", "token"
"""A holder's files."""
_FILES = (
    (ENV_TOKEN_FILE, TOKEN_FILE),
    (ENV_CA, CA_FILE),
    (ENV_CERTIFICATE, CERTIFICATE_FILE),
    (ENV_KEY, KEY_FILE),
)
AUTHORIZATION = "authorization"
BEARER = "Bearer "
VARIABLES = (ENV_CREDENTIALS, *(name for name, _ in _FILES))
_RELOAD_S = 1.0

Options = Sequence[tuple[str, Any]]
CONNECTING: Options = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A client that waits for a restart must not share its backoff with another client of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # Services are reached directly by their addresses, never through an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    # A server that comes back may have another address under its name, as pods do. By default gRPC goes on for 30 s
    # with the one that it has.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)
"""Options of every channel."""


_part = "ranks"


def act_as(holder: str) -> None:
    """Lets this process, but not its children, use that holder's folder of ``SWIFT_CREDENTIALS``; before: of ranks."""
    global _part
    _part = holder


def own_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of ``SWIFT_CREDENTIALS`` that this process uses: its part, if that is a whole directory; None
    if the variable is not set. Raises UsageError if there are no credentials in it."""
    if not environment.get(ENV_CREDENTIALS):
        return None
    folder = Path(environment[ENV_CREDENTIALS])
    folder = folder / _part if os.path.isdir(folder / _part) else folder
    if not os.path.isfile(folder / CA_FILE):
        raise UsageError(
            f"{ENV_CREDENTIALS} {environment[ENV_CREDENTIALS]}: there is no {CA_FILE} that this user can see: "
            "make one with swift-ft credentials init, or unset it"
        )
    return folder


def with_files(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the environment; variables of files that are not set name those of ``SWIFT_CREDENTIALS``, as far as it
    has them. Raises UsageError."""
    folder = own_folder(environment)
    if folder is None:
        return environment
    return {name: str(folder / file) for name, file in _FILES if (folder / file).exists()} | {
        name: value for name, value in environment.items() if value
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Files with this process's identity and the CA that it trusts."""

    token_file: Path | None = None
    ca: Path | None = None
    """CA of the servers' certificates; if set, connections use TLS."""
    certificate: Path | None = None
    """Client certificate, for servers that require one."""
    key: Path | None = None
    insecure: bool = False
    """True if unencrypted connections off loopback are allowed."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError(f"{ENV_CERTIFICATE} and {ENV_KEY}: give both, or neither")
        if self.certificate is not None and self.ca is None:
            raise UsageError(f"{ENV_CERTIFICATE}: a client's certificate needs {ENV_CA} too; set both")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Credentials":
        """Reads the SWIFT_ variables; the files are not read yet. Raises UsageError if they contradict each other."""
        environment = with_files(environment)

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
        """Raises UsageError if the address is not HOST:PORT (or several of them, with commas between), if a file is
        missing or accessible to others, or if the connection would be unencrypted."""
        for one in address.split(","):
            self._check_encrypted(one)
        self.tls()
        if self.token_file is not None:
            read_token(self.token_file)

    def _check_encrypted(self, address: str) -> None:
        host = _host(address)
        if self.ca is None and not self.insecure and not is_loopback(host):
            raise UsageError(
                f"{address} is not loopback and {ENV_CA} is not set: name the CA of its certificate there, "
                f"or say {ENV_INSECURE}=1 if the network is trusted"
            )

    def check_named(self, address: str) -> None:
        """Checks an address that another party has named. Raises UsageError as `check` does, and if the address would
        get this process's token unencrypted, even where that is allowed otherwise."""
        host = _host(address)
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


def _host(address: str) -> str:
    """Returns the host of an address. Raises UsageError if this is not the port of a host, but a URL for example."""
    place = split_address(address)
    if place is None:
        raise UsageError(f"{address[:80]!r} is not HOST:PORT, such as 10.0.0.5:7301")
    return place[0]


def read_token(path: Path) -> str:
    try:
        token = read_secret(path, ENV_TOKEN_FILE).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"{ENV_TOKEN_FILE} {path}: holds no token: make one with swift-ft token")
    return token


def open_channel(address: str, options: Options = (), credentials: Credentials | None = None) -> grpc.Channel:
    """Opens a channel that connects in the background, and reconnects if needed. With several addresses, commas between
    them, it finds the one that serves. Raises UsageError: see `check`."""
    credentials = credentials or Credentials.from_environment()
    credentials.check(address)
    addresses, options = address.split(","), [*options, *CONNECTING]
    if len(addresses) == 1 and credentials.token_file is None and credentials.ca is None:
        return grpc.insecure_channel(address, options=options)
    return _Channel(addresses, options, credentials)


def open_channel_on_loop(address: str, options: Options, credentials: Credentials) -> grpc.aio.Channel:
    """Opens a channel of asyncio, without a token, to a server that is not swift's. Raises UsageError: see `check`."""
    credentials.check(address)
    options, tls = [*options, *CONNECTING], credentials.tls()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls, options=options)


AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Status codes that mean that a server did not answer, or that another one does."""


class _Channel(grpc.Channel):
    """Channels to servers of which one serves at a time; mostly there is one server.

    Sends the current token of the token file with each call, and reconnects when certificates have changed: running
    calls stay on their connection, which is closed when the last of them has ended. After a call that is not answered,
    calls go to the next server, and the streams of the one before end as well.
    """

    def __init__(self, addresses: Sequence[str], options: Options, credentials: Credentials) -> None:
        self._addresses = addresses
        self._options = options
        self._credentials = credentials
        self._lock = threading.Lock()
        self._token: tuple[Signature, str] = ((), "")
        self._complained: Signature = ()
        self._files: Signature = signature(credentials.tls_files())
        self._look_at = time.monotonic() + _RELOAD_S
        self._channels = self._connect()
        self._at = 0
        """The server that calls go to now."""
        self._streams: dict[Any, int] = {}
        """(several servers) Stream -> its server."""
        self._closed = False

    def _connect(self) -> list[grpc.Channel]:
        tls = self._credentials.tls()
        if tls is None:
            return [grpc.insecure_channel(address, options=self._options) for address in self._addresses]
        return [grpc.secure_channel(address, tls, options=self._options) for address in self._addresses]

    def current(self) -> tuple[int, grpc.Channel]:
        """Returns the number of the server that calls go to, and its channel. Reconnects if certificates have
        changed."""
        now = time.monotonic()
        with self._lock:
            if now >= self._look_at and not self._closed:
                self._look_at = now + _RELOAD_S
                files = signature(self._credentials.tls_files())
                if files != self._files:
                    try:
                        self._channels = self._connect()
                        self._files = files
                    except UsageError:  # half-written: tried again in a second
                        pass
            return self._at, self._channels[self._at]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        path = self._credentials.token_file
        if path is None:
            return ()
        current = signature([path])
        if current != self._token[0]:
            try:
                self._token = (current, read_token(path))
            except UsageError as error:  # the last token may still be valid
                if current and current != self._complained:  # not just being replaced
                    self._complained = current
                    events.emit("token_not_reloaded", reason=str(error))
        return ((AUTHORIZATION, BEARER + self._token[1]),)

    def missed(self, at: int) -> None:
        """Moves on to the next server, unless another call has done so already."""
        with self._lock:
            if at != self._at:
                return
            self._at = (at + 1) % len(self._addresses)
            left = [stream for stream, of in self._streams.items() if of == at]
        for stream in left:
            stream.cancel()

    def follow(self, call: Any, at: int) -> Any:
        """Returns the call, which has just begun. Moves on once its server turns out to be away."""
        if len(self._addresses) == 1:
            return call
        with self._lock:
            self._streams[call] = at

        def ended(_: Any) -> None:
            with self._lock:
                self._streams.pop(call, None)
            if call.code() in AWAY:
                self.missed(at)

        call.add_done_callback(ended)
        return call

    def unary_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return _Callable(self, "unary_unary", arguments, keywords)

    def unary_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return _Callable(self, "unary_stream", arguments, keywords)

    def stream_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return _Callable(self, "stream_unary", arguments, keywords)

    def stream_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return _Callable(self, "stream_stream", arguments, keywords)

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool | None = False) -> None:
        self.current()[1].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    def __enter__(self) -> "_Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = self._channels
        for channel in channels:  # without the lock: gRPC waits for calls whose ends are counted under it
            channel.close()


class _Callable:
    def __init__(
        self, channel: _Channel, kind: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        """`kind`: the name of a method of `grpc.Channel`."""
        self._channel = channel
        self._kind, self._arguments, self._keywords = kind, arguments, keywords
        self._made: dict[int, tuple[grpc.Channel, Any]] = {}
        """Number of a server -> the channel, and what it has made."""

    def _now(self) -> tuple[int, Any]:
        at, channel = self._channel.current()
        if at not in self._made or self._made[at][0] is not channel:
            make = getattr(channel, self._kind)
            self._made[at] = channel, make(*self._arguments, **self._keywords)
        return at, self._made[at][1]

    def _with_token(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {**keywords, "metadata": (*(keywords.get("metadata") or ()), *self._channel.metadata())}

    def __call__(self, request: Any, **keywords: Any) -> Any:
        at, method = self._now()
        if self._kind.endswith("_stream"):
            return self._channel.follow(method(request, **self._with_token(keywords)), at)
        return self._awaited(at, method, request, keywords)

    def with_call(self, request: Any, **keywords: Any) -> Any:
        at, method = self._now()
        return self._awaited(at, method.with_call, request, keywords)

    def future(self, request: Any, **keywords: Any) -> Any:
        at, method = self._now()
        return self._channel.follow(method.future(request, **self._with_token(keywords)), at)

    def _awaited(self, at: int, method: Callable[..., Any], request: Any, keywords: dict[str, Any]) -> Any:
        try:
            return method(request, **self._with_token(keywords))
        except grpc.RpcError as error:
            if cast("grpc.Call", error).code() in AWAY:
                self._channel.missed(at)
            raise


# Advice about failed connections: gRPC's message for a server that requires TLS is only "Socket closed".

_LOOK_S = 1.0
_NOT_BELIEVED = ("CERTIFICATE_VERIFY_FAILED", "certificate signature failure", "BAD_SIGNATURE", "Peer name")
_UNSPECIFIC = ("Socket closed", "reset", "eadline", "in time", "within", "Broken pipe", "no reason given")


def advice(address: str, reason: str, credentials: Credentials | None = None) -> str:
    """Returns advice for a failed connection; empty if none can be given or ``reason`` suffices. May connect for a
    second."""
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


def is_another_service(reason: str) -> bool:
    """Returns whether a connection failed because the server speaks no HTTP/2, which gRPC needs."""
    return "Expected SETTINGS frame" in reason


def advised(address: str, reason: str, credentials: Credentials | None = None) -> str:
    more = advice(address, reason, credentials)
    return f"{reason}: {more}" if more else reason


def speaks_tls(address: str) -> bool:
    """Returns whether the server speaks TLS. Certificates are not verified."""
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
    """Runs the handshake on memory buffers: ``wrap_socket`` of a connection that was just reset leaks its socket
    (Python 3.11)."""
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
